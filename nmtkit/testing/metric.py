"""Checks of a metric, on made-up translations and a few pairs of the tiny dataset."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from nmtkit.architectures import ARCHITECTURES
from nmtkit.architectures.contract import described
from nmtkit.config import derive
from nmtkit.models import vocabulary_of
from nmtkit.testing.checks import Check, require, require_all
from nmtkit.testing.runs import TINY_TRANSFORMER, batch, check_resume, dataset
from nmtkit.training.metrics import METRICS, Metric, Outputs, counts_of, score_of

SUMS = {"loss": 30.0, "nll": 25.0}


class MetricSubject:
    """A metric under test: its registered name, and settings over its preset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        entry = METRICS[name]
        self.config = derive(entry.preset, settings, f"metric {name}")
        self.factory = entry.factory

    def __str__(self) -> str:
        return f"metric {self.name}"

    def build(self) -> Metric:
        metric: object = self.factory(self.config)
        require(
            isinstance(metric, Metric),
            f"the factory of {self.name!r} returned {described(metric)}; it must return a Metric",
        )
        assert isinstance(metric, Metric)
        return metric

    def score(self, metric: Metric, hypotheses: list[str]) -> float:
        """Returns the score of translations of the valid set; what the metric counts is that of a fresh model."""
        split = dataset()["valid"]
        pairs = split.batch(torch.arange(len(split)).numpy())
        entry = ARCHITECTURES["transformer_tiny"]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1)
            config = derive(entry.preset, TINY_TRANSFORMER, "check")
            model = entry.factory(config, vocabulary_of(dataset().tokenizer)).eval()
            counts = {name: float(value) for name, value in counts_of(self.name, metric, model, pairs).items()}
        texts = {"sources": split.source_lines(), "references": split.references(), "hypotheses": hypotheses}
        outputs = Outputs(sums=SUMS | counts, tokens=pairs.target_tokens, **(texts if metric.translates else {}))
        return score_of(self.name, metric, outputs)


def check_metric(name: str, **settings: Any) -> None:
    """Raises ContractError unless the metric passes all checks."""
    require_all(METRIC_CHECKS, MetricSubject(name, settings))


def a_number_is_returned(subject: MetricSubject) -> None:
    subject.score(subject.build(), dataset()["valid"].references())


def the_score_repeats(subject: MetricSubject) -> None:
    metric, references = subject.build(), dataset()["valid"].references()
    worse = [line[::-1] for line in references]
    first, _, again = (subject.score(metric, lines) for lines in (references, worse, references))
    require(first == again, f"the same translations score {first:g} and then {again:g}; keep nothing between two calls")


def references_score_no_worse_than_nothing(subject: MetricSubject) -> None:
    metric, references = subject.build(), dataset()["valid"].references()
    perfect, empty = subject.score(metric, references), subject.score(metric, [""] * len(references))
    right = perfect >= empty if metric.higher_is_better else perfect <= empty
    require(
        right,
        f"the references themselves score {perfect:g}, and empty lines {empty:g}; with higher_is_better = "
        f"{metric.higher_is_better} that is worse: --best-checkpoint-metric would keep the wrong checkpoint",
    )


def counts_are_sums(subject: MetricSubject) -> None:
    entry = ARCHITECTURES["transformer_tiny"]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        config = derive(entry.preset, TINY_TRANSFORMER, "check")
        model = entry.factory(config, vocabulary_of(dataset().tokenizer)).eval()
        metric = subject.build()
        once, twice = (
            counts_of(subject.name, metric, model, batch(*pairs)) for pairs in ((0, 1, 2), (0, 1, 2, 0, 1, 2))
        )
    for name, value in once.items():
        one, two = float(value), float(twice[name])
        require(
            not one or abs(two / one - 1) > 0.2,
            f"count returned {one:.4g} for {name!r} of a batch, and {two:.4g} for the batch twice over: it is a mean; "
            "return the sum, which is added up over batches and processes",
        )


def a_run_with_it_resumes_exactly(subject: MetricSubject) -> None:
    names = {"architecture": "transformer_tiny", "metrics": subject.name}
    with tempfile.TemporaryDirectory() as folder:
        check_resume(names, {**TINY_TRANSFORMER, "lr": 0.01, **subject.settings}, Path(folder))


METRIC_CHECKS: tuple[Check, ...] = (
    a_number_is_returned,
    the_score_repeats,
    references_score_no_worse_than_nothing,
    counts_are_sums,
    a_run_with_it_resumes_exactly,
)
