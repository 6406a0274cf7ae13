"""Corpus and sentence scores through sacreBLEU, each with the signature that states every setting behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_METRICS = ("bleu", "chrf", "ter")
KNOWN_METRICS = ("bleu", "chrf", "chrf++", "ter")
BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number, and all that is needed to read it."""

    name: str  # as sacreBLEU calls it: BLEU, chrF2, chrF2++, TER
    value: float  # a percentage; for TER less is better
    signature: str
    details: str = ""  # BLEU: precisions, brevity penalty, lengths
    mean: float | None = None  # of the bootstrap resamples
    interval: float | None = None  # half the width of the 95 % confidence interval around the mean


def score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    bootstrap: int = 0,
) -> list[Score]:
    """Corpus scores of `hypotheses` against `references`, a list of one or more reference texts.

    `tokenize` and `lowercase` mean what they mean to sacreBLEU; `bootstrap` resamples, when not 0, give a confidence
    interval. Raises ValueError for an unknown metric or tokenizer, no sentences, or unequal numbers of them.
    """
    check_sentences(hypotheses, references)
    scores = []
    for name in metrics:
        metric = sacrebleu_metric(name, tokenize=tokenize, lowercase=lowercase)
        result = metric.corpus_score(hypotheses, references, n_bootstrap=bootstrap or 1)
        scores.append(
            Score(
                name=result.name,
                value=result.score,
                signature=str(metric.get_signature()),
                details=result._verbose,
                mean=result._mean if bootstrap else None,
                interval=result._ci if bootstrap else None,
            )
        )
    return scores


def check_sentences(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not hypotheses:
        raise ValueError("there are no translations to score")
    if not references:
        raise ValueError("there are no references to score against")
    for text in references:
        if len(text) != len(hypotheses):
            raise ValueError(f"there are {len(hypotheses)} translations and {len(text)} references")


def sacrebleu_metric(name: str, *, tokenize: str, lowercase: bool, sentence_level: bool = False) -> Any:
    """sacreBLEU's metric object of one of `KNOWN_METRICS`."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if name == "bleu":
        if tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"unknown tokenizer {tokenize!r}; sacreBLEU knows: {', '.join(BLEU.TOKENIZERS)}")
        # A single sentence often has no 4-gram: sacreBLEU's effective order stops where its n-grams do.
        return BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=sentence_level)
    if name in ("chrf", "chrf++"):
        return CHRF(word_order=2 if name == "chrf++" else 0, lowercase=lowercase)
    if name == "ter":
        return TER()  # folds case by its own default, as TERCOM does
    raise ValueError(f"unknown metric {name!r}; known: {', '.join(KNOWN_METRICS)}")
