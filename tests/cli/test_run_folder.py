"""The folder of a run stands for its best checkpoint, in every command that reads a checkpoint."""

import dataclasses
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

import nmtkit
from nmtkit.cleaning.config import CleanConfig
from nmtkit.cli import main
from nmtkit.cli.generate_config import GenerateConfig
from nmtkit.cli.rerank import RerankConfig
from nmtkit.cli.score import ScoreConfig
from nmtkit.config import COMMAND_LINE, derive
from nmtkit.config.files import checkpoint_of
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.serving.config import ModelPath
from nmtkit.training.criterions.distillation import DistillationConfig
from nmtkit.training.run_config import RunConfig
from nmtkit.translation.search.logits_processors.second_model import ContrastiveConfig, LMFusionConfig
from nmtkit.translation.translator import Translator


def call(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)), prog_name="nmtkit")
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose best checkpoint is not the last."""
    folder = tmp_path / "run"
    folder.mkdir()
    tokenizer = tiny_tokenizer()
    for seed, name in enumerate(("update_00000001.pt", "update_00000002.pt")):
        save_tiny_transformer(folder / name, tokenizer, seed=seed)
    (folder / "best.pt").symlink_to("update_00000001.pt")
    (folder / "last.pt").symlink_to("update_00000002.pt")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("a b c\nd e\n", encoding="utf-8")
    return tmp_path / "text"


def test_the_best_checkpoint_is_taken_or_the_last_with_a_notice(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nmtkit"):
        assert checkpoint_of(run) == run / "best.pt"
        assert not caplog.messages
        (run / "best.pt").unlink()
        assert checkpoint_of(run) == run / "last.pt"
    (notice,) = caplog.messages
    assert str(run) in notice and "best.pt" in notice and "last.pt" in notice
    (run / "last.pt").unlink()
    assert checkpoint_of(run) == run


def test_generate_and_score_take_the_folder(run: Path, text: Path) -> None:
    words = ("--input", text, "--max-len-b", "4")
    best, last = (call("generate", "--path", run / name, *words).stdout for name in ("best.pt", "last.pt"))
    assert call("generate", "--path", run, *words).stdout == best != last
    words = ("--sys", text, "--src", text)
    assert call("score", "--path", run, *words).stdout == call("score", "--path", run / "best.pt", *words).stdout


def test_inspect_and_export_take_the_folder(run: Path, tmp_path: Path) -> None:
    assert str(run / "best.pt") in call("inspect", run).stdout
    call("export", "--format", "safetensors", run, tmp_path / "exported")
    call("export", "--format", "safetensors", run / "best.pt", tmp_path / "expected")
    (first, second) = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("exported", "expected"))
    assert first == second
    call("export", "--format", "checkpoint", tmp_path / "exported", tmp_path / "again.pt")  # this folder is not a run


def test_several_runs_are_averaged(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other, symlinks=True)
    call("average-checkpoints", run, other, "--output", tmp_path / "averaged.pt")
    assert "average of" in call("inspect", tmp_path / "averaged.pt").stdout
    call("average-checkpoints", run / "best.pt", "--output", tmp_path / "one.pt")
    assert "1 checkpoint," in call("inspect", tmp_path / "one.pt").stdout
    result = CliRunner().invoke(main, ["average-checkpoints", str(run), "--output", str(tmp_path / "one.pt")])
    assert result.exit_code == 2 and "--last" in result.stderr  # one run: the number of checkpoints is open


def test_a_shortlist_does_not_replace_a_checkpoint_of_a_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lex").write_text("a b 0.5\n", encoding="utf-8")
    result = CliRunner().invoke(main, ["shortlist", "--lexicon", str(tmp_path / "lex"), "--path", str(run)])
    assert result.exit_code == 2 and "--output" in result.stderr
    call("shortlist", "--lexicon", tmp_path / "lex", "--path", run, "--output", tmp_path / "short.pt")


def test_python_and_the_service_take_the_folder(run: Path) -> None:
    assert Translator.load(run).paths == [run / "best.pt"]
    best = nmtkit.load(run / "best.pt").translate(["a b c"], max_len_b=4)
    assert nmtkit.load(str(run)).translate(["a b c"], max_len_b=4) == best
    assert ModelPath.parse(str(run)).path == ModelPath.parse(f"en-de={run}").path == run / "best.pt"


CONFIGS = (
    CleanConfig, ContrastiveConfig, DistillationConfig, LMFusionConfig, GenerateConfig, PreprocessConfig, RerankConfig,
    RunConfig, ScoreConfig,
)  # fmt: skip


def fields_of_checkpoints() -> Iterator[tuple[type, dataclasses.Field]]:
    for config in CONFIGS:
        yield from ((config, field) for field in dataclasses.fields(config) if field.metadata["checkpoint"])


@pytest.mark.parametrize(
    ("config", "field"), list(fields_of_checkpoints()), ids=[field.name for _, field in fields_of_checkpoints()]
)
def test_every_setting_that_names_a_checkpoint_takes_the_folder(
    config: type, field: dataclasses.Field, run: Path
) -> None:
    several = field.default == ()
    needed = {"destdir": run.parent / "data"} if config is PreprocessConfig else {}
    needed |= {"source_lang": "en", "target_lang": "de", "train": ("x",)} if config is PreprocessConfig else {}
    needed |= {"backward": "b", "forward": "f"} if config is CleanConfig else {}
    needed |= {"output": "o", "source_lang": "en", "target_lang": "de"} if config is CleanConfig else {}
    derived = derive(config, needed | {field.name: [str(run)] if several else str(run)}, COMMAND_LINE)
    assert getattr(derived, field.name) == ((run / "best.pt",) if several else run / "best.pt")


def test_every_setting_whose_help_says_checkpoint_is_marked() -> None:
    marked = {field.name for _, field in fields_of_checkpoints()}
    named = {
        field.name
        for config in CONFIGS
        for field in dataclasses.fields(config)
        if field.metadata["help"].lower().startswith("checkpoint") and field.name != "best_checkpoint_metric"
    }
    assert named <= marked
    assert {"finetune_from", "teacher", "backward", "lm", "pivot_path", "path", "tokenizer_from", "contrast"} <= marked


def test_a_run_is_not_imported(run: Path, tmp_path: Path) -> None:
    """A model without encoder layers ended with a KeyError after the file was written."""
    result = CliRunner().invoke(main, ["import", str(run), str(tmp_path / "new.pt")])
    assert result.exit_code == 2 and "needs no import" in result.output
    assert not (tmp_path / "new.pt").exists()
