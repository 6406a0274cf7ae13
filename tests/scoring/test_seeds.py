"""Significance over sentences and seeds, against tables, sacreBLEU and simulated experiments of known truth."""

import math
import random

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from nmtkit.scoring import metrics, seeds, significance
from nmtkit.scoring.report import comparison_report
from nmtkit.scoring.significance import Test

WORDS = "the a cat dog man woman runs sits eats on in red green small house street"


def texts(count: int, wrong: float, seed: int) -> tuple[list[str], list[str]]:
    """Returns references, and translations in which a share of the words is wrong."""
    generator = random.Random(7)
    references = [[generator.choice(WORDS.split()) for _ in range(generator.randint(6, 14))] for _ in range(count)]
    noise = random.Random(seed)
    lines = [[word if noise.random() > wrong else noise.choice(WORDS.split()) for word in line] for line in references]
    return [" ".join(line) for line in references], [" ".join(line) for line in lines]


def constant(values: list[float], samples: int = 50) -> seeds.ResampledScores:
    """Returns the scores of seeds that do not depend on the sentences."""
    return np.repeat(np.array(values)[:, None], 1 + samples, axis=1)


# 97.5 % quantiles of Student's t distribution, from a printed table
@pytest.mark.parametrize(("count", "t"), [(2, 4.303), (3, 2.776), (5, 2.306), (11, 2.086)])
def test_without_chance_of_sentences_the_interval_is_that_of_the_t_test(count: int, t: float) -> None:
    generator = np.random.default_rng(count)
    one, other = generator.normal(20, 1, count), generator.normal(21, 1, count)
    found = seeds.difference(constant(one.tolist()), constant(other.tolist()))
    pooled = (one.var(ddof=1) + other.var(ddof=1)) / 2
    assert found.value == pytest.approx(one.mean() - other.mean())
    assert found.margin == pytest.approx(t * math.sqrt(pooled * 2 / count), rel=0.02)
    assert (found.p_value < 0.05) == (abs(found.value) > found.margin)


@pytest.mark.slow
def test_with_one_seed_the_test_agrees_with_the_randomization_test_of_sacrebleu() -> None:
    references, base = texts(300, 0.30, 1)
    for wrong in (0.30, 0.27, 0.20):
        _, system = texts(300, wrong, 2)
        compared = seeds.compare_seeds({"base": [base], "new": [system]}, [references], ("bleu",))["new"][0]
        systems = {"base": base, "new": system}
        expected = significance.compare(systems, [references], ("bleu",), test="randomization", samples=1000)[1]
        assert compared.difference is not None and expected.p_value is not None
        assert compared.mean == pytest.approx(expected.score.value)
        assert compared.difference.p_value == pytest.approx(expected.p_value, abs=0.04)
        assert not compared.difference.covers_seeds and not compared.difference.significant


def test_the_bootstrap_of_sacrebleu_is_one_sided_as_the_report_says() -> None:
    references, base = texts(300, 0.30, 1)
    _, system = texts(300, 0.27, 2)
    systems = {"base": base, "new": system}
    p_values: dict[str, float] = {}
    tests: tuple[Test, ...] = ("bootstrap", "randomization")
    for test in tests:
        results = significance.compare(systems, [references], ("bleu",), test=test, samples=1000)
        p_values[test] = results[1].p_value or 0.0
        sides = {"bootstrap": "one-sided", "randomization": "two-sided"}[test]
        assert sides in comparison_report(results, test, 1000, 1).lines[-1]
    assert 0.3 * p_values["randomization"] < p_values["bootstrap"] < 0.6 * p_values["randomization"]


def test_scores_of_the_whole_text_and_of_resamples_are_those_of_sacrebleu() -> None:
    references, lines = texts(80, 0.3, 3)
    metric = metrics.build_metrics(("bleu",), metrics.MetricSettings(), [references])[0]
    scores = seeds.resampled(metric, [lines, references], [references], samples=3)
    assert scores[0, 0] == pytest.approx(BLEU().corpus_score(lines, [references]).score)
    assert scores[1] == pytest.approx([100.0] * 4)
    generator = np.random.default_rng(seeds.SEED)
    for sample in (1, 2, 3):
        rows = generator.integers(80, size=80)
        expected = BLEU().corpus_score([lines[row] for row in rows], [[references[row] for row in rows]]).score
        assert scores[0, sample] == pytest.approx(expected)


def test_a_system_with_one_seed_has_the_spread_of_the_baseline() -> None:
    found = seeds.difference(constant([22.0]), constant([20.0, 21.0, 22.0]))
    assert found.covers_seeds
    assert found.margin == pytest.approx(4.303 * 1.0 * math.sqrt(1 + 1 / 3), rel=0.02)


def test_equal_systems_have_no_difference() -> None:
    references, base = texts(60, 0.3, 1)
    compared = seeds.compare_seeds({"base": [base], "copy": [base]}, [references], ("bleu", "chrf"))["copy"]
    assert [score.difference and (score.difference.value, score.difference.p_value) for score in compared] == [
        (0, 1)
    ] * 2


def experiment(generator: np.random.Generator, count: int, effect: float, spread: float) -> seeds.Difference:
    """Compares two systems in a world whose scores are sums of effects of sentences, seeds and noise."""
    sentences = generator.normal(0, 1, 100)
    rows = np.vstack([np.arange(100), generator.integers(100, size=(200, 100))])
    systems = []
    for mean in (effect, 0.0):
        own = generator.normal(0, 0.5, 100)  # sentences that suit the system
        scores = (
            mean + sentences + own + generator.normal(0, spread, (count, 1)) + generator.normal(0, 0.5, (count, 100))
        )
        systems.append(scores[:, rows].mean(2))
    return seeds.difference(*systems)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "spread"), [(3, 0.0), (3, 0.05), (3, 0.5), (5, 0.1)])
def test_intervals_cover_the_truth_in_repeated_experiments(
    count: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = seeds.student_t(2 * count - 2)[::20]  # fewer values, for speed
    monkeypatch.setattr(seeds, "student_t", lambda freedom: values)
    generator = np.random.default_rng(count)
    results = [experiment(generator, count, 0.3, spread) for _ in range(300)]
    covered = sum(abs(result.value - 0.3) <= result.margin for result in results) / len(results)
    assert 0.92 <= covered <= 0.995  # the noise of a sentence counts in both sources, so intervals may be too wide


def test_ignoring_the_seeds_would_claim_differences_that_are_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    values = seeds.student_t(4)[::20]
    monkeypatch.setattr(seeds, "student_t", lambda freedom: values)
    generator = np.random.default_rng(0)
    claimed = [experiment(generator, 3, 0.0, 0.3).significant for _ in range(200)]
    alone = [experiment(generator, 1, 0.0, 0.3).p_value < 0.05 for _ in range(200)]
    assert sum(claimed) <= 0.08 * 200
    assert sum(alone) > 0.3 * 200
