"""Beam search for translations that hold required phrases.

Source: the banks of Post and Vilar 2018 ("Fast Lexically Constrained Decoding with Dynamic Beam Allocation"): a
hypothesis competes with those that have produced equally many required tokens. When the rest of the length is just
enough for the phrases that are missing, only they may come. How far a hypothesis has come is read off an automaton.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import EOS
from nmtkit.generation.beam_search import BeamSearch, Candidates, topk
from nmtkit.generation.constraints import NONE, Constraints, Phrase
from nmtkit.generation.options import SearchOptions
from nmtkit.packed import Packed

# B sentences, R hypotheses of each, V target vocabulary, C candidates of a sentence

READINGS = 64  # of a hypothesis that are followed, the most advanced; with fewer than 7 phrases there are hardly more

Reading = tuple[int, int, int]  # phrases held (a bit for each), the phrase under way, its tokens so far (0: none is)


class PhraseAutomaton:
    """How much of the required phrases a hypothesis holds; its states are numbered as they are first met, from 0.

    A hypothesis may be read in several ways: "4 4 3" holds "4 3" from its second token on, and with "3 5" required as
    well, a 3 may end one phrase or begin the other. A state is the set of these readings (a subset construction).
    """

    def __init__(self, phrases: Sequence[Phrase], ordered: bool) -> None:
        self.phrases, self.ordered = phrases, ordered
        self.total = sum(map(len, phrases))
        self.alphabet = {token for phrase in phrases for token in phrase}
        self.numbers: dict[frozenset[Reading], int] = {}
        self.states: list[frozenset[Reading]] = []
        self.progress: list[int] = []  # of each state, the required tokens that its best reading holds
        self.wanted: list[list[int]] = []  # of each state, the tokens that a phrase begins or goes on with
        self.transitions: list[dict[int, int]] = []
        self.number_of({(0, 0, 0)})

    def next(self, state: int, token: int) -> int:
        """Returns the state after one more token."""
        if token not in self.alphabet:
            token = NONE
        known = self.transitions[state]
        if token not in known:
            known[token] = self.number_of(
                {after for reading in self.states[state] for after in self.readings_after(reading, token)}
            )
        return known[token]

    def number_of(self, readings: set[Reading]) -> int:
        best = sorted(readings, key=lambda reading: (reading[2] == 0, self.tokens(reading)))
        kept = frozenset([reading for reading in best if not self.dominated(reading, readings)][-READINGS:])
        if kept not in self.numbers:
            self.numbers[kept] = len(self.states)
            self.states.append(kept)
            self.progress.append(max(map(self.tokens, kept)))
            self.wanted.append(sorted({token for reading in kept for token in self.wanted_by(reading)}))
            self.transitions.append({})
        return self.numbers[kept]

    def tokens(self, reading: Reading) -> int:
        """Returns the required tokens that a reading holds, those of the phrase under way included."""
        held, _, position = reading
        return position + sum(len(phrase) for index, phrase in enumerate(self.phrases) if held >> index & 1)

    def dominated(self, reading: Reading, readings: set[Reading]) -> bool:
        """Returns whether another reading is as far in the same phrase and holds more phrases."""
        held, *rest = reading
        return any(held & other == held and held != other and rest == others for other, *others in readings)

    def startable(self, held: int) -> Iterator[int]:
        """Yields the phrases that may begin: the first missing one if they are ordered; of equal ones, one."""
        seen: set[Phrase] = set()
        for index, phrase in enumerate(self.phrases):
            if not held >> index & 1 and phrase not in seen:
                yield index
                if self.ordered:
                    return
                seen.add(phrase)

    def wanted_by(self, reading: Reading) -> list[int]:
        held, index, position = reading
        return [self.phrases[index][position]] if position else [self.phrases[i][0] for i in self.startable(held)]

    def readings_after(self, reading: Reading, token: int) -> Iterator[Reading]:
        held, index, position = reading
        if not position:
            yield reading
        for phrase in [index] if position else self.startable(held):
            if self.phrases[phrase][position] == token:
                whole = position + 1 == len(self.phrases[phrase])
                yield (held | 1 << phrase, 0, 0) if whole else (held, phrase, position + 1)


class ConstrainedBeamSearch(BeamSearch):
    """Every hypothesis that ends holds every required phrase; in their order, if `options.ordered_constraints`."""

    def __init__(
        self, models: Sequence[Architecture], source: Packed, options: SearchOptions, constraints: Sequence[Constraints]
    ) -> None:
        super().__init__(models, source, options, constraints)
        self.automata = [PhraseAutomaton(sentence.required, options.ordered_constraints) for sentence in constraints]
        self.states = [[0] * options.rows for _ in constraints]  # of each open hypothesis: B R

    def candidates(self, group: Tensor, start: int, log_probs: Tensor) -> Candidates:
        sentences, rows = group.shape[:2]
        wanted = self.wanted_tokens()  # B R wanted
        wanted_values = group.gather(2, wanted.clamp_min(0).to(group.device)).double().cpu()
        wanted_values = wanted_values.masked_fill(wanted == NONE, -math.inf)
        values, tokens = topk(group.flatten(0, 1), rows + 1 + wanted.shape[2])
        values, tokens = values.double().cpu().view(sentences, rows, -1), tokens.cpu().view(sentences, rows, -1)
        doubled = (tokens[:, :, :, None] == wanted[:, :, None, :]).any(3)
        values = torch.cat([values.masked_fill(doubled, -math.inf), wanted_values], 2)
        tokens = torch.cat([tokens, wanted.clamp_min(0)], 2)
        progress = self.progress_after(tokens)
        total = torch.tensor([automaton.total for automaton in self.automata])[:, None, None]
        # tokens that may follow this one
        room = (self.logits_processor.max_length - self.history.shape[2] - 1)[:, None, None]
        forbidden = torch.where(tokens == EOS, progress < total, total - progress > room)
        totals = (self.log_probability[:, :, None] + values).masked_fill(forbidden, -math.inf).flatten(1)
        best = round_robin(totals, progress.flatten(1), min(2 * rows, totals.shape[1]))
        beam_index = torch.arange(rows)[None, :, None].expand_as(tokens).flatten(1)
        return Candidates(totals.gather(1, best), beam_index.gather(1, best), tokens.flatten(1).gather(1, best))

    def wanted_tokens(self) -> Tensor:
        """Returns the tokens that a required phrase begins or goes on with: B R and as many as any row has, or NONE."""
        lists = [
            [automaton.wanted[state] for state in states]
            for automaton, states in zip(self.automata, self.states, strict=True)
        ]
        width = max(len(tokens) for rows in lists for tokens in rows)
        padded = [[tokens + [NONE] * (width - len(tokens)) for tokens in rows] for rows in lists]
        return torch.tensor(padded, dtype=torch.int64).view(len(lists), self.options.rows, width)

    def progress_after(self, tokens: Tensor) -> Tensor:
        """Returns the required tokens that each hypothesis holds after each of `tokens` [B, R, C]; eos adds none."""
        return torch.tensor(
            [
                [
                    [automaton.progress[state if token == EOS else automaton.next(state, token)] for token in row]
                    for state, row in zip(states, rows, strict=True)
                ]
                for automaton, states, rows in zip(self.automata, self.states, tokens.tolist(), strict=True)
            ]
        )

    def advance(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        parents, tokens = super().advance(log_probs)
        self.states = [
            [automaton.next(states[row % self.options.rows], token) for row, token in zip(*pairs, strict=True)]
            for automaton, states, *pairs in zip(
                self.automata, self.states, parents.tolist(), tokens.tolist(), strict=True
            )
        ]
        return parents, tokens

    def drop_finished(self, kept: Tensor) -> None:
        super().drop_finished(kept)
        self.automata = [self.automata[index] for index in kept.tolist()]
        self.states = [self.states[index] for index in kept.tolist()]


def round_robin(scores: Tensor, banks: Tensor, number: int) -> Tensor:
    """Returns the indices of `number` of `scores` [B, C]: banks take turns, the fullest first, each with its best."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    bank = banks.gather(1, order)
    same_bank = bank[:, :, None] == bank[:, None, :]  # B C C
    rank = (same_bank & torch.ones(same_bank.shape[1:], dtype=torch.bool).tril(-1)).sum(2)  # better ones of the bank
    most = int(banks.max()) + 1
    closed = ~scores.gather(1, order).isfinite()
    key = rank * (most + 1) - bank + closed * (scores.shape[1] + 1) * (most + 1)
    return order.gather(1, key.argsort(dim=1, stable=True)[:, :number])
