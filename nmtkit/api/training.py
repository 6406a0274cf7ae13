"""Trains in this process, like `nmtkit train`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.api.settings import PathLike, checked, hints_of, named_arguments
from nmtkit.training.callbacks import Callback
from nmtkit.training.config import REGISTRIES, ConfigFile, JobConfig
from nmtkit.training.run import TrainingResult, train_job
from nmtkit.training.run_config import RunConfig


@named_arguments
def train(
    settings: Mapping[str, Any] | PathLike, data: PathLike | None = None, callbacks: Sequence[Callback] = ()
) -> TrainingResult:
    """Trains a model on a dataset in this process, like `nmtkit train`, and returns a TrainingResult.

    >>> result = nmtkit.train({"arch": "transformer_tiny", "max_update": 1000, "save_dir": "run"}, "data-bin")
    >>> nmtkit.load(result.best).translate("A dog runs.")

    `settings` maps the flags of the command to values. The flags choose components (`arch`, `criterion`, …), set the
    settings of the components and of the run, and name files (`config`, `plugin`). A flag with several values takes a
    list: `{"metrics": ["bleu", "chrf"]}`. Instead of a dict, `settings` can be the path of a config file. With the
    `config.toml` of a run, `data` is not needed, because the file names the dataset. The objects in `callbacks` are
    called in addition to the callbacks that the settings name.

    Repeating the call resumes the run in `save_dir`. Ctrl-C and SIGTERM save and end the run, as on the command line.
    The run uses a GPU if there is one; to use several, start the script with torchrun. Settings of torch for the whole
    process, such as the number of threads, stay changed after the run. Raises ValueError for wrong settings or data,
    and OSError for a file that cannot be read or written.
    """
    merged = {"config": settings} if isinstance(settings, str | Path) else dict(settings)
    job = _job({name.replace("-", "_"): value for name, value in merged.items()}, data)
    return train_job(job, callbacks)


def _job(settings: dict[str, Any], data: PathLike | None) -> JobConfig:
    """Returns the job for `settings`, which map flags to values. Raises ValueError for a flag that does not exist."""
    title = "nmtkit.train"
    chosen = {kind: registry.flag[2:].replace("-", "_") for kind, registry in REGISTRIES.items()}
    types = dict.fromkeys(chosen.values(), tuple[str, ...]) | {"config": Path | None, "plugin": tuple[str, ...]}
    kinds = checked(title, {name: value for name, value in settings.items() if name in types}, types)
    names = {kind: ",".join(kinds[name]) or "none" for kind, name in chosen.items() if name in kinds}
    file, plugins = kinds.get("config"), kinds.get("plugin", ())
    source = ConfigFile(file)
    components = source.components(names, plugins, settings)
    classes: list[Any] = [RunConfig, *(type(component.config) for component in components.values())]
    hints = hints_of(*classes)
    values = checked(title, settings, {**types, **hints})
    flags = {name: value for name, value in values.items() if name in hints}
    job = JobConfig.read(file, names, plugins, flags, None if data is None else Path(data))
    source.check_paths(job, flags)
    return job
