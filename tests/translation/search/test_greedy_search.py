"""Greedy search, compared with a loop over whole prefixes."""

import math

import pytest
import torch
from builders import tiny_model, tiny_transformer
from torch import Tensor, nn

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture
from nmtkit.translation.search import decoding
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis

SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [20, 2], [3, 21, 8, 2], [5, 24, 2], [2]]


def ending(seed: int = 1) -> Architecture:
    """Returns a random model whose translations end after different numbers of tokens."""
    model = tiny_transformer(30, sharpness=3.0, seed=seed)
    with torch.no_grad():
        model.output_projection.weight[2] *= 1.5
    return model


@pytest.mark.parametrize("architecture", ["transformer_tiny", "gnmt_small", "convs2s_small"])
def test_greedy_search_equals_a_loop_over_whole_prefixes(architecture: str) -> None:
    model = tiny_model(architecture, 30, sharpness=3.0)
    found = decoding.beam_search([model], Packed.from_lists(SOURCES), SearchOptions(beam=1, max_len_a=0, max_len_b=6))
    with torch.inference_mode():
        for source, each in zip(SOURCES, found, strict=True):
            prefix, total = [1], 0.0
            while prefix[-1] != 2:
                logits = model.output_projection(model(Packed.from_lists([source]), Packed.from_lists([prefix])))[-1]
                log_probs = logits.double().log_softmax(0)
                log_probs[:2] = -math.inf
                best = 2 if len(prefix) == 7 else int(log_probs.argmax())
                total += float(log_probs[best])
                prefix.append(best)
            assert each[0].tokens == prefix[1:-1]
            score = total / ((5 + len(prefix) - 1) / 6) ** 0.6
            assert (each[0].log_probability, each[0].score) == pytest.approx((total, score), abs=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_model_that_overflows_gives_an_empty_translation(value: float, caplog: pytest.LogCaptureFixture) -> None:
    class Overflowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 30), value)

    model = ending()
    model.output_projection = Overflowing()  # type: ignore[assignment]
    results = decoding.beam_search([model], Packed.from_lists(SOURCES), SearchOptions(beam=1))
    assert results == [[Hypothesis([], -math.inf, -math.inf)]] * len(SOURCES)
    assert "has a finite score" in caplog.text
