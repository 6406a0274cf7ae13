"""The engine CTranslate2 gives the translations of PyTorch's search, and refuses options that would differ."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import REAL_LINES, fragments, save_ending_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.models import checkpoint
from nmtkit.translation.engines import TorchEngine
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

pytest.importorskip("ctranslate2")
SAME = {"max_len_a": 0.0, "max_len_b": 10, "lenpen": 0.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_transformer(tmp_path_factory.mktemp("trained") / "model.pt")


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(trained, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 3])
def test_translations_and_scores_are_those_of_pytorch(model: Path, beam: int, workers: int) -> None:
    lines = [*fragments(), ""]
    ours = Translator.load(model, max_tokens=200).translate(lines, beam=beam, **SAME)
    loaded = Translator.load(model, engine="ctranslate2", workers=workers, max_tokens=200)
    theirs = loaded.translate(lines, beam=beam, **SAME)
    lengths = set()
    for line, other in zip(ours, theirs, strict=True):
        hypothesis, found = line.hypotheses[0], other.hypotheses[0]
        assert found.pieces == hypothesis.pieces
        assert found.score == pytest.approx(hypothesis.score, abs=0.05)  # <unk> is not among its probabilities
        lengths.add(len(found.pieces))
    assert len(lengths) > 5 and 10 in lengths  # some translations are cut off


def test_only_sentences_cut_at_the_longest_length_are_searched_by_pytorch(model: Path, monkeypatch) -> None:
    searched: list[object] = []
    search = TorchEngine.search

    def counted(engine, batch, *rest):
        searched.extend(batch)
        return search(engine, batch, *rest)

    monkeypatch.setattr(TorchEngine, "search", counted)
    found = Translator.load(model, engine="ctranslate2").translate(fragments(), beam=2, **SAME)
    longest = sum(len(line.hypotheses[0].pieces) == 10 for line in found)
    assert 0 < longest <= len(searched) < len(found) // 2


def test_the_log_names_pytorch_if_it_searches_every_segment(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = Translator.load(model, engine="ctranslate2")
    with caplog.at_level(logging.INFO, "nmtkit"):
        loaded.translate([Request("all are", prefix="born")], **SAME)
        assert [record.getMessage().split(",")[0] for record in caplog.records] == ["engine: torch"]
        loaded.translate(["all are", Request("all are", prefix="born")], **SAME)
    assert caplog.records[-1].getMessage() == "engine: ctranslate2"


def test_alignments_are_those_of_pytorch(model: Path) -> None:
    ours = Translator.load(model).translate(REAL_LINES, beam=2, alignment="soft", **SAME)
    theirs = Translator.load(model, engine="ctranslate2").translate(REAL_LINES, beam=2, alignment="soft", **SAME)
    for line, other in zip(ours, theirs, strict=True):
        weights, found = (torch.tensor(side.hypotheses[0].alignment) for side in (line, other))
        torch.testing.assert_close(found, weights, atol=1e-4, rtol=0)


def test_the_exported_model_stays_beside_the_checkpoint_until_that_changes(model: Path) -> None:
    def folders() -> list[Path]:
        return [path for path in model.parent.iterdir() if path.is_dir()]

    Translator.load(model, engine="ctranslate2")
    (first,) = folders()
    written = (first / "model.bin").stat().st_mtime_ns
    Translator.load(model, engine="ctranslate2")
    assert (first / "model.bin").stat().st_mtime_ns == written
    contents = checkpoint.load(model)
    contents["model"]["decoder.0.feed_forward.fc1.bias"] += 1
    checkpoint_file.save(model, contents)
    Translator.load(model, engine="ctranslate2")
    (second,) = folders()
    assert second != first
    Translator.load(model, engine="ctranslate2", precision="int8")
    assert len(folders()) == 2


READ_ONLY = """
import sys, tempfile
from pathlib import Path

model = Path(sys.argv[1])
make = tempfile.TemporaryFile

def refuse(dir):
    if Path(dir) == model.parent:
        raise PermissionError("read-only")
    return make(dir=dir)

tempfile.TemporaryFile = refuse
from nmtkit.translation.engines import TorchEngine
from nmtkit.translation.translator import Translator
for _ in range(2):
    assert Translator.load(model, engine="ctranslate2").translate(["All"], beam=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_cache", [True, False])
def test_processes_share_the_export_of_a_read_only_folder_or_leave_none(
    model: Path, tmp_path_factory, has_cache: bool
) -> None:
    folder = tmp_path_factory.mktemp("folders")
    (folder / "temporary").mkdir()
    cache = folder / "cache" if has_cache else Path("/proc/no/folder")
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(folder / "temporary")}
    if has_cache:  # the export of an older model with the same name
        (cache / "nmtkit" / "model.ctranslate2-fp32-0").mkdir(parents=True)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", READ_ONLY, str(model)], env=environment, check=True)
    assert [path.name for path in model.parent.iterdir()] == ["model.pt"]
    assert len(list((folder / "cache" / "nmtkit").glob("model.ctranslate2-fp32-*"))) == (1 if has_cache else 0)
    assert not list((folder / "temporary").glob("nmtkit-*"))


def generate(*flags: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(
        main, ["generate", "--engine", "ctranslate2", *map(str, flags)], input="\n".join(REAL_LINES)
    )
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "flags", [["--beam", 1], ["--lenpen", 0], ["--lenpen", 0, "--precision", "int8", "--workers", 2]]
)
def test_the_command_translates_every_line(model: Path, flags: list[object]) -> None:
    code, text, error = generate("--path", model, "--format", "jsonl", *flags)
    assert code == 0, error
    assert [json.loads(line)["source"] for line in text.splitlines()] == REAL_LINES


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--lenpen 0"),
        (["--beam", "1", "--sampling"], "--sampling"),
        (["--lenpen", "0", "--nbest", "2", "--format", "jsonl"], "--nbest"),
        (["--lenpen", "0", "--min-len", "3"], "--min-len"),
        (["--lenpen", "0", "--no-repeat-ngram", "3"], "--no-repeat-ngram"),
        (["--lenpen", "0", "--precision", "bf16"], "--precision"),
        (["--lenpen", "0", "--path", "model.pt"], "one model"),
    ],
)
def test_what_would_differ_is_refused_by_name(model: Path, monkeypatch, flags: list[str], named: str) -> None:
    monkeypatch.chdir(model.parent)
    code, text, error = generate("--path", model, *flags)
    assert code == 2 and named in error and not text, error
    assert len(error.strip().splitlines()) == 1
