"""Log probabilities of a search step, and the best of them, against torch's own log-softmax and top-k."""

import math

import pytest
import torch
from torch import nn

from nmtkit.data.packed import Packed
from nmtkit.models.layers.prepack import prepack
from nmtkit.translation.search import scorer as search_scorer
from nmtkit.translation.search.scorer import Scorer, block_maxima, continuations, log_softmax_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 32, 75])
def test_log_probabilities_are_those_of_the_logits_in_fp32(rows, dtype):
    torch.manual_seed(1)
    logits = (3 * torch.randn(rows, 200)).to(dtype)
    expected = logits.double().log_softmax(1)
    found = log_softmax_(logits.clone())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


class Fixed(nn.Module):
    """A model that computes the same logits in every step."""

    def __init__(self, weight):
        super().__init__()
        self.output_projection = nn.Linear(*weight.shape[::-1], bias=False)
        self.output_projection.weight = nn.Parameter(weight)

    def encode(self, source):
        return source

    def start(self, memory, beams):
        return None

    def step(self, tokens, state):
        return self.output_projection(nn.functional.one_hot(tokens, 8).float())


@pytest.mark.parametrize("prepacked", [False, True])
def test_an_ensemble_averages_the_probabilities_of_its_models(prepacked):
    torch.manual_seed(1)
    weights = [2 * torch.randn(50, 8) for _ in range(3)]
    models, tokens = [Fixed(weight) for weight in weights], torch.tensor([3, 0, 7])
    expected = sum(weight.T[tokens].double().softmax(1) for weight in weights) / 3
    with torch.no_grad():
        for model in models:
            if prepacked:
                prepack(model, "fp32")
        scorer = Scorer(models, Packed.from_lists([[1]]), 3)
        torch.testing.assert_close(scorer.step(tokens).double().exp(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_logits_become_log_probabilities_with_their_normalizer(rows, many, monkeypatch):
    if many:
        monkeypatch.setattr(search_scorer, "FEW_LOGITS", 0)
    torch.manual_seed(1)
    model, tokens = Fixed(6 * torch.randn(50, 8)), torch.randint(8, (rows,))
    with torch.no_grad():
        scorer = Scorer([model], Packed.from_lists([[1]]), rows)
        scores, normalizer = scorer.step_unnormalized(tokens)
        expected = scorer.logits(tokens)[0].double().log_softmax(1)
        assert (normalizer is not None) == many
        subtracted = normalizer.double()[:, None] if many else 0.0
        torch.testing.assert_close(scores.double() - subtracted, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("logit", [math.nan, math.inf, 200.0, -200.0])
def test_logits_whose_exponentials_overflow_or_vanish_are_normalized_with_care(logit, monkeypatch):
    monkeypatch.setattr(search_scorer, "FEW_LOGITS", 0)
    weight = torch.zeros(50, 8)
    weight[:, 3] = logit
    with torch.no_grad():
        scorer = Scorer([Fixed(weight)], Packed.from_lists([[1]]), 2)
        scores, normalizer = scorer.step_unnormalized(torch.tensor([3, 1]))
    assert normalizer is None
    # times the zeros of the other row's input, they are NaN as well
    expected = -math.log(50) if math.isfinite(logit) else -math.inf
    torch.testing.assert_close(scores, torch.full((2, 50), expected))


@pytest.mark.parametrize("columns", [100, 1024, 1100, 1151])
@pytest.mark.parametrize(("sentences", "rows"), [(1, 1), (1, 4), (3, 4)])
def test_best_continuations_are_those_of_a_search_through_all(sentences, rows, columns):
    torch.manual_seed(1)
    scores, before = torch.randn(sentences, rows + 1, columns)[:, 1:], torch.randn(sentences, rows).double()
    scores[0, 0, -3:] = torch.tensor([7.0, 9.0, 8.0])  # in the last block, which may overlap the previous block
    scores[0, 0, 5] = -math.inf
    before[0, 1:] = -math.inf
    number = 2 * rows
    expected = (scores.double() + before[:, :, None]).flatten(1).topk(number)
    for maxima in (None, block_maxima(scores)):
        values, index = continuations(scores, before, number, maxima)
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0)
        assert torch.equal(index, expected.indices)


@pytest.mark.parametrize("columns", [100, 4096, 4100])
def test_with_block_maxima_a_row_of_nan_has_no_continuation(columns):
    scores, before = torch.zeros(1, 2, columns), torch.tensor([[-math.inf, -1.0]]).double()
    scores[0, 0], scores[0, 1, 70] = math.nan, 2.0
    values, index = continuations(scores, before, 4, block_maxima(scores))
    assert values[0].tolist() == [1.0, -1.0, -1.0, -1.0]
    assert index[0, 0] == columns + 70
    scores[0, 1], before[0, 1] = math.inf, math.nan
    assert continuations(scores, before, 4, block_maxima(scores))[0][0].tolist() == [-math.inf] * 4
