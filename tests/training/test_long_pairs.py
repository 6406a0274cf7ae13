"""Pairs that are longer than the learned positions of the model are found before the first update."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main

FLAGS = ["--arch", "transformer_tiny", "--d-model", "16", "--d-ff", "16", "--heads", "2", "--device", "cpu"]
FLAGS += ["--encoder-layers", "1", "--decoder-layers", "1", "--precision", "fp32", "--metrics", "none"]
FLAGS += ["--batch-tokens", "400", "--max-update", "1", "--positions", "learned", "--max-positions", "12"]


@pytest.mark.parametrize(
    ("subset", "side", "more", "fails"),
    [
        ("valid", "source", [], True),
        ("valid", "target", [], True),
        ("valid1", "source", ["--valid-subset", "valid,valid1"], True),
        ("valid1", "source", [], False),  # not used
        ("valid", "source", ["--valid-sentences", "3"], False),
        ("valid", "source", ["--validate-interval", "none"], False),
        ("train", "target", [], True),
    ],
)
def test_a_pair_is_named(subset: str, side: str, more: list[str], fails: bool, tmp_path: Path) -> None:
    for name in ("train", "valid", "valid1"):
        for each, language in (("source", "xx"), ("target", "yy")):
            lines = ["a b c", "d e", "f g h", "a d"] * 5
            if (name, each) == (subset, side):
                lines[6] = " ".join("abcdefgh" * 2)
            (tmp_path / f"{name}.{language}").write_text("\n".join(lines) + "\n")
    words = ["-s", "xx", "-t", "yy", "--trainpref", tmp_path / "train", "--workers", "1", "--model-type", "char"]
    words += ["--validpref", f"{tmp_path / 'valid'},{tmp_path / 'valid1'}", "--destdir", tmp_path / "bin"]
    prepared = CliRunner().invoke(main, ["preprocess", *map(str, words), "--max-ratio", "100"])
    assert prepared.exit_code == 0, prepared.output
    run = ["train", str(tmp_path / "bin"), *FLAGS, "--save-dir", str(tmp_path / "run"), *more]
    result = CliRunner().invoke(main, run)
    assert result.exit_code == (2 if fails else 0), result.output
    if fails:
        said = " ".join(result.stderr.split())
        assert f"pair {7 if subset != 'train' else ''}" in said
        assert f"{side} of pair" in said and f" of {subset} " in said and "12 positions" in said
        assert not list((tmp_path / "run").glob("*.pt"))
