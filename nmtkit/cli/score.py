"""`nmtkit score`: prints scores of translations with their signatures, or perplexities of texts."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit.cli.command import Command, standard_input
from nmtkit.cli.flags import flags, given_flags, on_command_line
from nmtkit.config import COMMAND_LINE, Config, FlagRule, check_flags, derive, option
from nmtkit.config.plugins import load_plugins
from nmtkit.data.corpora.corpus import as_columns, format_of
from nmtkit.scoring.metrics import DEFAULT_COMET_MODEL, DEFAULT_METRICS, Settings, check_names

if TYPE_CHECKING:
    from nmtkit.data.directions import Direction
    from nmtkit.scoring.metrics import Score
    from nmtkit.scoring.significance import Comparison
    from nmtkit.scoring.texts import Texts
    from nmtkit.translation.likelihood import Likelihood


SCORE_RULES = (
    FlagRule("--data", excludes=("--ref",), reason="both provide references"),
    FlagRule(
        "--path",
        excludes=(
            "--ref",
            "--data",
            "--metric",
            "--tokenize",
            "--lowercase",
            "--confidence",
            "--comet-model",
            "--test",
        ),
        reason="a model gives the probability of a text without a reference",
    ),
    FlagRule("--source-lang", needs=("--path",)),
    FlagRule("--plugin", needs=("--path",)),
    FlagRule("--gen-subset", needs=("--data",)),
    FlagRule("--tokenize", needs=("--metric bleu",)),
    FlagRule("--lowercase", needs=("--metric bleu", "--metric chrf", "--metric chrf++")),
    FlagRule(
        "--target-lang",
        needs=("--metric tokenized-bleu", "--metric bleu without --tokenize", "--metric off-target", "--path"),
    ),
    FlagRule("--languages", needs=("--metric off-target",)),
    FlagRule("--src", needs=("--metric comet", "--path")),
    FlagRule("--comet-model", needs=("--metric comet",)),
    FlagRule("--test", needs=("several --sys",)),
    FlagRule("--samples", needs=("--confidence", "several --sys")),
    FlagRule(
        "--sentence-level",
        excludes=("--confidence", "several --sys"),
        reason="sentence scores have no intervals or tests",
    ),
    FlagRule("--width", needs=("--format text",)),
)


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Config):
    """Settings of `nmtkit score`."""

    data: Path | None = option(None, "dataset with the references, instead of --ref", metavar="FOLDER")
    gen_subset: str = option("test", "subset of --data", metavar="NAME")
    src: Path | None = option(
        None, "source text for comet and for --path, or a corpus such as a .tsv; --data contains the source text"
    )
    columns: tuple[str, ...] = option(
        (), "source and target column of .tsv, .jsonl and .parquet files: names, or numbers from 1",
        metavar="SOURCE,TARGET",
    )  # fmt: skip
    path: Path | None = option(
        None,
        "checkpoint of a language model, or of a translation model with --src: print the perplexity of the texts "
        "instead of metrics",
        metavar="FILE",
    )
    source_lang: str | None = option(
        None, "source language for a multilingual model of --path", flag="-s/--source-lang", metavar="CODE"
    )
    target_lang: str | None = option(
        None,
        "language of the translations: chooses the tokenizers of bleu and tokenized-bleu, and off-target expects this "
        "language; --data contains it",
        flag="-t/--target-lang",
        metavar="CODE",
    )
    metric: tuple[str, ...] = option(
        DEFAULT_METRICS,
        "bleu, chrf, chrf++, ter, comet, or tokenized-bleu (BLEU of papers around 2017, with Moses tokens and split "
        "compounds, not comparable with bleu), or off-target (percentage of lines in a wrong language)",
        metavar="NAME,…",
    )
    languages: tuple[str, ...] = option(
        (),
        "languages that off-target distinguishes; default: all languages, or the languages of --data if the dataset "
        "has several directions",
        metavar="CODE,…",
    )
    tokenize: str = option(
        "auto",
        "sacreBLEU's tokenizer for bleu; auto chooses by the target language: zh, ja-mecab, ko-mecab, else 13a",
        metavar="NAME",
    )
    lowercase: bool = option(False, "ignore case in bleu and chrf (ter always ignores case)")
    comet_model: str = option(DEFAULT_COMET_MODEL, "model of comet", metavar="NAME")
    confidence: bool = option(False, "show a 95 % confidence interval of each score, by bootstrap")
    test: Literal["bootstrap", "randomization"] = option(
        "bootstrap", "significance test of several --sys: paired bootstrap or approximate randomization"
    )
    samples: int | None = option(
        None,
        "number of bootstrap resamples (default: 1000) or randomization trials (default: 10000)",
        min=40,
        max=1_000_000,
    )
    sentence_level: bool = option(False, "write one line of tab-separated scores for each sentence")
    width: int = option(1, "digits after the decimal point", min=0, max=9)
    format: Literal["text", "json"] = option("text", "output format")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.metric)
        as_columns(self.columns)


@click.command(cls=Command)
@click.option(
    "--ref",
    "references",
    type=Path,
    multiple=True,
    metavar="FILE",
    help="Reference text, or a corpus .tsv, .tmx, .jsonl, .parquet or .zip, whose target side is taken; repeatable.",
)
@click.option(
    "--sys",
    "systems",
    type=Path,
    multiple=True,
    metavar="FILE",
    help="Translations, as lines or as JSON Lines of generate; repeat the flag to compare systems with the first.  "
    "[default: standard input]",
)
@click.option(
    "--plugin", "plugins", multiple=True, metavar="FILE|MODULE", help="Import this plug-in of --path first; repeatable."
)
def command(references: tuple[Path, ...], systems: tuple[Path, ...], plugins: tuple[str, ...], **flags: Any) -> None:
    """Score translations with sacreBLEU, and test whether systems differ.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit score --sys output.de --ref reference-1.de --ref reference-2.de
    nmtkit score --sys baseline.de --sys better.de --ref reference.de
    nmtkit score --path lm.pt --sys text.de
    """
    config = derive(ScoreConfig, on_command_line(flags), COMMAND_LINE)
    conditions = given_flags() | ({"several --sys"} if len(systems) > 1 else set())
    values = {f"--metric {name}" for name in config.metric} | {f"--format {config.format}"}
    if "bleu" in config.metric and config.tokenize == "auto":
        values.add("--metric bleu without --tokenize")
    check_flags(SCORE_RULES, conditions, conditions | values)
    if config.columns and all(path is None or format_of(path) is None for path in (*references, config.src)):
        raise ValueError("--columns does nothing without a .tsv, .jsonl or .parquet as --ref or --src")
    if config.path is not None:
        load_plugins(plugins)
        score_likelihoods(config.path, systems, config)
    else:
        score(references, systems, config)


command.params += flags(ScoreConfig)


def score(references: tuple[Path, ...], systems: tuple[Path, ...], config: ScoreConfig) -> None:
    from nmtkit.scoring import metrics, significance
    from nmtkit.scoring.texts import read_texts

    stream = None if systems else standard_input()
    texts = read_texts(
        references, config.data, config.gen_subset, systems, config.src, stream, config.target_lang,
        as_columns(config.columns),
    )  # fmt: skip
    if texts.directions:
        show_directions(direction_scores(texts, config), texts.untrained, config.width, config.format == "json")
        return
    settings = settings_of(texts, config)
    hypotheses = next(iter(texts.systems.values()))
    as_json = config.format == "json"
    if config.sentence_level:
        table = metrics.sentence_scores(hypotheses, texts.references, config.metric, settings)
        show_sentences(table, config.width, as_json)
    elif len(texts.systems) > 1:
        samples = config.samples or significance.SAMPLES[config.test]
        results = significance.compare(
            texts.systems,
            texts.references,
            config.metric,
            settings,
            test=config.test,
            samples=samples,
            confidence=config.confidence,
        )
        show_comparison(results, config.test, samples, config.width, as_json)
    else:
        bootstrap = (config.samples or significance.SAMPLES["bootstrap"]) if config.confidence else 0
        scores = metrics.score(hypotheses, texts.references, config.metric, settings, bootstrap=bootstrap)
        show_scores(scores, config.width, as_json)


def score_likelihoods(path: Path, systems: tuple[Path, ...], config: ScoreConfig) -> None:
    """Prints the perplexity of each file of `systems`, or of standard input, under the model of a checkpoint."""
    from nmtkit.scoring.texts import check_equal_counts, lines_of, read_lines, read_side, translations_of
    from nmtkit.translation.likelihood import Perplexity, is_language_model, likelihoods
    from nmtkit.translation.translator import Translator

    translator = Translator.load(path)
    if is_language_model(translator) and config.src is not None:
        raise ValueError(f"{path} is a language model, which reads no source; leave out --src")
    if not is_language_model(translator) and config.src is None:
        raise ValueError(f"{path} is a translation model; give the source text with --src FILE")
    sources = None if config.src is None else read_side(config.src, 0, config.target_lang, as_columns(config.columns))
    texts = {str(name): translations_of(read_lines(name), name) for name in systems}
    if not systems:
        name = Path("standard input")
        texts[str(name)] = translations_of(lines_of(standard_input().read(), name), name)
    languages = config.source_lang, config.target_lang
    results = {}
    for title, lines in texts.items():
        if sources is not None:
            check_equal_counts({str(config.src): sources, title: lines})
        results[title] = list(likelihoods(translator, sources, lines, *languages))
    if config.sentence_level:
        show_likelihoods(next(iter(results.values())), config.format == "json")
        return
    totals = {title: Perplexity.of(each) for title, each in results.items()}
    if config.format == "json":
        fields = [
            {
                "system": title,
                "perplexity": total.value,
                "log_probability": total.log_probability,
                "pieces": total.pieces,
                "lines": total.lines,
            }
            for title, total in totals.items()
        ]
        show_json(fields)
        return
    for title, total in totals.items():
        click.echo(
            f"perplexity {total.value:.{max(2, config.width)}f}  {total.pieces:,} pieces with eos in {total.lines:,} "
            f"lines, log probability {total.log_probability:.{max(2, config.width)}f}  {title}"
        )


def show_likelihoods(likelihoods: list["Likelihood"], as_json: bool) -> None:
    """Writes the log probability and the number of pieces of each line, separated by a tab."""
    if as_json:
        show_json([{"log_probability": each.log_probability, "pieces": each.pieces} for each in likelihoods])
        return
    for each in likelihoods:
        click.echo(f"{each.log_probability:.6f}\t{each.pieces}")


def settings_of(texts: "Texts", config: ScoreConfig) -> Settings:
    return Settings(
        tokenize=config.tokenize,
        lowercase=config.lowercase,
        target_lang=config.target_lang or texts.target_lang,
        languages=config.languages,
        sources=None if texts.sources is None else tuple(texts.sources),
        comet_model=config.comet_model,
    )


def direction_scores(texts: "Texts", config: ScoreConfig) -> "dict[Direction, tuple[int, list[Score]]]":
    """Returns the number of sentences and the scores of each direction of a dataset of many directions.

    Raises ValueError for settings that need texts of one direction.
    """
    from nmtkit.scoring import metrics, significance

    unusable = {"several --sys": len(texts.systems) > 1, "--sentence-level": config.sentence_level}
    unusable["--target-lang"] = config.target_lang is not None
    for setting, is_set in unusable.items():
        if is_set:
            raise ValueError(f"--data has many directions, and {setting} needs one direction; give --ref FILE")
    samples = (config.samples or significance.SAMPLES["bootstrap"]) if config.confidence else 0
    codes = tuple(dict.fromkeys(code for each in texts.directions for code in (each.source, each.target)))
    result = {}
    for direction in texts.directions:
        direction_texts = texts.of(direction)
        (lines,) = direction_texts.systems.values()
        settings = dataclasses.replace(settings_of(direction_texts, config), languages=config.languages or codes)
        scores = metrics.score(lines, direction_texts.references, config.metric, settings, bootstrap=samples)
        result[direction] = len(lines), scores
    return result


def show_directions(
    directions: "Mapping[Direction, tuple[int, list[Score]]]",
    untrained: "Collection[Direction]",
    width: int,
    as_json: bool,
) -> None:
    """Writes the scores of each direction, and the mean of each score over the trained directions."""
    trained = [scores for direction, (_, scores) in directions.items() if direction not in untrained]
    columns = list(zip(*(trained or [scores for _, scores in directions.values()]), strict=True))
    means = {column[0].name: sum(score.value for score in column) / len(column) for column in columns}
    if as_json:
        rows: list[dict[str, Any]] = [
            {"direction": str(direction), "sentences": count, "scores": [plain(score) for score in scores]}
            | ({"trained": False} if direction in untrained else {})
            for direction, (count, scores) in directions.items()
        ]
        show_json({"directions": rows, "average": means})
        return
    table = [["direction", "sentences", *means]]
    for direction, (count, scores) in directions.items():
        name = f"{direction}{' *' * (direction in untrained)}"
        table.append([name, f"{count:,}", *(number(score, width) for score in scores)])
    table.append(["average", "", *(f"{mean:.{width}f}" for mean in means.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True)]
        click.echo("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    if any(direction in untrained for direction in directions):
        click.echo("* no training pairs; not part of the average")
    click.echo()
    names: dict[str, list[str]] = {}
    longest = max(map(len, means))
    for direction, (_, scores) in directions.items():
        for score in scores:
            names.setdefault(f"{score.name:<{longest}}  {score.signature}", []).append(str(direction))
    for signature, of in names.items():
        click.echo(signature + ("" if len(of) == len(directions) else f"  {', '.join(of)}"))


def plain(score: "Score") -> dict[str, Any]:
    """Returns a score for JSON, with unrounded numbers and without fields that do not apply."""
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
    """Shortens sacreBLEU's details of BLEU to fit into 80 columns: removes the ratio of lengths."""
    return re.sub(r" ratio = \S+", "", details).replace(" = ", "=")


def show_sentences(table: list[list["Score"]], width: int, as_json: bool) -> None:
    """Writes a heading with the signatures, and a line for each sentence. With `as_json`, writes a JSON object."""
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
