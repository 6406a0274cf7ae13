"""Reports of `nmtkit score`: each report is a value for JSON and the same facts as lines of text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nmtkit.config.tables import right_aligned
from nmtkit.data.directions import Direction
from nmtkit.scoring.lengths import WORDS_OF_BLEU, LengthBand, length_bands
from nmtkit.scoring.metrics import MetricSettings, Score, part_scores, score
from nmtkit.scoring.significance import Comparison, Test
from nmtkit.scoring.texts import ScoredTexts


@dataclass(frozen=True)
class ScoreReport:
    """Scores as a value for JSON, with unrounded numbers, and as lines of text."""

    value: Any
    lines: Sequence[str]


def scores_report(scores: Sequence[Score], width: int) -> ScoreReport:
    """Returns the report of a text. `width` is the number of digits after the decimal point."""
    margin = max(len(score.name) for score in scores)
    lines = [f"{each.name:<{margin}}  {number(each, width)}  {short(each.details)}".rstrip() for each in scores]
    return ScoreReport(
        list(map(plain, scores)), [*lines, "", *(f"{each.name:<{margin}}  {each.signature}" for each in scores)]
    )


def sentences_report(table: Sequence[Sequence[Score]], width: int) -> ScoreReport:
    """Returns the report of sentences: a heading with the signatures, and a line for each sentence.

    `table` has the scores of all sentences for each metric.
    """
    signatures = {column[0].name: column[0].signature for column in table}
    rows = list(zip(*table, strict=True))
    sentences = [{score.name: score.value for score in row} for row in rows]
    heading = "\t".join(f"{name}|{signature}" for name, signature in signatures.items())
    lines = ["\t".join(f"{score.value:.{width}f}" for score in row) for row in rows]
    return ScoreReport({"signatures": signatures, "sentences": sentences}, [heading, *lines])


def comparison_report(results: Sequence[Comparison], test: Test, samples: int, width: int) -> ScoreReport:
    """Returns the report of several systems, the first of which is the baseline."""
    rows = [{"system": result.system, **plain(result.score), "p_value": result.p_value} for result in results]
    margin, lines = max(len(result.system) for result in results), []
    for name in dict.fromkeys(result.score.name for result in results):
        rows_of_metric = [result for result in results if result.score.name == name]
        lines.append(f"{name}  {rows_of_metric[0].score.signature}")
        for result in rows_of_metric:
            verdict = "" if result.p_value is None else f"  p = {result.p_value:.4f}{' *' * (result.p_value < 0.05)}"
            lines.append(f"  {result.system:<{margin}}  {number(result.score, width)}{verdict}")
        lines.append("")
    baseline = results[0].system
    method = {"bootstrap": "one-sided paired bootstrap", "randomization": "two-sided approximate randomization"}[test]
    lines.append(f"* differs from {baseline}: p < 0.05, {method}, {samples} samples")
    return ScoreReport({"baseline": baseline, "test": test, "samples": samples, "scores": rows}, lines)


def with_test_set(report: ScoreReport, title: str, *, in_lines: bool) -> ScoreReport:
    """Adds the title of a published test set to the JSON value of a report and, if `in_lines`, to its lines of text."""
    value = report.value
    named = [{**row, "test_set": title} for row in value] if isinstance(value, list) else {**value, "test_set": title}
    return ScoreReport(named, [*report.lines, *([f"references  {title}"] if in_lines else [])])


def direction_scores(
    texts: ScoredTexts, metrics: Sequence[str], settings: MetricSettings, bootstrap: int
) -> dict[Direction, list[Score]]:
    """Returns the scores of each direction of a dataset of many directions."""
    codes = tuple(dict.fromkeys(code for each in texts.directions for code in (each.source, each.target)))
    result = {}
    for direction in texts.directions:
        part = texts.of(direction)
        (lines,) = part.systems.values()
        sources = None if part.sources is None else tuple(part.sources)
        own = replace(settings, target_lang=direction.target, sources=sources, languages=settings.languages or codes)
        result[direction] = score(lines, part.references, metrics, own, bootstrap=bootstrap)
    return result


def directions_report(texts: ScoredTexts, directions: Mapping[Direction, list[Score]], width: int) -> ScoreReport:
    """Returns the report of a dataset of many directions, with the mean of each score over the trained directions.

    `directions` has the scores of each direction of `texts`.
    """
    trained = [scores for direction, scores in directions.items() if direction not in texts.untrained]
    columns = list(zip(*(trained or directions.values()), strict=True))
    means = {column[0].name: sum(score.value for score in column) / len(column) for column in columns}
    rows, table = [], [["direction", "sentences", *means]]
    names: dict[str, list[str]] = {}
    longest = max(map(len, means))
    for direction, scores in directions.items():
        count, is_trained = len(texts.directions[direction]), direction not in texts.untrained
        row = {"direction": str(direction), "sentences": count, "scores": list(map(plain, scores))}
        rows.append(row if is_trained else row | {"trained": False})
        mark = "" if is_trained else " *"
        table.append([f"{direction}{mark}", f"{count:,}", *(number(score, width) for score in scores)])
        for each in scores:
            names.setdefault(f"{each.name:<{longest}}  {each.signature}", []).append(str(direction))
    table.append(["average", "", *(f"{mean:.{width}f}" for mean in means.values())])
    lines = right_aligned(table)
    if len(trained) < len(directions):
        lines.append("* no training pairs; not part of the average")
    lines += ["", *(name + ("" if len(of) == len(directions) else f"  {', '.join(of)}") for name, of in names.items())]
    return ScoreReport({"directions": rows, "average": means}, lines)


BandScores = Sequence[tuple[LengthBand, list[Score]]]


def length_scores(
    hypotheses: Sequence[str],
    texts: ScoredTexts,
    by: str,
    metrics: Sequence[str],
    settings: MetricSettings,
    bootstrap: int,
) -> tuple[BandScores, list[Score]]:
    """Returns the scores of each band of lengths, and the scores of all lines.

    `by` is the side whose words are counted: "source", or "reference" for the first reference. Raises ValueError if
    this side has no text.
    """
    counted = texts.sources if by == "source" else next(iter(texts.references), None)
    if counted is None:
        needed = "--src FILE, --data or --test-set" if by == "source" else "--ref FILE, --data or --test-set"
        raise ValueError(f"--by-length {by} counts the words of the {by}: give {needed}")
    bands = length_bands(counted)
    parts = [*(band.rows for band in bands), range(len(counted))]
    table = part_scores(hypotheses, texts.references, parts, metrics, settings, bootstrap=bootstrap)
    *rows, total = map(list, zip(*table, strict=True))
    return list(zip(bands, rows, strict=True)), total


def lengths_report(bands: BandScores, total: Sequence[Score], by: str, width: int) -> ScoreReport:
    """Returns the report of bands of lengths, and of all lines. `by` is the side whose words are counted."""
    table = [[f"words of the {by}", "lines", *(score.name for score in total)]]
    for band, scores in bands:
        table.append([band.title, f"{len(band.rows):,}", *(number(score, width) for score in scores)])
    lines = sum(len(band.rows) for band, _ in bands)
    table.append(["all", f"{lines:,}", *(number(score, width) for score in total)])
    margin = max(len(score.name) for score in total)
    shown = right_aligned(table)
    if any(score.name == "BLEU" for score in total) and bands[0][0].fewest < WORDS_OF_BLEU:
        shown.append(f"BLEU compares up to {WORDS_OF_BLEU} words in a row, so the BLEU of shorter lines is unreliable")
    shown += ["", *(f"{score.name:<{margin}}  {score.signature}" for score in total)]
    rows = [
        {"fewest": band.fewest, "most": band.most, "lines": len(band.rows), "scores": list(map(plain, scores))}
        for band, scores in bands
    ]
    everything = {"lines": lines, "scores": list(map(plain, total))}
    return ScoreReport({"words_of": by, "bands": rows, "all": everything}, shown)


def plain(score: Score) -> dict[str, Any]:
    """Returns a score for JSON, without fields that do not apply."""
    fields = {"name": score.name, "score": score.value, "mean": score.mean, "interval": score.interval}
    fields |= {"signature": score.signature, "details": score.details or None}
    return {name: value for name, value in fields.items() if value is not None}


def number(score: Score, width: int) -> str:
    interval = "" if score.mean is None else f"  ({score.mean:.{width}f} ± {score.interval:.{width}f})"
    return f"{score.value:.{width}f}{interval}"


def short(details: str) -> str:
    """Shortens sacreBLEU's details of BLEU to fit into 80 columns: removes the ratio of lengths."""
    return re.sub(r" ratio = \S+", "", details).replace(" = ", "=")
