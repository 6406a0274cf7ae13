"""Required phrases: what the search finds is the best of all outputs that hold them, by exhaustive search."""

import itertools
import random

import pytest
import torch
from testing import tiny_transformer

from nmtkit.data.tokenizer import BOS, EOS
from nmtkit.generation.constrained_search import PhraseAutomaton
from nmtkit.generation.constraints import Constraints
from nmtkit.generation.decoding import beam_search
from nmtkit.generation.options import SearchOptions
from nmtkit.packed import Packed

Phrases = tuple[tuple[int, ...], ...]
LONGEST = 4
OUTPUTS = [output for n in range(LONGEST + 1) for output in itertools.product((3, 4, 5), repeat=n)]


def holds(phrases: Phrases, output: tuple[int, ...], ordered: bool) -> bool:
    """By trying every position of every phrase: no two may overlap."""
    for starts in itertools.product(*(range(len(output) - len(phrase) + 1) for phrase in phrases)):
        spans = sorted((start, start + len(phrase)) for start, phrase in zip(starts, phrases, strict=True))
        there = all(output[i : i + len(phrase)] == phrase for i, phrase in zip(starts, phrases, strict=True))
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        if there and apart and (not ordered or list(starts) == sorted(starts)):
            return True
    return False


def random_phrases(draw: random.Random) -> Phrases:
    """Of few tokens, so that they overlap themselves and each other; together no longer than an output."""
    while True:
        lengths = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        if sum(lengths) <= LONGEST:
            return tuple(tuple(draw.choice((3, 4, 5)) for _ in range(n)) for n in lengths)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_automaton_holds_what_some_placement_of_the_phrases_holds(ordered):
    draw = random.Random(1)
    for _ in range(60):
        phrases = random_phrases(draw)
        automaton = PhraseAutomaton(phrases, ordered)
        for output in OUTPUTS:
            state = 0
            for token in output:
                state = automaton.next(state, token)
            assert (automaton.progress[state] == automaton.total) == holds(phrases, output, ordered), (phrases, output)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_wide_beam_finds_the_best_of_all_outputs_that_hold_the_phrases(ordered):
    """Phrases that begin anew within themselves or end in the beginning of another among them: 4 4 3 holds 4 3."""
    draw = random.Random(2)
    cases = [(((4, 3),), [4, 4, 5]), (((4, 4, 3),), [3, 5]), (((3, 4), (4, 5)), [5, 3])]
    cases += [(random_phrases(draw), [draw.choice((3, 4, 5)) for _ in range(3)]) for _ in range(20)]
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
        found = beam_search([model], Packed.from_lists([[*source, EOS]]), options, constraints)[0]
        assert [tuple(hypothesis.tokens) for hypothesis in found] == best, phrases
        assert [hypothesis.score for hypothesis in found] == pytest.approx([scores[o] for o in best], abs=1e-4)
