"""Sampling, diverse groups, prefixes, required and avoided phrases, and repeated n-grams on tiny random models."""

import copy
import itertools
import math
from collections import Counter

import pytest
import torch
from builders import tiny_transformer

from nmtkit.contracts.engine import avoided_tokens, required_tokens
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import UNK
from nmtkit.models.architectures import Architecture
from nmtkit.translation.search.beam_search import draw
from nmtkit.translation.search.constraints import Constraints, RequiredText
from nmtkit.translation.search.decoding import beam_search, score_references
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Segment

SIZE = 30
CASES = 200


@pytest.fixture(scope="module")
def model() -> Architecture:
    return tiny_transformer(SIZE, seed=3, sharpness=2.5, decoder_layers=1)


def ids(number: int, longest: int, seed: int, shortest: int = 1) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (number,), generator=generator).tolist()
    return [tuple(torch.randint(3, SIZE, (n,), generator=generator).tolist()) for n in lengths]


SOURCE = Packed.from_lists([[*sentence, 2] for sentence in ids(CASES, 8, 1)])


def places(phrase: tuple[int, ...], output: list[int]) -> list[int]:
    return [i for i in range(len(output)) if tuple(output[i : i + len(phrase)]) == phrase]


def holds_in_order(phrases: tuple[tuple[int, ...], ...], output: list[int]) -> bool:
    start = 0
    for phrase in phrases:
        place = next((i for i in places(phrase, output) if i >= start), None)
        if place is None:
            return False
        start = place + len(phrase)
    return True


def holds(phrases: tuple[tuple[int, ...], ...], output: list[int]) -> bool:
    """Equal phrases are counted without overlap; different phrases may overlap."""
    return all(holds_in_order((phrase,) * number, output) for phrase, number in Counter(phrases).items())


def exactly(*phrases: tuple[int, ...]) -> tuple[RequiredText, ...]:
    return tuple(required_tokens(SIZE, phrase) for phrase in phrases)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("ordered", [False, True])
def test_every_translation_holds_its_required_phrases(model, beam, ordered):
    phrases = ids(3 * CASES, 3, 2)
    wanted = [tuple(phrases[3 * i : 3 * i + i % 4]) for i in range(CASES)]
    constraints = [Constraints(required=exactly(*of_case)) for of_case in wanted]
    options = SearchOptions(beam=beam, nbest=beam, max_len_b=4, ordered_constraints=ordered)
    for of_case, found in zip(wanted, beam_search([model], SOURCE, options, constraints), strict=True):
        for hypothesis in found:
            assert math.isfinite(hypothesis.score)
            assert (holds_in_order if ordered else holds)(of_case, hypothesis.tokens)


def test_required_phrases_that_share_a_beginning_are_all_held(model):
    wanted = ((5, 6, 7), (5, 6, 8), (5,), (5, 6, 7))
    constraints = [Constraints(required=exactly(*wanted))] * 20
    source = SOURCE.select(torch.arange(20))
    for found in beam_search([model], source, SearchOptions(max_len_a=0, max_len_b=3), constraints):
        assert holds(wanted, found[0].tokens)


@pytest.mark.slow
def test_without_required_phrases_the_neighbours_translations_are_as_ever(model):
    plain = beam_search([model], SOURCE, SearchOptions())
    constraints = [Constraints(required=exactly((5, 6))) if i % 2 else Constraints() for i in range(CASES)]
    for i, found in enumerate(beam_search([model], SOURCE, SearchOptions(), constraints)):
        if not i % 2:
            assert found[0].tokens == plain[i][0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("options", [SearchOptions(nbest=4), SearchOptions(sampling=True, nbest=3)])
def test_no_translation_holds_an_avoided_phrase(model, options):
    free = beam_search([model], SOURCE, SearchOptions())
    phrases = []
    for found, random in zip(free, ids(CASES, 3, 4), strict=True):
        output = found[0].tokens
        phrases.append({tuple(output[:1]) or (3,), tuple(output[1:3]) or (4,), random})
    constraints = [Constraints(avoided=avoided_tokens(SIZE, *each)) for each in phrases]
    changed = 0
    for avoided, before, found in zip(phrases, free, beam_search([model], SOURCE, options, constraints), strict=True):
        assert not any(places(phrase, hypothesis.tokens) for hypothesis in found for phrase in avoided)
        changed += before[0].tokens != found[0].tokens
    assert changed > CASES / 2


@pytest.mark.parametrize("options", [SearchOptions(), SearchOptions(beam=1), SearchOptions(sampling=True)])
def test_every_translation_begins_with_its_prefix(model, options):
    constraints = [Constraints(prefix=prefix if i % 3 else ()) for i, prefix in enumerate(ids(CASES, 4, 5))]
    for constraint, found in zip(constraints, beam_search([model], SOURCE, options, constraints), strict=True):
        assert tuple(found[0].tokens[: len(constraint.prefix)]) == constraint.prefix


def test_a_prefix_longer_than_the_limit_is_the_translation(model):
    constraints = [Constraints(prefix=(5, 6, 7))] * CASES
    for found in beam_search([model], SOURCE, SearchOptions(max_len_a=0, max_len_b=1), constraints):
        assert found[0].tokens == [5, 6, 7]


def test_a_prefix_scores_as_the_search_that_chose_it(model):
    """If the best translation is forced as a prefix, its score stays the same, because the prefix counts in full."""
    free = beam_search([model], SOURCE, SearchOptions())
    constraints = [Constraints(prefix=tuple(found[0].tokens)) for found in free]
    for before, found in zip(free, beam_search([model], SOURCE, SearchOptions(), constraints), strict=True):
        assert found[0].score == pytest.approx(before[0].score, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated(model, size):
    options = SearchOptions(nbest=4, no_repeat_ngram=size, min_len=10, max_len_a=0, max_len_b=14)
    for found in beam_search([model], SOURCE, options):
        for hypothesis in found:
            runs = Counter(tuple(hypothesis.tokens[i : i + size]) for i in range(len(hypothesis.tokens) - size + 1))
            assert max(runs.values()) == 1


def test_diverse_groups_are_sorted_distinct_and_more_diverse(model):
    def distinct_tokens(options: SearchOptions) -> float:
        total = 0
        for found in beam_search([model], SOURCE, options):
            assert (
                len({tuple(hypothesis.tokens) for hypothesis in found}) == len(found) <= 4
            )  # groups may find the same translation translation
            assert [hypothesis.score for hypothesis in found] == sorted(
                (hypothesis.score for hypothesis in found), reverse=True
            )
            total += len({hypothesis.tokens[0] if hypothesis.tokens else 2 for hypothesis in found})
        return total / CASES

    plain = distinct_tokens(SearchOptions(nbest=4, max_len_b=5))
    assert distinct_tokens(SearchOptions(nbest=4, diverse_groups=2, diversity=2.0, max_len_b=5)) > plain
    assert distinct_tokens(SearchOptions(nbest=4, diverse_groups=4, diversity=5.0, max_len_b=5)) > plain


def test_diverse_scores_are_the_models(model):
    diverse = SearchOptions(nbest=4, diverse_groups=4, diversity=1.0, max_len_b=5)
    found = beam_search([model], SOURCE, diverse)
    best = [Constraints(prefix=tuple(hypotheses[0].tokens)) for hypotheses in found]
    again = beam_search([model], SOURCE, SearchOptions(max_len_a=0, max_len_b=0), best)
    for ours, theirs in zip(found, again, strict=True):
        assert ours[0].log_probability == pytest.approx(theirs[0].log_probability, abs=1e-4)


def test_a_sample_depends_on_its_seed_alone(model):
    options = SearchOptions(sampling=True, nbest=3, max_len_b=5)
    together = beam_search([model], SOURCE, options, seeds=range(CASES))
    order = torch.randperm(CASES, generator=torch.Generator().manual_seed(1))[:50]
    parts = [beam_search([model], SOURCE.select(part), options, seeds=part.tolist()) for part in order.split(7)]
    for place, found in zip(order.tolist(), itertools.chain.from_iterable(parts), strict=True):
        assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in together[place]]
    other = beam_search([model], SOURCE, SearchOptions(sampling=True, nbest=3, max_len_b=5, seed=2))
    assert sum(a[0].tokens != b[0].tokens for a, b in zip(together, other, strict=True)) > CASES / 2


@pytest.mark.slow
def test_samples_follow_the_models_distribution(model):
    """The first tokens of 4,000 samples of a sentence have the probabilities of the first step."""
    source = SOURCE.select(torch.zeros(1, dtype=torch.int64))
    found = beam_search([model], source, SearchOptions(sampling=True, nbest=4000, max_len_a=0, max_len_b=1))[0]
    counts = Counter(hypothesis.tokens[0] if hypothesis.tokens else 2 for hypothesis in found)
    with torch.no_grad():
        logits = model.output_projection(model(source, Packed.from_lists([[1]])))[0]
    logits[:2] = -math.inf
    for token, probability in enumerate(logits.softmax(0).tolist()):
        assert abs(counts[token] / 4000 - probability) < 4 * math.sqrt(probability / 4000) + 1e-3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.2, 0.4, 0.3]),
        ({"top_k": 2}, [0, 0, 4 / 7, 3 / 7]),
        ({"top_p": 0.65}, [0, 0, 4 / 7, 3 / 7]),
        ({"top_p": 0.71}, [0, 2 / 9, 4 / 9, 3 / 9]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 16 / 30, 9 / 30]),
        ({"top_k": 1}, [0, 0, 1, 0]),
    ],
)
def test_draw_shares_chance_out_by_probability(settings, expected):
    chance = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    steps = torch.tensor([0.1, 0.2, 0.4, 0.3]).log().expand(3000, -1)
    drawn = draw(steps, chance, SearchOptions(sampling=True, **settings))
    shares = torch.bincount(drawn, minlength=4) / 3000
    assert shares.tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": True, "diverse_groups": 2}, "--sampling and --diverse-groups"),
        ({"top_k": 5}, "--top-k does nothing"),
        ({"beam": 4, "diverse_groups": 3}, "--beam 4 is not"),
        ({"sampling": True, "top_p": 0}, "--top-p is 0"),
    ],
)
def test_options_that_cannot_be_combined_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchOptions(**settings)


@pytest.mark.parametrize(
    ("constraint", "settings", "message"),
    [
        (Constraints(required=exactly((5,))), {"sampling": True}, "--constraints and --sampling"),
        (Constraints(required=exactly((5,))), {"diverse_groups": 2}, "--constraints and --diverse-groups"),
        (Constraints(required=exactly((5,))), {"no_repeat_ngram": 2}, "--constraints and --no-repeat-ngram"),
        (Constraints(required=exactly((5,)), avoided=avoided_tokens(SIZE, (6,))), {}, "required phrases and avoided"),
        (Constraints(required=(required_tokens(SIZE),)), {}, "does not know"),
        (Constraints(avoided=avoided_tokens(SIZE, ())), {}, "is empty"),
    ],
)
def test_constraints_that_cannot_be_met_are_refused_by_name(constraint, settings, message):
    with pytest.raises(ValueError, match=message):
        constraint.check(SearchOptions(**settings))


@pytest.mark.parametrize("penalty", [0.0, 0.3, 4.0])
def test_an_unknown_token_costs_its_penalty_and_no_other_does(model, penalty):
    """Compares the probability of <unk> with the model; a larger penalty makes <unk> rarer."""
    model = copy.deepcopy(model)
    free = beam_search([model], SOURCE, SearchOptions(max_len_a=0, max_len_b=5))
    usual = Counter(token for hypotheses in free for token in hypotheses[0].tokens).most_common(1)[0][0]
    with torch.no_grad():
        model.output_projection.weight[UNK] = model.output_projection.weight[usual]  # <unk> is as probable
    options = SearchOptions(unkpen=penalty, max_len_a=0, max_len_b=5)
    found = beam_search([model], SOURCE, options)
    references = [hypotheses[0].tokens for hypotheses in found]
    batch = [Segment([], reference=ids) for ids in references]
    scored = score_references([model], SOURCE, batch, options.lenpen)
    for hypotheses, (free,) in zip(found, scored, strict=True):
        expected = free.log_probability - penalty * hypotheses[0].tokens.count(UNK)
        assert hypotheses[0].log_probability == pytest.approx(expected, abs=1e-4)
    unknown = sum(tokens.count(UNK) for tokens in references)
    fewer = sum(
        hypotheses[0].tokens.count(UNK)
        for hypotheses in beam_search([model], SOURCE, SearchOptions(unkpen=penalty + 1, max_len_a=0, max_len_b=5))
    )
    assert fewer < unknown or unknown == 0
    assert unknown > 0 or penalty > 0
