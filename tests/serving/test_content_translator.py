"""Documents of clients without a server: warnings reach the client who sent the document."""

import asyncio
import io
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")

from starlette.datastructures import UploadFile
from starlette.requests import Request

from nmtkit.serving.config import ServeConfig
from nmtkit.serving.content_translator import ContentTranslator
from nmtkit.serving.door import Door
from nmtkit.serving.fair_queue import BatchKey, LineResult
from nmtkit.serving.interface import TranslateFileFields
from nmtkit.serving.kept_files import KeptFiles
from nmtkit.serving.keys import ApiKey, Usage
from nmtkit.serving.libretranslate import LibreTranslate
from nmtkit.serving.metrics import Metrics
from nmtkit.serving.pool import Pool

HEADER = 'msgid ""\nmsgstr "Language: {}\\n"\n\n'
ENTRY = '#, python-format\nmsgid "{}"\nmsgstr ""\n'


async def translate(key: BatchKey, lines: Sequence[str]) -> list[list[LineResult]]:
    """Stands for `Pool.translate`. The translations lack the placeholders of the lines."""
    return [[{"text": "Hallo"}] for _ in lines]


def answer(document: str) -> dict[str, object]:
    """Returns the answer to an upload of a PO file, as English to German."""
    metrics = cast(Metrics, SimpleNamespace(count=lambda *counts: None))
    door = Door(ServeConfig(public_url="http://x"), {}, Usage(), metrics)
    translator = ContentTranslator(door, cast(Pool, SimpleNamespace(pairs=[("en", "de")], translate=translate)))
    request = Request({"type": "http", "headers": [], "state": {"key": ApiKey()}})
    file = UploadFile(io.BytesIO(document.encode()), filename="a.po")
    fields = TranslateFileFields(file=file, source="en", target="DE")
    found = asyncio.run(LibreTranslate(translator, KeptFiles()).translate_file(request, fields))
    return cast(dict[str, object], json.loads(bytes(found.body)))


@pytest.mark.parametrize(
    ("language", "source", "facts"),
    [
        ("de", "Hello!", []),
        ("fr", "Hello!", [("fr", "de")]),
        ("de", "Hello, %s!", [("1", "placeholders")]),
        ("fr", "Hello, %s!", [("fr", "de"), ("1", "placeholders")]),
    ],
)
def test_warnings_about_a_document_are_in_the_answer_and_not_in_the_log(
    language: str, source: str, facts: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    warnings = answer(HEADER.format(language) + ENTRY.format(source)).get("warnings", [])
    assert isinstance(warnings, list) and len(warnings) == len(facts)
    for warning, words in zip(warnings, facts, strict=True):
        assert all(word in warning for word in words)
    assert caplog.messages == []
