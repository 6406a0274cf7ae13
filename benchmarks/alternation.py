"""Measures two checkouts in alternating turns. Compares their figures (quartiles of ratios) and their outputs."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness import Row

CHECKOUTS = ("before", "after")


@dataclass(frozen=True)
class Turn:
    """The figures and the outputs of one checkout in one round."""

    figures: dict[str, float]  # unit -> figure
    outputs: dict[str, object]  # name of an output -> contents


Measure = Callable[[str], Turn]  # name of a checkout -> its turn


def compare(systems: Mapping[str, Measure], rounds: int) -> list[Row]:
    """Measures each system with both checkouts, in the order A B, B A, …. Returns the rows of the table."""
    turns: dict[str, dict[str, list[Turn]]] = {system: {name: [] for name in CHECKOUTS} for system in systems}
    for number in range(rounds):
        for system, measure in systems.items():
            for name in reversed(CHECKOUTS) if number % 2 else CHECKOUTS:
                turns[system][name].append(measure(name))
    return [row for system in systems for row in table_rows(system, turns[system])]


def table_rows(system: str, turns: Mapping[str, list[Turn]]) -> list[Row]:
    """Returns a row of the table for each unit, such as "lines/s"."""
    outputs, result = verdict(turns), []
    for unit in turns["before"][0].figures:
        figures = {name: [turn.figures[unit] for turn in turns[name]] for name in CHECKOUTS}
        ratios = [after / before for before, after in zip(*figures.values(), strict=True)]
        low, middle, high = quartiles(ratios)
        row: Row = {"system": system, "unit": unit} | {name: statistics.median(figures[name]) for name in CHECKOUTS}
        row |= {"after / before": middle, "from": low, "to": high, "outputs": outputs}
        result.append(row | {"rounds": list(figures.values())})
    return result


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values


def verdict(turns: Mapping[str, list[Turn]]) -> str:
    """Returns "equal", how many outputs differ, or "varies" if the outputs of a checkout differ between rounds."""
    if any(turn.outputs != rounds[0].outputs for rounds in turns.values() for turn in rounds):
        return "varies"
    before, after = (turns[name][0].outputs for name in CHECKOUTS)
    names = before.keys() | after.keys()
    different = sorted(name for name in names if before.get(name) != after.get(name))
    return f"{len(different)} of {len(names)} differ: {different[0]} …" if different else "equal"
