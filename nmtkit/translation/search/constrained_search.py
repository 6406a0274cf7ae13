"""Beam search for translations that contain required phrases.

Source: Post and Vilar 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation". Hypotheses are divided
into banks by the number of required tokens that they have produced; a hypothesis competes within its bank. When the
remaining length is just enough for the missing phrases, only their tokens are allowed. An automaton tracks the progress
of a hypothesis.
"""

import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import EOS, SPACE_SYMBOL, SPECIALS, Tokenizer
from nmtkit.text.alignment import UNSPACED, is_letter
from nmtkit.translation.search.beam_search import Search, Selector
from nmtkit.translation.search.constraints import Constraints, Phrase, PieceEdges, RequiredPhrase
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import NONE
from nmtkit.translation.search.scorer import Candidates, continuations
from nmtkit.translation.search.types import Hypothesis

# B sentences, R hypotheses of each, V target vocabulary, C candidates of a sentence

# Maximum number of readings of a hypothesis. If there are more (with about 7 phrases), the most advanced readings stay.
READINGS = 64

# a bit for each complete phrase; the index of the phrase that has begun; the tokens of this phrase, () if there is none
Reading = tuple[int, int, Phrase]


def piece_edges(tokenizer: Tokenizer) -> PieceEdges:
    """Returns two masks over the target pieces: pieces that begin with a letter, and pieces that end with a letter.

    Byte pieces of non-ASCII characters count as pieces without letters.
    """
    pieces = [_surface(piece) for piece in tokenizer.target_pieces(range(tokenizer.target_size))]
    begins, ends = [_inside(piece[:1]) for piece in pieces], [_inside(piece[-1:]) for piece in pieces]
    for special in SPECIALS:
        begins[special] = ends[special] = False
    return PieceEdges(begins, ends)


def _surface(piece: str) -> str:
    byte = re.fullmatch("<0x([0-7][0-9A-F])>", piece)
    return chr(int(byte[1], 16)) if byte else piece.removeprefix(FOREIGN)


def _inside(char: str) -> bool:
    return char not in ("", SPACE_SYMBOL) and is_letter(char) and not UNSPACED.match(char)


class PhraseAutomaton:
    """Tracks the required phrases that a hypothesis contains. States are numbered from 0 in the order of their use.

    A reading assigns tokens of the hypothesis to phrases. There can be several readings: if "4 3" and "3 5" are
    required, the 3 in "4 4 3" can end the first phrase or begin the second phrase. A state has the set of readings (a
    subset construction), and whether the last token ends in a letter. Phrases of whole words need `edges`: a reading at
    the end of such a phrase contains the phrase unless the next token continues the word.
    """

    def __init__(self, phrases: Sequence[RequiredPhrase], ordered: bool, edges: PieceEdges | None = None) -> None:
        self.phrases, self.ordered = phrases, ordered
        self.edges = edges if any(phrase.whole_words for phrase in phrases) else None
        self.beginnings = [
            {alternative[:end] for alternative in phrase.alternatives for end in range(1, len(alternative) + 1)}
            for phrase in phrases
        ]
        self.shortest = [self.least(phrase) for phrase in phrases]
        self.total = sum(self.shortest)
        self.alphabet = {token for beginnings in self.beginnings for beginning in beginnings for token in beginning}
        self.numbers: dict[tuple[frozenset[Reading], bool], int] = {}
        self.states: list[tuple[frozenset[Reading], bool]] = []
        self.remaining: list[int] = []  # for each state, the number of tokens that its best reading still needs
        self.useful: list[list[int]] = []  # for each state, the tokens that begin or continue a phrase
        self.transitions: list[dict[int, int]] = []
        self.number_of({(0, 0, ())}, False)

    def least(self, phrase: RequiredPhrase) -> int:
        """Returns the length of the shortest alternative.

        In a phrase of whole words, an alternative that begins with a letter cannot follow a letter. If the phrase also
        has other alternatives, only these alternatives count.
        """
        joined = self.edges.begins if self.edges is not None and phrase.whole_words else ()
        free = [alternative for alternative in phrase.alternatives if not joined or not joined[alternative[0]]]
        return min(map(len, free or phrase.alternatives))

    def next(self, state: int, token: int) -> int:
        """Returns the state after one more token."""
        key = token
        if token not in self.alphabet:  # all other tokens with the same edges have the same effect
            key = NONE if self.edges is None else NONE - self.edges.begins[token] - 2 * self.edges.ends[token]
        known = self.transitions[state]
        if key not in known:
            readings, inside = self.states[state]
            joined = inside and self.edges is not None and self.edges.begins[token]
            after = {after for reading in readings for after in self.readings_after(reading, token, joined)}
            known[key] = self.number_of(after, self.edges is not None and self.edges.ends[token])
        return known[key]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Returns whether a complete output contains all phrases."""
        state = 0
        for token in tokens:
            state = self.next(state, token)
        return self.remaining[state] == 0

    def number_of(self, readings: set[Reading], inside: bool) -> int:
        best = sorted(readings, key=lambda reading: (not reading[2], -self.needed(reading)))
        kept = frozenset([reading for reading in best if not self.dominated(reading, readings)][-READINGS:])
        if (kept, inside) not in self.numbers:
            self.numbers[kept, inside] = len(self.states)
            self.states.append((kept, inside))
            self.remaining.append(min(map(self.needed, kept)))
            self.useful.append(sorted({token for reading in kept for token in self.useful_after(reading)}))
            self.transitions.append({})
        return self.numbers[kept, inside]

    def needed(self, reading: Reading) -> int:
        """Returns the smallest number of further tokens with which a reading contains all phrases."""
        held, index, begun = reading
        others = sum(n for i, n in enumerate(self.shortest) if not held >> i & 1 and not (begun and i == index))
        return others + min((len(rest) for rest in self.rests(index, begun)), default=0)

    def rests(self, index: int, begun: Phrase) -> list[Phrase]:
        """Returns the tokens after `begun`, for each alternative of phrase `index` that starts with `begun`."""
        alternatives = self.phrases[index].alternatives if begun else ()
        return [other[len(begun) :] for other in alternatives if other[: len(begun)] == begun]

    def dominated(self, reading: Reading, readings: set[Reading]) -> bool:
        """Returns whether one of `readings`, at the same point of the same phrase, has completed additional phrases."""
        held, *rest = reading
        return any(held & other == held and held != other and rest == others for other, *others in readings)

    def startable(self, held: int) -> Iterator[int]:
        """Yields the index of each required phrase that may begin at the next token.

        Bit i of `held` is 1 if phrase i is already in the output. If `ordered`, only the first phrase that the output
        lacks may begin. Of several equal phrases, only the first is yielded.
        """
        seen: set[RequiredPhrase] = set()
        for index, phrase in enumerate(self.phrases):
            if not held >> index & 1 and phrase not in seen:
                yield index
                if self.ordered:
                    return
                seen.add(phrase)

    def useful_after(self, reading: Reading) -> Iterator[int]:
        held, index, begun = reading
        rests = self.rests(index, begun)
        yield from (rest[0] for rest in rests if rest)
        if () in rests or not begun:
            for start in self.startable(held | 1 << index if begun else held):
                yield from (alternative[0] for alternative in self.phrases[start].alternatives)

    def readings_after(self, reading: Reading, token: int, joined: bool) -> Iterator[Reading]:
        """Yields the readings after one more token. With `joined`, the token continues the previous word."""
        held, index, begun = reading
        if begun:
            yield from self.begun_with(held, index, (*begun, token))
            if joined or begun not in self.phrases[index].alternatives:
                return
            held |= 1 << index
        yield held, 0, ()
        for start in self.startable(held):
            if not (joined and self.phrases[start].whole_words):
                yield from self.begun_with(held, start, (token,))

    def begun_with(self, held: int, index: int, tokens: Phrase) -> Iterator[Reading]:
        """Yields the reading in which a phrase has begun with `tokens`, if an alternative begins with `tokens`."""
        phrase = self.phrases[index]
        if tokens in phrase.alternatives and not phrase.whole_words:
            yield held | 1 << index, 0, ()
        elif tokens in self.beginnings[index]:
            yield held, index, tokens


def lacking_sentences(
    constraints: Sequence[Constraints],
    results: Sequence[Sequence[Hypothesis]],
    options: SearchOptions,
    edges: PieceEdges | None,
) -> list[int]:
    """Returns the indices of sentences with fewer than `options.nbest` hypotheses that contain all required phrases."""
    result = []
    for index, (sentence, hypotheses) in enumerate(zip(constraints, results, strict=True)):
        if sentence.required:
            automaton = PhraseAutomaton(sentence.required, options.ordered_constraints, edges)
            if sum(automaton.holds(hypothesis.tokens) for hypothesis in hypotheses) < options.nbest:
                result.append(index)
    return result


class PhraseSelector(Selector):
    """Finishes only hypotheses that contain all required phrases, in order if `options.ordered_constraints`."""

    def __init__(
        self, options: SearchOptions, constraints: Sequence[Constraints], edges: PieceEdges | None = None
    ) -> None:
        ordered, self.group = options.ordered_constraints, options.beam
        self.automata = [PhraseAutomaton(sentence.required, ordered, edges) for sentence in constraints]
        self.states = [[0] * options.beam for _ in constraints]  # B R: state of the automaton for each open hypothesis

    def select(self, search: Search, scores: Tensor) -> Candidates:
        kept = search.finish_among(self.candidates(search, scores), self.group)
        self.states = [
            [automaton.next(states[row], token) for row, token in zip(*pairs, strict=True)]
            for automaton, states, *pairs in zip(
                self.automata, self.states, kept.beam_index.tolist(), kept.tokens.tolist(), strict=True
            )
        ]
        return kept

    def candidates(self, search: Search, scores: Tensor) -> Candidates:
        """Returns the best continuations of each bank in turn."""
        sentences, rows = search.log_probability.shape
        useful = self.useful_tokens()  # B R useful
        useful_values = scores.view(sentences, rows, -1).gather(2, useful.clamp_min(0).to(scores.device)).double().cpu()
        useful_values = useful_values.masked_fill(useful == NONE, -math.inf)
        before = scores.new_zeros(len(scores), 1, dtype=torch.float64)
        values, tokens = continuations(scores[:, None], before, rows + 1 + useful.shape[2])
        values, tokens = values.cpu().view(sentences, rows, -1), tokens.cpu().view(sentences, rows, -1)
        duplicate = (tokens[:, :, :, None] == useful[:, :, None, :]).any(3)
        values = torch.cat([values.masked_fill(duplicate, -math.inf), useful_values], 2)
        tokens = torch.cat([tokens, useful.clamp_min(0)], 2)
        remaining = self.remaining_after(tokens)
        total = torch.tensor([automaton.total for automaton in self.automata])[:, None, None]
        # number of tokens that can still follow
        free = (search.constraint_processor.max_length - search.history.shape[2] - 1)[:, None, None]
        forbidden = torch.where(tokens == EOS, remaining > 0, remaining > free)
        totals = (search.log_probability[:, :, None] + values).masked_fill(forbidden, -math.inf).flatten(1)
        # in a long alternative, more tokens may remain than `total`, which counts the shortest alternative
        banks = (total - remaining).clamp_min(0).flatten(1)
        best = round_robin(totals, banks, min(2 * rows, totals.shape[1]))
        beam_index = torch.arange(rows)[None, :, None].expand_as(tokens).flatten(1)
        return Candidates(totals.gather(1, best), beam_index.gather(1, best), tokens.flatten(1).gather(1, best))

    def useful_tokens(self) -> Tensor:
        """Returns the tokens that begin or continue a required phrase, padded with NONE: B R tokens."""
        lists = [
            [automaton.useful[state] for state in states]
            for automaton, states in zip(self.automata, self.states, strict=True)
        ]
        width = max(len(tokens) for rows in lists for tokens in rows)
        padded = [[tokens + [NONE] * (width - len(tokens)) for tokens in rows] for rows in lists]
        return torch.tensor(padded, dtype=torch.int64).view(len(lists), self.group, width)

    def remaining_after(self, tokens: Tensor) -> Tensor:
        """Returns the number of tokens still needed after each of `tokens` [B, R, C]. eos does not count."""
        return torch.tensor(
            [
                [
                    [automaton.remaining[state if token == EOS else automaton.next(state, token)] for token in row]
                    for state, row in zip(states, rows, strict=True)
                ]
                for automaton, states, rows in zip(self.automata, self.states, tokens.tolist(), strict=True)
            ]
        )

    def drop_finished(self, kept: Tensor) -> None:
        self.automata = [self.automata[index] for index in kept.tolist()]
        self.states = [self.states[index] for index in kept.tolist()]


def round_robin(scores: Tensor, banks: Tensor, number: int) -> Tensor:
    """Returns `number` indices into `scores` [B, C]: the best of each bank in turn, starting with the fullest bank."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    bank = banks.gather(1, order)
    same_bank = bank[:, :, None] == bank[:, None, :]  # B C C
    better = torch.ones(same_bank.shape[1:], dtype=torch.bool).tril(-1)
    rank = (same_bank & better).sum(2)  # number of better candidates of the same bank
    most = int(banks.max()) + 1
    closed = ~scores.gather(1, order).isfinite()
    key = rank * (most + 1) - bank + closed * (scores.shape[1] + 1) * (most + 1)
    return order.gather(1, key.argsort(dim=1, stable=True)[:, :number])
