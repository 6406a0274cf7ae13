"""Checks of a metric, on made-up translations and a few pairs of the tiny dataset."""

import math

import torch
from torch import Tensor

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import batch, dataset, resume_is_exact, tiny_model
from nmtkit.data.packed import Batch
from nmtkit.training.metrics import METRICS, Metric, Outputs, counts_of, score_of

SUMS = {"loss": 30.0, "nll": 25.0}


def score(subject: Subject[Metric], metric: Metric, hypotheses: list[str]) -> float:
    """Returns the score of translations of the valid set. Counts of the metric come from an untrained model."""
    split = dataset()["valid"]
    pairs = split.batch(torch.arange(len(split)).numpy())
    counts = {name: float(value) for name, value in _counts(subject, metric, pairs).items()}
    texts = {"sources": split.source_lines(), "references": split.references(), "hypotheses": hypotheses}
    outputs = Outputs(sums=SUMS | counts, tokens=pairs.target_tokens, target_lang=dataset().target_lang, **texts)
    return score_of(subject.name, metric, outputs)


def _counts(subject: Subject[Metric], metric: Metric, pairs: Batch) -> dict[str, Tensor]:
    with torch.no_grad():
        return counts_of(subject.name, metric, tiny_model().eval(), pairs)


def a_finite_number_is_returned(subject: Subject[Metric]) -> None:
    references = dataset()["valid"].references()
    for title, lines in (("the references themselves", references), ("empty lines", [""] * len(references))):
        value = score(subject, subject.build(), lines)
        require(math.isfinite(value), f"score returned {value} for {title}; it must return a finite number")


def the_score_repeats(subject: Subject[Metric]) -> None:
    metric, references = subject.build(), dataset()["valid"].references()
    worse = [line[::-1] for line in references]
    first, _, again = (score(subject, metric, lines) for lines in (references, worse, references))
    require(first == again, f"the same translations score {first:g}, and then {again:g}; keep no state between calls")


def references_score_no_worse_than_nothing(subject: Subject[Metric]) -> None:
    metric, references = subject.build(), dataset()["valid"].references()
    perfect, empty = score(subject, metric, references), score(subject, metric, [""] * len(references))
    right = perfect >= empty if metric.higher_is_better else perfect <= empty
    require(
        right,
        f"the references as translations score {perfect:g}, and empty lines score {empty:g}; with higher_is_better = "
        f"{metric.higher_is_better} empty lines are better, so --best-checkpoint-metric would keep a wrong checkpoint",
    )


def counts_are_sums(subject: Subject[Metric]) -> None:
    once, twice = (_counts(subject, subject.build(), batch(*pairs)) for pairs in ((0, 1, 2), (0, 1, 2, 0, 1, 2)))
    for name, value in once.items():
        single, double = float(value), float(twice[name])
        require(
            not single or abs(double / single - 1) > 0.2,
            f"count returned {single:.4g} for {name!r} of a batch, and {double:.4g} for twice the batch: this looks "
            "like a mean; return the sum, because counts are added over batches and processes",
        )


check_metric = Contract(METRICS, Metric, checks_of(__name__, resume_is_exact))
