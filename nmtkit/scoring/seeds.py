"""Significance of the difference between systems that were trained with several seeds."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.jobs import progress
from nmtkit.scoring.metrics import DEFAULT_METRICS, MetricSettings, build_metrics
from nmtkit.scoring.significance import SAMPLES

ResampledScores = npt.NDArray[np.float64]
SEED = 12345  # seed of the resamples, the same as in sacreBLEU
QUANTILES = 1000  # number of values that represent Student's t distribution


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean score of a system minus the mean score of the baseline."""

    value: float
    margin: float  # half the width of the 95 % confidence interval
    p_value: float  # two-sided
    covers_seeds: bool  # false if both systems have one seed: `margin` then covers only the choice of sentences

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero, and the spread over seeds is known."""
        return self.covers_seeds and self.p_value < 0.05


@dataclass(frozen=True, kw_only=True)
class SeedScores:
    """The scores of a system by a metric. `difference` is None for the baseline."""

    name: str  # name of the metric in the output of sacreBLEU
    signature: str
    values: Sequence[float]  # one for each seed
    difference: Difference | None

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds, with the divisor N - 1; None for one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


def compare_seeds(
    systems: Mapping[str, Sequence[Sequence[str]]],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    settings: MetricSettings | None = None,
    *,
    samples: int = SAMPLES["bootstrap"],
) -> dict[str, list[SeedScores]]:
    """Compares systems (name -> the translations of each seed) with the first system, the baseline.

    Returns a list for each system, with an entry for each metric. Sentences are resampled, with the same sentences for
    all systems (Koehn 2004). Raises the same errors as `metrics.score`.
    """
    texts = [text for seeds in systems.values() for text in seeds]
    result: dict[str, list[SeedScores]] = {name: [] for name in systems}
    for name, metric in zip(metrics, build_metrics(metrics, settings, references, texts), strict=True):
        progress.begin(f"Comparing the systems by {name}")
        scores = resampled(metric, texts, references, samples)
        signature = str(metric.get_signature())
        label = metric._aggregate_and_compute(metric._extract_corpus_statistics(texts[0], references or None)).name
        ends = np.cumsum([len(seeds) for seeds in systems.values()])
        baseline, *others = np.split(scores, ends[:-1])
        differences = [None, *(difference(other, baseline) for other in others)]
        for system, own, gap in zip(systems, (baseline, *others), differences, strict=True):
            values = own[:, 0].tolist()
            result[system].append(SeedScores(name=label, signature=signature, values=values, difference=gap))
    return result


def resampled(
    metric: Any, texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]], samples: int
) -> ResampledScores:
    """Returns the score of each text, and its scores on `samples` resamples of the sentences: [texts, 1 + samples]."""
    statistics = np.array([metric._extract_corpus_statistics(text, references) for text in texts], dtype=np.float64)
    sentences = statistics.shape[1]
    generator = np.random.default_rng(SEED)
    scores = np.empty((len(texts), 1 + samples))
    for sample in range(1 + samples):
        rows = generator.integers(sentences, size=sentences) if sample else slice(None)
        for index, sums in enumerate(statistics[:, rows].sum(1)):
            scores[index, sample] = metric._compute_score_from_stats(sums.tolist()).score
    return scores


@functools.cache
def student_t(freedom: int) -> ResampledScores:
    """Returns QUANTILES equally likely values of Student's t distribution with `freedom` degrees of freedom, sorted."""
    draws = np.sort(np.random.default_rng(SEED).standard_t(freedom, 1000 * QUANTILES))
    return draws[500::1000]


def difference(system: ResampledScores, baseline: ResampledScores) -> Difference:
    """Returns the difference of two systems. Row i of an array has the score of seed i, then its scores on resamples.

    Two random effects are added, as in the bootstrap over seeds and sentences of Sellam et al. (2022, section 3). The
    effect of the test sentences comes from the resamples. The effect of the seeds follows Student's t distribution,
    because a bootstrap of few seeds gives intervals that are too narrow. The variance over seeds is the same for both
    systems: a system with one seed gets the variance of the other system.
    """
    value = float(system[:, 0].mean() - baseline[:, 0].mean())
    by_sentences = system[:, 1:].mean(0) - baseline[:, 1:].mean(0)
    chance = by_sentences - by_sentences.mean()
    freedom = len(system) + len(baseline) - 2
    if freedom:
        squares = sum(float(((scores[:, 0] - scores[:, 0].mean()) ** 2).sum()) for scores in (system, baseline))
        scale = math.sqrt(squares / freedom * (1 / len(system) + 1 / len(baseline)))
        chance = (chance[:, None] + scale * student_t(freedom)).ravel()
    sizes = np.abs(chance)
    extreme = int((sizes >= abs(value)).sum())
    return Difference(
        value=value,
        margin=float(np.quantile(sizes, 0.95)),
        p_value=(extreme + 1) / (len(sizes) + 1),
        covers_seeds=freedom > 0,
    )
