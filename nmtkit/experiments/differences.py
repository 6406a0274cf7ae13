"""The rows of a sweep, each compared with the base row: scores over seeds, costs, and differences with intervals."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nmtkit.config import suggestion
from nmtkit.experiments import run_translations
from nmtkit.experiments.comparison import RunSummary, common_name, groups_over_seeds, one_for_each_seed, row_name
from nmtkit.experiments.run_translations import RunTranslations
from nmtkit.scoring.metrics import MetricSettings
from nmtkit.scoring.seeds import SeedScores, compare_seeds

LEVEL = 0.05  # significance level of p-values


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """Finished runs that differ only in the seed. Costs are means over the runs, or None if they are unknown."""

    name: str
    seeds: int
    parameters: int | None
    updates: int
    flop: float | None
    device_minutes: float | None  # minutes of all cores or GPUs
    scores: Sequence[SeedScores]


@dataclass(frozen=True, kw_only=True)
class RowComparison:
    """Rows of a sweep, with the base first. `left_out` has the reason for each run that is not compared, by name."""

    rows: Sequence[SweepRow]
    left_out: Mapping[str, str]
    made_by: str  # description of the model and the search that made the translations
    sentences: int
    device: str  # "core" or "GPU", the unit of `device_minutes`

    def verdict(self, row: SweepRow, metric: int) -> str:
        """Returns "higher" or "lower" for a significant difference, else the reason, such as "one seed".

        A star marks differences that stay significant if p-values are corrected for the number of rows (Holm 1979).
        """
        difference = row.scores[metric].difference
        if difference is None:
            return "base"
        if not difference.covers_seeds:
            return "one seed"
        if not difference.significant:
            return "within spread"
        return ("higher" if difference.value > 0 else "lower") + " *" * (row.name in self._after_holm(metric))

    def _after_holm(self, metric: int) -> set[str]:
        tested = [(row.name, row.scores[metric].difference) for row in self.rows]
        ordered = sorted((each.p_value, name) for name, each in tested if each and each.covers_seeds)
        corrected = ((p_value * (len(ordered) - rank), name) for rank, (p_value, name) in enumerate(ordered))
        return {name for _, name in itertools.takewhile(lambda each: each[0] < LEVEL, corrected)}


def compare_rows(
    runs: Sequence[RunSummary], base: str | None, metrics: Sequence[str], settings: MetricSettings, *, samples: int
) -> RowComparison:
    """Compares rows of runs with the row `base` (None: the first row). Only finished runs with translations count.

    If a sweep has translated some of the runs, the other runs do not count: a second process of the sweep may have
    finished these runs a moment ago, and translates them next. Raises OSError, or ValueError if the base is missing, or
    if two runs translated different texts or used different settings.
    """
    left_out: dict[str, str] = {}
    found: dict[str, RunTranslations] = {}
    read = {run.name: run_translations.read(run) if run.state == "finished" else None for run in runs}
    by_sweep = any(each is not None and each.by_sweep for each in read.values())
    for run in runs:
        translations = read[run.name]
        if translations is None:
            left_out[run.name] = run.state if run.state != "finished" else "no translations of the last model"
        elif by_sweep and not translations.by_sweep:
            left_out[run.name] = "finished, but not yet translated by the sweep"
        else:
            found[run.name] = translations
    if not found:
        raise ValueError(
            "no finished run has translations; add [sweep.generate] to the sweep, or validate with --metrics bleu"
        )
    _check_alike(found)
    groups = named_rows([run for run in runs if run.name in found], left_out)
    base = next(iter(groups)) if base is None else base
    if base not in groups:
        unfinished = named_rows(runs, {})
        if base in unfinished:
            raise ValueError(f"the base {base} has no finished run with translations yet")
        raise ValueError(f"there is no row {base!r}; {suggestion(base, list(unfinished))}")
    ordered = {base: groups[base]} | groups
    first = next(iter(found.values()))
    systems = {name: [found[run.name].lines for run in group] for name, group in ordered.items()}
    chosen = replace(settings, target_lang=first.target_lang, sources=tuple(first.sources))
    scores = compare_seeds(systems, [first.references], metrics, chosen, samples=samples)
    return RowComparison(
        rows=[_row(name, group, found, scores[name]) for name, group in ordered.items()],
        left_out=left_out,
        made_by=first.made_by,
        sentences=len(first.references),
        device="GPU" if groups[base][0].on_gpu else "core",
    )


def named_rows(runs: Sequence[RunSummary], left_out: dict[str, str]) -> dict[str, list[RunSummary]]:
    """Returns the runs of each row by the name of the row: the name of the folder without the seed.

    If two rows have the same name, the names of all rows are paths. If two paths are equal too, because the settings
    changed between two seeds, each row with such a name gets the name of its first run instead. A second run with the
    same settings and seed is left out.
    """
    rows: list[tuple[str, list[RunSummary]]] = []
    for group in groups_over_seeds(runs):
        chosen = one_for_each_seed(group, left_out)
        names = [run.name for run in chosen]
        path = common_name(names) if len(names) > 1 else names[0]
        rows.append((row_name(path), chosen))
    paths = [path for path, _ in rows]
    short = [Path(path).name for path in paths]
    whole = [name if short.count(name) == 1 else group[0].name for name, (_, group) in zip(short, rows, strict=True)]
    names = next(choice for choice in (short, paths, whole) if len(set(choice)) == len(choice))
    return {name: group for name, (_, group) in zip(names, rows, strict=True)}


def _check_alike(found: Mapping[str, RunTranslations]) -> None:
    """Raises ValueError if runs translated different texts, or with different settings."""
    (name, first), *others = found.items()
    for other, translations in others:
        if translations.made_by != first.made_by:
            raise ValueError(
                f"{name} translates with {first.made_by}, but {other} with {translations.made_by}; "
                "repeat the sweep command, which translates all runs with the same settings"
            )
        if translations.references != first.references:
            raise ValueError(f"{name} and {other} translate different texts: their references differ")


def _row(
    name: str, group: Sequence[RunSummary], found: Mapping[str, RunTranslations], scores: Sequence[SeedScores]
) -> SweepRow:
    flops = [flop for run in group if (flop := found[run.name].flop) is not None]
    seconds = [run.device_seconds for run in group if run.device_seconds is not None]
    return SweepRow(
        name=name,
        seeds=len(group),
        parameters=group[0].parameters,
        updates=round(statistics.fmean(run.update for run in group)),
        flop=statistics.fmean(flops) if len(flops) == len(group) else None,
        device_minutes=statistics.fmean(seconds) / 60 if len(seconds) == len(group) else None,
        scores=scores,
    )
