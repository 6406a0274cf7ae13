"""In resumed runs, state belongs to parameters by name, with averaging, freezing and resets."""

import logging
import math
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import log_records
from test_run import job, train
from torch import Tensor

from nmtkit.config import plugins
from nmtkit.data import checkpoint_file
from nmtkit.experiments.comparison import summarize
from nmtkit.experiments.inspection import config_of
from nmtkit.training.callbacks import CALLBACKS
from nmtkit.training.config import JobConfig
from nmtkit.training.run import Run
from nmtkit.training.run_log import Lines


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nmtkit")


# --- running means x frozen parameters x --reset-optimizer ------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], Path]:
    """Makes runs of three updates with each combination of --ema-decay and --freeze."""
    folders = {}
    for ema, freeze in product((None, 0.5), ((), ("encoder.*",))):
        folders[ema, freeze] = tmp_path_factory.mktemp("stopped") / "run"
        train(mirror_data, folders[ema, freeze], max_update=3, ema_decay=ema, freeze=freeze)
    return folders


def copied(folder: Path, destination: Path) -> Path:
    destination.mkdir()
    for path in folder.iterdir():
        if path.suffix in (".pt", ".toml", ".jsonl") and not path.is_symlink():
            (destination / path.name).write_bytes(path.read_bytes())
    return destination


@pytest.mark.parametrize("ema_after", [None, 0.5])
@pytest.mark.parametrize("freeze_after", [(), ("encoder.*",), ("decoder.*",)])
@pytest.mark.parametrize("freeze_before", [(), ("encoder.*",)])
@pytest.mark.parametrize("ema_before", [None, 0.5])
def test_a_resumed_run_has_the_weights_and_the_state_of_each_parameter(
    mirror_data: Path,
    tmp_path: Path,
    stopped: dict[tuple[Any, ...], Path],
    ema_before: float | None,
    freeze_before: tuple[str, ...],
    ema_after: float | None,
    freeze_after: tuple[str, ...],
) -> None:
    folder = copied(stopped[ema_before, freeze_before], tmp_path / "run")
    saved = checkpoint_file.read(folder / "update_00000003.pt")
    raw: dict[str, Tensor] = saved["training"].get("weights", {})
    reset = freeze_before != freeze_after
    settings = {"ema_decay": ema_after, "freeze": freeze_after, "reset_optimizer": reset, "max_update": 3}
    run = Run(job(folder, **settings), mirror_data, Lines())
    try:
        trained = run.trainer.engine.parameters
        for name, parameter in run.trainer.model.named_parameters():
            expected = raw[name] if name in raw and name in trained else saved["model"][name]
            assert torch.equal(parameter, expected), name
        if run.trainer.ema:
            with run.trainer.evaluated_weights():
                for name, parameter in run.trainer.model.named_parameters():
                    assert torch.equal(parameter, saved["model"][name]), name
        assert bool(run.trainer.optimizer.state) != reset
        for name, parameter in trained.items():
            for key, value in run.trainer.optimizer.state.get(parameter, {}).items():
                assert torch.equal(value, saved["training"]["optimizer"]["state"][name][key]), (name, key)
    finally:
        run.checkpoints.unlock()


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("freeze", [(), ("encoder.*",)])
def test_a_run_in_parts_equals_the_whole_run(
    mirror_data: Path,
    tmp_path: Path,
    stopped: dict[tuple[Any, ...], Path],
    ema: float | None,
    freeze: tuple[str, ...],
) -> None:
    folder = copied(stopped[ema, freeze], tmp_path / "run")
    settings = {"ema_decay": ema, "freeze": freeze, "max_update": 6, "log_interval": 1}
    train(mirror_data, folder, **settings)
    train(mirror_data, tmp_path / "whole", **settings)
    losses = [{it["update"]: it["loss"] for it in log_records(path, "train")} for path in (folder, tmp_path / "whole")]
    assert [losses[0][update] for update in (4, 5, 6)] == [losses[1][update] for update in (4, 5, 6)]
    parts, whole = (checkpoint_file.read(path / "last.pt") for path in (folder, tmp_path / "whole"))
    assert all(torch.equal(parts["model"][name], whole["model"][name]) for name in whole["model"])
    for name, weight in whole["training"].get("weights", {}).items():
        assert torch.equal(parts["training"]["weights"][name], weight)


def test_training_state_saved_by_position_is_refused(
    mirror_data: Path, tmp_path: Path, stopped: dict[tuple[Any, ...], Path]
) -> None:
    folder = copied(stopped[None, ()], tmp_path / "run")
    contents = checkpoint_file.read(folder / "update_00000003.pt")
    contents["training"]["optimizer"] = {"state": {0: {}}, "param_groups": [{"params": [0]}]}
    checkpoint_file.save(folder / "update_00000003.pt", contents)
    with pytest.raises(ValueError, match=r"older version .*--finetune-from .*00003.pt"):
        train(mirror_data, folder, max_update=6)


def test_settings_that_trained_nothing_are_not_those_of_the_run(
    mirror_data: Path, tmp_path: Path, stopped: dict[tuple[Any, ...], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(stopped[None, ()], tmp_path / "run")
    before, config = summarize(folder), (folder / "config.toml").read_text()
    train(mirror_data, folder, max_update=3, clip_norm=7.0)
    assert "clip_norm" in caplog.text
    after = summarize(folder)
    assert (after.settings, after.state) == (before.settings, "finished")
    assert after.settings["clip_norm"] == 0 and (folder / "config.toml").read_text() == config
    assert "clip_norm = 0.0" in (folder / "report.html").read_text()
    train(mirror_data, folder, max_update=4, clip_norm=7.0)
    assert summarize(folder).settings["clip_norm"] == 7.0


def test_a_schedule_free_run_validates_before_its_first_update(mirror_data: Path, tmp_path: Path) -> None:
    names = {"optimizer": "schedule_free_adamw", "lr-scheduler": "fixed"}
    train(mirror_data, tmp_path, names, max_update=1, validate_first=True, validate_interval_updates=1, keep_best=2)
    assert [record["update"] for record in log_records(tmp_path, "valid")] == [0, 1]
    saved, later = (checkpoint_file.read(path) for path in sorted(tmp_path.glob("update_*.pt")))
    assert (saved["update"], later["update"]) == (0, 1)
    assert all(
        torch.equal(saved["model"][name], weight) for name, weight in saved["training"]["optimizer"]["weights"].items()
    )


@pytest.mark.parametrize("optimizer", [None, "schedule_free_adamw", "adam"])
def test_a_reset_of_a_schedule_free_optimizer_starts_from_its_averages(
    mirror_data: Path, tmp_path: Path, optimizer: str | None
) -> None:
    names, folder = {"optimizer": "schedule_free_adamw", "lr-scheduler": "fixed"}, tmp_path / "run"
    train(mirror_data, folder, names, max_update=3, warmup_updates=0)
    saved = checkpoint_file.read(folder / "update_00000003.pt")
    averages, trained = saved["model"], saved["training"]["optimizer"]["weights"]
    assert any(not torch.equal(averages[name], weight) for name, weight in trained.items())
    resumed = names if optimizer is None else names | {"optimizer": optimizer}
    settings = {"reset_optimizer": optimizer is not None, "warmup_updates": 0, "max_update": 3}
    run = Run(job(folder, resumed, **settings), mirror_data, Lines())
    run.checkpoints.unlock()
    for name, parameter in run.trainer.engine.parameters.items():
        assert torch.equal(parameter, trained[name] if optimizer is None else averages[name]), name


def test_a_resume_by_the_config_of_the_folder_resets_nothing_again(
    mirror_data: Path, tmp_path: Path, stopped: dict[tuple[Any, ...], Path]
) -> None:
    folder = copied(stopped[None, ()], tmp_path / "run")
    train(mirror_data, folder, max_update=4, reset_optimizer=True, reset_lr_scheduler=True)
    by_file = JobConfig.read(folder / "config.toml", settings={"max_update": 5})
    assert by_file.data == mirror_data  # without the .. of the file, because the next commands show this path
    run = Run(by_file, mirror_data, Lines())
    run.checkpoints.unlock()
    assert run.trainer.schedule_start == 3
    assert {float(entries["step"]) for entries in run.trainer.optimizer.state.values()} == {1.0}
    repeated = tomllib.loads(config_of(folder / "last.pt"))["run"]
    assert not repeated["reset_optimizer"] and not repeated["reset_lr_scheduler"]


# --- the learning-rate schedule ---------------------------------------------------------------------------------------


def test_a_schedule_of_another_kind_starts_with_its_own_state(
    mirror_data: Path, tmp_path: Path, stopped: dict[tuple[Any, ...], Path]
) -> None:
    folder, names = copied(stopped[None, ()], tmp_path / "run"), {"lr-scheduler": "plateau"}
    run = Run(job(folder, names, validate_interval_updates=1, max_update=3), mirror_data, Lines())
    run.checkpoints.unlock()
    assert run.trainer.done == 3
    assert run.trainer.scheduler.state() == {"best": math.inf, "waited": 0, "steps": 0}


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["cosine", "polynomial"])
def test_a_reset_schedule_reaches_its_end_rate_with_the_run(mirror_data: Path, tmp_path: Path, scheduler: str) -> None:
    names = {"lr-scheduler": scheduler}
    settings = {"lr": 0.01, "end_lr": 0.001, "warmup_updates": 1, "log_interval": 1}
    train(mirror_data, tmp_path / "run", names, max_update=6, **settings)
    train(mirror_data, tmp_path / "run", names, max_update=9, reset_lr_scheduler=True, **settings)
    # the schedule of the reset run goes on in a run that is resumed once more
    train(mirror_data, tmp_path / "run", names, max_update=12, **settings)
    rates = {it["update"]: it["lr"] for it in log_records(tmp_path / "run", "train")}
    assert [rates[1], rates[6]] == pytest.approx([0.01, 0.001])
    assert [rates[7], rates[9]] == pytest.approx([0.01, 0.001])
    # updates 1 to 6 of the schedule, of which the first is warm-up: 10 to 12 are its updates 4 to 6
    progress = 3 / 5
    middle = {"polynomial": 0.001 + 0.009 * (1 - progress), "cosine": 0.001 + 0.009 * 0.34549150}[scheduler]
    assert [rates[10], rates[12]] == pytest.approx([middle, 0.001])


# --- plug-ins ---------------------------------------------------------------------------------------------------------


PLUGIN = """
from nmtkit.training.callbacks import CALLBACKS, Callback
from nmtkit.config import Config
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class NothingConfig(Config):
    pass

@CALLBACKS.register("{name}", NothingConfig())
class Nothing(Callback):
    def __init__(self, config):
        pass
"""


@pytest.mark.slow
def test_a_plug_in_that_was_edited_since_the_stop_is_named(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = tmp_path / "mine.py"

    def go(updates: int, text: str) -> str:
        plugin.write_text(text)
        caplog.clear()
        CALLBACKS.entries.pop("nothing_much", None)
        module = plugins.plugin_module(str(plugin))
        plugins._digests.pop(module, None)
        plugins.sys.modules.pop(module, None)  # like a new process
        plugins.load_plugin(str(plugin))
        config = job(tmp_path / "run", {"callbacks": "nothing_much"}, max_update=updates)
        Run(replace(config, plugins=(str(plugin),)), mirror_data, Lines()).run()
        return caplog.text

    source = PLUGIN.format(name="nothing_much")
    assert "mine.py" not in go(1, source)
    assert "mine.py has changed" not in go(2, source)
    assert "source of plug-in mine.py" in go(3, source + "\nX = 1\n")
    assert "trained to its end, so the new source changes nothing" in go(3, source + "\nX = 3\n")
    starts = [*log_records(tmp_path / "run", "start"), *log_records(tmp_path / "run", "resume")]
    digests = [record["plugin_sources"]["mine.py"] for record in starts]
    assert digests[0] == digests[1] != digests[2]
    # the same process does not see the edit; it says so
    plugin.write_text(source + "\nX = 2\n")
    caplog.clear()
    plugins.load_plugin(str(plugin))
    assert "mine.py has changed" in caplog.text
