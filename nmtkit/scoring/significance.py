"""Paired significance tests of systems against a baseline, computed by sacreBLEU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nmtkit.jobs import progress
from nmtkit.scoring.metrics import DEFAULT_METRICS, MetricSettings, Score, build_metrics

Test = Literal["bootstrap", "randomization"]
SAMPLES: Mapping[Test, int] = {"bootstrap": 1000, "randomization": 10000}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The score of a system, and the p-value of its difference from the baseline."""

    system: str
    score: Score
    p_value: float | None  # None for the baseline itself


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = DEFAULT_METRICS,
    settings: MetricSettings | None = None,
    *,
    test: Test = "bootstrap",
    samples: int | None = None,
    confidence: bool = False,
) -> list[Comparison]:
    """Compares systems (name -> translations) with the first system, the baseline, for each metric in turn.

    "bootstrap" resamples sentences (Koehn 2004) and always gives confidence intervals. "randomization" chooses
    sentences at random and exchanges the translations of two systems for these sentences (Riezler and Maxwell 2005).
    The randomization test gives intervals only if `confidence` is set. This test is two-sided. sacreBLEU's bootstrap
    test is one-sided, so its p-values are about half as large. A copy of the baseline gets p = 1, although
    sacreBLEU would return the smallest possible p-value.

    Raises ValueError for fewer than two systems, and the same errors as `metrics.score`.
    """
    from sacrebleu.significance import PairedTest

    if len(systems) < 2:
        raise ValueError("a comparison needs at least two systems")
    built = build_metrics(metrics, settings, references, systems.values())
    paired: Any = PairedTest(
        list(systems.items()),
        {str(index): metric for index, metric in enumerate(built)},
        references or None,
        test_type={"bootstrap": "bs", "randomization": "ar"}[test],
        n_samples=samples or SAMPLES[test],
        n_ar_confidence=SAMPLES["bootstrap"] if confidence and test == "randomization" else -1,
    )
    progress.begin("Comparing the systems")
    signatures, results = paired()
    baseline, *_ = systems.values()
    return [
        Comparison(
            system=system,
            score=Score(
                name=name,
                value=float(result.score),
                signature=str(signature),
                mean=None if result.mean is None else float(result.mean),
                interval=None if result.ci is None else float(result.ci),
            ),
            p_value=None if result.p_value is None else 1.0 if hypotheses == baseline else float(result.p_value),
        )
        for name, signature in signatures.items()
        for (system, hypotheses), result in zip(systems.items(), results[name], strict=True)
    ]
