"""With required phrases, the search finds the best of all outputs with the phrases, as by exhaustive search."""

import itertools
import random

import pytest
import torch
from builders import tiny_transformer

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.translation.search.constrained_search import PhraseAutomaton
from nmtkit.translation.search.constraints import Constraints, PieceEdges, RequiredPhrase
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.options import SearchOptions

Alternatives = tuple[tuple[int, ...], ...]
LONGEST = 4
OUTPUTS = [output for n in range(LONGEST + 1) for output in itertools.product((3, 4, 5), repeat=n)]
# 3 is a word such as "\u2581a" and 4 its continuation "b"; 5 is a sign.
EDGES = PieceEdges(begins=[False, False, False, False, True, False], ends=[False, False, False, True, True, False])


def occurrences(alternatives: Alternatives, output: tuple[int, ...], whole_words: bool) -> list[tuple[int, int]]:
    spans = [
        (start, start + len(tokens))
        for tokens in alternatives
        for start in range(len(output) - len(tokens) + 1)
        if output[start : start + len(tokens)] == tokens
    ]

    def inside(place: int) -> bool:
        return 0 < place < len(output) and EDGES.ends[output[place - 1]] and EDGES.begins[output[place]]

    return [span for span in spans if not whole_words or not any(map(inside, span))]


def holds(phrases: tuple[RequiredPhrase, ...], output: tuple[int, ...], ordered: bool) -> bool:
    """Tries every position of every alternative of every phrase. Two phrases must not overlap."""
    found = [occurrences(phrase.alternatives, output, phrase.whole_words) for phrase in phrases]
    for spans in itertools.product(*found):
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
        if apart and (not ordered or list(spans) == sorted(spans)):
            return True
    return False


def random_phrases(draw: random.Random, most: int, whole_words: bool) -> tuple[RequiredPhrase, ...]:
    """Returns random phrases of few different tokens, so that the phrases overlap. Together they fit into an output.

    The shortest alternative begins a word, because a continuation would need a token before it.
    """
    while True:
        phrases = []
        for _ in range(draw.randint(1, 3)):
            lengths = sorted(draw.randint(1, 3) for _ in range(draw.randint(1, most)))
            alternatives = [tuple(draw.choice((3, 4, 5)) for _ in range(n)) for n in lengths]
            phrases.append(RequiredPhrase(tuple(alternatives), whole_words))
        begins = all(phrase.alternatives[0][0] != 4 for phrase in phrases)
        if sum(len(phrase.alternatives[-1]) for phrase in phrases) <= LONGEST and (begins or not whole_words):
            return tuple(phrases)


def exactly(*phrases: tuple[int, ...]) -> tuple[RequiredPhrase, ...]:
    return tuple(RequiredPhrase((phrase,)) for phrase in phrases)


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_automaton_holds_what_some_placement_of_the_phrases_holds(ordered, whole_words, most):
    draw = random.Random(1)
    for _ in range(60):
        phrases = random_phrases(draw, most, whole_words)
        automaton = PhraseAutomaton(phrases, ordered, EDGES)
        for output in OUTPUTS:
            state = 0
            for token in output:
                state = automaton.next(state, token)
            assert (automaton.remaining[state] == 0) == holds(phrases, output, ordered), (phrases, output)


def test_an_automaton_counts_what_the_nearest_alternative_needs():
    """3 or 3 4 5 4, and 5 5: three tokens at least, and no more when the long one has begun."""
    automaton = PhraseAutomaton((RequiredPhrase(((4, 3, 5, 4), (3,))), *exactly((5, 5))), False)
    states = [0]
    for token in (4, 3, 5, 5):
        states.append(automaton.next(states[-1], token))
    assert [automaton.remaining[state] for state in states] == [3, 3, 2, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_wide_beam_finds_the_best_of_all_outputs_that_hold_the_phrases(ordered, whole_words, most):
    """Some phrases contain their own beginning, or end with the beginning of another phrase: 4 4 3 contains 4 3."""
    draw = random.Random(2)
    cases = [(exactly((4, 3)), [4, 4, 5]), (exactly((4, 4, 3)), [3, 5]), (exactly((3, 4), (4, 5)), [5, 3])]
    cases += [
        (random_phrases(draw, most, whole_words), [draw.choice((3, 4, 5)) for _ in range(3)])
        for _ in range(20 if most == 1 else 10)
    ]
    inputs = [[BOS, *output] for output in OUTPUTS]
    for seed, (phrases, source) in enumerate(cases):
        model = tiny_transformer(6, seed=seed, sharpness=3.0)
        sources = Packed.from_lists([[*source, EOS]] * len(OUTPUTS))
        with torch.no_grad():
            table = model.output_projection(model(sources, Packed.from_lists(inputs))).double().log_softmax(-1)
        targets = torch.tensor([token for output in OUTPUTS for token in (*output, EOS)])
        parts = table.gather(1, targets[:, None])[:, 0].split([len(output) + 1 for output in OUTPUTS])
        totals = {output: float(part.sum()) for output, part in zip(OUTPUTS, parts, strict=True)}
        scores = {
            output: total / ((5 + len(output) + 1) / 6) ** 0.6
            for output, total in totals.items()
            if holds(phrases, output, ordered)
        }
        best = sorted(scores, key=lambda output: -scores[output])[:3]
        options = SearchOptions(beam=100, nbest=3, max_len_a=0, max_len_b=LONGEST, ordered_constraints=ordered)
        constraints = [Constraints(required=phrases)]
        found = beam_search([model], Packed.from_lists([[*source, EOS]]), options, constraints, edges=EDGES)[0]
        assert [tuple(hypothesis.tokens) for hypothesis in found] == best, phrases
        assert [hypothesis.score for hypothesis in found] == pytest.approx([scores[o] for o in best], abs=1e-4)


def test_a_narrow_beam_ends_with_one_alternative_of_each_phrase():
    """The phrases are long, share their beginnings, and just fit into the output."""
    draw = random.Random(3)
    edges = PieceEdges([token % 3 == 0 for token in range(12)], [token % 2 == 0 for token in range(12)])
    tokens = [token for token in range(3, 12) if token % 3]
    for seed in range(12):
        phrases = []
        for _ in range(4):
            begin = (draw.choice(tokens),)
            tails = [tuple(draw.choice(range(3, 12)) for _ in range(draw.randint(0, 3))) for _ in range(3)]
            phrases.append(RequiredPhrase(tuple(begin + tail for tail in tails), whole_words=True))
        options = SearchOptions(beam=1 + seed % 3, max_len_a=0, max_len_b=0)
        model = tiny_transformer(12, seed=seed, sharpness=3.0)
        source = Packed.from_lists([[3, 4, EOS], [5, EOS]])
        required = Constraints(required=tuple(phrases))
        for found in beam_search([model], source, options, [required, Constraints()], edges=edges)[:1]:
            automaton = PhraseAutomaton(phrases, False, edges)
            state = 0
            for token in found[0].tokens:
                state = automaton.next(state, token)
            assert automaton.remaining[state] == 0 and found[0].score > -torch.inf
