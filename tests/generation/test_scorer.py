"""Log probabilities of a search step against torch's own log-softmax."""

import pytest
import torch
from torch import nn

from nmtkit.generation.beam_search import Scorer, log_softmax_
from nmtkit.layers.prepack import prepack
from nmtkit.packed import Packed


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
    """A model whose every step returns the same logits, computed anew."""

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
