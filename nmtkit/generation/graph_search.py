"""Beam search (greedy search with one row) over slots, all of it on the device, in tensors that never change shape.

`step` is what `search.Search` does between two tokens: the same candidates, penalty and bound, on the same numbers in
64 bits. It never waits for the device, so that it can run from a CUDA graph; the host looks at `done` now and then,
takes results out and puts other sentences into their slots.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import BOS, EOS, UNK
from nmtkit.generation.beam_search import penalty
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.topk import topk
from nmtkit.layers.static_kv_cache import CacheLengths
from nmtkit.packed import Packed

# S slots, R hypotheses (rows) of each, N = S x R, Z translations wanted of each sentence, C positions, P of them in
# lengths, V target vocabulary, K continuations of a row, B sentences

# What can be asked for here, or does not matter here; all else is for `decoding.beam_search`.
KNOWN = {"beam", "nbest", "lenpen", "max_len_a", "max_len_b", "min_len", "mbr", "seed", "diversity"}


def suits(models: Sequence[Architecture], options: SearchOptions) -> bool:
    """Whether this search does what `options` say, with these models. (Constraints it never grants.)"""
    asked = {field.name for field in dataclasses.fields(options)} - KNOWN
    if any(getattr(options, name) != getattr(SearchOptions, name) for name in asked):
        return False
    return all(model.supports_static_decoding for model in models)


class GraphBeamSearch:
    """`slots` sentences at a time, in outputs of up to `capacity` - 1 tokens, from sources of up to `source_capacity`.

    Slots are done at first, and stay as they are until `refill`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        models: Sequence[Architecture],
        options: SearchOptions,
        slots: int,
        capacity: int,
        source_capacity: int,
        device: torch.device,
    ) -> None:
        self.models, self.options = models, options
        self.slots, self.capacity, self.source_capacity = slots, capacity, source_capacity
        self.states = [model.static_start(slots, options.beam, capacity, source_capacity) for model in models]
        rows, kept = (slots, options.beam), (slots, options.nbest)
        self.tokens = torch.full(rows, BOS, device=device)  # S R: the newest of each row
        self.log_probability = torch.full(rows, -math.inf, dtype=torch.float64, device=device)
        self.history = torch.zeros(*rows, capacity, dtype=torch.int32, device=device)  # S R C: the tokens before
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)  # how many those are
        self.max_length = torch.zeros_like(self.length)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        # the best that ended, best first: S Z
        self.score = torch.full(kept, -math.inf, dtype=torch.float64, device=device)
        self.total = torch.zeros_like(self.score)  # the log probability, eos included
        self.size = torch.zeros(kept, dtype=torch.int64, device=device)
        self.output = torch.zeros(*kept, capacity, dtype=torch.int32, device=device)  # S Z C

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + self.output.nbytes + sum(state.nbytes for state in self.states)

    @torch.inference_mode()
    def insert(self, slots: Tensor, memories: Sequence[Packed], max_length: Tensor) -> None:
        """Sentences begin in `slots` [B], with a memory of each model, and may have `max_length` [B] tokens."""
        for state, memory in zip(self.states, memories, strict=True):
            state.insert(slots, memory)
        self.tokens.index_fill_(0, slots, BOS)
        self.log_probability.index_fill_(0, slots, -math.inf)
        self.log_probability[:, 0].index_fill_(0, slots, 0.0)  # the other rows would be the same hypothesis
        self.length.index_fill_(0, slots, 0)
        self.max_length.index_copy_(0, slots, max_length)
        self.score.index_fill_(0, slots, -math.inf)
        self.done.index_fill_(0, slots, False)

    @torch.inference_mode()
    def results(self, slots: Tensor, longest: int) -> tuple[Tensor, ...]:
        """Of `slots` [B]: scores, log probabilities, lengths B Z and tokens B Z `longest`; a score of -inf is none."""
        parts = self.score, self.total, self.size, self.output[:, :, :longest]
        return tuple(part.index_select(0, slots) for part in parts)

    @torch.inference_mode()
    def clear(self) -> None:
        """Forgets what was begun."""
        self._settle(torch.ones_like(self.done))

    @torch.inference_mode()
    def step(self, lengths: CacheLengths) -> None:
        """One more token for every hypothesis. `lengths.target` is more than any slot has tokens."""
        best, rows, tokens = self._candidates(self._log_probabilities(lengths))
        beam = self.options.beam
        self._finish(best[:, :beam], rows[:, :beam], tokens[:, :beam], lengths)
        parents = self._extend(best, rows, tokens, lengths)
        for state in self.states:
            state.reorder(parents, lengths)
        self._settle(self._over())

    def _log_probabilities(self, lengths: CacheLengths) -> Tensor:
        """Of every token that may come next, the mean over the models: N V."""
        tokens = self.tokens.flatten()
        each = [
            model.static_step(tokens, self.length, state, lengths).log_softmax(1, dtype=torch.float32)
            for model, state in zip(self.models, self.states, strict=True)
        ]
        steps = each[0] if len(each) == 1 else torch.stack(each).logsumexp(0).sub_(math.log(len(each)))
        for forbidden in (BOS, UNK):
            steps[:, forbidden].fill_(-math.inf)
        if self.options.min_len:
            short = (self.length < self.options.min_len)[:, None].expand_as(self.tokens).flatten()
            steps[:, EOS].masked_fill_(short, -math.inf)
        return steps

    def _candidates(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The 2 R best continuations of each sentence, best first: log probabilities, rows and tokens, each S 2R."""
        slots, beam = self.tokens.shape
        values, tokens = topk(steps, beam + 1)  # N K; one of a row's may be eos
        eos = steps[:, EOS].view(slots, beam)
        values, tokens = values.view(slots, beam, -1), tokens.view(slots, beam, -1)
        ended = torch.full_like(values, -math.inf)
        ended[:, :, 0] = eos
        full = (self.length >= self.max_length)[:, None, None]
        values, tokens = torch.where(full, ended, values), tokens.masked_fill(full, EOS)
        values = values.masked_fill(values.isnan(), -math.inf)  # the model overflowed
        ranked = (self.log_probability[:, :, None] + values.double()).flatten(1)
        width = values.shape[2]
        best, place = ranked.topk(min(2 * beam, beam * width), dim=1)
        return best, place // width, tokens.flatten(1).gather(1, place)

    def _finish(self, best: Tensor, rows: Tensor, tokens: Tensor, lengths: CacheLengths) -> None:
        """Puts by the candidates that end, each field S R, where they are among the best."""
        ending = (tokens == EOS) & best.isfinite()
        score = (best / penalty(self.length + 1, self.options.lenpen)[:, None]).masked_fill(~ending, -math.inf)
        output = self.history[:, :, : lengths.target].gather(1, _wide(rows, lengths.target))
        merged = torch.cat([self.score, score], 1)
        # stable: of two with one score the older stays
        order = merged.sort(dim=1, descending=True, stable=True).indices[:, : self.options.nbest]
        kept = self.output[:, :, : lengths.target]
        kept.copy_(torch.cat([kept, output], 1).gather(1, _wide(order, lengths.target)))
        self.score.copy_(merged.gather(1, order))
        self.total.copy_(torch.cat([self.total, best], 1).gather(1, order))
        size = self.length[:, None].expand_as(best)
        self.size.copy_(torch.cat([self.size, size], 1).gather(1, order))

    def _extend(self, best: Tensor, rows: Tensor, tokens: Tensor, lengths: CacheLengths) -> Tensor:
        """Goes on with the R best candidates that do not end; returns the rows they come from, S R."""
        going = best.masked_fill(tokens == EOS, -math.inf)
        order = going.isfinite().to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        first = order[:, : self.options.beam]
        parents = rows.gather(1, first)
        self.tokens.copy_(tokens.gather(1, first))
        self.log_probability.copy_(going.gather(1, first))
        past = self.history[:, :, : lengths.target]
        new = past.gather(1, _wide(parents, lengths.target))
        place = self.length[:, None, None].expand(-1, new.shape[1], 1)
        past.copy_(new.scatter_(2, place, self.tokens[:, :, None].to(new.dtype)))
        return parents

    def _over(self) -> Tensor:
        """Which slots can get no better: S, bool. (See `Search.bound`.)"""
        lenpen = self.options.lenpen
        largest = torch.maximum(penalty(self.length + 2, lenpen), penalty(self.max_length + 1, lenpen))
        threshold = self.score[:, -1]
        over = self.log_probability.amax(1) / largest <= threshold
        if self.options.beam == 1:  # greedy: the first end is the end
            over = over | (threshold > -math.inf)
        return over

    def _settle(self, over: Tensor) -> None:
        """Counts the step; slots that are done stand still at their beginning, with nothing to go on from."""
        self.done.logical_or_(over)
        self.length.add_(1).masked_fill_(self.done, 0)
        self.log_probability.masked_fill_(self.done[:, None], -math.inf)


def _wide(index: Tensor, width: int) -> Tensor:
    """S X -> S X width, to gather whole rows by."""
    return index[:, :, None].expand(-1, -1, width)
