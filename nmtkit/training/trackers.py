"""Callbacks that send settings and numbers of a run to experiment trackers: TensorBoard, Weights & Biases, MLflow."""

import importlib.util
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.config import Config, option
from nmtkit.training.callbacks import CALLBACKS, Callback, RunState

# limits that every version of the MLflow server accepts
MLFLOW_PARAMS = 100  # maximum parameters per request
MLFLOW_VALUE = 500  # maximum characters in the value of a parameter
MLFLOW_FORBIDDEN = re.compile(r"[^\w./ -]")  # forbidden in the name of a parameter or a metric


def flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns settings by "table.name", and settings of the run by name only. Lists become texts with commas."""
    return {
        name if table == "run" else f"{table}.{name}": ",".join(map(str, value)) if isinstance(value, list) else value
        for table, values in settings.items()
        for name, value in values.items()
    }


class Tracker(Callback):
    """Sends logged numbers under names such as "train/loss" and "valid/bleu". bleu@valid1 becomes valid/bleu/valid1."""

    name: str  # name of the callback, of the package that it needs, and of the extra that installs this package
    run_id = ""  # id in the tracker, which a resumed run uses again; empty until the tracker gives an id

    def __init__(self, config: Any) -> None:
        """Keeps the config. Raises ImportError, with the pip command, unless the package is installed."""
        if importlib.util.find_spec(self.name) is None:
            raise ImportError(
                f"--callbacks {self.name} needs a package that is not installed: pip install 'nmtkit[{self.name}]'"
            )
        self.config = config

    def send(self, run: RunState, values: dict[str, float]) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id} if self.run_id else {}

    def load_state(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]

    def log(self, run: RunState, metrics: Mapping[str, float]) -> None:
        self.send(run, {f"train/{name}": value for name, value in metrics.items()})

    def validation(self, run: RunState, scores: Mapping[str, float]) -> None:
        self.send(run, {f"valid/{name.replace('@', '/')}": value for name, value in scores.items()})


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig(Config):
    tensorboard_dir: Path | None = option(None, "Folder of the event files; default: SAVE_DIR/tensorboard.")


@CALLBACKS.register("tensorboard", TensorBoardConfig())
class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with the settings of the run as hyper-parameters."""

    name = "tensorboard"

    def start(self, run: RunState) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = self.config.tensorboard_dir or run.save_dir / "tensorboard"
        # removes numbers that a killed run has logged for updates that this run repeats
        self.writer: Any = SummaryWriter(str(folder), purge_step=run.update + 1)
        settings = {name: "none" if value is None else value for name, value in flat(run.settings).items()}
        scores = {f"valid/{name}": 0.0 for name in ("loss", "ppl", *run.settings["run"]["metrics"])}
        for summary in hparams(settings, scores):
            self.writer._get_file_writer().add_summary(summary)

    def send(self, run: RunState, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, run.update)

    def end(self, run: RunState, reason: str | None) -> None:
        self.writer.close()


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Config):
    wandb_project: str = option("nmtkit", "Project in Weights & Biases.")
    wandb_name: str | None = option(None, "Name of the run in Weights & Biases; default: the name of --save-dir.")


@CALLBACKS.register("wandb", WandbConfig())
class WeightsAndBiases(Tracker):
    """Logs to a run of Weights & Biases; a resumed run continues the same run there.

    With the environment variable WANDB_MODE=offline, no network is needed.
    """

    name = "wandb"

    def start(self, run: RunState) -> None:
        import wandb

        self.session = wandb.init(
            project=self.config.wandb_project,
            name=self.config.wandb_name or run.save_dir.resolve().name,
            dir=str(run.save_dir),
            config=flat(run.settings),
            id=self.run_id or None,
            resume="allow",
        )
        self.run_id = self.session.id
        self.session.define_metric("update")
        # the built-in step must not decrease, but the update number can decrease when a run is resumed
        self.session.define_metric("*", step_metric="update")

    def send(self, run: RunState, values: dict[str, float]) -> None:
        self.session.log(values | {"update": run.update})

    def end(self, run: RunState, reason: str | None) -> None:
        self.session.summary["end"] = reason or "failed"
        self.session.finish(exit_code=0 if reason else 1)


def _allowed(name: str) -> str:
    """Returns the name of a metric or parameter with _ for each character that MLflow refuses."""
    return MLFLOW_FORBIDDEN.sub("_", name)


@dataclass(frozen=True, kw_only=True)
class MlflowConfig(Config):
    mlflow_experiment: str = option("nmtkit", "Experiment in MLflow.")
    mlflow_uri: str | None = option(
        None, "Tracking server or store of MLflow; default: MLFLOW_TRACKING_URI or the default of MLflow."
    )


@CALLBACKS.register("mlflow", MlflowConfig())
class Mlflow(Tracker):
    """Logs to a run of MLflow; a resumed run continues the same run there."""

    name = "mlflow"

    def start(self, run: RunState) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri=self.config.mlflow_uri)
        if self.run_id:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        known = self.client.get_experiment_by_name(self.config.mlflow_experiment)
        experiment = known.experiment_id if known else self.client.create_experiment(self.config.mlflow_experiment)
        self.run_id = self.client.create_run(experiment, run_name=run.save_dir.resolve().name).info.run_id
        params = [Param(_allowed(name), str(value)[:MLFLOW_VALUE]) for name, value in flat(run.settings).items()]
        for first in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(self.run_id, params=params[first : first + MLFLOW_PARAMS])

    def send(self, run: RunState, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_allowed(name), value, now, run.update) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics)

    def end(self, run: RunState, reason: str | None) -> None:
        self.client.set_tag(self.run_id, "end", reason or "failed")
        self.client.set_terminated(self.run_id, "FINISHED" if reason else "FAILED")
