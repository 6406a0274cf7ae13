"""Log probabilities of a search step, and the best of them, against torch's own log-softmax and top-k."""

import math

import pytest
import torch
from torch import nn

from nmtkit.data.packed import Packed
from nmtkit.models.layers.prepack import prepack
from nmtkit.translation.search.scorer import Scorer, block_maxima, continuations


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
        scorer = Scorer(models, Packed.from_lists([[1]]), 3, torch.tensor([9]))
        torch.testing.assert_close(scorer.step(tokens).double().exp(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("logit", [math.nan, math.inf, 200.0, -200.0])
def test_logits_that_overflow_have_no_continuation(logit):
    weight = torch.zeros(50, 8)
    weight[:, 3] = logit
    with torch.no_grad():
        scores = Scorer([Fixed(weight)], Packed.from_lists([[1]]), 2, torch.tensor([9])).step(torch.tensor([3, 1]))
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
