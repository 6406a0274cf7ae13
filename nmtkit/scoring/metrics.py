"""Corpus and sentence scores. Each score has a signature that lists all settings of the metric.

BLEU, chrF and TER are computed by sacreBLEU. Tokenized BLEU and neural metrics such as COMET have the interface of
sacreBLEU's metrics, so that confidence intervals and significance tests work for all metrics.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nmtkit.config import suggestion
from nmtkit.jobs import progress
from nmtkit.scoring.segments import NEURAL_METRICS, MetricName
from nmtkit.scoring.tokenizers import bleu_tokenizer, missing_extra, sacrebleu_metric, warn_if_unsegmented

DEFAULT_METRICS = ("bleu", "chrf", "ter")
KNOWN_METRICS = ("bleu", "chrf", "chrf++", "ter", "tokenized-bleu", "off-target", *NEURAL_METRICS)


@dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """Settings of metrics."""

    tokenize: str = "auto"  # sacreBLEU's tokenizer for bleu; "auto" chooses by target_lang
    lowercase: bool = False  # affects bleu and chrf; ter always ignores case, as in TERCOM
    target_lang: str | None = None  # code of the target language, for bleu, tokenized-bleu and off-target
    languages: tuple[str, ...] = ()  # codes of the languages that off-target can identify; empty: all known languages
    sources: tuple[str, ...] | None = None  # source sentences, for neural metrics
    device: str = "auto"  # device of neural metrics; "auto" is a GPU if there is one


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score with its signature and, if computed, a confidence interval."""

    name: str  # name in the output of sacreBLEU, such as BLEU, chrF2, chrF2++ or TER
    value: float  # mostly 0 to 100, but 0 to 25 for MetricX; lower TER, off-target and MetricX scores are better
    signature: str
    details: str = ""  # BLEU: precisions, brevity penalty, lengths; off-target: the score of the references
    mean: float | None = None  # mean score of the bootstrap resamples
    interval: float | None = None  # half the width of the 95 % confidence interval


def score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    settings: MetricSettings | None = None,
    *,
    bootstrap: int = 0,
) -> list[Score]:
    """Returns corpus scores of `hypotheses` against `references`, a list of one or more reference texts.

    `references` may be empty if all metrics estimate the quality without a reference. `bootstrap` is the number of
    resamples for a confidence interval; 0 computes no interval. Raises ValueError for an unknown metric or tokenizer,
    and for empty texts or texts of different lengths. Raises ImportError if the extra that a metric needs is not
    installed.
    """
    parts = part_scores(hypotheses, references, [range(len(hypotheses))], metrics, settings, bootstrap=bootstrap)
    return [score for (score,) in parts]


def sentence_scores(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    settings: MetricSettings | None = None,
) -> list[list[Score]]:
    """Returns, for each metric, the score of every sentence.

    BLEU uses only n-gram lengths that do not exceed the length of the sentence. Raises the same errors as `score`.
    """
    rows = [[row] for row in range(len(hypotheses))]
    return part_scores(hypotheses, references, rows, metrics, settings, sentence_level=True)


def part_scores(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    parts: Sequence[Sequence[int]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    settings: MetricSettings | None = None,
    *,
    bootstrap: int = 0,
    sentence_level: bool = False,
) -> list[list[Score]]:
    """Returns, for each metric, the corpus score of each part of the text. A part is a list of indices of sentences.

    The statistics of a sentence are computed once, even if it is in several parts. With `sentence_level`, BLEU uses
    only n-gram lengths that do not exceed the length of the part. `bootstrap` and the errors are as in `score`.
    """
    table = []
    built = build_metrics(metrics, settings, references, [hypotheses], sentence_level)
    for name, metric in zip(metrics, built, strict=True):
        progress.begin(f"Computing {name}")
        statistics = metric._extract_corpus_statistics(hypotheses, references or None)
        results = [_aggregate(metric, [statistics[row] for row in rows], bootstrap) for rows in parts]
        signature = str(metric.get_signature())  # read last, because it lists the number of resamples
        table.append([Score(**fields, signature=signature) for fields in results])
    return table


def _aggregate(metric: Any, statistics: list[Any], bootstrap: int) -> dict[str, Any]:
    """Returns the fields of a corpus score, without the signature, from the statistics of sentences.

    If `bootstrap` is not 0, the score has a confidence interval from this number of resamples.
    """
    from sacrebleu.significance import _bootstrap_resample

    result = metric._aggregate_and_compute(statistics)
    fields = {"name": result.name, "value": float(result.score), "details": result._verbose}
    if bootstrap:
        metric.n_bootstrap = bootstrap
        metric.seed, samples = _bootstrap_resample(statistics, metric, bootstrap)
        for sample in samples:  # scores of chrF are np.float32, except for samples without matches
            sample.score = float(sample.score)
        result.estimate_ci(samples)
        fields |= {"mean": float(result._mean), "interval": float(result._ci)}
    return fields


def check_sentences(hypotheses: Sequence[str], references: Sequence[Sequence[str]], metrics: Sequence[str]) -> None:
    if not hypotheses:
        raise ValueError("there are no translations to score")
    if not references and (needed := reference_metrics(metrics)):
        raise ValueError(f"there are no references to score against, but they are required for {', '.join(needed)}")
    for text in references:
        if len(text) != len(hypotheses):
            raise ValueError(f"there are {len(hypotheses)} translations and {len(text)} references")


def reference_metrics(names: Sequence[str]) -> list[str]:
    """Returns the metrics that compare translations with a reference."""
    return [name for name in names if MetricName.parse(name).reads_reference]


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown metric, a metric that is named twice, and an empty list."""
    unknown = [parsed.name for parsed in map(MetricName.parse, names) if parsed.name not in KNOWN_METRICS]
    if unknown:
        raise ValueError(f"unknown metric {unknown[0]!r}; {suggestion(unknown[0], KNOWN_METRICS)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"name at least one metric, and each metric once; given: {', '.join(names) or 'none'}")


def build_metrics(
    names: Sequence[str],
    settings: MetricSettings | None,
    references: Sequence[Sequence[str]] = (),
    systems: Iterable[Sequence[str]] = (),
    sentence_level: bool = False,
) -> list[Any]:
    """Returns a metric for each name, with the interface of `sacrebleu.metrics.base.Metric`.

    The `names` are from `KNOWN_METRICS`; the name of a neural metric may be NAME=MODEL. `systems` has the translations
    of each system. Logs a warning for metrics that compare words if the `references` are written without spaces. Raises
    the errors of `check_sentences` for the translations of each system, the errors of `check_names` and `build_metric`,
    and ValueError if two metrics have the same name in the output.
    """
    for hypotheses in systems:
        check_sentences(hypotheses, references, names)
    check_names(names)
    metrics = [build_metric(name, settings or MetricSettings(), sentence_level) for name in names]
    labels = [metric.label for metric in metrics if hasattr(metric, "label")]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two metrics have the same name in the output: {', '.join(labels)}; rename a model folder")
    for name, metric in zip(names, metrics, strict=True):
        if name in ("bleu", "ter", "tokenized-bleu") and references:
            warn_if_unsegmented(metric, name.upper(), references[0])
    return metrics


def build_metric(name: str, settings: MetricSettings, sentence_level: bool) -> Any:
    """Returns the metric object for a name in `KNOWN_METRICS`, or for NAME=MODEL of a neural metric.

    Raises ValueError for an unknown tokenizer or unusable settings, and ImportError for a missing package.
    """
    from sacrebleu.metrics.bleu import BLEU

    if name == "bleu":
        tokenize = bleu_tokenizer(settings.target_lang) if settings.tokenize == "auto" else settings.tokenize
        if tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"unknown tokenizer {tokenize!r}; {suggestion(tokenize, ['auto', *BLEU.TOKENIZERS])}")
        if extra := missing_extra(tokenize):
            raise ImportError(f"the tokenizer {tokenize} is not installed: pip install 'sacrebleu[{extra}]'")
        return sacrebleu_metric(name, tokenize, settings.lowercase, sentence_level)
    if name in ("chrf", "chrf++", "ter"):
        return sacrebleu_metric(name, lowercase=settings.lowercase)
    from nmtkit.scoring.extra_metrics import OffTarget, SegmentScores, TokenizedBLEU

    if name == "tokenized-bleu":
        return TokenizedBLEU(settings.target_lang, effective_order=sentence_level)
    if name == "off-target":
        return OffTarget(settings.target_lang, settings.languages)
    return SegmentScores(name, settings.sources, settings.device)
