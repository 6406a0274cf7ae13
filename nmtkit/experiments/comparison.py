"""Summaries of runs for comparison: settings that differ, best scores, speed, time and state.

Everything comes from the logs in the folders of the runs, so unfinished runs can be compared, and no plug-in is loaded.
"""

import itertools
import logging
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nmtkit.jobs.folder_lock import described, holder_of
from nmtkit.training.config import flat_settings
from nmtkit.training.metrics import conditions_of
from nmtkit.training.report import elapsed, latest_records, read_lines
from nmtkit.training.resume import changed_settings
from nmtkit.training.run_log import numbers_of

log = logging.getLogger("nmtkit")

SCORES = ("loss", "ppl", "bleu")  # validation scores that are listed first, in this order
NO_SCORES = ("update", "epoch", "seconds", "time", "cpu_seconds")  # numbers of a validation record that are not scores
# settings that do not change the trained model
OWN = ("save_dir", "data", "plugin", "device", "threads", "nproc_per_node", "callbacks", "log_interval")


@dataclass(frozen=True, kw_only=True)
class ValidationScore:
    """A validation score and the update after which it was measured. For several seeds, both numbers are means."""

    value: float
    update: int
    deviation: float | None = None  # standard deviation of the score over N runs, with the divisor N - 1


@dataclass(frozen=True, kw_only=True)
class ChangedSetting:
    """A setting that changed when a run was resumed after `update`, with its values before and after this change."""

    update: int
    name: str
    before: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Facts about a run, read from its folder."""

    name: str
    state: str  # running, finished, stopped, failed; new if the log is empty
    reason: str  # stop reason; for a run that is running, its process and machine
    update: int  # last update in the log
    updates: int | None  # updates of the whole run, if known
    settings: dict[str, Any]  # settings since the last start or resume, as returned by `flat_settings`
    dataset: str  # fingerprint of the dataset
    plugin_sources: dict[str, str]  # digest of the source of each plug-in
    inputs: dict[str, str]  # for each setting that names files, digits that identify their contents
    best: dict[str, ValidationScore]  # metric -> best score
    last: dict[str, ValidationScore]
    tokens_per_second: float | None  # target tokens; median over the log lines
    seconds: float  # duration, without the breaks between a stop and the next resume
    device_seconds: float | None = None  # seconds of all cores or GPUs; None for logs without this information
    on_gpu: bool = False
    parameters: int | None = None  # number of parameters of the model
    changed: tuple[ChangedSetting, ...] = ()  # settings that changed when the run was resumed, except those in `OWN`
    runs: int = 1  # number of runs that this summary averages
    records: list[dict[str, Any]] = field(default_factory=list, repr=False)  # `latest_records`; empty for averages


def folders_of(paths: Iterable[Path]) -> list[Path]:
    """Returns the folders of runs. A path of a folder with several runs is replaced by the folders of these runs."""
    folders: list[Path] = []
    for path in paths:
        inside = [] if (path / "log.jsonl").is_file() else sorted(log.parent for log in path.glob("*/log.jsonl"))
        folders += inside or [path]
    return list(dict.fromkeys(folders))


def summarize(folder: Path) -> RunSummary:
    """Returns the summary of the run in a folder. Raises OSError or ValueError for a folder without a run."""
    log = folder / "log.jsonl"
    if not log.is_file():
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder of a run")
        raise ValueError(f"{folder} holds no run: it has no log.jsonl")
    records = read_lines(log)
    starts = _of_kinds(records, "start", "resume")
    current = latest_records(records)
    trained, valid = _of_kinds(current, "train"), _of_kinds(current, "valid")
    state, reason = state_of(folder, records)
    speeds = [record["tokens_per_second"] for record in trained if record.get("tokens_per_second")]
    latest = starts[-1] if starts else {}
    return RunSummary(
        name=str(folder),
        state=state,
        reason=reason,
        update=max((record.get("update", 0) for record in current), default=0),
        updates=trained[-1].get("updates") if trained else None,
        settings=flat_settings(latest.get("config", {})),
        dataset=latest.get("dataset", ""),
        plugin_sources=latest.get("plugin_sources", {}),
        inputs=latest.get("inputs", {}),
        best=best_scores(valid, starts),
        last=_scores_of(valid[-1]) if valid else {},
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=elapsed(records, "time"),
        device_seconds=_device_seconds(records, latest),
        on_gpu=not _on_cpu(latest),
        parameters=latest.get("parameters"),
        changed=changed_at_resumes(starts),
        records=current,
    )


def _of_kinds(records: Iterable[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] in kinds]


def changed_at_resumes(starts: Iterable[Mapping[str, Any]]) -> tuple[ChangedSetting, ...]:
    """Returns the settings that changed when a run was resumed. `starts` are the log records of starts and resumes.

    If a run was resumed from an older checkpoint, the settings of the lost updates do not count. Settings that an older
    version of nmtkit did not have are left out.
    """
    return tuple(
        ChangedSetting(update=after["update"], name=name, before=old, now=new)
        for before, after in itertools.pairwise(_lasting(starts))
        for name, old, new in changed_settings(before.get("config", {}), after.get("config", {}))
        if name not in OWN and name in flat_settings(before.get("config", {}))
    )


def _lasting(starts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the log records of starts and resumes whose updates are part of the final model.

    A resume from an older checkpoint discards the later updates, and the resumes during these updates.
    """
    parts: list[Mapping[str, Any]] = []
    for record in starts:
        while parts and parts[-1].get("update", 0) >= record.get("update", 0):
            parts.pop()
        parts.append(record)
    return parts


def state_of(folder: Path, records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Returns the state of a run and the reason for the state, in one line.

    A run is running if its folder is locked. Otherwise, the end of the log shows the state.
    """
    if holder := holder_of(folder):
        return "running", described(holder)
    decisive = _of_kinds(records, "start", "resume", "end")
    if not decisive:
        return "new", ""
    if decisive[-1]["kind"] == "end":
        return decisive[-1]["state"], " ".join(decisive[-1]["reason"].split())
    return "stopped", "killed, or the machine stopped"


def best_scores(valid: Iterable[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]) -> dict[str, ValidationScore]:
    """Returns the best score of each metric with its update. Among equal scores, the first is returned.

    If a resume has changed settings on which a score depends (`conditions_of`), only later scores count. `starts` are
    the records of starts and resumes.
    """
    parts = _lasting(starts)
    best: dict[str, ValidationScore] = {}
    for record in valid:
        for name, score in _scores_of(record).items():
            conditions = [(part.get("update", 0), conditions_of(name, part.get("config", {}))) for part in parts]
            changed = [after[0] for before, after in itertools.pairwise(conditions) if before[1] != after[1]]
            if score.update <= max(changed, default=-1):
                continue
            more = score.value - best[name].value if name in best else None
            if more is None or (more > 0 if name in record.get("maximized", ()) else more < 0):
                best[name] = score
    return best


def _scores_of(record: Mapping[str, Any]) -> dict[str, ValidationScore]:
    numbers = numbers_of(record, NO_SCORES)
    order = dict.fromkeys([*SCORES, *numbers])
    return {name: ValidationScore(value=numbers[name], update=record["update"]) for name in order if name in numbers}


def _on_cpu(facts: Mapping[str, Any]) -> bool:
    return str(facts.get("device", "cpu")).startswith("cpu")


def _device_seconds(records: Sequence[dict[str, Any]], facts: Mapping[str, Any]) -> float | None:
    """Returns the CPU seconds of all processes of a run, or its duration in seconds multiplied by the number of GPUs.

    The result for a log without CPU times is duration x processes x --threads, or None without --threads.
    """
    processes = int(facts.get("processes", 1))
    if not _on_cpu(facts):
        return processes * elapsed(records, "time")
    if all("cpu_seconds" in record for record in _of_kinds(records, "start", "resume")):
        return processes * elapsed(records, "cpu_seconds")
    threads = facts.get("config", {}).get("run", {}).get("threads")  # an old log
    return processes * threads * elapsed(records, "time") if threads else None


# --- comparisons -----------------------------------------------------------------------------------------------------


def differing(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the settings outside `OWN` that differ among the runs that have them, and "dataset" if it differs."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in OWN)
    values = {name: [run.settings[name] for run in runs if name in run.settings] for name in names}
    unequal = [name for name, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)]
    return unequal + (["dataset"] if len({run.dataset for run in runs}) > 1 else [])


def setting(run: RunSummary, name: str) -> Any:
    """Returns the value of a setting, or an empty text if no component of the run has the setting."""
    if name == "dataset":
        return Path(run.settings.get("data", "")).name + f" ({run.dataset})"
    return run.settings.get(name, "")


def groups_over_seeds(runs: Sequence[RunSummary]) -> list[list[RunSummary]]:
    """Groups runs with the same dataset, plug-in code, input files, settings, and changes of settings at resumes.

    The seed and the settings in `OWN` may differ within a group.
    """
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        same = sorted((name, value) for name, value in run.settings.items() if name not in ("seed", *OWN))
        files = run.dataset, sorted(run.plugin_sources.values()), sorted(run.inputs.items())
        groups.setdefault(repr((same, files, run.changed)), []).append(run)
    return list(groups.values())


def one_for_each_seed(group: Sequence[RunSummary], left_out: dict[str, str]) -> list[RunSummary]:
    """Returns one run for each seed: the first finished run, or else the first run.

    `group` comes from `groups_over_seeds`. The names of the other runs are added to `left_out`, with the reasons.
    """
    by_seed: dict[object, RunSummary] = {}
    for run in sorted(group, key=lambda run: run.state != "finished"):
        first = by_seed.setdefault(run.settings.get("seed"), run)
        if first is not run:
            left_out[run.name] = f"same settings and seed as {first.name}"
    return [run for run in group if run.name not in left_out]


def means_over_seeds(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Merges runs that differ only in the seed. The merged run has the means of scores, speeds and times.

    A second run with the same settings and seed is left out with a warning.
    """
    left_out: dict[str, str] = {}
    groups = [one_for_each_seed(group, left_out) for group in groups_over_seeds(runs)]
    for name, reason in left_out.items():
        log.warning("%s is not part of the mean: %s", name, reason)
    return [_mean(group) if len(group) > 1 else group[0] for group in groups]


def _mean(runs: Sequence[RunSummary]) -> RunSummary:
    states = Counter(run.state for run in runs)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    seeds = [run.settings.get("seed") for run in runs]
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    return replace(
        runs[0],
        name=common_name([run.name for run in runs]),
        state=runs[0].state if len(states) == 1 else counted,
        reason="",
        update=min(run.update for run in runs),
        settings=runs[0].settings | {"seed": seeds},
        best=_mean_scores([run.best for run in runs]),
        last=_mean_scores([run.last for run in runs]),
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
        seconds=statistics.fmean(run.seconds for run in runs),
        device_seconds=None,
        runs=len(runs),
        records=[],
    )


def _mean_scores(scores: Sequence[Mapping[str, ValidationScore]]) -> dict[str, ValidationScore]:
    """Returns means and standard deviations of the metrics that all runs have."""
    result = {}
    for name in scores[0]:
        if all(name in of_run for of_run in scores):
            values = [of_run[name].value for of_run in scores]
            update = round(statistics.fmean(of_run[name].update for of_run in scores))
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            result[name] = ValidationScore(value=mean, update=update, deviation=deviation)
    return result


def common_name(names: Sequence[str]) -> str:
    """Returns the parts that all names share, such as "runs/lr=0.1" for several seeds.

    Names are split at slashes and commas. If there are no shared parts, returns the first name.
    """
    parts = [name.replace("/", ",/").split(",") for name in names]
    shared = [part for part in parts[0] if all(part in other for other in parts[1:])]
    return ",".join(shared).replace(",/", "/") or names[0]


def row_name(name: str) -> str:
    """Returns the name of the row of a run: the name of the run without its seed."""
    return re.sub(r"(.),?seed=\d+$", r"\1", name)


def as_plain(run: RunSummary, columns: Sequence[str]) -> dict[str, Any]:
    """Returns a summary in plain types, for JSON."""

    def scores(by_name: Mapping[str, ValidationScore]) -> dict[str, Any]:
        finite = {name: asdict(score) for name, score in by_name.items() if math.isfinite(score.value)}
        return {name: {key: value for key, value in of.items() if value is not None} for name, of in finite.items()}

    plain = {"run": run.name, "settings": {name: setting(run, name) for name in columns}}
    plain |= {"best": scores(run.best), "last": scores(run.last)}
    facts = ("update", "updates", "tokens_per_second", "seconds", "state", "reason", "runs")
    plain |= {name: getattr(run, name) for name in facts}
    return plain | ({"changed": [asdict(each) for each in run.changed]} if run.changed else {})
