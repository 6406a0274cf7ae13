"""Beam search against exhaustive search and plain loops, on tiny random models."""

import itertools
import math

import pytest
import torch
from builders import TINY_CONFIGS, tiny_model, tiny_transformer

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import PrefixState
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis

BOS, EOS = 1, 2


class Slow(Architecture):
    """A model with the layers of another model and the slow default state of the interface."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.model, self.output_projection = model, model.output_projection

    def encode(self, source: Packed) -> Packed:
        return self.model.encode(source)

    def decode(self, memory: Packed, target_input: Packed) -> torch.Tensor:
        return self.model.decode(memory, target_input)


def random_sources(number: int, vocabulary: int, longest: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    return [[*torch.randint(3, vocabulary, (n,), generator=generator).tolist(), EOS] for n in lengths]


def log_probability_of(model: Architecture, source: list[int], output: list[int]) -> float:
    """Returns the log probability of an output with eos by one teacher-forced pass."""
    with torch.no_grad():
        features = model(Packed.from_lists([source]), Packed.from_lists([[BOS, *output]]))
        table = model.output_projection(features).double().log_softmax(-1)
    return sum(table[place, token].item() for place, token in enumerate([*output, EOS]))


@pytest.mark.parametrize("lenpen", [0.0, 0.6, 1.5, -0.5])
def test_beam_search_equals_exhaustive_search_when_the_beam_covers_every_prefix(lenpen):
    vocabulary, longest = 6, 3  # tokens 3, 4 and 5 may be produced, in outputs of up to 3
    for seed in range(3):
        model = tiny_transformer(vocabulary, seed=seed, sharpness=3.0)
        source = random_sources(1, vocabulary, 4, seed)[0]
        outputs = [list(o) for n in range(longest + 1) for o in itertools.product((3, 4, 5), repeat=n)]
        expected = {}
        for output in outputs:
            log_probability = log_probability_of(model, source, output)
            expected[tuple(output)] = log_probability / ((5 + len(output) + 1) / 6) ** lenpen
        best = sorted(expected, key=lambda output: -expected[output])[:10]
        options = SearchOptions(beam=40, nbest=10, lenpen=lenpen, max_len_a=0, max_len_b=longest)
        found = beam_search([model], Packed.from_lists([source]), options)[0]
        assert [tuple(hypothesis.tokens) for hypothesis in found] == best
        assert [hypothesis.score for hypothesis in found] == pytest.approx(
            [expected[hypothesis] for hypothesis in best], abs=1e-5
        )


def test_the_score_is_the_log_probability_over_the_papers_penalty():
    model, sources = tiny_transformer(20, sharpness=2.0), random_sources(8, 20, 6)
    for source, found in zip(sources, beam_search([model], Packed.from_lists(sources), SearchOptions()), strict=True):
        best = found[0]
        log_probability = log_probability_of(model, source, best.tokens)
        assert best.log_probability == pytest.approx(log_probability, abs=1e-4)
        assert best.score == pytest.approx(log_probability / ((5 + len(best.tokens) + 1) / 6) ** 0.6, abs=1e-4)


def test_a_beam_of_one_is_greedy():
    model = tiny_transformer(20, sharpness=2.0)
    for source in random_sources(10, 20, 6):
        output: list[int] = []
        while len(output) < 12:
            with torch.no_grad():
                features = model(Packed.from_lists([source]), Packed.from_lists([[BOS, *output]]))
            logits = model.output_projection(features[-1])
            logits[:2] = -math.inf
            token = int(logits.argmax())
            if token == EOS:
                break
            output.append(token)
        options = SearchOptions(beam=1, max_len_a=0, max_len_b=12)
        assert beam_search([model], Packed.from_lists([source]), options)[0][0].tokens == output


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_is_searched_alike_alone_and_in_any_batch(beam):
    model, sources = tiny_transformer(50, sharpness=2.0), random_sources(16, 50, 12)
    options = SearchOptions(beam=beam, nbest=beam)
    alone = [beam_search([model], Packed.from_lists([source]), options)[0] for source in sources]
    for size in (5, 16):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(size)).tolist()
        for start in range(0, 16, size):
            part = order[start : start + size]
            for place, found in zip(
                part, beam_search([model], Packed.from_lists([sources[i] for i in part]), options), strict=True
            ):
                assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in alone[place]]
                assert [hypothesis.score for hypothesis in found] == pytest.approx(
                    [hypothesis.score for hypothesis in alone[place]], abs=1e-5
                )


def test_the_cached_state_finds_what_the_slow_one_finds():
    model, sources = tiny_transformer(50, sharpness=2.0), random_sources(10, 50, 12)
    source, options = Packed.from_lists(sources), SearchOptions(nbest=4)
    assert isinstance(Slow(model).start(model.encode(source), 4), PrefixState)
    for fast, slow in zip(
        beam_search([model], source, options), beam_search([Slow(model)], source, options), strict=True
    ):
        assert [hypothesis.tokens for hypothesis in fast] == [hypothesis.tokens for hypothesis in slow]
        assert [hypothesis.score for hypothesis in fast] == pytest.approx(
            [hypothesis.score for hypothesis in slow], abs=1e-5
        )


def test_the_nbest_are_sorted_and_distinct():
    model, sources = tiny_transformer(30, sharpness=2.0), random_sources(50, 30, 8)
    for found in beam_search([model], Packed.from_lists(sources), SearchOptions(beam=6, nbest=6)):
        assert len(found) == 6
        assert len({tuple(hypothesis.tokens) for hypothesis in found}) == 6
        assert [hypothesis.score for hypothesis in found] == sorted(
            (hypothesis.score for hypothesis in found), reverse=True
        )


@pytest.mark.slow
def test_a_beam_scores_at_least_as_well_as_greedy_on_average():
    model, source = tiny_transformer(30, sharpness=2.5), Packed.from_lists(random_sources(200, 30, 8))

    def mean(beam: int) -> float:
        return sum(found[0].score for found in beam_search([model], source, SearchOptions(beam=beam))) / 200

    assert mean(4) >= mean(1)


def test_lengths_stay_within_their_limits_and_no_special_is_produced():
    model, sources = tiny_transformer(30), random_sources(30, 30, 8)
    options = SearchOptions(nbest=4, min_len=3, max_len_a=0.5, max_len_b=4)
    for source, found in zip(sources, beam_search([model], Packed.from_lists(sources), options), strict=True):
        for hypothesis in found:
            assert 3 <= len(hypothesis.tokens) <= int(0.5 * (len(source) - 1) + 4)
            assert not {0, 1, 2} & set(hypothesis.tokens)


def test_an_ensemble_of_a_model_with_itself_equals_the_model():
    model, source = tiny_transformer(30, sharpness=2.0), Packed.from_lists(random_sources(20, 30, 8))
    for alone, ensemble in zip(
        beam_search([model], source, SearchOptions()), beam_search([model] * 3, source, SearchOptions()), strict=True
    ):
        assert [x.tokens for x in alone] == [x.tokens for x in ensemble]
        assert [x.score for x in alone] == pytest.approx([x.score for x in ensemble], abs=1e-5)


@pytest.mark.parametrize("partner", TINY_CONFIGS)
def test_an_ensemble_averages_probabilities(partner):
    models = [tiny_transformer(12, sharpness=2.0), tiny_model(partner, 12, seed=2, sharpness=2.0)]
    sources = random_sources(6, 12, 6)
    for source, found in zip(sources, beam_search(models, Packed.from_lists(sources), SearchOptions()), strict=True):
        tables = []
        for model in models:
            with torch.no_grad():
                features = model(Packed.from_lists([source]), Packed.from_lists([[BOS, *found[0].tokens]]))
                tables.append(model.output_projection(features).double().softmax(-1))
        mean = torch.stack(tables).mean(0).log()
        expected = sum(mean[place, token].item() for place, token in enumerate([*found[0].tokens, EOS]))
        assert found[0].log_probability == pytest.approx(expected, abs=1e-4)


def test_a_sentence_that_overflows_gets_an_empty_translation_and_its_neighbours_theirs():
    class Overflowing(Slow):
        def encode(self, source: Packed) -> Packed:
            memory = super().encode(source)
            return memory.with_values(memory.values.masked_fill((source.values == 7)[:, None], math.nan))

    model = tiny_transformer(20, sharpness=2.0)
    healthy, broken = [3, 4, 5, EOS], [3, 7, 5, EOS]
    found = beam_search([Overflowing(model)], Packed.from_lists([healthy, broken]), SearchOptions())
    assert found[0][0].tokens == beam_search([model], Packed.from_lists([healthy]), SearchOptions())[0][0].tokens
    assert found[1] == [Hypothesis([], -math.inf, -math.inf)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beam": 0}, "--beam is 0"), ({"nbest": 5}, "--beam 5 or more"), ({"max_len_b": -1}, "--max-len-b is -1")],
)
def test_options_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchOptions(**settings)
