"""`nmtkit train`: sources of its settings, its help, and mistakes."""

import os
import re
import shlex
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.data.dataset.transforms import TRANSFORMS
from nmtkit.experiments import estimate
from nmtkit.models import checkpoint
from nmtkit.training import checkpoints
from nmtkit.training.config import read_tables
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.lr_schedulers import LR_SCHEDULERS

TINY = (
    "--arch transformer_tiny --d-model 16 --d-ff 32 --heads 2 --encoder-layers 1 --decoder-layers 1 "
    "--max-tokens 200 --precision fp32 --device cpu --metrics none --max-update 2"
)


def train(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def resolved(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_a_run_talks_on_stderr_only_and_without_control_characters(mirror_data: Path, tmp_path: Path) -> None:
    result = train(mirror_data, *TINY.split(), "--save-dir", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "\x1b" not in result.stderr
    assert "update 2/2" in result.stderr
    assert checkpoint.load(tmp_path / "run" / "last.pt")["update"] == 2


@pytest.mark.slow
def test_the_end_of_a_run_names_the_commands_that_follow(mirror_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [mirror_data, *TINY.split(), "--save-dir", folder, "--save-interval-updates", 1]
    said = train(*arguments).stderr.splitlines()[-3:]
    assert "--max-update 2 is reached" in said[0]
    for line in said[1:]:
        _, _, follows = line.partition("nmtkit ")
        result = CliRunner().invoke(main, [*shlex.split(follows), *(["--device", "cpu"] * ("generate" in follows))])
        assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 20
    assert "training is finished" in train(*arguments).stderr


def test_sigusr1_saves_and_says_how_to_resume(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmtkit.training.run_log.Lines.tick", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    arguments = [mirror_data, *TINY.split(), "--save-dir", tmp_path / "run", "--quiet"]
    result = train(*arguments)
    assert result.exit_code == 128 + signal.SIGUSR1
    again = shlex.join(["nmtkit", "train", *map(str, arguments)])
    assert f"To resume: {again}" in result.stderr
    monkeypatch.undo()
    assert train(*arguments).exit_code == 0
    assert checkpoint.load(tmp_path / "run" / "last.pt")["update"] == 2


def test_flags_win_over_the_config_and_the_config_over_the_preset(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[run]\nmax_update = 9\nseed = 7\n[architecture]\nname = "transformer_tiny"\ndropout = 0.25\nd_ff = 48\n'
        '[lr-scheduler]\nname = "fixed"\nlr = 0.125\n'
    )
    given = ["--config", tmp_path / "run.toml", "--save-dir", tmp_path / "run", *TINY.split()]
    assert train(mirror_data, *given).exit_code == 0
    tables = resolved(tmp_path / "run")
    assert tables["run"]["max_update"] == 2
    assert tables["run"]["seed"] == 7
    assert tables["architecture"]["d_ff"] == 32
    assert tables["architecture"]["dropout"] == 0.25
    assert tables["lr-scheduler"] == {"name": "fixed", "lr": 0.125, "warmup_updates": 0}


@pytest.mark.slow
def test_none_on_the_command_line_is_no_value_and_not_the_default(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsave_interval_updates = 1\n")
    nones = ("keep_last", "save_interval", "save_interval_minutes", "validate_interval")
    flags = [word for name in nones for word in (f"--{name.replace('_', '-')}", "none")]
    flags += ["--config", tmp_path / "run.toml", "--max-update", 7]
    result = train(mirror_data, *TINY.split(), *flags, "--save-dir", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    run = resolved(tmp_path / "run")["run"]
    assert {run[name] for name in nones} == {"none"}
    assert len(checkpoints.numbered(tmp_path / "run")) == 7  # two more than the default keeps
    assert "valid " not in result.stderr


def test_a_table_belongs_to_the_name_it_was_written_for(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[lr-scheduler]\nname = "fixed"\nlr = 0.125\n')
    flags = ["--lr-scheduler", "inverse_sqrt", "--config", tmp_path / "run.toml", "--save-dir", tmp_path / "run"]
    result = train(mirror_data, *TINY.split(), *flags)
    assert result.exit_code == 0
    assert resolved(tmp_path / "run")["lr-scheduler"]["lr"] == "none"
    (warned,) = [line for line in result.stderr.splitlines() if "run.toml" in line]
    assert "fixed" in warned and "inverse_sqrt" in warned and "lr of [lr-scheduler]" in warned
    again = train(mirror_data, *TINY.split(), *flags, "--lr", 0.25, "--save-dir", tmp_path / "again")
    assert again.exit_code == 0 and "run.toml" not in again.stderr


def test_the_resolved_config_can_be_fed_back(mirror_data: Path, tmp_path: Path) -> None:
    assert train(mirror_data, *TINY.split(), "--save-dir", tmp_path / "one").exit_code == 0
    again = train(mirror_data, "--config", tmp_path / "one" / "config.toml", "--save-dir", tmp_path / "other")
    assert again.exit_code == 0, again.stderr
    one, other = resolved(tmp_path / "one"), resolved(tmp_path / "other")
    one["run"].pop("save_dir"), other["run"].pop("save_dir")
    assert one == other


@pytest.mark.slow
def test_the_saved_config_alone_starts_or_resumes_the_run_from_anywhere(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All paths are relative to the file, also of data and plug-ins, so that the folder can be moved as a whole."""
    before, after = tmp_path / "before", tmp_path / "after"
    (before / "plugins").mkdir(parents=True)
    (before / "plugins" / "mine.py").write_text(PLUGIN)
    shutil.copytree(mirror_data, before / "data-bin")
    monkeypatch.chdir(before)
    flags = [*TINY.split(), "--plugin", "plugins/mine.py", "--criterion", "mine"]
    first = train("data-bin", *flags, "--save-dir", "runs/one")
    assert first.exit_code == 0, first.stderr
    shutil.move(before, after)
    monkeypatch.chdir(tmp_path)
    CRITERIONS.entries.pop("mine")
    config = after / "runs" / "one" / "config.toml"
    again = train("--config", config)
    assert again.exit_code == 0 and "training is finished" in again.stderr, again.stderr
    assert train("--config", config, "--max-update", 3).exit_code == 0
    assert checkpoint.load(after / "runs" / "one" / "last.pt")["update"] == 3
    assert train("--config", config, "--save-dir", after / "two").exit_code == 0
    one, other = resolved(after / "runs" / "one")["run"], resolved(after / "two")["run"]
    assert (one["data"], one["plugin"], one["save_dir"]) == ("../../data-bin", ["../../plugins/mine.py"], ".")
    assert (other["data"], other["plugin"], other["save_dir"]) == ("../data-bin", ["../plugins/mine.py"], ".")
    CRITERIONS.entries.pop("mine")


@pytest.mark.slow
def test_a_run_is_rebuilt_from_its_averaged_checkpoint_to_the_bit(mirror_data: Path, tmp_path: Path) -> None:
    flags = [*TINY.split(), "--seed", 5, "--dropout", 0.3, "--save-interval-updates", 1, "--keep-last", "none"]
    assert train(mirror_data, *flags, "--save-dir", tmp_path / "one").exit_code == 0
    averaged = tmp_path / "averaged.pt"
    average = ["average-checkpoints", str(tmp_path / "one"), "--last", "2", "--output", str(averaged)]
    assert CliRunner().invoke(main, average).exit_code == 0
    written = CliRunner().invoke(main, ["inspect", str(averaged), "--format", "toml"])
    (tmp_path / "again.toml").write_text(written.stdout)
    shutil.copytree(tmp_path / "one", tmp_path / "kept")
    shutil.rmtree(tmp_path / "one")
    again = train("--config", tmp_path / "again.toml", "--save-dir", tmp_path / "two")
    assert again.exit_code == 0, again.stderr
    for update in (1, 2):
        name = checkpoints.file_name(update)
        one, other = (checkpoint.load(tmp_path / folder / name)["model"] for folder in ("kept", "two"))
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    assert f"dataset: {checkpoint.load(averaged)['run']['dataset']}" in written.stdout


@pytest.mark.parametrize("subset", ["test", "valid"])
def test_the_advice_at_the_end_names_a_subset_that_is_there(mirror_data: Path, tmp_path: Path, subset: str) -> None:
    data = tmp_path / "data-bin"
    flags = [word for name in ("train", "valid") for word in (f"--{name}pref", str(mirror_data.parent / name))]
    flags += ["-s", "xx", "-t", "yy", "--destdir", str(data), "--vocab-size", "320"]
    if subset == "test":
        flags += ["--testpref", str(mirror_data.parent / "test")]
    made = CliRunner().invoke(main, ["preprocess", *flags])
    assert made.exit_code == 0, made.stderr
    said = train(data, *TINY.split(), "--save-dir", tmp_path / "run").stderr
    assert f"--gen-subset {subset}" in said


def test_the_advice_at_the_end_counts_no_checkpoint_that_a_signal_left(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmtkit.training.run_log.Lines.tick", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    arguments = [mirror_data, *TINY.split(), "--save-dir", tmp_path / "run", "--save-interval", "none"]
    assert train(*arguments).exit_code == 128 + signal.SIGTERM
    monkeypatch.undo()
    said = train(*arguments).stderr
    assert len(checkpoints.numbered(tmp_path / "run")) == 2
    assert "average-checkpoints" not in said and "last.pt" in said


def test_the_clocks_checkpoints_are_the_runs_interval_where_there_is_no_other(
    mirror_data: Path, tmp_path: Path
) -> None:
    flags = ["--save-interval", "none", "--save-interval-minutes", "0.000001", "--keep-best", "0"]
    said = train(mirror_data, *TINY.split(), *flags, "--save-dir", tmp_path / "run").stderr
    assert "average-checkpoints" in said and "--last 2" in said


PLUGIN = """
import math
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig

@CRITERIONS.register("mine", CrossEntropyConfig())
class Mine(CrossEntropy):
    pass
"""
BROKEN = """
import math
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, Fixed, FixedConfig

@LR_SCHEDULERS.register("broken", FixedConfig())
class Broken(Fixed):
    def lr(self, update):
        return math.nan
"""


@pytest.mark.slow
def test_only_plugins_that_the_model_needs_are_named_for_generate(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "criterion.py").write_text(PLUGIN)
    gru = Path(__file__).parents[2] / "examples" / "plugin" / "gru.py"
    plugins = ["--plugin", tmp_path / "criterion.py", "--criterion", "mine"]
    said = train(mirror_data, *TINY.split(), *plugins, "--save-dir", tmp_path / "one").stderr
    assert "nmtkit generate" in said and "--plugin" not in said
    assert checkpoint.load(tmp_path / "one" / "last.pt")["plugins"] == []
    flags = ["--arch", "gru", "--width", 8, "--lr", 0.1, "--max-update", 1, "--metrics", "none", "--device", "cpu"]
    said = train(mirror_data, *flags, "--plugin", gru, *plugins, "--save-dir", tmp_path / "two").stderr
    assert f"--plugin {gru}" in said and "criterion.py" not in said
    assert checkpoint.load(tmp_path / "two" / "last.pt")["plugins"] == [str(gru)]
    CRITERIONS.entries.pop("mine")


def test_a_schedule_that_returns_nan_ends_the_run_as_a_mistake(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = ["--plugin", tmp_path / "broken.py", "--lr-scheduler", "broken", "--save-dir", tmp_path / "run"]
    result = train(mirror_data, *TINY.split(), *flags)
    assert result.exit_code == 2 and "Broken returned nan for" in result.stderr.replace("\n", " ")
    LR_SCHEDULERS.entries.pop("broken")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--wandb-project mine", "--wandb-project does nothing"),
        ("--callbacks none --tensorboard-dir=runs", "--tensorboard-dir does nothing"),
        ("--end-lr 0.1", "without --lr-scheduler cosine or"),
        ("--plugin {gru} --width 3", "--width does nothing"),
        ("--no-bleu-lowercase --metrics chrf", "--no-bleu-lowercase does nothing"),
        ("--arch-type x", "No such option '--arch-type'"),
    ],
)
def test_a_flag_of_a_component_that_is_not_chosen_names_the_flag_that_chooses_it(arguments: str, said: str) -> None:
    gru = Path(__file__).parents[2] / "examples/plugin/gru.py"
    result = train("data-bin", *arguments.format(gru=gru).split())
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--optimizer=sgd", "--momentum"),
        ("--optimizer adamw --optimizer sgd", "--momentum"),  # the last value counts
        ("--optimizer sgd --optimizer=adam", "--adam-betas"),
        ("--save-dir --optimizer sgd", "--adam-betas"),  # the folder has that name, and sgd is DATA
        ("--optimizer sgd --", "--momentum"),
        ("-q --lr 0.1 data-bin --optimizer sgd", "--momentum"),
    ],
)
def test_flags_that_choose_components_are_parsed_like_all_flags(arguments: str, shown: str) -> None:
    words = arguments.split()
    words.insert(words.index("--") if "--" in words else len(words), "--help")
    page = train(*words).stdout
    assert {flag for flag in ("--momentum", "--adam-betas") if flag in page} == {shown}


def test_after_two_dashes_every_word_is_an_argument() -> None:
    result = train("--device", "cpu", "--", "--optimizer=nonsense")
    assert result.exit_code == 2 and "--optimizer=nonsense: no such folder" in result.stderr


def test_help_shows_the_chosen_components_own_flags() -> None:
    plain = train("--help").stdout
    chosen = train("--arch", "transformer_tiny", "--lr-scheduler", "cosine", "--optimizer", "sgd", "--help").stdout
    assert "--d-model" in chosen
    assert "--end-lr" in chosen and "--end-lr" not in plain
    assert "--momentum" in chosen and "--adam-betas" not in chosen
    for name in ("transformer_big_en_fr", "r_drop", "adafactor", "plateau"):
        assert name in plain.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "my_rnn"], "unknown architecture 'my_rnn'; "),
        (["--criterion", "zzz"], "unknown criterion 'zzz'; known: "),
        (["--optimizer", "shampoo"], "unknown optimizer 'shampoo'; "),
        (["--lr-scheduler", "noam"], "unknown lr-scheduler 'noam'; "),
        (["--plugin", "nowhere.py"], "plug-in nowhere.py"),
        (["--config", "nowhere.toml"], "config nowhere.toml"),
        (["--batch-tokens", "100", "--update-freq", "2"], "give only one"),
        (["--max-tokens", "5"], "--max-tokens 5; give --max-tokens"),
        (["--label-smoothing", "1"], "--label-smoothing"),
        (["--precision", "fp16"], "for GPUs"),
        (["--valid-subset", "dev"], "no subset 'dev'"),
        (["--freeze", "head.*"], "--freeze head.* matches no"),
        (["--finetune-from", "nowhere.pt"], "nowhere.pt: no such file"),
        (["--vocab-size", "100"], "--vocab-size does nothing"),
        (["--vocab-size", "100", "--dry-run"], "--vocab-size and DATA"),
        (["--dry-run-updates", "2"], "--dry-run-updates does nothing"),
        (["--validate-interval", "none", "--patience", "3"], "--patience does nothing"),
        (["--validate-interval", "none", "--valid-beam", "3"], "--valid-beam does nothing without"),
        (["--validate-interval", "none", "--lr-scheduler", "plateau"], "--lr-scheduler plateau does nothing"),
        (["--best-checkpoint-metric", "bleu"], "without --metrics bleu"),
        (
            ["--best-checkpoint-metric", "wer"],
            "wer:max if",
        ),
        (["--best-checkpoint-metric", "loss:up"], "'up' is neither"),
        (["--valid-beam", "3"], "--valid-beam does nothing"),
        (["--metrics", "bleu", "--bleu-tokenize", "klingon"], "unknown tokenizer 'klingon'"),
        (["--metrics", "chrf", "--validate-interval", "none"], "--metrics does nothing"),
        (["--device", "tpu"], "'tpu' is not"),
        (["--device", "cuda:9"], "'cuda:9' is not"),
        (["--lr", "nan"], "--lr is nan"),
        (["--clip-norm", "inf"], "--clip-norm is inf"),
        (["--timeout-minutes", "nan"], "--timeout-minutes is nan"),
        (["--max-tokens", str(10**30)], "at most 1,000,000,000,000"),
        (["--threads", "100000"], "--threads is 100000"),
        (["--d-model", "10000000", "--heads", "1"], "--d-model is 10000000;"),
        (["--encoder-layers", "100000000"], "--encoder-layers is 100000000;"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_to_do(
    mirror_data: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    result = train(mirror_data, *TINY.split(), "--save-dir", tmp_path / "run", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.pt"))


def test_a_dataset_that_is_none_is_refused(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "is not an nmtkit dataset")):
        result = train(folder, *TINY.split(), "--save-dir", tmp_path / "run")
        assert result.exit_code == 2
        assert said in result.stderr
    assert "give a dataset" in train(*TINY.split()).stderr


def test_averages_take_the_checkpoints_of_the_interval(mirror_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ["--max-update", "7", "--save-interval-updates", "2", "--save-interval", "none"]
    flags += ["--keep-last", "2", "--keep-best", "0"]
    said = train(mirror_data, *TINY.split(), *flags, "--save-dir", folder).stderr
    assert [path.name[-6:-3] for path in checkpoints.numbered(folder)] == ["004", "006", "007"]
    assert f"average-checkpoints {folder} --last 2 " in said
    average = ["average-checkpoints", str(folder), "--last", "2", "--output", str(folder / "averaged.pt")]
    assert CliRunner().invoke(main, average).exit_code == 0
    assert checkpoint.load(folder / "averaged.pt")["averaged"] == ["update_00000004.pt", "update_00000006.pt"]


def test_dashes_and_underscores_are_alike_in_the_config(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nsave-interval = 3\n[lr_scheduler]\nname = "fixed"\nlr = 0.5\n')
    flags = ["--config", tmp_path / "run.toml", "--save-dir", tmp_path / "run"]
    assert train(mirror_data, *TINY.split(), *flags).exit_code == 0
    assert resolved(tmp_path / "run")["run"]["save_interval"] == 3
    assert resolved(tmp_path / "run")["lr-scheduler"]["lr"] == 0.5
    (tmp_path / "run.toml").write_text("[run]\nsave-interval = 3\nsave_interval = 3\n")
    assert "occurs twice in" in train(mirror_data, *TINY.split(), *flags).stderr


def test_a_byte_order_mark_and_line_ends_of_windows_change_no_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nmax_update = 17\r\n")
    assert read_tables(tmp_path / "run.toml") == {"run": {"max_update": 17}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_updates = 3", "did you mean 'max_update'?"),
        ("max_update = 3.0", "max_update: 3.0 is not"),
        ("compile = 1", "compile: 1 is not"),
        ('save_dir = ""', "save_dir: '' is not"),
        ("clip_norm = nan", "--clip-norm is nan"),
        ("seed = -1", "--seed is -1"),
        ('device = "tpu"', "device: 'tpu' is not"),
        ("freeze = [1]", "freeze: 1 is not"),
    ],
)
def test_a_wrong_value_in_the_config_is_named_with_its_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "run.toml").write_text(f"[run]\n{line}\n")
    result = train(tmp_path, *TINY.split()[:2], "--config", tmp_path / "run.toml")
    assert result.exit_code == 2
    assert said in result.stderr and "run.toml" in result.stderr and result.stderr.count("\n") == 1


def test_a_setting_of_another_name_in_the_config_is_named(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nmax_updates = 3\n")
    result = train(mirror_data, *TINY.split(), "--config", tmp_path / "run.toml")
    assert result.exit_code == 2
    assert "'max_updates'" in result.stderr
    (tmp_path / "run.toml").write_text("[optimiser]\nname = 3\n")
    assert "'optimiser' is not" in train(mirror_data, "--config", tmp_path / "run.toml").stderr


@pytest.mark.slow
def test_a_dry_run_needs_no_dataset_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.experiments.estimate.product_ceiling", lambda *_, **__: 1e11)  # measured for 0.2 s
    monkeypatch.chdir(tmp_path)
    flags = ["--dry-run", "--vocab-size", 37000, "--batch-tokens", 25000, "--device", "cpu", "--max-update", 100000]
    result = train(*flags, "--arch", "transformer_base")
    assert result.exit_code == 0, result.stderr
    assert "63.0 M" in result.stdout
    # computed as in test_estimate.py; the weights alone have 9.45
    assert "9.54 TFLOP" in result.stdout
    # weights, gradients and Adam's two means of 63.0 M parameters, 4 bytes each; and an eighth of that
    assert re.search(r"state +1.01 GB", result.stdout)
    shared = train(*flags, "--parallel", "fsdp", "--nproc-per-node", 8)
    assert re.search(r"state +0.13 GB", shared.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_under_a_launcher_is_printed_by_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmtkit.experiments.estimate.product_ceiling", lambda *_, **__: 1e11)  # measured for 0.2 s
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        result = train("--dry-run", "--vocab-size", 100, "--device", "cpu", "--arch", "transformer_tiny")
        assert result.exit_code == 0 and ("FLOP" in result.stdout) == (rank == "0"), result.output


def test_a_dry_run_times_real_updates(mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceiling = estimate.product_ceiling
    monkeypatch.setattr(estimate, "product_ceiling", lambda device, precision: ceiling(device, precision, 0.05))
    result = train(mirror_data, *TINY.split(), "--dry-run", "--dry-run-updates", 2, "--save-dir", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "target tokens/s" in result.stdout
    assert "device hours" in result.stdout
    assert not (tmp_path / "run").exists()


SEVERAL = """
from dataclasses import dataclass
from nmtkit.config import Config, option
from nmtkit.data.dataset.transforms import TRANSFORMS, Transform

@dataclass(frozen=True, kw_only=True)
class SwapConfig(Config):
    swap_share: float = option(0.5, "Share of pairs to swap.", min=0, max=1)

@dataclass(frozen=True, kw_only=True)
class CutConfig(Config):
    cut_tokens: int = option(3, "Tokens to keep.", min=1)

class Keep(Transform):
    def __init__(self, config, tokenizer): ...
    def transform(self, source, target, generator):
        return source, target

TRANSFORMS.register("swap.all", SwapConfig())(type("Swap", (Keep,), {}))
TRANSFORMS.register("cut", CutConfig())(type("Cut", (Keep,), {}))
"""


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Loads a plug-in with two transforms, and removes the transforms after the test."""
    monkeypatch.setattr(TRANSFORMS, "entries", dict(TRANSFORMS.entries))
    (tmp_path / "several.py").write_text(SEVERAL)
    return tmp_path / "several.py"


@pytest.mark.slow
def test_several_components_of_a_kind_have_flags_and_tables_of_their_own(
    mirror_data: Path, tmp_path: Path, several: Path
) -> None:
    flags = [*TINY.split(), "--plugin", several, "--transforms", "cut,swap.all"]
    shown = train(*flags, "--help").stdout
    assert "--swap-share" in shown and "Transform cut:" in shown
    assert re.search(r"--transforms NAME,…\s+Transforms of .*swap\.all, +cut", shown.replace("\n", " "))
    assert train(mirror_data, *flags, "--swap-share", 0.25, "--save-dir", tmp_path / "one").exit_code == 0
    tables = resolved(tmp_path / "one")
    assert tables["run"]["transforms"] == ["cut", "swap.all"]
    assert tables["transforms"] == {"cut": {"cut_tokens": 3}, "swap.all": {"swap_share": 0.25}}
    assert train(mirror_data, "--config", tmp_path / "one/config.toml", "--save-dir", tmp_path / "two").exit_code == 0
    assert resolved(tmp_path / "two")["transforms"] == tables["transforms"]
    fed_back = ["--config", tmp_path / "one/config.toml", "--save-dir", tmp_path / "three"]
    assert train(mirror_data, *fed_back, "--transforms", "swap.all", "--swap-share", "1").exit_code == 0
    assert resolved(tmp_path / "three")["transforms"] == {"swap.all": {"swap_share": 1.0}}
    assert train(mirror_data, *fed_back[:2], "--transforms", "none", "--save-dir", tmp_path / "four").exit_code == 0
    assert resolved(tmp_path / "four")["run"]["transforms"] == []


@pytest.mark.parametrize(
    ("toml", "arguments", "said"),
    [
        ("", "--transforms cut,cut", "--transforms cut,cut repeats"),
        ("", "--transforms blur", "unknown transform 'blur'; known: "),
        ("", "--transforms cut --swap-share 1", "--swap-share does nothing"),
        (
            "[transforms.cut]\ncut_tokens = 2\n",
            "",
            "[transforms.cut] does nothing",
        ),
        ("[transforms]\ncut_tokens = 2\n", "", "'cut_tokens' is in"),
        ('[run]\ntransforms = "cut"\n', "", "'cut' is not a"),
        ('[run]\ntransforms = ["cut"]\n[transforms.cut]\ncut_token = 2\n', "", "did you mean 'cut_tokens'?"),
    ],
)
def test_mistakes_with_several_components_are_named(
    tmp_path: Path, several: Path, toml: str, arguments: str, said: str
) -> None:
    (tmp_path / "run.toml").write_text(toml)
    result = train(tmp_path, "--plugin", several, "--config", tmp_path / "run.toml", *arguments.split())
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
