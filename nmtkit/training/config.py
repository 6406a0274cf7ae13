"""The settings of training: settings of the run, settings of the components, and plug-ins.

Flags override a TOML file, which overrides the presets.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nmtkit.config import (
    COMMAND_LINE,
    changed_flags,
    check_no_collisions,
    convert,
    derive,
    flag_of,
    in_folder,
    map_paths,
    relative_to,
    split_settings,
    suggestion,
    to_dict,
    to_toml,
)
from nmtkit.config.files import check_readable, checkpoint_of, is_hub_name, read_toml, tidy
from nmtkit.config.plugins import load_plugins
from nmtkit.config.registry import Registry
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.transforms import TRANSFORMS
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.training import profiling, trackers  # noqa: F401  # registers callbacks
from nmtkit.training.callbacks import CALLBACKS
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, LRScheduler
from nmtkit.training.metrics import METRICS, Metric, objective
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.training.run_config import VALIDATION, RunConfig

log = logging.getLogger("nmtkit")
_warn_once = cache(log.warning)  # shows each warning once, although a sweep reads its file for each run

# Kind of component -> registry. If a kind allows only one component per job, the TOML table [kind] has the settings of
# the component, and `name` in this table is the name of the component. If a kind allows several components per job,
# the list `kind` in [run] has their names, and the table [kind.name] has the settings of each component.
REGISTRIES: dict[str, Registry[Any]] = {
    "architecture": ARCHITECTURES,
    "criterion": CRITERIONS,
    "optimizer": OPTIMIZERS,
    "lr-scheduler": LR_SCHEDULERS,
    "transforms": TRANSFORMS,
    "metrics": METRICS,
    "callbacks": CALLBACKS,
}
SEVERAL = tuple(kind for kind, entries in REGISTRIES.items() if entries.several)
CALLING_PARTS = ("expected_reward", "guided_alignment")  # criterions that call model methods other than `forward`
DEFAULTS: dict[str, tuple[str, ...]] = {
    "architecture": ("transformer_base",),
    "criterion": ("label_smoothed_cross_entropy",),
    "optimizer": ("adam",),
    "lr-scheduler": ("inverse_sqrt",),
    "transforms": (),
    "metrics": ("bleu",),
    "callbacks": (),
}

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of a job: its registered name and its config."""

    name: str
    config: Any


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A training job: the config of the run, the components by TOML table, the plug-ins, and the dataset."""

    run: RunConfig
    components: dict[str, Component]  # table, such as "optimizer" or "metrics.bleu" -> component; see `table_of`
    plugins: tuple[str, ...] = ()
    data: Path | None = None  # folder of the dataset

    def __post_init__(self) -> None:
        scheduler = self.components["lr-scheduler"].name
        if self.schedule_follows_validations and not self.run.validates:
            raise ValueError(f"--lr-scheduler {scheduler} does nothing without {' or '.join(VALIDATION)}")
        if self.run.parallel == "fsdp":
            self._check_shardable()
        self._check_base_width()
        may_validate = self.run.validates or self.chosen("callbacks")  # callbacks may ask for validations
        if self.has_own_metrics and not may_validate:
            raise ValueError(f"--metrics does nothing without {' or '.join(VALIDATION)}")
        metrics = self.metrics()
        translating = [name for name, metric in metrics.items() if metric.translates]
        if translating and not self.reads_source:
            raise ValueError(
                f"--metrics {translating[0]} scores translations, and a language model does not translate; leave it "
                "out: validations report the perplexity"
            )
        objective(self.run.best_checkpoint_metric, metrics, self.run.valid_subset[1:])
        if "--valid-beam" in changed_flags(self.run) and not translating:
            raise ValueError("--valid-beam does nothing without a metric that scores translations, like --metrics bleu")

    @staticmethod
    def read(
        file: Path | None = None,
        names: Mapping[str, str | None] | None = None,
        plugins: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        data: Path | None = None,
    ) -> "JobConfig":
        """Returns the job that a TOML file and flags describe. Loads the plug-ins that the file and the flags name.

        `names` and `plugins` are flags as in `ConfigFile.components`. `settings` has all other flags by field name.
        Flags override the file, and `data` overrides the dataset of the file. Raises OSError or ValueError.
        """
        source, names, settings = ConfigFile(file), names or {}, settings or {}
        components = source.components(names, plugins, settings)
        classes = [type(component.config) for component in components.values()]
        run_flags, *parts, _ = split_settings(settings, RunConfig, *classes)
        in_file = source.run_settings()
        # A flag removes the conflicting setting of the file.
        for name, other in (("update_freq", "batch_tokens"), ("batch_tokens", "update_freq")):
            if run_flags.get(name) is not None:
                in_file.pop(other, None)
        run = derive(RunConfig(), in_file | run_flags, source.origin if in_file else COMMAND_LINE)
        components = {
            table: dataclasses.replace(component, config=derive(component.config, changes, COMMAND_LINE))
            for (table, component), changes in zip(components.items(), parts, strict=True)
        }
        has_metrics = "metrics" in source.run or names.get("metrics") is not None
        if not has_metrics and not getattr(components["architecture"].config, "reads_source", True):
            # the default metrics score translations, and a language model does not translate
            components = {table: each for table, each in components.items() if kind_of(table) != "metrics"}
        source.warn_of_lost_settings(components, settings)
        return JobConfig(run=run, components=components, plugins=source.plugins(plugins), data=data or source.data)

    @property
    def reads_source(self) -> bool:
        """Whether the model reads a source. False for a language model."""
        return getattr(self.components["architecture"].config, "reads_source", True)

    @property
    def schedule_follows_validations(self) -> bool:
        """Whether the learning-rate schedule depends on the scores of validations."""
        factory = LR_SCHEDULERS[self.components["lr-scheduler"].name].factory
        return getattr(factory, "observe", LRScheduler.observe) is not LRScheduler.observe

    @property
    def has_own_metrics(self) -> bool:
        """Whether the job has metrics other than the default metrics."""
        return tuple(metric.name for metric in self.chosen("metrics")) not in ((), DEFAULTS["metrics"])

    def _check_shardable(self) -> None:
        """Raises ValueError for components that need whole parameters. With fsdp, a process has only shards."""
        optimizer, criterion = (self.components[table].name for table in ("optimizer", "criterion"))
        if optimizer not in OPTIMIZERS.on_shards:
            raise ValueError(
                f"--optimizer {optimizer} needs whole parameters, but with --parallel fsdp a process has only a "
                f"share; give one of {', '.join(sorted(OPTIMIZERS.on_shards))}, or --parallel ddp"
            )
        if criterion in CALLING_PARTS:
            raise ValueError(f"--criterion {criterion} needs whole parameters; give --parallel ddp")
        if self.run.compile:
            raise ValueError("--compile and --parallel fsdp exclude each other; give only one of them")

    def _check_base_width(self) -> None:
        """Raises ValueError if --base-width is given with SGD or Adafactor.

        --base-width multiplies the learning rates of parts of the model by factors for Adam. SGD needs other factors
        (Yang et al. 2021, table 8). Adafactor already scales each update by the size of the weights.
        """
        optimizer, architecture = (self.components[table] for table in ("optimizer", "architecture"))
        if optimizer.name in ("sgd", "adafactor") and getattr(architecture.config, "base_width", None) is not None:
            raise ValueError(
                "--base-width scales the learning rates of optimizers whose updates have the size of the learning "
                f"rate, such as adam, adamw and lion; with --optimizer {optimizer.name}, leave out --base-width"
            )

    def metrics(self) -> dict[str, Metric]:
        """Returns new metrics by name. Raises ValueError or ImportError if a metric rejects its settings."""
        return self.built("metrics")

    def built(self, kind: str, *arguments: Any) -> dict[str, Any]:
        """Returns new components of a kind by name. The factory of a component gets its config, then `arguments`."""
        return {each.name: REGISTRIES[kind][each.name].factory(each.config, *arguments) for each in self.chosen(kind)}

    def chosen(self, kind: str) -> list[Component]:
        """Returns the components of a kind, in the order of their names on the command line."""
        return [component for table, component in self.components.items() if kind_of(table) == kind]

    def tables(self, folder: Path | None = None) -> dict[str, dict[str, Any]]:
        """Returns the resolved config in plain types, for a config file or a checkpoint.

        Paths are relative to `folder`, or absolute if `folder` is None.
        """

        def located(path: str) -> str:
            if is_hub_name(path):
                return path
            return os.path.abspath(path) if folder is None else relative_to(path, folder)

        def plain(config: Any) -> dict[str, Any]:
            return map_paths(to_dict(config), type(config), located)

        run: dict[str, Any] = {} if self.data is None else {"data": located(str(self.data))}
        run |= plain(self.run)
        if self.plugins:
            run["plugin"] = [located(name) if name.endswith(".py") else name for name in self.plugins]
        run |= {kind: [component.name for component in self.chosen(kind)] for kind in SEVERAL}
        tables = {"run": run}
        for table, component in self.components.items():
            named = {} if REGISTRIES[kind_of(table)].several else {"name": component.name}
            if settings := named | plain(component.config):
                tables[table] = settings
        return tables

    def toml(self, folder: Path) -> str:
        """Returns the resolved config as TOML for a file in `folder`. `--config` with this file makes the same job."""
        return to_toml(self.tables(folder))


def architecture_of(path: Path) -> Component:
    """Returns the architecture of a checkpoint. Raises OSError or ValueError."""
    contents = checkpoint_file.read(path, mmap=True)
    name = contents["architecture"]
    return Component(name=name, config=derive(ARCHITECTURES[name].preset, contents["config"], f"{path}: {name}"))


def _is_run(folder: Path) -> bool:
    return (folder / "last.pt").exists()


def table_of(kind: str, name: str) -> str:
    """Returns the title of the TOML table of a component, such as "optimizer" or "metrics.bleu"."""
    return f"{kind}.{name}" if REGISTRIES[kind].several else kind


def kind_of(table: str) -> str:
    return table.partition(".")[0]


class ConfigFile:
    """A TOML config file; empty without a path. Paths in the file are relative to the folder of the file."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads the file. Raises OSError, or ValueError with the name of the file and the mistake."""
        self.origin = str(path) if path else COMMAND_LINE  # for error messages
        self.folder = path.parent if path else Path()
        self.tables = read_tables(path) if path else {}
        self.run = self.tables.get("run", {})

    @property
    def data(self) -> Path | None:
        """The dataset that the file names."""
        data = _converted(self.run.get("data"), Path | None, f"{self.origin}: data")
        return None if data is None else tidy(self.folder / data)

    def plugins(self, others: Sequence[str] = ()) -> tuple[str, ...]:
        """Returns the plug-ins of the file, then the `others`. Each plug-in occurs once."""
        listed = _converted(self.run.get("plugin", []), tuple[str, ...], f"{self.origin}: plugin")
        located = (str(self.folder / name) if name.endswith(".py") else name for name in listed)
        return tuple(dict.fromkeys((*located, *others)))

    def run_settings(self) -> dict[str, Any]:
        """Returns the settings of `RunConfig` in the file."""
        others = ("data", "plugin", *SEVERAL)
        return in_folder({name: v for name, v in self.run.items() if name not in others}, RunConfig, self.folder)

    def check_paths(self, job: JobConfig, flags: Mapping[str, Any]) -> None:
        """Checks the paths of `job` that come from this config or from `flags`.

        Raises OSError if a file or folder does not exist. The message has the flag, or the table and the key. If the
        run resumes, the files that a run reads only at its first start may be missing.
        """
        checked = ("read",) if _is_run(job.run.save_dir) else ("read", "start")
        for table, config in (("run", job.run), *((table, each.config) for table, each in job.components.items())):
            for field in dataclasses.fields(config):
                value, typed = getattr(config, field.name), field.name in flags
                if field.metadata.get("access") in checked and (typed or field.name in self.tables.get(table, {})):
                    name = flag_of(field) if typed else f"{self.origin}: {field.name} of [{table}]:"
                    for path in value if isinstance(value, tuple) else (value,):
                        if path is not None:
                            check_readable(path, name, several=None if isinstance(value, tuple) else False)

    def warn_of_lost_settings(self, components: Mapping[str, Component], flags: Mapping[str, Any]) -> None:
        """Warns about settings of this file for a component that a flag has replaced, unless `flags` repeat them."""
        for kind in self.tables.keys() & {kind for kind, registry in REGISTRIES.items() if not registry.several}:
            name, now = self.tables[kind].get("name", DEFAULTS[kind][0]), components[kind].name
            lost = sorted(self.tables[kind].keys() - {"name"} - flags.keys())
            if lost and name != now:
                _warn_once(f"{self.origin}: settings for {name} are not used with {now}: {', '.join(lost)} of [{kind}]")

    def components(
        self, names: Mapping[str, str | None], plugins: Sequence[str], flags: Mapping[str, Any]
    ) -> dict[str, Component]:
        """Loads the plug-ins and returns the components by TOML table, with the settings of the file.

        The components decide which flags a job has, so commands call this method before they parse these flags.

        `names` maps each kind to the text of its flag: several names with commas between them, or "none". These names
        override the names in the file, and the names in the file override the defaults. A table of the file applies
        only to the component that the table names. If no architecture is named, the architecture and its settings come
        from the checkpoint of the setting `finetune_from`. If this checkpoint is missing and the run resumes, they come
        from the newest checkpoint of the run. `flags` are the settings that the user typed; they override the file.
        Raises OSError, or ValueError for an unknown name, a wrong setting, or two components with the same flag.
        """
        load_plugins(self.plugins(plugins))
        components: dict[str, Component] = {}
        for kind in REGISTRIES:
            components |= self._components_of(kind, names.get(kind))
        settings = self.run_settings() | dict(flags)
        start = _converted(settings.get("finetune_from", "none"), Path | None, f"{self.origin}: finetune_from")
        if start and not names.get("architecture") and "architecture" not in self.tables:
            name = "--finetune-from" if "finetune_from" in flags else f"{self.origin}: finetune_from of [run]:"
            if not start.exists() and _is_run(folder := Path(settings.get("save_dir", RunConfig.save_dir))):
                start = folder / "last.pt"
            check_readable(start, name, several=False)
            components["architecture"] = architecture_of(checkpoint_of(start))
        titled = {f"{REGISTRIES[kind_of(table)].kind} {each.name}": each.config for table, each in components.items()}
        check_no_collisions({"the run": RunConfig()} | titled)
        return components

    def _components_of(self, kind: str, typed: str | None) -> dict[str, Component]:
        """Returns the components of a kind. `typed` is the text of the flag that names components, if it is given."""
        several, default, tables = REGISTRIES[kind].several, DEFAULTS[kind], self.tables
        if several:
            listed = self.run.get(kind, list(default))
            in_file = _converted(listed, tuple[str, ...], f"{self.origin}: {kind} of [run]")
        else:
            name = tables.get(kind, {}).get("name", default[0])
            in_file = (_converted(name, str, f"{self.origin}: name of [{kind}]"),)
        written_for = {table_of(kind, name) for name in in_file}
        for table in tables:
            if kind_of(table) == kind and table not in written_for and typed is None:
                known = ", ".join(in_file) or "none"
                raise ValueError(
                    f"{self.origin}: [{table}] does nothing, because its name is not in the list {kind} of [run] "
                    f"({known}); add the name"
                )
        names = in_file if typed is None else names_in(typed) if several else (typed,)
        if len(set(names)) < len(names):
            raise ValueError(f"{REGISTRIES[kind].flag} {','.join(names)} repeats a name")
        chosen = {}
        for name in names:
            preset, table = REGISTRIES[kind][name].preset, table_of(kind, name)
            written = tables.get(table, {}) if several or name in in_file else {}
            settings = {key: value for key, value in written.items() if several or key != "name"}
            settings = in_folder(settings, type(preset), self.folder)
            chosen[table] = Component(name=name, config=derive(preset, settings, f"{self.origin}: [{table}]"))
        return chosen


def names_in(text: str) -> tuple[str, ...]:
    """Returns the names in a text such as "a,b". Returns () for "none" and for the empty text."""
    return () if text.strip() in ("", "none") else tuple(name.strip() for name in text.split(","))


def flat_settings(tables: Tables) -> dict[str, Any]:
    """Returns all settings by name. The name of a component has the title of its table as key, such as "optimizer".

    Settings of different tables never have the same name.
    """
    return {
        table if name == "name" else name: value
        for table, settings in tables.items()
        for name, value in settings.items()
    }


def _converted(value: Any, hint: Any, name: str) -> Any:
    try:
        return convert(value, hint)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the tables of a TOML config. Keys in the file may have dashes, and titles may have underscores.

    Raises OSError, or ValueError with the name of the file and the mistake.
    """
    if not path.is_file():
        raise FileNotFoundError(f"config {path}: no such file")
    try:
        contents = read_toml(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tables: dict[str, dict[str, Any]] = {}
    for title, table in contents.items():
        if title == "sweep":  # only `nmtkit sweep` reads this table
            continue
        kind = title.replace("_", "-")
        if kind not in ("run", *REGISTRIES) or not isinstance(table, dict):
            known = [f"{kind}.NAME" if kind in SEVERAL else kind for kind in ("run", *REGISTRIES)]
            raise ValueError(f"{path}: {title!r} is not a table of a run; {suggestion(kind, known)}")
        inner = {f"{kind}.{name}": settings for name, settings in table.items()} if kind in SEVERAL else {kind: table}
        for name, settings in inner.items():
            if not isinstance(settings, dict):
                key = name.partition(".")[2]
                raise ValueError(
                    f"{path}: {key!r} is in [{kind}]; put settings into [{kind}.NAME], and names into "
                    f'{kind} = ["NAME"] in [run]'
                )
            added = tables.setdefault(name, {})
            for key, value in settings.items():
                if (key := key.replace("-", "_")) in added:
                    raise ValueError(f"{path}: {key!r} occurs twice in [{name}]")
                added[key] = value
    return tables
