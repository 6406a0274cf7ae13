"""The error for a file that is missing or cannot be written has words, without the error numbers of the system."""

import typing
from pathlib import Path
from typing import Any

import click
import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner

from nmtkit.cli import main

MISSING = "no such file or folder"
COMMANDS: dict[str, tuple[list[str], str]] = {
    "score --sys": (["score", "--sys", "nope", "--ref", "text"], f"--sys nope: {MISSING}"),
    "score --ref": (["score", "--sys", "text", "--ref", "nope"], f"--ref nope: {MISSING}"),
    "score a folder": (["score", "--sys", "folder", "--ref", "text"], "folder: it is a folder, not a file"),
    "score below a file": (
        ["score", "--sys", "text/x", "--ref", "text"],
        "--sys text/x: a part of the path is a file",
    ),
    "rerank": (["rerank", "nope"], f"nope: {MISSING}"),
    "clean --from-scores": (
        ["clean", "-s", "en", "-t", "de", "c.tsv", "--output", "o.tsv", "--from-scores", "nope.tsv"],
        "--from-scores nope.tsv: no such file",
    ),
    "clean --from-scores, Parquet": (
        ["clean", "-s", "en", "-t", "de", "c.tsv", "--output", "o.tsv", "--from-scores", "nope.parquet"],
        "--from-scores nope.parquet: no such file",
    ),
    "clean --output": (
        ["clean", "-s", "en", "-t", "de", "c.tsv", "--output", "nope/o.tsv"],
        "cannot write nope/o.tsv: the folder nope does not exist; make it first",
    ),
    "generate --path": (["generate", "--path", "nope.pt"], f"--path nope.pt: {MISSING}"),
    "generate --path of fairseq": (
        ["generate", "--path", "model.pt:nope.pt"],
        f"--path model.pt:nope.pt: {MISSING}; give --path model.pt --path nope.pt",
    ),
    "generate --pivot-path with two paths": (
        ["generate", "--path", "model.pt", "--pivot", "de", "--pivot-path", "model.pt:nope.pt", "--input", "text"],
        f"--pivot-path model.pt:nope.pt: {MISSING}; give a single path",
    ),
    "attention --path with two paths": (
        ["attention", "--path", "model.pt:model.pt", "sate"],
        f"--path model.pt:model.pt: {MISSING}; give a single path",
    ),
    "score --path with two paths": (
        ["score", "--path", "model.pt:model.pt", "--src", "text", "--ref", "text"],
        f"--path model.pt:model.pt: {MISSING}; give a single path",
    ),
    "train --finetune-from with two paths": (
        ["train", "folder", "--finetune-from", "model.pt,model.pt"],
        f"--finetune-from model.pt,model.pt: {MISSING}; give a single path",
    ),
    "average-checkpoints with a comma": (
        ["average-checkpoints", "model.pt,folder", "--output", "x.pt"],
        f"model.pt,folder: {MISSING}; give model.pt folder",
    ),
    "generate without --path": (["generate", "text"], "Missing option '--path'. Name a checkpoint"),
    "generate, a file as DATA": (["generate", "--path", "model.pt", "text"], "text is a file, but DATA is the folder"),
    "score, files without flags": (
        ["score", "text", "text"],
        "Got unexpected extra arguments (text text). Example: nmt",
    ),
    "serve, a file without a flag": (
        ["serve", "--path", "x", "y"],
        "Got unexpected extra argument (y). Example: nmtkit serve --path",
    ),
    "train, a file as DATA": (["train", "text"], "text is a file; a dataset is a folder"),
    "export without --format": (
        ["export", "model.pt", "x"],
        "Missing option '--format'. Choose from: ctranslate2, huggingface, ",
    ),
    "generate --input": (["generate", "--path", "model.pt", "--input", "nope"], f"--input nope: {MISSING}"),
    "generate --prefix": (
        ["generate", "--path", "model.pt", "--input", "text", "--prefix", "nope"],
        f"--prefix nope: {MISSING}",
    ),
    "generate --output": (
        ["generate", "--path", "model.pt", "--input", "text", "--output", "nope/x"],
        "cannot write nope/x: the folder nope does not exist; make it first",
    ),
    "serve --path": (["serve", "--path", "en-de=nope.pt"], f"--path nope.pt: {MISSING}"),
    "shortlist --lexicon": (
        ["shortlist", "--path", "model.pt", "--lexicon", "nope"],
        f"--lexicon nope: {MISSING}",
    ),
    "export --calibration": (
        ["export", "--format", "bergamot", "--calibration", "nope", "model.pt", "x"],
        f"--calibration nope: {MISSING}",
    ),
    "average-checkpoints --output": (
        ["average-checkpoints", "model.pt", "--output", "nope/x.pt"],
        "cannot write nope/x.pt: the folder nope does not exist; make it first",
    ),
    "attention --output": (
        ["attention", "--path", "model.pt", "sate", "--output", "nope/x.html"],
        "cannot write nope/x.html: the folder nope does not exist; make it first",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "folder").mkdir()
    (folder / "text").write_text("sate\n")
    (folder / "c.tsv").write_text("a dog\tein Hund\n")
    save_tiny_transformer(folder / "model.pt", tiny_tokenizer())
    return folder


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_missing_file_is_named_in_words(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "nope.parquet" in arguments:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, [*arguments, *(["--workers", "1"] if arguments[0] == "clean" else [])])
    assert result.exit_code == 2, result.output
    error = " ".join(result.stderr.split()).partition("nmtkit: error: ")[2]
    assert error.startswith(message) and "Errno" not in error, error


@pytest.mark.parametrize("flags", [["--input", "nope"], ["--glossary", "nope"], ["--output", "nope/x"]], ids=" ".join)
def test_paths_are_checked_before_a_model_is_loaded(
    flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("nmtkit.cli.generate_run.load_translator", lambda *_: pytest.fail("the model was loaded"))
    result = CliRunner().invoke(main, ["generate", "--path", "model.pt", *flags])
    assert result.exit_code == 2 and "nope" in result.stderr and result.exception.__class__ is SystemExit


FILES = {
    "finetune_from": "[run]\nfinetune_from = 'nope'",
    "finetune_from of an --arch": "[run]\nfinetune_from = 'nope'\n[architecture]\nname = 'transformer_tiny'",
    "encoder_embed_path": "[run]\nencoder_embed_path = 'nope'",
    "teacher": "[criterion]\nname = 'kd_cross_entropy'\nteacher = ['model.pt', 'nope']",
    "teacher_probabilities": "[criterion]\nname = 'kd_cross_entropy'\nteacher-probabilities = 'nope'",
}


@pytest.mark.parametrize("key", FILES)
def test_paths_of_a_config_file_are_checked_before_data_is_loaded(
    key: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "job.toml").write_text(FILES[key])
    arguments = ["train", "nodata", "--config", "job.toml", "--save-dir", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    said = " ".join(result.stderr.split())
    table = "criterion" if "teacher" in key else "run"
    assert result.exit_code == 2 and f"job.toml: {key.partition(' ')[0]} of [{table}]: nope: " in said
    (tmp_path / "last.pt").touch()
    if " " in key:  # a run that resumes does not read these files
        assert "nodata" in CliRunner().invoke(main, arguments).stderr


# Paths that a command checks itself with a better message, and folders that commands make.
OWN_CHECKS = {
    "compare runs", "demo folder", "distill output", "export destination", "merge folder", "train data", "train config",
    "generate output_dir", "clean output_dir", "distill output_dir", "preprocess destdir", "serve state",
    "fetch output", "train save_dir",
}  # fmt: skip


def test_each_path_is_read_or_written_or_has_its_own_check() -> None:
    group = click.Context(main)
    unchecked = {
        f"{name} {parameter.name}"
        for name in main.list_commands(group)
        for parameter in main.get_command(group, name).params
        if getattr(parameter.type, "access", "") is None and Path in all_types(getattr(parameter.type, "hint", Path))
    }
    assert unchecked == OWN_CHECKS


def all_types(hint: Any) -> set[Any]:
    return {hint}.union(*map(all_types, typing.get_args(hint)))


def test_a_merge_into_a_missing_folder_is_named_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    generate = ["generate", "--path", "model.pt", "--max-len-a", "0", "--max-len-b", "2", "--input", "text"]
    assert CliRunner().invoke(main, [*generate, "--output-dir", "shards"]).exit_code == 0
    result = CliRunner().invoke(main, ["merge", "shards", "--output", "/nonexistent/x"])
    message = "cannot write /nonexistent/x: the folder /nonexistent does not exist; make it first"
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
