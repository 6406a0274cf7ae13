"""With required texts, the search finds the best of all outputs with the texts, as by exhaustive search."""

import itertools
import random
import re

import pytest
import torch
from builders import tiny_transformer

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.translation.search.constraints import Constraints, PieceTexts, RequiredText, SpelledPhrase, usual_spelling
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.text_automaton import TextAutomaton

SPECIAL = [" \u2047 ".encode(), b"", b" "]
PIECES = [b" a", b"b", b"ab", b".", b" ", "ü".encode()[:1], "ü".encode()[1:]]
TEXTS = PieceTexts([*SPECIAL, *PIECES])
PHRASES = ["a", "b", "ab", "ba", ".", "b.", ".a", "b ab", "a a", " a", "b ", " b ", ". a", "bab", "ü", "aü", "..", "b."]


def outputs(pieces: int, longest: int) -> list[tuple[int, ...]]:
    return [output for n in range(longest + 1) for output in itertools.product(range(3, 3 + pieces), repeat=n)]


def text_of(tokens: tuple[int, ...]) -> str:
    return b"".join(TEXTS.texts[token] for token in tokens).decode(errors="replace")


def required(alternatives: list[str], whole_words: bool = False) -> RequiredText:
    spellings = [SpelledPhrase(text, usual_spelling(text, TEXTS, whole_words)) for text in alternatives]
    return RequiredText(tuple(each for each in spellings if each.tokens), TEXTS, whole_words)


def spans(text: RequiredText, line: str) -> list[tuple[int, int]]:
    letters = ("(?<![abü])", "(?![abü])") if text.whole_words else ("", "")
    result = []
    for each in text.alternatives:
        # a sign separates words, but the sign at the edge of a text with letters belongs to the text
        left, right = letters if set(each.text) & set("abü") else ("", "")
        result += [match.span(1) for match in re.finditer(f"{left}(?=({re.escape(each.text)}){right})", line)]
    return result


def holds(texts: tuple[RequiredText, ...], tokens: tuple[int, ...], ordered: bool) -> bool:
    """Tries every place of every alternative of every text. Equal texts, whole words and ordered texts are disjoint."""
    line = f" {text_of(tokens)} "
    for places in itertools.product(*(spans(text, line) for text in texts)):
        fits = not ordered or all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        for one, other in itertools.combinations(range(len(texts)), 2):
            if texts[one] == texts[other] or (texts[one].whole_words and texts[other].whole_words):
                (start, end), (begin, last) = places[one], places[other]
                fits = fits and (end <= begin or last <= start)
        if fits:
            return True
    return False


def random_texts(draw: random.Random, most: int, whole_words: bool) -> tuple[RequiredText, ...]:
    phrases = [phrase for phrase in PHRASES if not whole_words or phrase == phrase.strip()]
    while True:
        texts = [required(draw.sample(phrases, draw.randint(1, most)), whole_words) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.2:
            texts.append(texts[0])
        if all(text.alternatives for text in texts):
            return tuple(texts)


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_automaton_holds_what_some_placement_of_the_texts_holds(ordered, whole_words, most):
    draw, every = random.Random(1), outputs(len(PIECES), 4)
    held = 0
    for _ in range(30):
        texts = random_texts(draw, most, whole_words)
        automaton = TextAutomaton(texts, ordered)
        for output in draw.sample(every, 300):
            assert automaton.holds(output) == holds(texts, output, ordered), (texts, text_of(output))
            held += automaton.holds(output)
    assert held > 300


def test_a_text_needs_as_many_tokens_as_the_shortest_rest():
    """After a letter, "ab" needs a token for its space; a started text needs its rest, in bytes too."""
    for texts, tokens, needed in [
        (["ab"], [], 1), (["ab"], [4], 2), (["ab"], [4, 7], 1), (["ab"], [3], 1), ([".ü"], [4], 3), ([".ü"], [6], 2),
        ([".ü"], [6, 8], 1), ([".ü"], [6, 8, 4], 3), (["b.b", "ü"], [4, 6], 1), (["b "], [4], 0), ([" b "], [7], 1),
    ]:  # fmt: skip
        automaton, state = TextAutomaton([required(texts)], False), 0
        for token in tokens:
            state = automaton.next(state, token)
        assert automaton.facts(state)[0] == needed, (texts, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_wide_beam_finds_the_best_of_all_outputs_that_hold_the_texts(ordered, whole_words, most):
    """The best outputs are short enough that the search never has to force a text at the maximum length."""
    draw, longest, compared = random.Random(2), 6, 0
    every = [output for output in outputs(5, longest) if 7 not in output]
    inputs = Packed.from_lists([[BOS, *output] for output in every])
    targets = torch.tensor([token for output in every for token in (*output, EOS)])
    for seed in range(30):
        texts, source = random_texts(draw, most, whole_words)[:2], [draw.choice((3, 4, 5)) for _ in range(3)]
        if compared == 5 or any("ü" in each.text for text in texts for each in text.alternatives):
            continue
        model = tiny_transformer(len(TEXTS.texts), seed=seed, sharpness=3.0)
        with torch.no_grad():
            model.output_projection.bias = torch.nn.Parameter(torch.zeros(len(TEXTS.texts)))
            model.output_projection.bias[[EOS, 7, 8, 9]] = torch.tensor([9.0, -1e4, -1e4, -1e4])
            sources = Packed.from_lists([[*source, EOS]] * len(every))
            table = model.output_projection(model(sources, inputs)).double().log_softmax(-1)
        parts = table.gather(1, targets[:, None])[:, 0].split([len(output) + 1 for output in every])
        scores = {
            output: float(part.sum())
            for output, part in zip(every, parts, strict=True)
            if holds(texts, output, ordered)
        }
        best = sorted(scores, key=lambda output: -scores[output])[:2]
        if not best or max(map(len, best)) > longest - 2:
            continue
        compared += 1
        options = SearchOptions(
            beam=150, nbest=2, max_len_a=0, max_len_b=longest, lenpen=0, ordered_constraints=ordered
        )
        found = beam_search([model], Packed.from_lists([[*source, EOS]]), options, [Constraints(required=texts)])[0]
        assert [tuple(hypothesis.tokens) for hypothesis in found] == best, texts
        assert [hypothesis.score for hypothesis in found] == pytest.approx([scores[o] for o in best], abs=1e-4)
    assert compared >= 4


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_a_narrow_beam_ends_with_one_alternative_of_each_text(ordered):
    """The maximum length is just enough for the longest alternatives."""
    draw = random.Random(3)
    for seed in range(30):
        texts = random_texts(draw, 3, seed % 2 == 1)
        options = SearchOptions(beam=1 + seed % 3, max_len_a=0, max_len_b=0, ordered_constraints=ordered)
        model = tiny_transformer(len(TEXTS.texts), seed=seed, sharpness=3.0)
        constraints = [Constraints(required=texts), Constraints()]
        found = beam_search([model], Packed.from_lists([[3, 4, EOS], [5, EOS]]), options, constraints)[0]
        assert holds(texts, tuple(found[0].tokens), ordered) and found[0].score > -torch.inf, texts
