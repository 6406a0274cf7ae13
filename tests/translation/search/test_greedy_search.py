"""Greedy search, compared with beam search with one hypothesis and with a loop over whole prefixes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import tiny_model, tiny_transformer
from torch import Tensor, nn

from nmtkit.contracts.engine import avoided_tokens
from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture
from nmtkit.translation.search import beam_search, decoding, scorer
from nmtkit.translation.search.beam_search import Search, greedy_search
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis

SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [20, 2], [3, 21, 8, 2], [5, 24, 2], [2]]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "short": {"max_len_a": 0.0, "max_len_b": 2},
    "long": {"min_len": 6, "lenpen": -1.0},
    "ngram": {"no_repeat_ngram": 2, "min_len": 5},
    "unk": {"unkpen": 0.0},
}
CONSTRAINTS = {
    "none": Constraints(),
    "prefix": Constraints(prefix=(4, 9)),
    "language": Constraints(prefix=(4, 9), language_tokens=1),
    "avoided": Constraints(avoided=avoided_tokens(30, (4,), (9, 11), (17, 3, 5))),
}


def ending(seed: int = 1) -> Architecture:
    """Returns a random model whose translations end after different numbers of tokens."""
    model = tiny_transformer(30, sharpness=3.0, seed=seed)
    with torch.no_grad():
        model.output_projection.weight[2] *= 1.5
    return model


def hypotheses(
    search: Callable[[Search], Any], models: list[Architecture], options: SearchOptions, constraint: str
) -> Any:
    constraints = [CONSTRAINTS[constraint] if index % 2 else Constraints() for index in range(len(SOURCES))]
    if constraint == "language":  # is the same for all sentences
        constraints = [CONSTRAINTS[constraint]] * len(SOURCES)
    with torch.inference_mode():
        return search(Search(models, Packed.from_lists(SOURCES), options, constraints))


@pytest.mark.parametrize("few_logits", [0, 1 << 16], ids=["logits", "log_probabilities"])
@pytest.mark.parametrize("models", [1, 2], ids=["one_model", "ensemble"])
@pytest.mark.parametrize(
    ("case", "constraint"), [(case, "none") for case in CASES] + [("plain", name) for name in CONSTRAINTS]
)
def test_greedy_search_finds_what_beam_search_finds_with_one_hypothesis(
    case: str, constraint: str, models: int, few_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "FEW_LOGITS", few_logits)
    ensemble = [ending(seed) for seed in range(1, 1 + models)]
    options = SearchOptions(beam=1, **CASES[case])
    found = hypotheses(greedy_search, ensemble, options, constraint)
    assert found == hypotheses(Search.run, ensemble, options, constraint)


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
    results = [hypotheses(search, [model], SearchOptions(beam=1), "none") for search in (greedy_search, Search.run)]
    assert results[0] == results[1] == [[Hypothesis([], -math.inf, -math.inf)]] * len(SOURCES)
    assert "has a finite score" in caplog.text


def test_only_searches_with_one_hypothesis_are_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    run, greedy = Search.run, greedy_search
    monkeypatch.setattr(Search, "run", lambda search: used.append(type(search.selector).__name__) or run(search))
    monkeypatch.setattr(beam_search, "greedy_search", lambda search: used.append("greedy") or greedy(search))
    source = Packed.from_lists(SOURCES)
    for options in (SearchOptions(beam=1), SearchOptions(beam=2), SearchOptions(sampling=True)):
        decoding.beam_search([ending()], source, options)
    assert used == ["greedy", "BeamSelector", "Sampler"]
