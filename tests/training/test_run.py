"""Runs from start to end: resume, early stopping, checkpoints kept, bad input."""

import dataclasses
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import log_records

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.experiments.comparison import summarize
from nmtkit.experiments.inspection import after_training
from nmtkit.jobs import distributed, folder_lock
from nmtkit.models import checkpoint
from nmtkit.training import checkpoints, health, setup
from nmtkit.training.config import JobConfig
from nmtkit.training.due import RunProgress, StopReason
from nmtkit.training.loader import BatchLoader
from nmtkit.training.meter import DivergedError
from nmtkit.training.metrics import conditions_of
from nmtkit.training.run import Run, train_job
from nmtkit.training.run_log import Lines
from nmtkit.training.validation import Validator
from nmtkit.translation.search import scorer
from nmtkit.translation.translator import Translator

TINY = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1}
SMALL_RUN = {
    "batch_tokens": 200,
    "max_tokens": 120,  # two micro-batches in an update
    "precision": "fp32",
    "device": "cpu",
    "lr": 0.01,
    "warmup_updates": 10,
    "validate_interval": None,
    "log_interval": 5,
}


def job(save_dir: Path, names: dict[str, str] | None = None, **settings: Any) -> JobConfig:
    names = {"architecture": "transformer_tiny", "metrics": "none", **(names or {})}
    return JobConfig.read(names=names, settings=TINY | SMALL_RUN | {"save_dir": save_dir} | settings)


def train(data: Path, save_dir: Path, names: dict[str, str] | None = None, **settings: Any) -> StopReason:
    return Run(job(save_dir, names, **settings), data, Lines()).run()


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nmtkit")


@pytest.mark.slow
def test_training_lowers_the_loss_and_writes_complete_checkpoints(mirror_data: Path, tmp_path: Path) -> None:
    ending = train(mirror_data, tmp_path / "run", {"metrics": "bleu"}, max_update=40, validate_interval=1, valid_beam=2)
    assert ending.updates == 40
    losses = [record["loss"] for record in log_records(tmp_path / "run", "train")]
    assert losses[-1] < losses[0] - 0.5
    assert {"loss", "ppl", "bleu"} <= set(log_records(tmp_path / "run", "valid")[-1])
    contents = checkpoint.load(tmp_path / "run" / "last.pt")
    assert contents["update"] == 40
    assert contents["architecture"] == "transformer_tiny"


OTHERWISE = {"ema_decay": 0.9, "clip_norm": 0.1, "word_shuffle": 2}


OTHER_NAMES = {"optimizer": "adafactor", "lr-scheduler": "plateau", "criterion": "r_drop"}
OTHER_NAMES["transforms"] = "casing,typos,bpe_dropout,word_dropout,word_blank,word_shuffle"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "settings"),
    [
        ({}, {}),
        (OTHER_NAMES, OTHERWISE),
        ({"optimizer": "schedule_free_adamw", "lr-scheduler": "fixed"}, {}),
        pytest.param({"optimizer": "lion"}, {}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon"}, {"weight_decay_for": ("decoder.*=0.3",)}, marks=pytest.mark.slow),
    ],
    ids=["plain", "otherwise", "schedule-free", "lion", "muon"],
)
def test_resume_equals_uninterrupted_bit_for_bit(
    mirror_data: Path, tmp_path: Path, names: dict[str, str], settings: dict[str, Any]
) -> None:
    settings = settings | {"names": names, "validate_interval_updates": 4, "batch_tokens": 500, "max_tokens": 300}
    train(mirror_data, tmp_path / "whole", max_update=12, **settings)  # an epoch has eight updates
    train(mirror_data, tmp_path / "parts", max_update=3, **settings)
    train(mirror_data, tmp_path / "parts", max_update=10, save_interval_updates=4, **settings)
    train(mirror_data, tmp_path / "parts", max_update=12, **settings)
    assert log_records(tmp_path / "whole", "train")[-1]["epoch"] == 2
    whole = checkpoint.load(tmp_path / "whole" / "last.pt")
    parts = checkpoint.load(tmp_path / "parts" / "last.pt")
    assert all(torch.equal(tensor, parts["model"][name]) for name, tensor in whole["model"].items())
    optimizers = [it["training"]["optimizer"]["state"] for it in (whole, parts)]
    assert optimizers[0].keys() == optimizers[1].keys()
    for parameter, state in optimizers[0].items():
        assert all(torch.equal(value, optimizers[1][parameter][name]) for name, value in state.items())


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(mirror_data, tmp_path / "whole", max_update=5)
    train(mirror_data, tmp_path / "run", max_update=4, save_interval_updates=2)
    newest = tmp_path / "run" / "update_00000004.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    train(mirror_data, tmp_path / "run", max_update=5)
    assert "update_00000004.pt is" in caplog.text
    one, other = (checkpoint.load(tmp_path / name / "last.pt")["model"] for name in ("whole", "run"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_training_state_stays_in_the_two_newest_checkpoints_only(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "run", max_update=10, save_interval=None, save_interval_updates=2, keep_last=4)
    paths = checkpoints.numbered(tmp_path / "run")
    assert [path.name for path in paths] == [checkpoints.file_name(update) for update in (4, 6, 8, 10)]
    assert ["training" in checkpoint.load(path) for path in paths] == [False, False, True, True]
    assert (tmp_path / "run" / "last.pt").resolve() == paths[-1]


@pytest.mark.slow
def test_the_best_checkpoint_stays_though_it_is_old(mirror_data: Path, tmp_path: Path) -> None:
    # a rate that is far too high makes later validations worse
    train(mirror_data, tmp_path / "run", max_update=10, validate_interval_updates=2, keep_last=2, lr=3.0)
    valid = {record["update"]: record["loss"] for record in log_records(tmp_path / "run", "valid")}
    best = min(valid, key=lambda update: valid[update])
    assert (tmp_path / "run" / "best.pt").resolve().name == checkpoints.file_name(best)
    assert checkpoint.load(tmp_path / "run" / "best.pt")["scores"]["loss"] == pytest.approx(valid[best], rel=1e-5)


def test_a_validation_gives_a_heartbeat_again_and_again(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int | None] = []
    monkeypatch.setattr(scorer, "HEARTBEAT_STEPS", 4)
    run = Run(job(tmp_path / "run", {"metrics": "chrf"}, max_update=1, validate_interval=1), mirror_data, Lines())
    monkeypatch.setattr(distributed, "heartbeat", lambda stage=None: beats.append(stage))
    assert run.validator is not None
    run.validator.translations(run.trainer.model)
    longest = int(run.dataset["valid"].target.lengths.max())
    assert len(beats) >= longest // 4


@pytest.mark.slow
def test_validation_translates_as_generate_does_and_leaves_the_model_alone(mirror_data: Path, tmp_path: Path) -> None:
    run = Run(job(tmp_path / "run", {"metrics": "bleu"}, max_update=6, validate_interval=1), mirror_data, Lines())
    run.run()
    assert run.validator is not None
    before = {name: (value.dtype, value.clone()) for name, value in run.trainer.model.state_dict().items()}
    kinds = [type(module) for module in run.trainer.model.modules()]
    run.validator.translations(run.trainer.model)
    after = run.trainer.model.state_dict()
    assert all(
        after[name].dtype == dtype and torch.equal(after[name], value) for name, (dtype, value) in before.items()
    )
    assert [type(module) for module in run.trainer.model.modules()] == kinds
    translator = Translator.load(tmp_path / "run" / "last.pt")
    lines = run.dataset["valid"].source_lines()
    texts = [translation.text for translation in translator.translate(lines, beam=4, keep_loops=True)]
    assert run.validator.hypotheses == texts
    best, worst = run.validator.rated()
    assert {row[1] for row in best + worst} <= set(texts)
    assert best[0][3] == max(row[3] for row in best) and worst[0][3] == min(row[3] for row in worst)


@pytest.mark.slow
def test_hours_of_training_end_the_run_and_count_from_its_start(mirror_data: Path, tmp_path: Path) -> None:
    end = train(mirror_data, tmp_path / "run", max_update=100_000, stop_time_hours=0.5 / 3600)
    assert 1 <= end.updates < 100_000
    assert end.reason.startswith("--stop-time-hours")
    saved = checkpoint.load(tmp_path / "run" / "last.pt")["training"]["seconds"]
    assert 0.5 <= saved < 60
    assert train(mirror_data, tmp_path / "run", max_update=100_000, stop_time_hours=0.5 / 3600).updates == end.updates


def test_the_first_process_decides_whether_a_resumed_run_is_out_of_time(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)
    monkeypatch.setattr(RunProgress, "is_out_of_time", lambda *_: True)  # the clock of this process
    monkeypatch.setattr(distributed, "broadcast", lambda value: False if value is True else value)
    run = Run(job(tmp_path / "run", max_update=2), mirror_data, Lines())
    run.checkpoints.unlock()
    assert run.ended is None


def test_patience_ends_the_run(mirror_data: Path, tmp_path: Path) -> None:
    ending = train(mirror_data, tmp_path / "run", max_update=200, validate_interval_updates=3, patience=2, lr=3.0)
    assert ending.updates < 200
    assert "validations" in ending.reason
    valid = [record["loss"] for record in log_records(tmp_path / "run", "valid")]
    assert min(valid) == valid[-3]


@pytest.mark.slow
def test_epochs_end_the_run(mirror_data: Path, tmp_path: Path) -> None:
    run = Run(job(tmp_path / "run", max_epoch=2, validate_interval=1, batch_tokens=600), mirror_data, Lines())
    assert run.run().updates == 2 * len(list(run.loader.sampler.epoch(0)))
    assert len(log_records(tmp_path / "run", "valid")) == 2


@pytest.mark.slow
def test_the_total_of_updates_is_an_estimate_until_the_last_and_then_right(mirror_data: Path, tmp_path: Path) -> None:
    ending = train(mirror_data, tmp_path / "run", max_epoch=3, log_interval=1)
    lines = log_records(tmp_path / "run", "train")
    lengths = [sum(line["epoch"] == epoch for line in lines) for epoch in (1, 2, 3)]
    assert ending.updates == sum(lengths)
    assert {line["estimated"] for line in lines[:-1]} == {True}
    assert all(abs(line["updates"] - sum(lengths)) <= 4 for line in lines)
    # in the last epoch: the number of the first two epochs, and half of this number in addition
    assert lines[-2]["updates"] == round(1.5 * (lengths[0] + lengths[1]))
    assert (lines[-1]["updates"], lines[-1]["estimated"]) == (sum(lengths), False)
    train(mirror_data, tmp_path / "other", max_epoch=3, max_update=4, log_interval=1)
    assert {(line["updates"], line["estimated"]) for line in log_records(tmp_path / "other", "train")} == {(4, False)}


@pytest.mark.parametrize(
    ("change", "named"),
    [({"d_ff": 64}, "d_ff +32 +64"), ({"seed": 7}, "seed +1 +7"), ({"batch_tokens": 300}, "batch tokens +200 +300")],
)
def test_resuming_another_run_names_the_difference(
    mirror_data: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)
    with pytest.raises(ValueError, match=rf"(?s)cannot continue.*setting +before +now\n +{named}\n.*--finetune-from"):
        train(mirror_data, tmp_path / "run", max_update=2, **change)


@pytest.mark.slow
def test_settings_that_change_on_resume_are_a_table_that_quiet_runs_show(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)
    caplog.clear()
    caplog.set_level(logging.WARNING, "nmtkit")  # like -q
    train(mirror_data, tmp_path / "run", {"lr-scheduler": "fixed"}, max_update=2, clip_norm=0.5, warmup_updates=1)
    text = caplog.records[0].getMessage()
    assert text.splitlines()[0].endswith("different settings:")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert rows[0] == ["setting", "before", "now"]
    assert ["clip_norm", "0", "0.5"] in rows and ["lr-scheduler", "inverse_sqrt", "fixed"] in rows
    assert {row[0] for row in rows} == {"setting", "clip_norm", "lr-scheduler", "warmup_updates"}
    caplog.clear()
    train(mirror_data, tmp_path / "run", {"lr-scheduler": "fixed"}, max_update=3, clip_norm=0.5, warmup_updates=1)
    assert not caplog.records


@pytest.mark.slow
def test_running_means_may_begin_and_end_when_a_run_is_resumed(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "plain", max_update=6)
    for updates, settings in ((2, {}), (4, {"ema_decay": 0.5}), (6, {})):
        train(mirror_data, tmp_path / "run", max_update=updates, **settings)
    plain, run = (checkpoint.load(tmp_path / name / "last.pt")["model"] for name in ("plain", "run"))
    assert all(torch.equal(tensor, run[name]) for name, tensor in plain.items())


def groups_of(run: Run) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in run.trainer.optimizer.param_groups
    ]


def test_a_resumed_run_takes_its_own_hyper_parameters(mirror_data: Path, tmp_path: Path) -> None:
    names = {"optimizer": "adamw"}
    train(mirror_data, tmp_path / "run", names, max_update=3)
    settings = {"weight_decay": 5.0, "adam_betas": (0.5, 0.6)}
    run = Run(job(tmp_path / "run", names, max_update=4, **settings), mirror_data, Lines())
    assert {group["betas"] for group in groups_of(run)} == {(0.5, 0.6)}
    decays = {group["name"]: group["weight_decay"] for group in groups_of(run)}
    assert decays == {"matrices": 5.0, "embeddings": 5.0, "vectors": 0.0}
    assert {float(entries["step"]) for entries in run.trainer.optimizer.state.values()} == {3.0}
    run.run()
    # and a run without other settings continues with these settings
    assert groups_of(Run(job(tmp_path / "run", names, **settings), mirror_data, Lines())) == groups_of(run)


@pytest.mark.slow
def test_the_optimizer_and_the_schedule_can_be_reset(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "run", max_update=7)
    resets = {"reset_optimizer": True, "reset_lr_scheduler": True, "log_interval": 1}
    run = Run(job(tmp_path / "run", {"optimizer": "sgd"}, max_update=9, **resets), mirror_data, Lines())
    assert not any(entries["momentum_buffer"].any() for entries in run.trainer.optimizer.state.values())
    run.run()
    train(mirror_data, tmp_path / "run", {"optimizer": "sgd"}, max_update=10, log_interval=1)
    rates = {record["update"]: record["lr"] for record in log_records(tmp_path / "run", "train")}
    assert [rates[update] for update in (8, 9, 10)] == pytest.approx([0.001, 0.002, 0.003])


def test_resuming_with_other_frozen_parameters_is_refused(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)
    with pytest.raises(ValueError, match=r"--freeze and --weight-decay-for"):
        train(mirror_data, tmp_path / "run", max_update=2, freeze=("encoder.*",))


def test_a_resumed_run_keeps_the_resolved_batch_size(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(mirror_data, tmp_path / "run", max_update=1, batch_tokens=None, update_freq=3)
    run = Run(job(tmp_path / "run", max_update=2, batch_tokens=None, update_freq=1), mirror_data, Lines())
    assert run.job.run.batch_tokens == 360
    assert "updates of 360 tokens; --update-freq 1" in caplog.text


def test_a_pair_larger_than_max_tokens_is_named_before_the_first_update(mirror_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pair \d+ .*--max-tokens 5; .*--max-tokens \d+"):
        Run(job(tmp_path / "run", max_tokens=5), mirror_data, Lines())
    assert not (tmp_path / "run").exists()


HOLDER = """
import sys, time
from pathlib import Path
from nmtkit.training.metrics import Objective
from nmtkit.training.checkpoints import CheckpointManager
manager = CheckpointManager(Path(sys.argv[1]), None, 1, Objective("loss"))
manager.open()
print("locked", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_folder_is_locked_until_its_run_ends_be_it_by_kill(mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    with pytest.raises(ValueError, match=rf"--save-dir .* process {holder.pid} on "):
        Run(job(tmp_path / "run", max_update=2), mirror_data, Lines())
    holder.kill()
    holder.wait()
    assert train(mirror_data, tmp_path / "run", max_update=2).updates == 2


@pytest.mark.slow
@pytest.mark.parametrize("alive", [True, False])
def test_a_lock_that_another_machine_does_not_show_is_known_by_its_signs_of_life(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """Some shared file systems lock within each machine only."""
    train(mirror_data, tmp_path / "run", max_update=1)
    lock = tmp_path / "run" / ".lock"
    assert lock.read_text() == ""
    lock.write_text(json.dumps({"process": 7, "host": "node9", "since": "2026-01-01 00:00:00"}))
    monkeypatch.setattr(folder_lock, "WATCHED_SECONDS", 20.0 if alive else 0.6)
    monkeypatch.setattr(folder_lock, "TOUCH_SECONDS", 0.05)
    if not alive:
        assert train(mirror_data, tmp_path / "run", max_update=2).updates == 2
        return
    ended = threading.Event()
    threading.Thread(target=folder_lock._touch, args=(lock, ended)).start()
    try:
        with pytest.raises(ValueError, match=r"process 7 on node9, .*2026-01-01 00:00:00"):
            train(mirror_data, tmp_path / "run", max_update=2)
        assert folder_lock.holder_of(tmp_path / "run") == json.loads(lock.read_text())
    finally:
        ended.set()


@pytest.mark.slow
def test_the_log_says_how_a_run_ended(mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)
    monkeypatch.setattr(Lines, "tick", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    train(mirror_data, tmp_path / "run", max_update=9)
    monkeypatch.setattr(Lines, "tick", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(mirror_data, tmp_path / "run", max_update=9)
    ends = [(line["update"], line["state"], line["reason"]) for line in log_records(tmp_path / "run", "end")]
    assert ends == [
        (1, "finished", "--max-update 1 is reached"),
        (2, "stopped", "SIGTERM"),
        (3, "failed", "division by zero"),
    ]


def test_a_folder_that_holds_something_else_is_refused(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="other than a run"):
        Run(job(tmp_path), mirror_data, Lines())


def test_a_full_disk_keeps_the_run_alive(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = checkpoint_file.save

    def full(path: Path, contents: dict[str, Any]) -> None:
        if contents["update"] == 4:
            raise OSError(28, "No space left on device")
        save(path, contents)

    monkeypatch.setattr(checkpoint_file, "save", full)
    ending = train(mirror_data, tmp_path / "run", max_update=6, save_interval_updates=2)
    assert ending.updates == 6
    assert "No space left" in caplog.text
    assert [path.name[-4:] for path in checkpoints.numbered(tmp_path / "run")] == ["2.pt", "6.pt"]


@pytest.mark.slow
def test_a_file_system_that_takes_no_more_keeps_the_older_checkpoint(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(mirror_data, tmp_path / "run", max_update=2)
    size = (tmp_path / "run" / "last.pt").resolve().stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        with pytest.raises(OSError, match=r"update_00000006\.pt: .*File too large"):
            train(mirror_data, tmp_path / "run", max_update=6, save_interval_updates=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "older checkpoints are kept" in caplog.text
    assert [path.name for path in tmp_path.rglob("*.pt") if not path.is_symlink()] == ["update_00000002.pt"]
    assert not list(tmp_path.rglob("*.tmp"))
    assert train(mirror_data, tmp_path / "run", max_update=6).updates == 6


@pytest.mark.slow
def test_a_validation_that_fails_leaves_a_checkpoint_and_is_made_first_by_the_resumed_run(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"max_update": 6, "validate_interval_updates": 3, "save_interval": None}
    with monkeypatch.context() as patch:
        patch.setattr(Validator, "_scores", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(mirror_data, tmp_path / "run", **settings)
    saved = checkpoint.load(tmp_path / "run" / "last.pt")
    assert saved["update"] == 3 and saved["training"]["validation_due"]
    train(mirror_data, tmp_path / "run", **settings)
    train(mirror_data, tmp_path / "whole", **settings)
    scores = [{it["update"]: it["loss"] for it in log_records(tmp_path / name, "valid")} for name in ("run", "whole")]
    assert list(scores[0]) == [3, 6] and scores[0] == scores[1]


def test_a_finished_run_whose_last_validation_failed_makes_no_update_without_validations(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Validator, "_scores", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(mirror_data, tmp_path / "run", max_update=3, validate_interval_updates=3)
    assert train(mirror_data, tmp_path / "run", max_update=3).updates == 3
    assert sorted(it["update"] for it in log_records(tmp_path / "run", "end")) == [3, 3]


def test_the_next_command_averages_the_last_checkpoints_without_an_older_best(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(Validator, "scores", lambda *_: {"loss": next(losses)})
    each_update = {"validate_interval_updates": 1, "save_interval_updates": 1}
    settings = job(tmp_path / "run", max_update=5, keep_last=2, **each_update)
    end = train_job(dataclasses.replace(settings, data=mirror_data))
    kept = [path.name for path in sorted((tmp_path / "run").glob("update_*.pt"))]
    assert kept == ["update_00000001.pt", "update_00000004.pt", "update_00000005.pt"]
    (average, _) = after_training(dataclasses.replace(settings, data=mirror_data), end)[1]
    assert " --last 2 " in average


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"valid_subset": ("test",)}, {"valid_sentences": 5}, {"label_smoothing": 0.3}], ids=str
)
def test_scores_under_other_conditions_are_not_compared(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    losses = iter([1.0, 2.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr(Validator, "scores", lambda *_: {"loss": next(losses)})
    settings = {"validate_interval_updates": 1, "save_interval_updates": 1, "patience": 3}
    train(mirror_data, tmp_path / "run", max_update=2, **settings)
    end = train(mirror_data, tmp_path / "run", max_update=5, **settings, **changes)
    assert end.updates == 5  # two of the three validations after the resume have a higher loss than the first
    assert (tmp_path / "run" / "best.pt").resolve().name == "update_00000003.pt"
    assert [record["best"] for record in log_records(tmp_path / "run", "valid")] == [True, False, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"valid_beam": 2}, {"bleu_lowercase": True}, {"bleu_tokenize": "char"}], ids=str)
def test_scores_of_another_beam_or_kind_of_a_metric_are_not_compared(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    scores = iter([30.0, 20.0, 5.0, 4.0, 3.0])
    monkeypatch.setattr(Validator, "scores", lambda *_: {"loss": 2.0, "bleu": next(scores)})
    settings = {"validate_interval_updates": 1, "patience": 3, "best_checkpoint_metric": "bleu"}
    train(mirror_data, tmp_path / "run", {"metrics": "bleu"}, max_update=2, **settings)
    end = train(mirror_data, tmp_path / "run", {"metrics": "bleu"}, max_update=5, **settings, **changes)
    assert end.updates == 5 and (tmp_path / "run" / "best.pt").resolve().name == "update_00000003.pt"
    best = summarize(tmp_path / "run").best
    assert best["bleu"].update == 3 and best["loss"].update == 1  # the loss does not depend on the translations


@pytest.mark.slow
def test_the_best_score_of_another_metric_is_that_of_the_kept_checkpoints(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([(2.0, 30.0), (1.0, 20.0), (3.0, 25.0), (3.0, 35.0)])
    monkeypatch.setattr(Validator, "scores", lambda *_: dict(zip(("loss", "bleu"), next(scores), strict=True)))
    settings = {"validate_interval_updates": 1, "save_interval_updates": 1}
    train(mirror_data, tmp_path / "run", {"metrics": "bleu"}, max_update=2, **settings)
    train(mirror_data, tmp_path / "run", {"metrics": "bleu"}, max_update=4, best_checkpoint_metric="bleu", **settings)
    assert [record["best"] for record in log_records(tmp_path / "run", "valid")] == [True, True, False, True]
    assert (tmp_path / "run" / "best.pt").resolve().name == "update_00000004.pt"


def test_the_loss_of_guided_alignment_depends_on_the_weight_of_the_alignment() -> None:
    def conditions(score: str, weight: float) -> tuple[str, ...]:
        return conditions_of(score, {"criterion": {"name": "guided_alignment", "alignment_weight": weight}})

    assert conditions("loss", 0.05) != conditions("loss", 0.1)
    assert conditions("nll", 0.05) == conditions("nll", 0.1)


@pytest.mark.slow
def test_a_dataset_without_a_valid_set_is_trained_on_with_a_notice(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = mirror_data.parent / "train"
    flags = ["-s", "xx", "-t", "yy", "--trainpref", str(corpus), "--destdir", str(tmp_path / "data-bin")]
    main(["preprocess", *flags, "--vocab-size", "320"], standalone_mode=False)
    monkeypatch.setattr(logging.getLogger("nmtkit"), "propagate", True)  # the command sets this handler
    without = {name: value for name, value in SMALL_RUN.items() if name != "validate_interval"}
    settings = TINY | without | {"save_dir": tmp_path / "run", "max_update": 2}
    config = JobConfig.read(names={"architecture": "transformer_tiny"}, settings=settings)
    caplog.clear()
    assert Run(config, tmp_path / "data-bin", Lines()).run().updates == 2
    (notice,) = warned(caplog)
    assert "no subset 'valid'" in notice and "--validpref" in notice
    assert not log_records(tmp_path / "run", "valid")
    # a run with the flag for validation needs a valid set
    for names, more in (
        ({}, {"patience": 3}),
        ({}, {"valid_subset": ("valid",), "validate_interval_updates": 5}),
        ({"lr-scheduler": "plateau"}, {}),
        ({"metrics": "chrf"}, {}),
    ):
        names = {"architecture": "transformer_tiny", **names}
        config = JobConfig.read(names=names, settings=settings | {"save_dir": tmp_path / "other"} | more)
        with pytest.raises(ValueError, match=r"no subset 'valid'; .*train"):
            Run(config, tmp_path / "data-bin", Lines())


@pytest.mark.parametrize("place", ["nmtkit.training.run.build_trainer", "nmtkit.training.run.Run._restore"])
def test_a_run_that_fails_to_start_does_not_keep_its_folder(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    train(mirror_data, tmp_path / "run", max_update=1)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(ValueError, match="no such thing") as caught:
            train(mirror_data, tmp_path / "run", max_update=2)
    # a notebook keeps the exception, and with it the objects of its frames
    assert caught.traceback and folder_lock.holder_of(tmp_path / "run") is None
    assert train(mirror_data, tmp_path / "run", max_update=2).updates == 2


# --- signs that something is wrong ------------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("share", "warns"), [(0.5, True), (0.1, False)])
def test_processes_without_work_are_told(
    share: float, warns: bool, mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(BatchLoader, "idle_share", lambda loader: share)
    monkeypatch.setattr(logging.getLogger("nmtkit"), "propagate", True)  # a command sets this handler
    train(mirror_data, tmp_path / "run", max_update=1)
    idle = [message for message in warned(caplog) if "processes are idle" in message]
    assert len(idle) == warns
    if warns:
        assert "idle 50 % of the time" in idle[0] and "give --max-tokens" in idle[0]


@pytest.mark.slow
def test_a_healthy_run_has_no_warning_of_its_losses(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SETTLED", 10)
    train(mirror_data, tmp_path / "run", max_update=20, validate_interval_updates=5)
    assert warned(caplog) == []


def test_a_first_loss_above_uniform_is_told(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(*arguments: Any) -> Any:
        model = build(*arguments)
        with torch.no_grad():
            model.output_projection.weight.mul_(30)
        return model

    build = setup.build_model
    monkeypatch.setattr(setup, "build_model", scaled)
    train(mirror_data, tmp_path / "run", max_update=1)
    (warning,) = warned(caplog)
    assert "the first update has" in warning and "have ppl 320.00: " in warning


@pytest.mark.slow
def test_a_loss_above_uniform_after_warm_up_is_told_once(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SETTLED", 10)
    monkeypatch.setattr(health, "DIVERGED_EXCESS", math.inf)  # the loss is so high that the run would also diverge
    train(mirror_data, tmp_path / "run", max_update=40, lr=20.0)
    (warning,) = warned(caplog)
    assert warning.startswith("update 15 has ppl ")
    assert "above ppl 320.00 of uniform" in warning and "learning rate too high" in warning


@pytest.mark.slow
def test_a_run_that_diverges_warns_once_and_then_stops(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default warm-up is longer than the run, so the end of the warm-up is not awaited."""
    monkeypatch.setattr(health, "DIVERGED_UPDATES", 30)
    flags = {"lr": 1e3, "warmup_updates": 4000, "save_interval_updates": 10, "save_interval": None}
    with pytest.raises(DivergedError, match=r"--lr.*--warmup-updates.*--clip-norm") as error:
        train(mirror_data, tmp_path / "run", max_update=300, **flags)
    (warning,) = warned(caplog)
    assert all(flag in warning for flag in ("--lr", "--warmup-updates", "--clip-norm"))
    losses = {record["update"]: math.log(record["ppl"]) for record in log_records(tmp_path / "run", "train")}
    diverged = [update for update, loss in losses.items() if loss > math.log(320) + 2]
    assert warning.startswith(f"update {diverged[0]} ") and diverged[-1] - diverged[0] in (25, 30)
    assert f"update {diverged[-1]} " in str(error.value) and "--save-dir" in str(error.value)
    assert "No checkpoint" in str(error.value)  # all checkpoints of the run have diverged
    assert log_records(tmp_path / "run", "end")[-1]["state"] == "failed"


def test_a_fine_tuning_that_starts_above_uniform_guesses_diverges_only_above_its_start(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Dataset.open(mirror_data)["train"]
    watch = health.TrainingHealth(job(tmp_path, finetune_from=tmp_path / "base.pt"), data, fresh=True)
    for update in range(1, 9):
        watch.stop_if_diverged(100 * update, 50 - update)
    assert warned(caplog) == []
    for update in (600, 800, 900):
        (tmp_path / f"update_{update:08d}.pt").touch()
    monkeypatch.setattr(watch, "save_dir", tmp_path)
    with pytest.raises(DivergedError, match=r"update 900 .* since update 801\. .*update_00000800\.pt"):
        watch.stop_if_diverged(900, 60)


def test_a_resumed_run_diverges_and_settles_after_its_start(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.open(mirror_data)["train"]
    watch = health.TrainingHealth(job(tmp_path), data, fresh=False, done=500, schedule_start=500)
    for update in (500, 600):
        (tmp_path / f"update_{update:08d}.pt").touch()
    watch.stop_if_diverged(550, 20)
    assert "diverges" in warned(caplog)[0]
    with pytest.raises(DivergedError, match=r"since update 501\. .*update_00000500\.pt"):
        watch.stop_if_diverged(600, 20)
    caplog.clear()
    watch = health.TrainingHealth(job(tmp_path, warmup_updates=300), data, fresh=False, done=500, schedule_start=500)
    for update in (600, 700, 750):  # updates 100, 200 and 250 of the schedule
        watch.after_log_line({"update": update, "ppl": 400.0})
    assert not warned(caplog)


def test_a_validation_tells_of_a_divergence_before_the_first_log_line(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.open(mirror_data)["train"]
    watch = health.TrainingHealth(job(tmp_path), data, fresh=True)
    watch.after_validation(15, {"ppl": 320 * math.exp(1.9)})
    assert not warned(caplog)
    watch.after_validation(30, {"ppl": 320 * math.exp(2.1)})
    watch.after_validation(45, {"ppl": 1e9})
    (warning,) = warned(caplog)
    assert warning.startswith("update 30 ") and "diverges" in warning and "ppl 320.00" in warning
    watch.after_log_line({"update": 50, "ppl": 1e6})
    watch.after_validation(60, {"ppl": 1e9})  # says nothing about the languages of the valid set
    assert len(warned(caplog)) == 1


def test_a_loss_at_the_entropy_of_the_target_pieces_is_told_once(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.open(mirror_data)["train"]
    counts = Counter(piece for row in range(len(data)) for piece in data.target.sentence(row))
    entropy = -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())

    counts = Counter(piece for row in range(len(data)) for piece in data.target.sentence(row)[1:])
    without_first = -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())
    assert health.target_entropy(dataclasses.replace(data, uncounted=1)) == pytest.approx(without_first)

    def losses(*above: float) -> None:
        watch = health.TrainingHealth(job(tmp_path), data, fresh=True)
        assert watch.entropy == pytest.approx(entropy)
        for number, excess in enumerate(above, 1):
            watch.after_log_line({"update": 100 * number, "ppl": math.exp(entropy + excess)})

    losses(0.9, 0.1, 0.05, -0.3, -0.31)  # passes the plateau
    losses(0.9, 0.1, 0.04, -0.03, -0.1)  # falls slowly
    assert not warned(caplog)
    losses(0.9, 0.1, 0.05, 0.03, 0.02)
    (warning,) = warned(caplog)
    assert warning.startswith("update 400 ")
    perplexities = [f"ppl {math.exp(nll):.2f}" for nll in (entropy + 0.03, entropy)]
    assert all(text in warning for text in (*perplexities, "--lr"))


def test_a_first_validation_far_above_training_is_told(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset.open(mirror_data)["train"]
    watch = health.TrainingHealth(job(tmp_path), data, fresh=True)
    watch.after_validation(5, {"ppl": 300.0})  # there is no training loss yet
    watch.after_log_line({"update": 10, "ppl": 20.0})
    watch.after_validation(10, {"ppl": 400.0})
    watch.after_validation(10, {"ppl": 400.0})
    (warning,) = warned(caplog)
    assert "has ppl 400.00, but training has ppl 20.00" in warning
    for other in (
        health.TrainingHealth(job(tmp_path), data, fresh=False),
        health.TrainingHealth(job(tmp_path, overfit_batches=1), data, True),
    ):
        other.after_log_line({"update": 10, "ppl": 20.0})
        other.after_validation(10, {"ppl": 400.0})
    assert len(warned(caplog)) == 1


# --- --overfit-batches ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_few_batches_are_learned_by_heart(mirror_data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"names": {"criterion": "cross_entropy"}, "dropout": 0.0, "overfit_batches": 2}
    settings |= {"d_model": 32, "validate_interval": 2, "log_interval": 50}
    train(mirror_data, tmp_path / "run", max_update=150, **settings)
    train(mirror_data, tmp_path / "run", max_update=250, **settings)
    assert log_records(tmp_path / "run", "train")[-1]["loss"] < 0.05
    assert log_records(tmp_path / "run", "valid")[-1]["loss"] > 1
    with pytest.raises(ValueError, match=r"(?s)cannot continue.*overfit.batches"):
        train(mirror_data, tmp_path / "run", max_update=300, **settings | {"overfit_batches": None})


def test_more_batches_than_there_are_are_refused(mirror_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--overfit-batches is 900, .*\d+ batches"):
        train(mirror_data, tmp_path / "run", max_update=1, overfit_batches=900)
