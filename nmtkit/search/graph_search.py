"""Beam search over a fixed number of slots, on the device alone, in tensors that never change shape.

`GraphBeamSearch.step` does what `beam_search.BeamSearch` does between two tokens: the same candidates, penalty and
bound, on the same numbers in 64 bits. It never waits for the device, so that `StepRunner` can record it in a CUDA graph
for each shape; the host looks at `done` now and then, takes results out and inserts other sentences.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import BOS, EOS, UNK
from nmtkit.layers.logsumexp_gpu import logsumexp
from nmtkit.layers.packed import Packed
from nmtkit.layers.static_kv_cache import CacheLengths
from nmtkit.search.beam_search import TOPK_BLOCK, length_penalty, mean_log_probabilities, topk
from nmtkit.search.options import SearchOptions

# B slots, or the sentences that are inserted, R hypotheses of each, N = B x R rows, P positions, of which
# `CacheLengths.target` are in use, V target vocabulary, C candidates

# Options that this search knows, or that do not matter to it; all others are for `decoding.beam_search`.
SUPPORTED = {"beam", "nbest", "lenpen", "max_len_a", "max_len_b", "min_len", "mbr"}


def supports(models: Sequence[Architecture], options: SearchOptions) -> bool:
    """Returns whether this search does what `options` say, with these models. (It never supports constraints.)"""
    others = {field.name for field in dataclasses.fields(options)} - SUPPORTED
    if any(getattr(options, name) != getattr(SearchOptions, name) for name in others):
        return False
    return all(model.supports_static_decoding for model in models)


class GraphBeamSearch:
    """Searches `slots` sentences at a time, for outputs of up to `capacity` - 1 tokens.

    Sources have up to `source_capacity` tokens. A slot is done until a sentence is inserted.
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
        open_shape, finished_shape = (slots, options.beam), (slots, options.nbest)
        self.tokens = torch.full(open_shape, BOS, device=device)  # B R: the newest of each hypothesis
        self.log_probability = torch.full(open_shape, -math.inf, dtype=torch.float64, device=device)
        self.history = torch.zeros(*open_shape, capacity, dtype=torch.int32, device=device)  # B R P: tokens before
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)  # B: tokens in `history`
        self.max_length = torch.zeros_like(self.length)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        # The best finished hypotheses, best first: B nbest
        self.finished_score = torch.full(finished_shape, -math.inf, dtype=torch.float64, device=device)
        self.finished_log_probability = torch.zeros_like(self.finished_score)  # eos included
        self.finished_length = torch.zeros(finished_shape, dtype=torch.int64, device=device)
        self.finished_tokens = torch.zeros(*finished_shape, capacity, dtype=torch.int32, device=device)  # B nbest P

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + self.finished_tokens.nbytes + sum(state.nbytes for state in self.states)

    @torch.inference_mode()
    def insert(self, slots: Tensor, memories: Sequence[Packed], max_length: Tensor) -> None:
        """Starts sentences in `slots` [B], with a memory of each model, of at most `max_length` [B] output tokens."""
        for state, memory in zip(self.states, memories, strict=True):
            state.insert(slots, memory)
        self.tokens.index_fill_(0, slots, BOS)
        self.log_probability.index_fill_(0, slots, -math.inf)
        self.log_probability[:, 0].index_fill_(0, slots, 0.0)  # the others would be copies of the same hypothesis
        self.length.index_fill_(0, slots, 0)
        self.max_length.index_copy_(0, slots, max_length)
        self.finished_score.index_fill_(0, slots, -math.inf)
        self.done.index_fill_(0, slots, False)

    @torch.inference_mode()
    def results(self, slots: Tensor, longest: int) -> tuple[Tensor, ...]:
        """Returns scores, log probabilities, lengths [B, nbest] and tokens [B, nbest, longest] of `slots` [B].

        A score of -inf says that there is no such hypothesis.
        """
        parts = (self.finished_score, self.finished_log_probability, self.finished_length)
        return tuple(part.index_select(0, slots) for part in (*parts, self.finished_tokens[:, :, :longest]))

    @torch.inference_mode()
    def reset(self) -> None:
        """Drops all sentences."""
        self._end_step(torch.ones_like(self.done))

    @torch.inference_mode()
    def step(self, lengths: CacheLengths) -> None:
        """Adds a token to every open hypothesis. `lengths.target` is more than the tokens of any slot."""
        log_probability, beam_index, tokens = self._candidates(*self._scores(lengths))
        beam = self.options.beam
        self._finish(log_probability[:, :beam], beam_index[:, :beam], tokens[:, :beam], lengths)
        parents = self._extend(log_probability, beam_index, tokens, lengths)
        for state in self.states:
            state.reorder(parents, lengths)
        self._end_step(self._is_done())

    def _scores(self, lengths: CacheLengths) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns scores of every token that may come next [N, V], and what makes them log probabilities when it is
        taken off, N; also the largest score of each block of columns for `topk`, if they are known.

        The scores of one model are its logits, for a log-softmax would read and write all of them again.
        """
        tokens = self.tokens.flatten()
        logits = [
            model.static_step(tokens, self.length, state, lengths)
            for model, state in zip(self.models, self.states, strict=True)
        ]
        if len(logits) == 1:
            scores = logits[0]
            normalizer, maxima = logsumexp(scores, TOPK_BLOCK)
        else:
            scores, maxima = mean_log_probabilities(logits), None
            normalizer = torch.zeros_like(scores[:, 0])
        for forbidden in (BOS, UNK):
            scores[:, forbidden].fill_(-math.inf)
        if self.options.min_len:
            short = (self.length < self.options.min_len)[:, None].expand_as(self.tokens).flatten()
            scores[:, EOS].masked_fill_(short, -math.inf)
        if maxima is not None and maxima.shape[1]:
            maxima[:, 0] = scores[:, :TOPK_BLOCK].amax(1)  # the special tokens are in the first block
        return scores, normalizer, maxima

    def _candidates(self, scores: Tensor, normalizer: Tensor, maxima: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the 2R best continuations of each sentence, best first: log probabilities, hypotheses and tokens."""
        slots, beam = self.tokens.shape
        values, tokens = topk(scores, beam + 1, maxima)  # one of a hypothesis's may be eos
        values, eos = values.double() - normalizer[:, None], scores[:, EOS].double() - normalizer
        values, tokens = values.view(slots, beam, -1), tokens.view(slots, beam, -1)
        only_eos = torch.full_like(values, -math.inf)
        only_eos[:, :, 0] = eos.view(slots, beam)
        full = (self.length >= self.max_length)[:, None, None]
        values, tokens = torch.where(full, only_eos, values), tokens.masked_fill(full, EOS)
        values = values.masked_fill(values.isnan(), -math.inf)  # the model overflowed
        totals = (self.log_probability[:, :, None] + values).flatten(1)
        width = values.shape[2]
        best, index = totals.topk(min(2 * beam, beam * width), dim=1)
        return best, index // width, tokens.flatten(1).gather(1, index)

    def _finish(self, log_probability: Tensor, beam_index: Tensor, tokens: Tensor, lengths: CacheLengths) -> None:
        """Keeps those candidates [B, R] that end and are among the best of their sentence."""
        ending = (tokens == EOS) & log_probability.isfinite()
        penalty = length_penalty(self.length + 1, self.options.lenpen)[:, None]
        score = (log_probability / penalty).masked_fill(~ending, -math.inf)
        output = self.history[:, :, : lengths.target].gather(1, _expanded(beam_index, lengths.target))
        merged = torch.cat([self.finished_score, score], 1)
        # stable: of two hypotheses with one score the older stays
        order = merged.sort(dim=1, descending=True, stable=True).indices[:, : self.options.nbest]
        kept = self.finished_tokens[:, :, : lengths.target]
        kept.copy_(torch.cat([kept, output], 1).gather(1, _expanded(order, lengths.target)))
        self.finished_score.copy_(merged.gather(1, order))
        for field, new in (
            (self.finished_log_probability, log_probability),
            (self.finished_length, self.length[:, None].expand_as(beam_index)),
        ):
            field.copy_(torch.cat([field, new], 1).gather(1, order))

    def _extend(self, log_probability: Tensor, beam_index: Tensor, tokens: Tensor, lengths: CacheLengths) -> Tensor:
        """Keeps the R best candidates that do not end as the open hypotheses; returns their parents, B R."""
        going_on = log_probability.masked_fill(tokens == EOS, -math.inf)
        order = going_on.isfinite().to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        order = order[:, : self.options.beam]
        parents = beam_index.gather(1, order)
        self.tokens.copy_(tokens.gather(1, order))
        self.log_probability.copy_(going_on.gather(1, order))
        past = self.history[:, :, : lengths.target]
        new = past.gather(1, _expanded(parents, lengths.target))
        position = self.length[:, None, None].expand(-1, new.shape[1], 1)
        past.copy_(new.scatter_(2, position, self.tokens[:, :, None].to(new.dtype)))
        return parents

    def _is_done(self) -> Tensor:
        """Returns a mask of slots that cannot find a better hypothesis: B, bool. See `BeamSearch.best_attainable`."""
        lenpen = self.options.lenpen
        largest = torch.maximum(length_penalty(self.length + 2, lenpen), length_penalty(self.max_length + 1, lenpen))
        threshold = self.finished_score[:, -1]
        done = self.log_probability.amax(1) / largest <= threshold
        if self.options.beam == 1:  # greedy: the first end is the end
            done = done | (threshold > -math.inf)
        return done

    def _end_step(self, done: Tensor) -> None:
        """Counts the step; slots that are done stay at length 0, without open hypotheses."""
        self.done.logical_or_(done)
        self.length.add_(1).masked_fill_(self.done, 0)
        self.log_probability.masked_fill_(self.done[:, None], -math.inf)


def _expanded(index: Tensor, width: int) -> Tensor:
    """Expands an index [B, rows] to [B, rows, width], to gather whole rows by."""
    return index[:, :, None].expand(-1, -1, width)


# --- recorded steps -------------------------------------------------------------------------------------------------

Shape = TypeVar("Shape", bound=Hashable)
Work = Callable[[], None]


class Eager:
    """Records nothing: on a CPU, and wherever graphs are compared with none."""

    def warm_up(self, work: Work) -> None:
        """Does the work, so that nothing that is set up at the first run is recorded."""
        work()

    def record(self, work: Work) -> Work:
        """Returns a function that does the recorded work, without doing it now."""
        return work


class CudaGraphs(Eager):
    """CUDA graphs, replayed one after the other on the current stream; they share one pool of memory.

    Sharing is safe, as no graph leaves a result in the pool for another: steps write theirs to tensors made before.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()

    def warm_up(self, work: Work) -> None:
        """Runs on the stream of recording, as libraries keep workspaces for each stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # thread-local: other threads, such as one that reads the input, may use the device meanwhile
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class StepRunner(Generic[Shape]):
    """Runs `step(shape)`: the first time of a shape it warms up, the second time it is recorded, and then replayed."""

    def __init__(self, step: Callable[[Shape], None], backend: Eager) -> None:
        self.step, self.backend = step, backend
        self.recorded: dict[Shape, Work | None] = {}  # None: warmed up

    def __call__(self, shape: Shape) -> None:
        if shape not in self.recorded:
            self.backend.warm_up(lambda: self.step(shape))
            self.recorded[shape] = None
            return
        replay = self.recorded[shape]
        if replay is None:
            replay = self.recorded[shape] = self.backend.record(lambda: self.step(shape))
        replay()
