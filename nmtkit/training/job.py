"""What to train and how: the run config, the four components by name and config, and the plug-ins they come from.

Settings come from three places; the first that has one wins: flags, a TOML file, the presets.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.architectures import ARCHITECTURES
from nmtkit.criterions import CRITERIONS
from nmtkit.lr_schedulers import LR_SCHEDULERS
from nmtkit.optimizers import OPTIMIZERS
from nmtkit.registry import COMMAND_LINE, Registry, check_no_collisions, convert, derive, field_types, plain, to_toml
from nmtkit.training.config import RunConfig

# table of the TOML file -> registry; a table's `name` says which entry it was written for
REGISTRIES: dict[str, Registry[Any]] = {
    "architecture": ARCHITECTURES,
    "criterion": CRITERIONS,
    "optimizer": OPTIMIZERS,
    "lr-scheduler": LR_SCHEDULERS,
}
DEFAULTS = {
    "architecture": "transformer_base",
    "criterion": "label_smoothed_cross_entropy",
    "optimizer": "adam",
    "lr-scheduler": "inverse_sqrt",
}

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Component:
    """A registered name and its config."""

    name: str
    config: Any


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    run: RunConfig
    components: dict[str, Component]  # by table
    plugins: tuple[str, ...] = ()

    def tables(self) -> dict[str, dict[str, Any]]:
        """The resolved config in plain types: what `--config` reads back and a checkpoint holds."""
        run = plain(self.run) | ({"plugin": list(self.plugins)} if self.plugins else {})
        return {"run": run} | {
            table: {"name": component.name} | plain(component.config) for table, component in self.components.items()
        }

    def toml(self) -> str:
        return to_toml(self.tables())


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML config. Raises OSError, or ValueError naming the file and what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"config {path}: no such file")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    known = ("run", *REGISTRIES)
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            raise ValueError(f"{path}: {name!r} is no table of a run; known: {', '.join(f'[{k}]' for k in known)}")
    return tables


def plugins_of(tables: Tables, given: Sequence[str], place: str) -> tuple[str, ...]:
    """The plug-ins of the config and of the flags, each once."""
    listed = convert(tables.get("run", {}).get("plugin", []), tuple[str, ...])
    return tuple(dict.fromkeys((*listed, *given)))


def choose(tables: Tables, names: Mapping[str, str | None], place: str) -> dict[str, Component]:
    """The components: names from flags, else from the config's tables, else the defaults; configs not from flags yet.

    A table applies only to the name it was written for. Raises ValueError for an unknown name, an unknown or wrong
    setting, and two components with one flag.
    """
    components = {}
    for table, registry in REGISTRIES.items():
        settings = dict(tables.get(table, {}))
        written_for = convert(settings.pop("name", DEFAULTS[table]), str)
        entry = registry[names.get(table) or written_for]
        config = entry.preset
        if entry.name == written_for and settings:
            config = derive(config, settings, f"{place}: [{table}]")
        components[table] = Component(name=entry.name, config=config)
    check_no_collisions(
        {"the run": RunConfig()} | {f"{table} {it.name}": it.config for table, it in components.items()}
    )
    return components


def resolve(
    tables: Tables,
    components: Mapping[str, Component],
    settings: Mapping[str, Any],
    plugins: tuple[str, ...],
    place: str,
) -> JobConfig:
    """The job: `settings` are the flags that were given, by field name, over the config's tables."""
    in_file = {name: value for name, value in tables.get("run", {}).items() if name != "plugin"}
    # the flags settle what the file left open: a pair such as --batch-tokens and --update-freq is checked once
    given = {name: value for name, value in settings.items() if name in field_types(RunConfig)}
    if given.get("update_freq") is not None:
        in_file.pop("batch_tokens", None)
    if given.get("batch_tokens") is not None:
        in_file.pop("update_freq", None)
    run = derive(RunConfig(), in_file | given, place if in_file else COMMAND_LINE)
    chosen = {}
    for table, component in components.items():
        own = field_types(type(component.config))
        changes = {name: value for name, value in settings.items() if name in own}
        chosen[table] = Component(name=component.name, config=derive(component.config, changes, COMMAND_LINE))
    return JobConfig(run=run, components=chosen, plugins=plugins)
