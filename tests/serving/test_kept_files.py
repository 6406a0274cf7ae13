"""Translated files in memory."""

import pytest

from nmtkit.serving.content_translator import KeptFiles


def test_kept_files_are_bounded_and_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.serving.content_translator.FILES_BYTES", 10)
    files = KeptFiles()
    for token in ("a", "b", "c"):
        files.keep(token, ".txt", b"12345")
    assert [files.get(token) is not None for token in ("a", "b", "c")] == [False, True, True]
    files.remove("b")
    assert files.get("b") is None
