"""Callbacks of a run: events, requests and state. The files of trackers are read by the packages of the trackers."""

import json
import re
import shlex
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import log_records
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.jobs.distributed import launch
from nmtkit.models import checkpoint
from nmtkit.training.callbacks import CALLBACKS, Callback, RunState
from nmtkit.training.config import JobConfig
from nmtkit.training.run import Run
from nmtkit.training.run_log import Lines

FLAGS = shlex.split("""
    --arch transformer_tiny --d-model 16 --d-ff 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --dropout 0.1
    --batch-tokens 400 --max-tokens 200 --precision fp32 --device cpu --metrics accuracy --lr 0.01 --warmup-updates 10
    --threads 1 --log-interval 2 --validate-interval none --validate-interval-updates 1000 --save-interval none
""")


def flags(data: Path, save_dir: Path, *more: object) -> list[str]:
    return ["train", str(data), *FLAGS, "--save-dir", str(save_dir), *map(str, more)]


def train(data: Path, save_dir: Path, *more: object) -> str:
    result = CliRunner().invoke(main, flags(data, save_dir, *more))
    assert result.exit_code == 0, result.stderr
    return result.stderr


class Recorder(Callback):
    """Records every event. Calls the function of the run that `asks` has for the event."""

    def __init__(self, **asks: Any) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.asks = asks

    def note(self, event: str, run: RunState, *more: Any) -> None:
        self.events.append((event, run.update, *more))
        if event in self.asks:
            self.asks[event](run)

    def start(self, run: RunState) -> None:
        self.note("start", run)

    def update(self, run: RunState) -> None:
        self.note("update", run)

    def log(self, run: RunState, metrics: Mapping[str, float]) -> None:
        self.note("log", run, dict(metrics))

    def validation(self, run: RunState, scores: Mapping[str, float]) -> None:
        self.note("validation", run, dict(scores))

    def checkpoint(self, run: RunState, path: Path) -> None:
        self.note("checkpoint", run, path.name)

    def end(self, run: RunState, reason: str | None) -> None:
        self.note("end", run, reason)

    def of(self, event: str) -> list[Any]:
        return [it[1:] for it in self.events if it[0] == event]


def run_with(callback: Callback, data: Path, save_dir: Path, metrics: str = "accuracy", **settings: Any) -> str:
    names = {"architecture": "transformer_tiny", "metrics": metrics}
    tiny = {"d_model": 16, "d_ff": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "lr": 0.01}
    tiny |= {"batch_tokens": 400, "max_tokens": 200, "device": "cpu", "log_interval": 2, "warmup_updates": 10}
    off = {"validate_interval": None, "save_interval": None, "save_dir": save_dir, "validate_interval_updates": 1000}
    return Run(JobConfig.read(names=names, settings=tiny | off | settings), data, Lines(), [callback]).run().reason


@pytest.mark.slow
def test_hooks_see_every_event_with_what_is_logged(mirror_data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    run_with(recorder, mirror_data, tmp_path, max_update=5, validate_interval_updates=3, save_interval_updates=2)
    assert [event[0] for event in recorder.events] == [
        *("start", "update", "update", "log", "checkpoint", "update", "validation", "checkpoint", "update", "log"),
        *("checkpoint", "update", "log", "validation", "checkpoint", "end"),
    ]
    assert recorder.of("update") == [(1,), (2,), (3,), (4,), (5,)]
    for (update, metrics), record in zip(recorder.of("log"), log_records(tmp_path, "train"), strict=True):
        assert update == record["update"]
        assert {name: metrics[name] for name in ("loss", "norm", "lr")} == {
            name: pytest.approx(record[name], rel=1e-4) for name in ("loss", "norm", "lr")
        }
    for (update, scores), record in zip(recorder.of("validation"), log_records(tmp_path, "valid"), strict=True):
        assert update == record["update"]
        assert scores["accuracy"] == pytest.approx(record["accuracy"], rel=1e-4)
    assert recorder.of("checkpoint")[0] == (2, "update_00000002.pt")
    assert recorder.of("end") == [(5, "--max-update 5 is reached")]


@pytest.mark.slow
def test_a_callback_may_stop_the_run(mirror_data: Path, tmp_path: Path) -> None:
    asks = {"update": lambda run: run.stop("enough") if run.update == 3 else None}
    assert run_with(Recorder(**asks), mirror_data, tmp_path / "one", max_update=50) == "enough"
    assert checkpoint.load(tmp_path / "one/last.pt")["update"] == 3
    assert log_records(tmp_path / "one", "end")[0]["reason"] == "enough"
    asks = {"validation": lambda run: run.stop("good enough")}
    stopped = Recorder(**asks)
    assert run_with(stopped, mirror_data, tmp_path / "two", max_update=50, validate_interval_updates=4) == "good enough"
    assert [event[:2] for event in stopped.events[-3:]] == [("validation", 4), ("checkpoint", 4), ("end", 4)]


@pytest.mark.slow
def test_a_callback_may_ask_for_a_validation_and_a_checkpoint(mirror_data: Path, tmp_path: Path) -> None:
    def ask(run: RunState) -> None:
        if run.update == 3:
            run.validate()
        if run.update == 4:
            run.save()

    recorder = Recorder(update=ask)
    run_with(recorder, mirror_data, tmp_path / "one", max_update=6, keep_best=0)
    assert [update for update, _ in recorder.of("validation")] == [3, 6]
    assert recorder.of("checkpoint") == [(4, "update_00000004.pt"), (6, "update_00000006.pt")]
    shutil.copytree(mirror_data, without_valid := tmp_path / "data-bin")
    manifest = json.loads((without_valid / "manifest.json").read_text())
    del manifest["splits"]["valid"]
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if not name.startswith("valid.")}
    (without_valid / "manifest.json").write_text(json.dumps(manifest))
    asking = Recorder(update=lambda run: run.validate())
    with pytest.raises(ValueError, match="no --valid-subset"):
        run_with(asking, without_valid, tmp_path / "two", "none", max_update=6, validate_interval_updates=None)


def test_an_exception_is_told_to_end_and_one_in_end_is_a_warning(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(run: RunState) -> None:
        raise RuntimeError("no")

    failing = Recorder(update=fail)
    with pytest.raises(RuntimeError, match="no"):
        run_with(failing, mirror_data, tmp_path / "one", max_update=2)
    assert failing.of("end") == [(1, None)]
    run_with(Recorder(end=fail), mirror_data, tmp_path / "two", max_update=1)
    assert "RuntimeError: no" in caplog.text


PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from nmtkit.jobs import distributed
from nmtkit.config import Config, option
from nmtkit.training.callbacks import CALLBACKS, Callback

@dataclass(frozen=True, kw_only=True)
class CounterConfig(Config):
    counter_stop: int | None = option(None, "Updates after which to stop.", min=1)
    counter_rank: int = option(0, "Rank that asks for it.", min=0)

@CALLBACKS.register("counter", CounterConfig())
class Counter(Callback):
    every_rank = True

    def __init__(self, config):
        self.config, self.count = config, 0

    def update(self, run):
        self.count += 1
        if distributed.rank() == self.config.counter_rank:
            if self.count == 2:
                run.validate()
            if self.count == self.config.counter_stop:
                run.stop(f"{self.count} are counted")

    def end(self, run, reason):
        (run.save_dir / f"rank{distributed.rank()}").write_text(f"{self.count} {reason}")

    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]
"""


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(CALLBACKS, "entries", dict(CALLBACKS.entries))
    (tmp_path / "counter.py").write_text(PLUGIN)
    return tmp_path / "counter.py"


@pytest.mark.slow
def test_state_goes_with_the_checkpoint_also_to_other_ranks(mirror_data: Path, tmp_path: Path, counter: Path) -> None:
    more = ["--plugin", counter, "--callbacks", "counter"]
    train(mirror_data, tmp_path / "run", *more, "--max-update", 5)
    assert checkpoint.load(tmp_path / "run/last.pt")["training"]["callbacks"] == {"counter": {"count": 5}}
    asking = ["--counter-stop", 8, "--counter-rank", 1, "--max-update", 400]
    assert launch(flags(mirror_data, tmp_path / "run", *more, *asking), 2) == 0
    # the other rank hears of it one update later, and both stop there
    assert {(tmp_path / f"run/rank{rank}").read_text() for rank in (0, 1)} == {"9 8 are counted"}
    assert checkpoint.load(tmp_path / "run/last.pt")["update"] == 9
    assert [record["update"] for record in log_records(tmp_path / "run", "valid")] == [2, 5, 9]
    assert "continues with different settings" not in train(mirror_data, tmp_path / "run", "--max-update", 10)


@pytest.mark.slow
def test_the_state_of_a_callback_that_a_resume_leaves_out_is_kept(
    mirror_data: Path, tmp_path: Path, counter: Path
) -> None:
    more = ["--plugin", counter, "--callbacks", "counter"]
    for flags, update, count in ((more, 2, 2), ([], 4, 2), (more, 5, 3)):
        train(mirror_data, tmp_path / "run", *flags, "--max-update", update)
        contents = checkpoint.load(tmp_path / "run/last.pt")
        assert contents["update"] == update and contents["training"]["callbacks"] == {"counter": {"count": count}}


def test_a_state_that_no_checkpoint_can_hold_is_named(mirror_data: Path, tmp_path: Path) -> None:
    odd = Recorder()
    odd.state = lambda: {"path": tmp_path}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"callback Recorder 1 .*dict"):
        run_with(odd, mirror_data, tmp_path / "run", max_update=1)


class Misspelt(Recorder):
    def on_validation(self, run: RunState, scores: Mapping[str, float]) -> None:
        raise AssertionError


def test_a_method_that_looks_like_a_hook_is_told_before_the_first_update(
    mirror_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(Misspelt(), mirror_data, tmp_path / "one", max_update=1, validate_interval_updates=1)
    assert "Misspelt.on_validation is not" in caplog.text
    caplog.clear()
    run_with(Recorder(), mirror_data, tmp_path / "two", max_update=1)
    assert "hook" not in caplog.text


# --- trackers, read by their own packages -----------------------------------------------------------------------------


@pytest.mark.slow
def test_tensorboard_gets_the_numbers_of_the_log_and_the_settings(mirror_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    for updates in (4, 6):
        train(
            mirror_data,
            tmp_path,
            "--callbacks",
            "tensorboard",
            "--validate-interval-updates",
            2,
            "--max-update",
            updates,
        )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for kind, names in (("train", ("loss", "norm")), ("valid", ("loss", "accuracy"))):
        for name in names:
            read = [(it.step, it.value) for it in events.Scalars(f"{kind}/{name}")]
            logged = [
                (record["update"], pytest.approx(record[name], rel=1e-5)) for record in log_records(tmp_path, kind)
            ]
            assert read == logged
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert settings["max_update"].number_value == 4
    assert settings["architecture.name"].string_value == "transformer_tiny"


def level_db_log(data: bytes, start: int) -> Iterator[bytes]:
    """The records of a LevelDB log, whose blocks of 32 KiB count from `start` bytes before `data`."""
    at, record = 0, b""
    while len(data) - at > 7:
        if (left := 32768 - (at + start) % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_weights_and_biases_gets_the_numbers_of_the_log_offline(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    more = ["--callbacks", "wandb", "--wandb-project", "mirror", "--validate-interval-updates", 2]
    for updates in (4, 6):
        train(mirror_data, tmp_path / "run", *more, "--max-update", updates)
    history: list[dict[str, Any]] = []
    ids, settings = set(), {}
    for path in sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb")):
        for data in level_db_log(path.read_bytes()[7:], start=7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                history.append({it.key or it.nested_key[0]: json.loads(it.value_json) for it in items})
            if record.HasField("run"):
                ids.add(record.run.run_id)
                settings |= {it.key: json.loads(it.value_json) for it in record.run.config.update}
    assert len(ids) == 1
    assert settings["max_update"] == 6 and settings["architecture.name"] == "transformer_tiny"
    read = [(row["update"], row["valid/accuracy"]) for row in history if "valid/accuracy" in row]
    assert read == [
        (it["update"], pytest.approx(it["accuracy"], rel=1e-5)) for it in log_records(tmp_path / "run", "valid")
    ]
    assert [row["update"] for row in history if "train/loss" in row] == [2, 4, 6]


@pytest.mark.slow
def test_mlflow_gets_the_numbers_of_the_log(mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    more = ["--callbacks", "mlflow", "--mlflow-uri", uri, "--validate-interval-updates", 2]
    for updates in (4, 6):
        train(mirror_data, tmp_path / "run", *more, "--max-update", updates)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nmtkit")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["architecture.name"] == "transformer_tiny"
    assert run.data.tags["end"] == "--max-update 6 is reached"
    read = [(it.step, it.value) for it in client.get_metric_history(run.info.run_id, "valid/accuracy")]
    assert read == [
        (it["update"], pytest.approx(it["accuracy"], rel=1e-5)) for it in log_records(tmp_path / "run", "valid")
    ]


class FakeMlflow:
    """Stands for MLflow, whose server refuses metrics with other characters than these."""

    ALLOWED = re.compile(r"^[/\w.\- :]*$")

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="1"), experiment_id="1")

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        for item in (*metrics, *params):
            assert self.ALLOWED.match(item[0]), item
        self.names += [name for name, *_ in metrics]


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard"])
def test_scores_of_several_subsets_reach_a_tracker(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    subsets = ["--valid-subset", "valid,test", "--validate-interval-updates", 2, "--max-update", 2]
    if tracker == "mlflow":
        client = FakeMlflow()
        entities = SimpleNamespace(Param=lambda *values: values, Metric=lambda *values: values)
        monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda **_: client))
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
        train(mirror_data, tmp_path, "--callbacks", tracker, *subsets)
        names = client.names
    else:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        train(mirror_data, tmp_path, "--callbacks", tracker, *subsets)
        names = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert {"train/loss", "valid/loss", "valid/loss/test", "valid/accuracy/test"} <= set(names)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_says_how_to_get_it(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    result = CliRunner().invoke(main, flags(mirror_data, tmp_path / "run", "--callbacks", name))
    assert result.exit_code == 2
    assert f"pip install 'nmtkit[{name}]'" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_optuna_prunes_with_the_example(mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    import importlib.util

    path = Path(__file__).parents[2] / "examples/plugin/optuna_pruning.py"
    spec = importlib.util.spec_from_file_location("optuna_pruning", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    # stops each run that is not better than the best earlier run at the same update
    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda: optuna.pruners.PercentilePruner(1, n_startup_trials=1))
    settings = {"arch": "transformer_tiny", "d_model": 8, "heads": 1, "encoder_layers": 1, "decoder_layers": 1}
    settings |= {"max_update": 6, "batch_tokens": 400, "validate_interval_updates": 2, "metrics": [], "device": "cpu"}
    study = example.search(str(mirror_data), 6, **settings)
    states = [trial.state.name for trial in study.trials]
    assert states[0] == "COMPLETE" and "PRUNED" in states
    for trial in study.trials:
        logged = log_records(tmp_path / f"optuna/{trial.number}", "valid")
        assert trial.intermediate_values == {it["update"]: pytest.approx(it["loss"], rel=1e-5) for it in logged}
        [end] = log_records(tmp_path / f"optuna/{trial.number}", "end")
        early = trial.state.name == "PRUNED" and logged[-1]["update"] < 6  # at update 6, the run ends anyway
        assert (end["reason"] == "pruned by Optuna") == early
