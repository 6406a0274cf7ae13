"""`nmtkit score`: prints scores of translations with their signatures, or perplexities of texts."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit.cli.command import Command, echo, standard_input
from nmtkit.cli.flags import complete_with, flags, from_flags, given_flags, plugin_option, published_sets
from nmtkit.config import Config, FlagRule, check_flags, option
from nmtkit.config.plugins import load_plugins
from nmtkit.data.corpora.corpus import as_columns, format_of
from nmtkit.scoring.metrics import DEFAULT_METRICS, check_names, reference_metrics
from nmtkit.scoring.segments import METRIC_RULES, NEURAL_METRICS, MetricName

if TYPE_CHECKING:
    from nmtkit.scoring.metrics import MetricSettings, Score
    from nmtkit.scoring.report import ScoreReport
    from nmtkit.scoring.texts import PublishedSelection, ScoredTexts

CORPUS = "a corpus as --ref or --src"  # a condition of the rules below; the languages choose the side of the corpus
SCORE_RULES = (
    FlagRule("--data", excludes=("--ref",), reason="both provide references"),
    FlagRule(
        "--test-set",
        excludes=("--ref", "--data", "--src", "--target-lang"),
        reason="a published test set has references, sources and languages",
    ),
    *(FlagRule(flag, needs=("--test-set",)) for flag in ("--language-pair", "--origlang", "--subset")),
    FlagRule(
        "--path",
        excludes=(
            *("--ref", "--data", "--test-set", "--metric", "--tokenize", "--lowercase", "--confidence", "--device"),
            *("--test", "--samples", "--by-length"),
        ),
        reason="a model gives the probability of a text without a reference",
    ),
    FlagRule("--source-lang", needs=("--path", CORPUS)),
    FlagRule("--columns", needs=(CORPUS,)),
    FlagRule("--plugin", needs=("--path",)),
    FlagRule("--gen-subset", needs=("--data",)),
    *METRIC_RULES,
    FlagRule(
        "--target-lang",
        needs=("--metric tokenized-bleu", "--metric bleu without --tokenize", "--metric off-target", "--path", CORPUS),
    ),
    FlagRule("--src", needs=(*(f"--metric {name}" for name in NEURAL_METRICS), "--path", "--by-length source")),
    FlagRule("--test", needs=("several --sys",)),
    FlagRule("--samples", needs=("--confidence", "several --sys")),
    FlagRule(
        "--sentence-level",
        excludes=("--confidence", "several --sys"),
        reason="sentence scores have no intervals or tests",
    ),
    FlagRule(
        "--by-length",
        excludes=("--sentence-level", "several --sys"),
        reason="--by-length shows corpus scores of one system; compare --sys shows two systems by length",
    ),
    FlagRule("--width", needs=("--format text",)),
)


LOWEST = {"BLEU": 5.0, "chrF2": 25.0, "chrF2++": 25.0}  # translations with lower scores may be in a wrong language


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Config):
    """Settings of `nmtkit score`."""

    ref: tuple[Path, ...] = option(
        (),
        "reference text, or a corpus .tsv, .tmx, .jsonl, .parquet or .zip, whose target side is taken; repeatable",
        metavar="FILE",
        repeatable=True,
        access="read",
    )
    sys: tuple[Path, ...] = option(
        (),
        "translations as lines or as JSON Lines of generate; repeat the flag to compare systems with the first.  "
        "[default: standard input]",
        metavar="FILE",
        repeatable=True,
        access="read",
    )
    data: Path | None = option(None, "dataset with the references, instead of --ref", metavar="FOLDER", access="read")
    gen_subset: str = option("test", "subset of --data", metavar="NAME")
    test_set: tuple[str, ...] = option(
        (), "sacreBLEU's test sets with the references, such as wmt14/full, instead of --ref", metavar="NAME,…"
    )
    language_pair: str | None = option(
        None, "languages of --test-set, such as en-de", flag="-l/--language-pair", metavar="PAIR"
    )
    origlang: str | None = option(
        None,
        "score only the lines of --test-set whose original language is CODE; non-CODE means all other languages",
        metavar="CODE",
    )
    subset: str | None = option(
        None,
        "score only the lines of --test-set from documents whose domain or country matches this regular expression",
        metavar="REGEX",
    )
    src: Path | None = option(
        None,
        "source text for neural metrics and for --path, or a corpus such as a .tsv; --data contains the source text",
        access="read",
    )
    columns: tuple[str, ...] = option(
        (), "columns of .tsv, .jsonl and .parquet files: names, or numbers from 1", metavar="SOURCE,TARGET"
    )
    path: Path | None = option(
        None,
        "checkpoint of a language model, or of a translation model with --src: print the perplexity of the texts "
        "instead of metrics",
        metavar="RUN|FILE",
        checkpoint=True,
    )
    source_lang: str | None = option(
        None,
        "language of the source text, for a multilingual model of --path, or if --src is a corpus of several languages",
        flag="-s/--source-lang",
        metavar="CODE",
    )
    target_lang: str | None = option(
        None,
        "language of the translations, for the tokenizers of bleu and tokenized-bleu, for off-target, and for a "
        "multilingual model of --path; not needed with --data, which contains the language",
        flag="-t/--target-lang",
        metavar="CODE",
    )
    metric: tuple[str, ...] = option(
        DEFAULT_METRICS,
        "bleu, chrf, chrf++, ter; the neural metrics comet and metricx, and without a reference cometkiwi and "
        "metricx-qe (comet=MODEL takes the model of a folder, or hf:ORG/NAME[@REVISION] of the Hugging Face Hub); "
        "off-target (percentage of lines in a wrong language); tokenized-bleu (BLEU of papers around 2017, with Moses "
        "tokens and split compounds, not comparable with bleu)",
        metavar="NAME[=MODEL],…",
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
    device: str = option(
        "auto", "device of neural metrics: cpu, cuda, cuda:1, …; auto is cuda if a GPU is available", metavar="NAME"
    )
    confidence: bool = option(False, "show a 95 % confidence interval of each score, by bootstrap")
    test: Literal["bootstrap", "randomization"] = option(
        "bootstrap", "significance test of several --sys: paired bootstrap or approximate randomization"
    )
    samples: int | None = option(
        None, "bootstrap resamples (default: 1000) or randomization trials (default: 10000)", min=40, max=1_000_000
    )
    sentence_level: bool = option(False, "write one line of tab-separated scores for each sentence")
    by_length: Literal["source", "reference"] | None = option(
        None,
        "also show the scores of lines with 1 to 3, 4 to 10, 11 to 20, 21 to 40 and more words; the value is the side "
        "whose words are counted (in the first reference, if there are several)",
    )
    width: int = option(1, "digits after the decimal point", min=0, max=9)
    format: Literal["text", "json"] = option("text", "output format")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.metric)
        as_columns(self.columns)


COMMON = {
    "--sys FILE": "translations; repeat it to compare systems",
    "--ref FILE": "references; repeatable",
    "--data FOLDER": "dataset with the references, instead of --ref",
    "--test-set NAME,…": "published test sets, such as wmt14/full",
    "-l, --language-pair PAIR": "languages of --test-set, such as en-de",
    "--metric NAME[=MODEL],…": "bleu, chrf, chrf++, ter, comet, … (default: bleu,chrf,ter)",
    "--src PATH": "source text, for comet, cometkiwi, … and --path",
    "-t, --target-lang CODE": "language, for the tokenizer of BLEU",
    "--[no-]confidence": "95 % confidence intervals",
    "--[no-]sentence-level": "scores of each sentence",
    "--by-length source|reference": "scores of short and long lines",
    "--format text|json": "output format (default: text)",
    "--path RUN|FILE": "perplexity of texts under this model",
}


@click.command(cls=Command, common=COMMON)
@plugin_option
def command(plugins: tuple[str, ...], **flags: Any) -> None:
    """Score translations with sacreBLEU, COMET or MetricX, and test whether systems differ.

    \b
    nmtkit generate data-bin --path averaged.pt | nmtkit score --data data-bin
    nmtkit score --sys output.de --ref reference-1.de --ref reference-2.de
    nmtkit score --sys output.de --test-set wmt14/full -l en-de
    nmtkit score --sys baseline.de --sys better.de --ref reference.de
    nmtkit score --sys output.de --ref reference.de --src source.en --metric comet
    nmtkit score --path lm.pt --sys text.de
    """
    config: ScoreConfig = from_flags(ScoreConfig, flags)
    conditions = given_flags() | facts_of(config) | ({"several --sys"} if len(config.sys) > 1 else set())
    values = {f"--metric {MetricName.parse(name).name}" for name in config.metric} | {f"--format {config.format}"}
    values.add(f"--by-length {config.by_length}")
    if "bleu" in config.metric and config.tokenize == "auto":
        values.add("--metric bleu without --tokenize")
    check_flags(SCORE_RULES, conditions, conditions | values)
    if config.path is not None:
        load_plugins(plugins)
        score_likelihoods(config.path, config)
    else:
        score(config)


def facts_of(config: ScoreConfig) -> set[str]:
    """Returns {CORPUS} if a reference or the source is a corpus, else an empty set, for `check_flags`."""
    return {CORPUS for path in (*config.ref, config.src) if path is not None and format_of(path) is not None}


command.params[:0] = flags(ScoreConfig)
complete_with(command.params, "test_set", published_sets)


def read(config: ScoreConfig) -> tuple["ScoredTexts", "MetricSettings"]:
    """Returns the texts to score, and the settings of the metrics.

    Raises ValueError for an unknown set of --test-set or an unknown language pair.
    """
    from nmtkit.scoring import metrics
    from nmtkit.scoring.texts import PublishedSelection, read_texts

    published = None
    if config.test_set:
        from nmtkit.data.fetch.sacrebleu_sets import check_sets

        check_sets(config.test_set, config.language_pair, "--language-pair")
        assert config.language_pair is not None
        published = PublishedSelection(
            names=config.test_set, pair=config.language_pair, origlang=config.origlang, subset=config.subset
        )
    texts = read_texts(
        reference_paths=config.ref,
        data=config.data,
        subset=config.gen_subset,
        system_paths=config.sys,
        source=config.src,
        stream=None if config.sys else standard_input(),
        source_lang=config.source_lang,
        target_lang=config.target_lang,
        columns=as_columns(config.columns),
        published=published,
        needs_references=bool(reference_metrics(config.metric)),
    )
    settings = metrics.MetricSettings(
        tokenize=config.tokenize,
        lowercase=config.lowercase,
        target_lang=config.target_lang or texts.target_lang,
        languages=config.languages,
        sources=None if texts.sources is None else tuple(texts.sources),
        device=config.device,
    )
    return texts, settings


def score(config: ScoreConfig) -> None:
    from nmtkit.scoring import metrics, report, significance

    texts, settings = read(config)
    bootstrap = (config.samples or significance.SAMPLES["bootstrap"]) if config.confidence else 0
    name, hypotheses = next(iter(texts.systems.items()))
    scores: list[tuple[str, Score]] = []  # (name of a system, score)
    if texts.directions:
        check_one_direction(texts)
        results = report.direction_scores(texts, config.metric, settings, bootstrap)
        shown = report.directions_report(texts, results, config.width)
    elif config.sentence_level:
        table = metrics.sentence_scores(hypotheses, texts.references, config.metric, settings)
        shown = report.sentences_report(table, config.width)
    elif len(texts.systems) > 1:
        samples = config.samples or significance.SAMPLES[config.test]
        comparison = significance.compare(
            texts.systems, texts.references, config.metric, settings,
            test=config.test, samples=samples, confidence=config.confidence,
        )  # fmt: skip
        shown = report.comparison_report(comparison, config.test, samples, config.width)
        scores = [(each.system, each.score) for each in comparison]
    elif config.by_length is not None:
        bands, total = report.length_scores(hypotheses, texts, config.by_length, config.metric, settings, bootstrap)
        shown = report.lengths_report(bands, total, config.by_length, config.width)
        scores = [(name, each) for each in total]
    else:
        total = metrics.score(hypotheses, texts.references, config.metric, settings, bootstrap=bootstrap)
        shown = report.scores_report(total, config.width)
        scores = [(name, each) for each in total]
    show(shown, config, texts.published)
    warn_of_languages(texts, scores)


def warn_of_languages(texts: "ScoredTexts", scores: Sequence[tuple[str, "Score"]]) -> None:
    """Warns of a system with a very low score whose translations are not in the language of the references."""
    from nmtkit.text.language_identification import different_languages

    low = [name for name, score in scores if score.name in LOWEST and score.value < LOWEST[score.name]]
    for name in dict.fromkeys(low):
        if (codes := different_languages(texts.systems[name], texts.references[0])) is not None:
            logging.getLogger("nmtkit").warning(
                "%s seems to be in the language %s, but the references are in %s", name, *codes
            )


def check_one_direction(texts: "ScoredTexts") -> None:
    """Raises ValueError for given flags that do not work with the texts of several directions (language pairs)."""
    given = given_flags() | ({"several --sys"} if len(texts.systems) > 1 else set())
    for setting in ("several --sys", "--sentence-level", "--by-length", "--target-lang"):
        if setting in given:
            raise ValueError(f"--data has many directions, but {setting} needs one direction; give --ref FILE")


def score_likelihoods(path: Path, config: ScoreConfig) -> None:
    """Prints the perplexity of each file of --sys, or of standard input, under the model of a checkpoint.

    With --sentence-level, prints a line of scores for each sentence instead.
    """
    from nmtkit.translation import likelihood

    stream = None if config.sys else standard_input()
    languages = config.source_lang, config.target_lang
    results = likelihood.text_likelihoods(path, config.sys, stream, config.src, as_columns(config.columns), languages)
    if config.sentence_level:
        show(likelihood.sentences_report(next(iter(results.values())), config.width), config)
    else:
        show(likelihood.perplexity_report(results, config.width), config)


def show(report: "ScoreReport", config: ScoreConfig, published: "PublishedSelection | None" = None) -> None:
    if published is not None:
        from nmtkit.scoring.report import with_test_set

        report = with_test_set(report, published.title, in_lines=not config.sentence_level)
    as_json = config.format == "json"
    echo(json.dumps(report.value, indent=2, ensure_ascii=False) if as_json else "\n".join(report.lines))
