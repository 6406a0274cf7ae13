"""Sweep files: a training config with a table [sweep], which lists the settings that vary, and the resulting runs."""

import dataclasses
import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nmtkit.config import LARGEST, field_types, flag_words, in_folder, setting_text, split_settings, suggestion
from nmtkit.config.files import read_toml
from nmtkit.experiments import estimate
from nmtkit.experiments.estimate import Estimate
from nmtkit.experiments.run_translations import AVERAGED, TRANSLATIONS
from nmtkit.training.config import REGISTRIES, ConfigFile, JobConfig
from nmtkit.training.run_config import RunConfig
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS

LENGTHS = {"max_update", "max_epoch"}
NOT_VARIED = ("save_dir", "plugin", "config")
# flags of `nmtkit generate` that a sweep sets, or that would write the files of all runs to one place
NOT_GENERATED = (
    "path", "input", "output", "output_dir", "format", "score_reference", "quality_report", "glossary_report",
)  # fmt: skip
# settings in the table [sweep] itself -> (whether a value is valid, description of valid values)
SINGLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "save_dir": (lambda value: isinstance(value, str) and value != "", "a folder"),
    "flop": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0, such as 1e15"),
    "seeds": (
        lambda value: isinstance(value, list) and value != [] and all(type(seed) is int for seed in value),
        "a list of at least one whole number",
    ),
    "base": (lambda value: isinstance(value, str) and value != "", 'the name of a row, such as "base"'),
    "average": (lambda value: type(value) is int and value >= 1, "the number of checkpoints to average"),
}
LONGEST_NAME = 120  # maximum characters in the name of the folder of a run
REPEATED_DRAWS = 1000  # after this many random draws in a row without a new combination, the sweep is rejected

VariedSettings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers from `low` to `high`, both included. If both limits are integers, the range has only integers."""

    low: float
    high: float
    log: bool  # whether the logarithm of the number is drawn uniformly

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, generator: random.Random) -> float:
        """Returns a random number in the range: an integer, or a number of three digits, to keep run names short."""
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        return min(max(round(value) if self.whole else float(f"{value:.3g}"), self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep: the name of its folder and the settings that override the file."""

    name: str
    settings: VariedSettings


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The contents of a sweep file.

    `flop` is the number of floating-point operations of each run, which determines its updates (`estimate`).
    With `generate`, each finished run translates a subset with these flags of `nmtkit generate`. The model is the
    average of the last `average` checkpoints, or the best checkpoint. A row has the runs that differ only in the seed.
    All rows are compared with the row `base`. Each factor of `factors` is a list of alternatives, and a run has the
    settings of one alternative of each factor. `space` holds the settings whose values are drawn at random. `draws` is
    the number of random combinations, and `seed` is the seed of the random generator.
    """

    file: Path
    folder: Path
    flop: float | None = None
    seeds: tuple[int, ...] = ()
    base: str | None = None
    average: int | None = None
    generate: VariedSettings | None = None
    named: Mapping[str, VariedSettings] = field(default_factory=lambda: {"": {}})
    factors: Sequence[Sequence[VariedSettings]] = ()  # [sweep.zip] is a factor, and so is each name in [sweep.grid]
    space: Mapping[str, Range | Sequence[Any]] = field(default_factory=dict)
    draws: int = 0
    seed: int = 1
    vocabulary_size: int | None = None  # for estimates without the dataset
    costs: dict[str, Estimate] = field(default_factory=dict, compare=False)  # settings of a run -> its cost

    @property
    def compares_rows(self) -> bool:
        """Whether all rows are compared with a base row: `base`, or the first row."""
        return self.base is not None or self.generate is not None

    # --- runs -------------------------------------------------------------------------------------------------------

    def runs(self) -> list[SweepRun]:
        """Returns the runs: all combinations of a named run, an alternative of each factor, a draw and a seed.

        Raises ValueError if two combinations are equal or get the same name.
        """
        runs: dict[str, SweepRun] = {}
        seeds: Sequence[VariedSettings] = [{"seed": seed} for seed in self.seeds] or [{}]
        for title, parts in itertools.product(self.named, itertools.product(*self.factors, self._drawn(), seeds)):
            run = self.run({name: value for part in parts for name, value in part.items()}, title)
            if run.name in runs:
                equal = runs[run.name].settings == run.settings
                reason = "a value is listed twice" if equal else "name them in [sweep.runs]"
                raise ValueError(f"{self.file}: two runs have the same name, {run.name}; {reason}")
            runs[run.name] = run
        return list(runs.values())

    def run(self, varied: VariedSettings, title: str = "") -> SweepRun:
        """Returns the run with the varied settings. Its name consists of `title` and these settings.

        With `flop`, also sets the number of updates. Raises OSError, or ValueError if the cost cannot be estimated.
        """
        texts = ([title] if title else []) + [f"{name}={_in_name(value)}" for name, value in varied.items()]
        name = re.sub(r"[^\w.=,+-]", "_", ",".join(texts))
        if len(name) > LONGEST_NAME:
            name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        run = SweepRun(name=name, settings=dict(self.named[title]) | varied)
        if self.flop is None:
            return run
        updates = max(1, round(self.flop / self.cost(run).flops))
        return replace(run, settings=run.settings | {"max_update": updates})

    def cost(self, run: SweepRun) -> Estimate:
        """Returns the cost of a run. All runs of a row have the same estimate. Raises OSError or ValueError."""
        key = repr({name: value for name, value in run.settings.items() if name != "seed"})
        if key not in self.costs:
            job = self.job(run)
            data = None if self.vocabulary_size else job.data
            self.costs[key] = estimate.cost_of(job, data, self.vocabulary_size)
        return self.costs[key]

    def _drawn(self) -> list[VariedSettings]:
        """Returns `draws` different random combinations. Raises ValueError if the space has fewer combinations."""
        generator = random.Random(self.seed)
        drawn: dict[str, VariedSettings] = {}  # text of the combination -> combination
        repeated = 0
        while len(drawn) < self.draws:
            settings = {
                name: values.draw(generator) if isinstance(values, Range) else generator.choice(list(values))
                for name, values in self.space.items()
            }
            repeated = repeated + 1 if repr(settings) in drawn else 0
            if repeated == REPEATED_DRAWS:
                raise ValueError(
                    f"{self.file}: [sweep.random] has draws = {self.draws}, but only {len(drawn)} different "
                    "combinations were found; lower draws or widen the ranges"
                )
            drawn.setdefault(repr(settings), settings)
        return list(drawn.values()) or [{}]

    def job(self, run: SweepRun) -> JobConfig:
        """Returns the resolved job of a run. Raises ValueError with the name of the run and the wrong setting."""
        kinds = kinds_by_setting()
        names = {kinds[name]: setting_text(value) for name, value in run.settings.items() if name in kinds}
        others = {name: value for name, value in run.settings.items() if name not in (*kinds, "data")}
        try:
            save_dir = {"save_dir": self.folder / run.name}
            located = in_folder(run.settings, RunConfig, self.file.parent) | save_dir
            components = ConfigFile(self.file).components(names, (), located)
            classes: list[type] = [RunConfig, *(type(component.config) for component in components.values())]
            *parts, unknown = split_settings(others, *classes)
            if unknown:
                known = [name for cls in classes for name in field_types(cls)]
                name = next(iter(unknown))
                raise ValueError(f"there is no setting {name!r}; {suggestion(name, [*known, *kinds, 'data'])}")
            settings: VariedSettings = dict(save_dir)
            for cls, part in zip(classes, parts, strict=True):
                settings |= in_folder(part, cls, self.file.parent)
            data = self.file.parent / str(run.settings["data"]) if "data" in run.settings else None
            job = JobConfig.read(self.file, names, (), settings, data)
        except ValueError as error:
            raise ValueError(f"{self.file}, run {run.name or 'without a name'}: {error}") from None
        if job.data is None:
            raise ValueError(f'{self.file} names no dataset to train on; give data = "FOLDER" in [run]')
        return job

    def command(self, run: SweepRun, extra: Sequence[str] = ()) -> list[str]:
        """Returns the words of the command that starts a run. `extra` are additional flags of `nmtkit train`."""
        job, kinds = self.job(run), kinds_by_setting()
        flags: list[str] = []
        for name, value in run.settings.items():
            if name in kinds:
                flags += [REGISTRIES[kinds[name]].flag, setting_text(value)]
            elif name != "data":
                flags += _flag(name, job)
        data = [str(job.data)] if "data" in run.settings else []
        folder = ["--save-dir", str(job.run.save_dir)]
        return ["nmtkit", "train", *data, "--config", str(self.file), *flags, *folder, *extra]

    def translation_commands(self, run: SweepRun) -> list[list[str]]:
        """Returns the commands that average the checkpoints of a finished run and translate.

        Without `generate`, returns no commands. Raises ValueError if the run keeps fewer checkpoints than the average
        needs.
        """
        if self.generate is None:
            return []
        job = self.job(run)
        folder = job.run.save_dir
        model, commands = folder, []
        if self.average is not None:
            if job.run.keep_last is not None and job.run.keep_last < self.average:
                raise ValueError(
                    f"{self.file}, run {run.name}: average = {self.average} of [sweep] needs as many checkpoints, but "
                    f"the run keeps {job.run.keep_last}; set keep_last = {self.average} in [run]"
                )
            model = folder / AVERAGED
            choice = ["--last", str(self.average), "--output", str(model)]
            commands.append(["nmtkit", "average-checkpoints", str(folder), *choice])
        # the architecture of the model may come from a plug-in of the runs
        flags = [word for name in job.plugins for word in ("--plugin", name)]
        settings = self.generate
        for entry in LOGITS_PROCESSORS.entries.values():  # settings of logits processors may be paths of models
            settings = in_folder(settings, type(entry.preset), self.file.parent)
        flags += [word for name, value in settings.items() for word in flag_words(name, value)]
        output = ["--output", str(folder / TRANSLATIONS)]
        return [*commands, ["nmtkit", "generate", str(job.data), "--path", str(model), *flags, *output]]


def kinds_by_setting() -> dict[str, str]:
    """Returns the kind of each setting that chooses a component: "architecture" for "arch" and for "architecture"."""
    return {name.replace("-", "_"): kind for kind, entries in REGISTRIES.items() for name in (entries.flag[2:], kind)}


def _flag(name: str, job: JobConfig) -> list[str]:
    """Returns the words of the flag that sets `name` to its value in `job`."""
    configs = [job.run, *(component.config for component in job.components.values())]
    config, field = next((each, field) for each in configs for field in dataclasses.fields(each) if field.name == name)
    value = getattr(config, name)
    if isinstance(value, tuple) and field.metadata.get("repeatable"):
        return [word for item in value for word in flag_words(name, item)]
    return flag_words(name, value)


def _in_name(value: Any) -> str:
    """Returns a value as text for the name of a folder, such as "on", "0.1", or the last part of a path."""
    if isinstance(value, list):
        return "-".join(_in_name(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value).rstrip("/").rpartition("/")[2]


# --- the file ---------------------------------------------------------------------------------------------------------


def read(file: Path) -> Sweep:
    """Reads a sweep file. Raises OSError, or ValueError with the file, the section and the mistake."""
    try:
        tables = read_toml(file)
        sweep = _sweep(file, tables.get("sweep"))
        lengths = {name.replace("-", "_") for name in tables.get("run", {})} & LENGTHS
        if sweep.flop is not None and lengths:
            raise ValueError(f"flop of [sweep] sets the number of updates; leave out {min(lengths)} of [run]")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return sweep


def _sweep(file: Path, table: Any) -> Sweep:
    """Returns the sweep that the table [sweep] of `file` describes."""
    if not isinstance(table, dict):
        raise ValueError("the file has no table [sweep], which lists the settings that vary")
    known = [*SINGLE, "generate", "runs", "zip", "grid", "random"]
    for name in table:
        if name not in known:
            raise ValueError(f"[sweep] has no {name!r}; {suggestion(name, known)}")
    for name, (is_right, wanted) in SINGLE.items():
        if name in table and not is_right(table[name]):
            raise ValueError(f"{name} of [sweep] is {table[name]!r}; give {wanted}")
    if "average" in table and "generate" not in table:
        raise ValueError("average of [sweep] needs [sweep.generate], the settings of the translation")
    zipped, grid = _zipped(table.get("zip", {})), _grid(table.get("grid", {}))
    drawn = _normalized(table.get("random", {}), "[sweep.random]")
    sweep = Sweep(
        file=file,
        folder=file.parent / table.get("save_dir", f"runs/{file.name.removesuffix('.toml').removesuffix('.sweep')}"),
        flop=table.get("flop"),
        seeds=tuple(table.get("seeds", ())),
        base=table.get("base"),
        average=table.get("average"),
        generate=_generated(table["generate"]) if "generate" in table else None,
        named=_named(table.get("runs", {})),
        factors=[*([zipped] if zipped else []), *grid],
        draws=_whole(drawn.pop("draws", 0 if not drawn else None), "draws"),
        seed=_whole(drawn.pop("seed", 1), "seed"),
        space={name: _values(value, f"{name} of [sweep.random]") for name, value in drawn.items()},
    )
    if sweep.draws and not sweep.space:
        raise ValueError("[sweep.random] has draws but no setting to draw")
    _check_clashes(sweep, zipped, grid)
    return sweep


def _normalized(table: Any, title: str) -> VariedSettings:
    if not isinstance(table, dict):
        raise ValueError(f"{title} is not a table of settings")
    settings = {name.replace("-", "_"): value for name, value in table.items()}
    for name in NOT_VARIED:
        if name in settings:
            raise ValueError(f"{title}: {name} cannot vary; give it once, outside [sweep]")
    return settings


def _list(value: Any, title: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{title} is {value!r}; give a list of values")
    if not value:
        raise ValueError(f"{title} is an empty list, which makes no runs")
    return value


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"[sweep.random] needs {name} = N, a whole number")
    return value


def _generated(table: Any) -> VariedSettings:
    """Returns the flags of `nmtkit generate`. By default, the subset is "valid"."""
    if not isinstance(table, dict):
        raise ValueError("[sweep.generate] is not a table of settings of nmtkit generate, such as beam = 5")
    flags = {"gen_subset": "valid"} | {name.replace("-", "_"): value for name, value in table.items()}
    for name in NOT_GENERATED:
        if name in flags:
            raise ValueError(f"[sweep.generate]: leave out {name}; translations are written to the folder of each run")
    return flags


def _named(table: Any) -> dict[str, VariedSettings]:
    if not isinstance(table, dict):
        raise ValueError("[sweep.runs] is not a table of runs: NAME = { setting = value }")
    return {name: _normalized(settings, f"[sweep.runs] {name}") for name, settings in table.items()} or {"": {}}


def _zipped(table: Any) -> list[VariedSettings]:
    settings = _normalized(table, "[sweep.zip]")
    columns = {name: _list(values, f"{name} of [sweep.zip]") for name, values in settings.items()}
    if len({len(values) for values in columns.values()}) > 1:
        counts = ", ".join(f"{name} has {len(values)}" for name, values in columns.items())
        raise ValueError(f"all lists of [sweep.zip] must have the same length; {counts}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _grid(table: Any) -> list[list[VariedSettings]]:
    """Returns a factor for each name in the table [sweep.grid]: a list of alternative settings."""
    grid = []
    for name, values in _normalized(table, "[sweep.grid]").items():
        title = f"{name} of [sweep.grid]"
        if len({isinstance(value, dict) for value in _list(values, title)}) > 1:
            raise ValueError(f"{title} mixes values with tables of settings; give only values or only tables")
        grid.append([_normalized(value, title) if isinstance(value, dict) else {name: value} for value in values])
    return grid


def _values(value: Any, title: str) -> Range | list[Any]:
    if isinstance(value, list):
        return _list(value, title)
    kinds = {name: type(each) for name, each in value.items()} if isinstance(value, dict) else {}
    numbers = {kinds.pop("min", None), kinds.pop("max", None)}
    if not numbers <= {int, float} or kinds not in ({}, {"log": bool}):
        raise ValueError(f"{title} is {value!r}; give a list, or {{ min = X, max = X }}, perhaps with log = true")
    low, high, log = value["min"], value["max"], value.get("log", False)
    if not -LARGEST <= low < high <= LARGEST or (log and low <= 0):
        positive = ", and above 0 with log" if log else ""
        raise ValueError(f"{title}: min must be below max{positive}, and both from {-LARGEST:,} to {LARGEST:,}")
    return Range(low=low, high=high, log=log)


def _check_clashes(sweep: Sweep, zipped: Sequence[VariedSettings], grid: Sequence[Sequence[VariedSettings]]) -> None:
    """Raises ValueError if two sections vary the same setting, or if nothing varies."""
    sections: dict[str, set[str]] = {
        "[sweep.runs]": set(itertools.chain(*sweep.named.values())),
        "[sweep.zip]": set(itertools.chain(*zipped)),
        "[sweep.grid]": {name for points in grid for name in itertools.chain(*points)},
        "[sweep.random]": set(sweep.space),
        "seeds": {"seed"} if sweep.seeds else set(),
        "flop": LENGTHS if sweep.flop is not None else set(),
    }
    for (section, settings), (other, more) in itertools.combinations(sections.items(), 2):
        if settings & more:
            raise ValueError(f"{section} and {other} both set {min(settings & more)}; set it in only one of them")
    if not any(varied for section, varied in sections.items() if section != "flop") and list(sweep.named) == [""]:
        raise ValueError(
            "nothing varies; give seeds, or a table [sweep.grid], [sweep.zip], [sweep.runs] or [sweep.random]"
        )
