"""Beam search for translations that hold required phrases.

Source: the banks of Post and Vilar 2018 ("Fast Lexically Constrained Decoding with Dynamic Beam Allocation"): a
hypothesis competes with those that hold as many required tokens. When what is left of the length is just enough for the
phrases that are missing, they are all that may come.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import EOS
from nmtkit.generation.beam_search import Candidates, Search
from nmtkit.generation.constraints import NONE, Constraints
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.topk import topk
from nmtkit.packed import Packed

# B sentences, R hypotheses (rows) of each, N = B x R, P phrases of a sentence, L tokens of a phrase (both at most),
# V target vocabulary, C candidates


class ConstrainedBeamSearch(Search):
    """Every hypothesis that ends holds every required phrase; in their order, if `options.ordered_constraints`."""

    def __init__(
        self, models: Sequence[Architecture], source: Packed, options: SearchOptions, constraints: Sequence[Constraints]
    ) -> None:
        super().__init__(models, source, options, constraints)
        number = max(len(one.required) for one in constraints)
        width = max(len(phrase) for one in constraints for phrase in one.required)
        rows = [[*one.required, *[()] * (number - len(one.required))] for one in constraints]
        table = [[list(phrase) + [NONE] * (width - len(phrase)) for phrase in one] for one in rows]
        self.phrases = torch.tensor(table, dtype=torch.int64).view(len(constraints), number, width)  # B P L
        self.lengths = (self.phrases != NONE).sum(2)  # B P
        self.met = (self.lengths == 0)[:, None].expand(-1, options.rows, -1).clone()  # B R P
        self.current = torch.zeros(
            len(constraints), options.rows, dtype=torch.int64
        )  # B R: the phrase begun, if place > 0
        self.place = torch.zeros(len(constraints), options.rows, dtype=torch.int64)  # B R: its tokens so far

    def open_tokens(self) -> Tensor:
        """The token that begins or goes on with each phrase not yet held: B R P, NONE where there is none."""
        begin = self.phrases[:, None, :, 0].expand_as(self.met)
        missing = ~self.met
        if self.options.ordered_constraints:
            missing &= missing.to(torch.int64).cumsum(2) == 1
        tokens = begin.masked_fill(~missing, NONE)
        going = self.place > 0
        row = torch.arange(len(self.place))[:, None].expand_as(self.place)
        following = self.phrases[row, self.current, self.place]
        here = torch.arange(self.met.shape[2]) == self.current[:, :, None]
        tokens = torch.where(here & going[:, :, None], following[:, :, None], tokens)
        # one token may begin two phrases: it counts for the one under way, or for the first
        same = (tokens[:, :, :, None] == tokens[:, :, None, :]) & (tokens != NONE)[:, :, None, :]
        first = torch.ones(same.shape[2:], dtype=torch.bool).tril(-1)
        under_way = (here & going[:, :, None])[:, :, None, :]
        taken = (same & (first | under_way) & ~torch.eye(len(first), dtype=torch.bool)).any(3)
        return tokens.masked_fill(taken & ~(here & going[:, :, None]), NONE)

    def held(self) -> Tensor:
        """Tokens of the phrases that each hypothesis holds whole: B R."""
        return (self.met * self.lengths[:, None]).sum(2)

    def candidates(self, group: Tensor, start: int, steps: Tensor) -> Candidates:
        sentences, rows = group.shape[:2]
        wanted, held = self.open_tokens(), self.held()
        total = self.lengths.sum(1)[:, None]  # B 1
        column = wanted.clamp_min(0).to(group.device)
        wanted_value = group.gather(2, column).double().cpu().masked_fill(wanted == NONE, -math.inf)
        values, tokens = topk(group.flatten(0, 1), rows + 1 + wanted.shape[2])
        values, tokens = values.double().cpu().view(sentences, rows, -1), tokens.cpu().view(sentences, rows, -1)
        doubled = (tokens[:, :, :, None] == wanted[:, :, None, :]).any(3)
        early = (tokens == EOS) & (held < total)[:, :, None]
        values = values.masked_fill(doubled | early, -math.inf)
        here = (torch.arange(wanted.shape[2]) == self.current[:, :, None]) & (self.place > 0)[:, :, None]
        progress = torch.cat(
            [
                held[:, :, None].expand_as(tokens),
                held[:, :, None] + torch.where(here, self.place[:, :, None] + 1, 1),
            ],
            2,
        ).flatten(1)
        every = self.log_probability[:, :, None] + torch.cat([values, wanted_value], 2)
        row = torch.arange(rows)[None, :, None].expand_as(every).flatten(1)
        every, tokens = every.flatten(1), torch.cat([tokens, wanted.clamp_min(0)], 2).flatten(1)
        room = self.logits_processor.max_length[:, None] - self.history.shape[2] - 1  # tokens that may follow this one
        every = every.masked_fill((total - progress > room) & (tokens != EOS), -math.inf)
        best = in_turn(every, progress, min(2 * rows, every.shape[1]))
        return Candidates(every.gather(1, best), row.gather(1, best), tokens.gather(1, best))

    def advance(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        wanted = self.open_tokens()
        parents, tokens = super().advance(steps)
        rows = parents % self.options.rows
        self.met = self.met.gather(1, rows[:, :, None].expand_as(self.met)).clone()
        wanted = wanted.gather(1, rows[:, :, None].expand_as(wanted))
        current, place = self.current.gather(1, rows), self.place.gather(1, rows)
        hit = wanted == tokens[:, :, None]  # B R P; at most one
        phrase = hit.to(torch.uint8).argmax(2)
        going_on = (phrase == current) & (place > 0)
        self.place = torch.where(hit.any(2), torch.where(going_on, place + 1, 1), 0)
        self.current = phrase
        done = (self.place > 0) & (self.place == self.lengths.gather(1, phrase))
        self.met |= done[:, :, None] & (torch.arange(self.met.shape[2]) == phrase[:, :, None])
        self.place = self.place.masked_fill(done, 0)
        return parents, tokens

    def drop_finished(self, kept: Tensor) -> None:
        super().drop_finished(kept)
        self.phrases, self.lengths, self.met = self.phrases[kept], self.lengths[kept], self.met[kept]
        self.current, self.place = self.current[kept], self.place[kept]


def in_turn(scores: Tensor, banks: Tensor, number: int) -> Tensor:
    """Places of the `number` first of `scores` B C when banks take turns, the fullest first, each with its best."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    bank = banks.gather(1, order)
    alike = bank[:, :, None] == bank[:, None, :]  # B C C
    rank = (alike & torch.ones(alike.shape[1:], dtype=torch.bool).tril(-1)).sum(2)  # better ones of the same bank
    most = int(banks.max()) + 1
    dead = ~scores.gather(1, order).isfinite()
    key = rank * (most + 1) - bank + dead * (scores.shape[1] + 1) * (most + 1)
    return order.gather(1, key.argsort(dim=1, stable=True)[:, :number])
