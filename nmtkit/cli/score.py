"""`nmtkit score`: translations in, scores with their signatures out."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit.cli.command import Command

if TYPE_CHECKING:
    from nmtkit.scoring.metrics import Score
    from nmtkit.scoring.significance import Comparison


@click.command(cls=Command)
@click.option("--ref", "reference_paths", type=Path, multiple=True, metavar="FILE", help="Reference text; repeatable.")
@click.option("--data", type=Path, metavar="FOLDER", help="Dataset whose kept references to use instead of --ref.")
@click.option("--gen-subset", default="test", metavar="NAME", help="Subset of --data.  [default: test]")
@click.option(
    "--sys", "system_paths", type=Path, multiple=True, metavar="FILE",
    help="Translations; several are compared with the first.  [default: standard input]",
)  # fmt: skip
@click.option("--src", type=Path, metavar="FILE", help="Source text, for comet; --data brings its own.")
@click.option("-t", "--target-lang", metavar="CODE", help="Language, for tokenized-bleu; --data brings its own.")
@click.option(
    "--metric", default="bleu,chrf,ter", metavar="NAME,…",
    help="Of bleu, chrf, chrf++, ter, comet, and tokenized-bleu: the BLEU of the papers of 2017, with Moses tokens and "
    "split compounds, not comparable with bleu.  [default: bleu,chrf,ter]",
)  # fmt: skip
@click.option("--tokenize", default="13a", metavar="NAME", help="sacreBLEU's tokenizer for bleu.  [default: 13a]")
@click.option("--lowercase", is_flag=True, help="Ignore case in bleu and chrf (ter always does).")
@click.option(
    "--comet-model",
    default="Unbabel/wmt22-comet-da",
    metavar="NAME",
    help="Model of comet.  [default: Unbabel/wmt22-comet-da]",
)
@click.option("--confidence", is_flag=True, help="A 95 % interval around each score, by bootstrap.")
@click.option(
    "--test", type=click.Choice(["bootstrap", "randomization"]), default="bootstrap",
    help="How several --sys are compared: paired bootstrap or approximate randomization.  [default: bootstrap]",
)  # fmt: skip
@click.option(
    "--samples", type=click.IntRange(min=40), metavar="N",
    help="Bootstrap resamples or randomization trials.  [default: 1000 or 10000]",
)  # fmt: skip
@click.option("--sentence-level", is_flag=True, help="One line of tab-separated scores for each sentence.")
@click.option(
    "--width", type=click.IntRange(0, 9), default=1, metavar="N", help="Digits after the point.  [default: 1]"
)
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="Output.  [default: text]")
def command(metric: str, width: int, format: str, **flags: Any) -> None:
    """Score translations, through sacreBLEU, and test whether systems differ.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit score --sys output.de --ref reference-1.de --ref reference-2.de
    nmtkit score --sys baseline.de --sys better.de --ref reference.de
    """
    from nmtkit.scoring import metrics, significance
    from nmtkit.scoring.texts import read_texts

    test: Literal["bootstrap", "randomization"] = flags["test"]
    samples: int | None = flags["samples"]
    texts = read_texts(
        flags["reference_paths"],
        flags["data"],
        flags["gen_subset"],
        flags["system_paths"],
        flags["src"],
        sys.stdin.buffer,
    )
    settings = metrics.Settings(
        tokenize=flags["tokenize"],
        lowercase=flags["lowercase"],
        target_lang=flags["target_lang"] or texts.target_lang,
        sources=None if texts.sources is None else tuple(texts.sources),
        comet_model=flags["comet_model"],
    )
    names = [name.strip() for name in metric.split(",") if name.strip()]
    hypotheses = next(iter(texts.systems.values()))
    as_json = format == "json"
    if flags["sentence_level"]:
        if len(texts.systems) > 1 or flags["confidence"]:
            raise ValueError("--sentence-level scores one system, without --confidence")
        show_sentences(metrics.sentence_scores(hypotheses, texts.references, names, settings), width, as_json)
    elif len(texts.systems) > 1:
        results = significance.compare(
            texts.systems, texts.references, names, settings, test=test, samples=samples, confidence=flags["confidence"]
        )
        show_comparison(results, test, samples or significance.SAMPLES[test], width, as_json)
    else:
        bootstrap = (samples or significance.SAMPLES["bootstrap"]) if flags["confidence"] else 0
        scores = metrics.score(hypotheses, texts.references, names, settings, bootstrap=bootstrap)
        show_scores(scores, width, as_json)


def plain(score: "Score") -> dict[str, Any]:
    """Returns a score for JSON: numbers unrounded, fields that do not apply left out."""
    fields = {"name": score.name, "score": score.value, "mean": score.mean, "interval": score.interval}
    fields |= {"signature": score.signature, "details": score.details or None}
    return {name: value for name, value in fields.items() if value is not None}


def number(score: "Score", width: int) -> str:
    interval = "" if score.mean is None else f"  ({score.mean:.{width}f} ± {score.interval:.{width}f})"
    return f"{score.value:.{width}f}{interval}"


def show_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_scores(scores: list["Score"], width: int, as_json: bool) -> None:
    if as_json:
        show_json([plain(score) for score in scores])
        return
    margin = max(len(score.name) for score in scores)
    for score in scores:
        click.echo(f"{score.name:<{margin}}  {number(score, width)}  {short(score.details)}".rstrip())
    click.echo()
    for score in scores:
        click.echo(f"{score.name:<{margin}}  {score.signature}")


def short(details: str) -> str:
    """Returns BLEU's details as sacreBLEU has them, without the ratio of the two lengths, to fit into 80 columns."""
    return re.sub(r" ratio = \S+", "", details).replace(" = ", "=")


def show_sentences(table: list[list["Score"]], width: int, as_json: bool) -> None:
    """Writes, as text, a heading with the signatures, then a line for each sentence."""
    signatures = {column[0].name: column[0].signature for column in table}
    rows = list(zip(*table, strict=True))
    if as_json:
        sentences = [{score.name: score.value for score in row} for row in rows]
        show_json({"signatures": signatures, "sentences": sentences})
        return
    click.echo("\t".join(f"{name}|{signature}" for name, signature in signatures.items()))
    for row in rows:
        click.echo("\t".join(f"{score.value:.{width}f}" for score in row))


def show_comparison(
    results: list["Comparison"], test: Literal["bootstrap", "randomization"], samples: int, width: int, as_json: bool
) -> None:
    if as_json:
        rows = [{"system": result.system, **plain(result.score), "p_value": result.p_value} for result in results]
        show_json({"baseline": results[0].system, "test": test, "samples": samples, "scores": rows})
        return
    margin = max(len(result.system) for result in results)
    for name in dict.fromkeys(result.score.name for result in results):
        rows_of_metric = [result for result in results if result.score.name == name]
        click.echo(f"{name}  {rows_of_metric[0].score.signature}")
        for result in rows_of_metric:
            verdict = "" if result.p_value is None else f"  p = {result.p_value:.4f}{' *' * (result.p_value < 0.05)}"
            click.echo(f"  {result.system:<{margin}}  {number(result.score, width)}{verdict}")
        click.echo()
    method = {"bootstrap": "paired bootstrap", "randomization": "approximate randomization"}[test]
    click.echo(f"* differs from {results[0].system} at p < 0.05 ({method}, {samples} samples, two-sided)")
