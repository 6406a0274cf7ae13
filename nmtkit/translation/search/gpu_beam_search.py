"""Beam search over a fixed number of slots. The tensors of the search stay on the device and never change shape.

`GraphBeamSearch.step` does the same as one step of `beam_search.Search`: both use the functions of `rules` and
`scorer`, in fp64. A step never waits for the device, so `StepRunner` can record it in a CUDA graph for each shape. From
time to time, the host reads `done`, takes results and inserts new sentences.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.logsumexp_gpu import logsumexp
from nmtkit.models.layers.static_kv_cache import CacheLengths
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import forbidden_tokens, is_over, length_penalty
from nmtkit.translation.search.scorer import BLOCK, Candidates, block_maxima, continuations, mean_log_probabilities

# B slots (or inserted sentences), R hypotheses of each, N = B x R rows, P positions (`CacheLengths.target` of them are
# in use), V target vocabulary, C candidates


class GraphBeamSearch:
    """A search over `slots` sentences at a time, with outputs of up to `capacity` - 1 tokens.

    Sources have up to `source_capacity` tokens. An empty slot counts as done.
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
        self.tokens = torch.full(open_shape, BOS, device=device)  # B R: the newest token of each hypothesis
        self.log_probability = torch.full(open_shape, -math.inf, dtype=torch.float64, device=device)
        self.history = torch.zeros(*open_shape, capacity, dtype=torch.int32, device=device)  # B R P: tokens so far
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)  # B: tokens in `history`
        self.max_length = torch.zeros_like(self.length)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        # the best finished hypotheses, best first: B nbest
        self.finished_score = torch.full(finished_shape, -math.inf, dtype=torch.float64, device=device)
        self.finished_log_probability = torch.zeros_like(self.finished_score)  # eos included
        self.finished_length = torch.zeros(finished_shape, dtype=torch.int64, device=device)
        self.finished_tokens = torch.zeros(*finished_shape, capacity, dtype=torch.int32, device=device)  # B nbest P

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + self.finished_tokens.nbytes + sum(state.nbytes for state in self.states)

    @torch.inference_mode()
    def insert(self, slots: Tensor, memories: Sequence[Packed], max_length: Tensor) -> None:
        """Starts sentences in `slots` [B] with the memories of all models and output lengths up to `max_length` [B]."""
        for state, memory in zip(self.states, memories, strict=True):
            state.insert(slots, memory)
        self.tokens.index_fill_(0, slots, BOS)
        self.log_probability.index_fill_(0, slots, -math.inf)
        self.log_probability[:, 0].index_fill_(0, slots, 0.0)  # other rows would be copies of row 0
        self.length.index_fill_(0, slots, 0)
        self.max_length.index_copy_(0, slots, max_length)
        self.finished_score.index_fill_(0, slots, -math.inf)
        self.done.index_fill_(0, slots, False)

    @torch.inference_mode()
    def results(self, slots: Tensor, longest: int) -> tuple[Tensor, ...]:
        """Returns scores, log probabilities, lengths [B, nbest] and tokens [B, nbest, longest] of `slots` [B].

        A score of -inf marks a hypothesis that does not exist.
        """
        parts = (self.finished_score, self.finished_log_probability, self.finished_length)
        return tuple(part.index_select(0, slots) for part in (*parts, self.finished_tokens[:, :, :longest]))

    @torch.inference_mode()
    def reset(self) -> None:
        """Drops all sentences."""
        self._end_step(torch.ones_like(self.done))

    @torch.inference_mode()
    def step(self, lengths: CacheLengths) -> None:
        """Adds a token to every open hypothesis. `lengths.target` must exceed the number of tokens of every slot."""
        candidates = self._candidates(*self._scores(lengths))
        self._finish(candidates.first(self.options.beam), lengths)
        parents = self._extend(candidates.unfinished(self.options.beam), lengths)
        for state in self.states:
            state.reorder(parents, lengths)
        self._end_step(self._is_done())

    def _scores(self, lengths: CacheLengths) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns scores of the next tokens [N, V], the normaliser [N] and the block maxima for `continuations`.

        Subtracting the normaliser turns the scores into log probabilities. The scores of a single model are its logits,
        because a log-softmax would read and write all logits again. The block maxima [N, blocks] are None if not
        computed.
        """
        tokens = self.tokens.flatten()
        logits = [
            model.static_step(tokens, self.length, state, lengths)
            for model, state in zip(self.models, self.states, strict=True)
        ]
        if len(logits) == 1:
            scores = logits[0]
            normalizer, maxima = logsumexp(scores, BLOCK)
        else:
            scores, maxima = mean_log_probabilities(logits), None
            normalizer = torch.zeros_like(scores[:, 0])
        for forbidden in forbidden_tokens(self.options):
            scores[:, forbidden].fill_(-math.inf)
        if self.options.min_len:
            short = (self.length < self.options.min_len)[:, None].expand_as(self.tokens).flatten()
            scores[:, EOS].masked_fill_(short, -math.inf)
        if maxima is not None and maxima.shape[1]:
            maxima[:, 0] = scores[:, :BLOCK].amax(1)  # the first block has the special tokens
        return scores, normalizer, maxima

    def _candidates(self, scores: Tensor, normalizer: Tensor, maxima: Tensor | None) -> Candidates:
        """Returns the 2R best continuations of each sentence, best first. At the maximum length, all are eos."""
        slots, beam = self.tokens.shape
        columns = scores.shape[1]
        scores = scores.view(slots, beam, columns)
        normalizer = normalizer.view(slots, beam).double()
        # if a normaliser is not finite, the model has overflowed
        before = (self.log_probability - normalizer).masked_fill_(~normalizer.isfinite(), -math.inf)
        if maxima is None:
            maxima = block_maxima(scores)
        best, index = continuations(scores, before, 2 * beam, maxima.view(slots, beam, -1))
        ends = (scores[:, :, EOS] + before).nan_to_num_(-math.inf, math.inf, -math.inf)
        ends, hypothesis = ends.sort(dim=1, descending=True, stable=True)
        padding = (0, best.shape[1] - beam)
        ends = torch.nn.functional.pad(ends, padding, value=-math.inf)
        hypothesis = torch.nn.functional.pad(hypothesis, padding)
        full = (self.length >= self.max_length)[:, None]
        return Candidates(
            torch.where(full, ends, best),
            torch.where(full, hypothesis, index // columns),
            (index % columns).masked_fill_(full, EOS),
        )

    def _finish(self, candidates: Candidates, lengths: CacheLengths) -> None:
        """Stores the candidates [B, R] that end and are among the `nbest` best outputs of their sentence."""
        score = candidates.final_scores(self._penalty(self.length + 1)[:, None])
        output = self.history[:, :, : lengths.target].gather(1, _expanded(candidates.beam_index, lengths.target))
        merged = torch.cat([self.finished_score, score], 1)
        # a stable sort puts the older of two hypotheses with the same score first
        order = merged.sort(dim=1, descending=True, stable=True).indices[:, : self.options.nbest]
        kept = self.finished_tokens[:, :, : lengths.target]
        kept.copy_(torch.cat([kept, output], 1).gather(1, _expanded(order, lengths.target)))
        self.finished_score.copy_(merged.gather(1, order))
        for field, new in (
            (self.finished_log_probability, candidates.log_probability),
            (self.finished_length, self.length[:, None].expand_as(score)),
        ):
            field.copy_(torch.cat([field, new], 1).gather(1, order))

    def _extend(self, candidates: Candidates, lengths: CacheLengths) -> Tensor:
        """Makes the candidates [B, R] the open hypotheses. Returns the parent [B, R] of each candidate."""
        parents = candidates.beam_index
        self.tokens.copy_(candidates.tokens)
        self.log_probability.copy_(candidates.log_probability)
        past = self.history[:, :, : lengths.target]
        new = past.gather(1, _expanded(parents, lengths.target))
        position = self.length[:, None, None].expand(-1, new.shape[1], 1)
        past.copy_(new.scatter_(2, position, self.tokens[:, :, None].to(new.dtype)))
        return parents

    def _is_done(self) -> Tensor:
        """Returns a bool for each slot, [B]: whether the search in the slot is over."""
        largest = torch.maximum(self._penalty(self.length + 2), self._penalty(self.max_length + 1))
        return is_over(self.log_probability, largest, self.finished_score[:, -1], greedy=self.options.beam == 1)

    def _penalty(self, tokens: Tensor) -> Tensor:
        """Returns the length penalty. Outputs have no language tokens, because the engine refuses prefixes."""
        return length_penalty(tokens, self.options.lenpen, language_tokens=0)

    def _end_step(self, done: Tensor) -> None:
        """Counts the step. Slots that are done stay at length 0, without open hypotheses."""
        self.done.logical_or_(done)
        self.length.add_(1).masked_fill_(self.done, 0)
        self.log_probability.masked_fill_(self.done[:, None], -math.inf)


def _expanded(index: Tensor, width: int) -> Tensor:
    """Expands an index [B, rows] to [B, rows, width], to gather whole rows."""
    return index[:, :, None].expand(-1, -1, width)


# --- recorded steps -------------------------------------------------------------------------------------------------

Work = Callable[[], None]


class Eager:
    """A backend that runs work without recording it, for CPUs and for comparisons with recorded graphs."""

    def warm_up(self, work: Work) -> None:
        """Runs the work once before recording, so that one-time set-up is not recorded."""
        work()

    def record(self, work: Work) -> Work:
        """Records the work without running it. Returns a function that replays the work."""
        return work


class CudaGraphs(Eager):
    """A backend that records CUDA graphs and replays them one after another on the current stream.

    The graphs share one memory pool. Sharing is safe, because no graph leaves a result in the pool for another graph.
    Steps write results to tensors that existed before the recording.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()

    def warm_up(self, work: Work) -> None:
        """Runs the work on the recording stream, because libraries keep a workspace for each stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # thread-local, because other threads, such as the input thread, may use the device at the same time
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class StepRunner:
    """Runs `step(lengths)`. The first run with new lengths is a warm-up. The second run records the step.

    All runs after the warm-up replay the recorded step.
    """

    def __init__(self, step: Callable[[CacheLengths], None], backend: Eager) -> None:
        self.step, self.backend = step, backend
        self.recorded: dict[CacheLengths, Work | None] = {}  # None after the warm-up, until the second run

    def __call__(self, lengths: CacheLengths) -> None:
        if lengths not in self.recorded:
            self.backend.warm_up(lambda: self.step(lengths))
            self.recorded[lengths] = None
            return
        replay = self.recorded[lengths]
        if replay is None:
            replay = self.recorded[lengths] = self.backend.record(lambda: self.step(lengths))
        replay()
