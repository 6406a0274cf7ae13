"""Late scores: noise that is made of good pairs, the probability of a pair, and the pairs that get late scores."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from nmtkit.cleaning.blocks import StoredBlock
from nmtkit.cleaning.filters.calibration import noise
from nmtkit.cleaning.filters.interface import Limits
from nmtkit.cleaning.filters.text_block import TextBlock
from nmtkit.cleaning.probability import MODEL_UNIT, LateScorer, PairProbability, late_limits
from nmtkit.data.corpora.corpus import Pairs


def test_noise_makes_all_errors_in_turn() -> None:
    targets = [f"a{row} b{row} c{row} d{row} e{row} f{row}" for row in range(60)]
    wrong = noise(targets, seed=1)
    words = [line.split() for line in targets]
    for row, line in enumerate(wrong):
        found = line.split()
        foreign = [word for word in found if word not in words[row]]
        match row % 6:
            case 0:
                assert line in targets and line != targets[row]
            case 1:
                assert len(found) < 6 and line in targets[row]  # a part from the beginning or to the end
            case 2:
                assert sorted(found) == sorted(words[row])
            case 3:
                assert len(found) == 6
            case 4:
                assert line.startswith(targets[row]) and len(found) == 9
            case 5:
                assert found[:3] == words[row][:3] and len(found) == 6 and len(foreign) in (0, 3)
    assert sum(line == target for line, target in zip(wrong, targets, strict=True)) <= 4
    assert noise(targets, seed=1) == wrong


def test_noise_makes_only_the_given_errors() -> None:
    targets = [f"a{row} b{row} c{row} d{row}" for row in range(20)]
    wrong = noise(targets, 1, ("appended", "reordered"))
    assert all(line.startswith(target + " ") for line, target in zip(wrong[::2], targets[::2], strict=True))
    reordered = zip(wrong[1::2], targets[1::2], strict=True)
    assert all(sorted(line.split()) == sorted(target.split()) for line, target in reordered)


def test_noise_of_text_without_spaces_exchanges_characters() -> None:
    targets = ["我们今天在学校看书", "他们明天在家里吃饭", "学习中文很高兴认识你"] * 4
    wrong = noise(targets, seed=1)
    assert " " not in "".join(wrong)
    assert sorted(wrong[2]) == sorted(targets[2]) and wrong[2] != targets[2]


def test_the_probability_follows_the_rule_of_bayes() -> None:
    generator = np.random.default_rng(1)
    good, bad = generator.normal(2, 1, (20_000, 1)), generator.normal(0, 1, (20_000, 1))
    probability = PairProbability([Limits(lowest=-9)])
    probability.fit(good.astype(np.float32), bad.astype(np.float32))
    scores = probability.score(np.array([[0], [1], [2]], np.float32))
    # log odds of two normal distributions with means 2 and 0 and variance 1: 2 x - 2
    np.testing.assert_allclose(scores, [0.1192, 0.5, 0.8808], atol=0.02)


def test_scores_far_from_the_middle_of_two_limits_are_bad_on_both_sides() -> None:
    generator = np.random.default_rng(1)
    good, bad = generator.normal(0, 0.5, (2000, 1)), generator.normal(0, 0.5, (2000, 1))
    bad += np.where(generator.random((2000, 1)) < 0.5, -3, 3)
    probability = PairProbability([Limits(-3.5, 3.5)])
    probability.fit(good.astype(np.float32), bad.astype(np.float32))
    scores = probability.score(np.array([[-3], [0], [3]], np.float32))
    assert scores[1] > 0.95 and scores[0] < 0.05 and scores[2] < 0.05


class LengthScorer:
    """A scorer for which long targets are bad. It keeps the pairs of `fit`."""

    unit, passes = "quality", 1

    def fit(self, sources: list[str], targets: list[str]) -> None:
        self.pairs = list(zip(sources, targets, strict=True))

    def score(self, sources: list[str], targets: list[str]) -> np.ndarray:
        return np.array([1 / max(1, len(target)) for target in targets], np.float32)


def test_only_pairs_that_all_filters_keep_get_late_scores(tmp_path: Path) -> None:
    sources = [f"source number {row}" for row in range(400)]
    targets = [f"target number {row}" for row in range(400)]
    for index, start in enumerate((0, 150)):
        rows = slice(start, (150, 400)[index])
        block = Pairs(sources[rows], targets[rows], [{}] * len(sources[rows]), 1)
        (tmp_path / str(index)).write_bytes(pickle.dumps(block))
    scores = np.tile(np.float32([1, 0]), (400, 1))
    scores[::4, 1] = 9  # the second filter drops these pairs
    scorer = LengthScorer()
    limits = [Limits(lowest=0.5), Limits(highest=1)]
    names = late_limits(scorer, None, 0, 0.2)
    late = LateScorer(limits, lambda block: np.tile(np.float32([1, 0]), (len(block), 1)), scorer, names, seed=1)
    result = late.add([StoredBlock(0, tmp_path / name) for name in "01"], scores, tmp_path / "late")
    np.testing.assert_array_equal(result[:, :2], scores)
    np.testing.assert_array_equal(np.isnan(result[:, 2:]).all(1), scores[:, 1] == 9)
    np.testing.assert_allclose(result[1::4, 2], [1 / len(target) for target in targets[1::4]])
    dropped = set(targets[::4])
    assert len(scorer.pairs) == 169  # 3/4 of the 300 kept pairs are the best; 1/4 of them calibrate the regression
    assert all(target not in dropped and source[6:] == target[6:] for source, target in scorer.pairs)


def test_scores_of_rules_do_not_count_beside_scores_of_words(tmp_path: Path) -> None:
    """The first score comes from a rule. Noise changes both scores, but only the second changes the probability."""

    class Words(Limits):
        in_probability = True

    class Rule(Limits):
        in_probability = False

    def score_block(block: TextBlock) -> np.ndarray:
        pairs = zip(*(side.lines for side in block.sides), strict=True)
        return np.float32([[source == target] * 2 for source, target in pairs])

    texts = [f"number {row}" for row in range(400)]
    (tmp_path / "0").write_bytes(pickle.dumps(Pairs(texts, texts, [{}] * 400, 1)))
    scores = np.tile(np.float32([1, 1]), (400, 1))
    scores[::2, 0], scores[1::4, 1] = 0, 0
    probabilities = {}
    for name, limits in {"one": [Rule(), Words()], "both": [Rule(), Rule()]}.items():
        late = LateScorer(limits, score_block, None, late_limits(None, None, 0, 0), seed=1)
        result = late.add([StoredBlock(0, tmp_path / "0")], scores, tmp_path / name)
        probabilities[name] = [float(result[row, 2]) for row in (3, 2, 1)]  # scores (1, 1), (0, 1) and (1, 0)
    assert probabilities["one"][0] == probabilities["one"][1] > 0.5 > probabilities["one"][2]
    assert probabilities["both"][0] > probabilities["both"][1]


def test_too_few_pairs_for_late_scores_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(pickle.dumps(Pairs(["a"] * 40, ["b"] * 40, [{}] * 40, 1)))
    names = late_limits(None, None, 0, 0.2)
    late = LateScorer([], lambda block: np.empty((len(block), 0), np.float32), None, names, 1)
    with pytest.raises(ValueError, match=r"40 pairs, .*100"):
        late.add([StoredBlock(0, tmp_path / "0")], np.empty((40, 0), np.float32), tmp_path / "late")


def test_the_probability_needs_no_models() -> None:
    assert list(late_limits(None, None, 0, None)) == []
    assert list(late_limits(None, None, 0, 0.5)) == ["probability"]
    assert list(late_limits(LengthScorer(), None, 0.1, 0.2)) == ["model", "probability"]
    assert list(late_limits(None, (), 0.1, None)) == ["model"]
    units = [
        late_limits(scorer, read, 0, 0)["model"].unit for scorer, read in ((LengthScorer(), None), (None, ["model"]))
    ]
    assert units[0] == LengthScorer.unit and units[1] not in ("", MODEL_UNIT)  # a file may have scores of --quality
