"""Log probabilities of the next tokens in a search, from one model or several."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.jobs import distributed
from nmtkit.models.architectures.contract import described
from nmtkit.models.architectures.interface import DecoderState
from nmtkit.translation.search.logits_processors import LogitsProcessor, LogitsProcessorState

# B sentences still in the search, R hypotheses of each, N = B x R rows, V target vocabulary

SOFTMAX_ROWS = 32  # number of rows that are normalised at a time on a CPU
EXP_ROWS = 16  # number of rows whose exponentials are computed at a time on a CPU
# Up to this many logits, one log-softmax is faster than the operations of `logsumexp`: 3 times as fast for 4 x 400
# logits, 1.4 times as fast for 4 x 10,000. For 16 x 10,000, both take the same time (AVX2, one thread).
FEW_LOGITS = 1 << 16
POSITIVE = 1e-4  # a log probability above this limit is not a rounding error
LOG2_E = 1 / math.log(2)


def log_softmax_(logits: Tensor) -> Tensor:
    """Returns the log probabilities of `logits` [N, V] in fp32. Logits in fp32 on a CPU are overwritten.

    A CPU normalises a few rows at a time, which stay in the cache of the processor. This saves 8 % of the time of a
    projection of 128 rows to 37,000 columns.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.log_softmax(1, dtype=torch.float32)
    for rows in logits.split(SOFTMAX_ROWS):
        torch.log_softmax(rows, 1, out=rows)
    return logits


def mean_log_probabilities(logits: Sequence[Tensor]) -> Tensor:
    """Returns the logarithm of the mean probabilities of several models in fp32. The logits [N, V] are overwritten."""
    each = [log_softmax_(model_logits) for model_logits in logits]
    return each[0] if len(each) == 1 else torch.stack(each).logsumexp(0).sub_(math.log(len(each)))


def logsumexp(logits: Tensor) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each row of `logits` [N, V] in fp32: N.

    The result is not finite where a sum overflows. The exponentials are powers of two, computed for a few rows at a
    time, which stay in the cache of the processor. This takes half the time of a log-softmax.
    """
    space = torch.empty_like(logits[:EXP_ROWS])
    sums = [torch.mul(x, LOG2_E, out=space[: x.shape[0]]).exp2_().sum(1) for x in logits.split(EXP_ROWS)]
    return (sums[0] if len(sums) == 1 else torch.cat(sums)).log_()


class SearchModel(Protocol):
    """The part of an architecture that a search uses."""

    max_target_positions: int | None

    def encode(self, source: Packed) -> Packed: ...

    def start(self, memory: Packed, beams: int) -> DecoderState: ...

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor: ...


class Scorer:
    """Scores continuations with one model, or with the mean probabilities of several models. Keeps decoder states.

    `processors` change the log probabilities one after another. `max_length` [B] is the maximum length of an output.
    """

    def __init__(
        self,
        models: Sequence[SearchModel],
        source: Packed,
        beams: int,
        processors: Sequence[LogitsProcessor] = (),
        max_length: Tensor | None = None,
    ) -> None:
        self.models = models
        self.states = [model.start(model.encode(source), beams) for model in models]
        self.processors = processors
        self.processor_states: list[LogitsProcessorState] = []
        if max_length is not None:
            self.processor_states = [processor.start(source, max_length, beams) for processor in processors]

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [N]. Returns the log probabilities of the next tokens, N V.

        If a model overflows, its rows of NaN become -inf, so the hypotheses of these rows have no continuation.
        """
        log_probs = self.log_probabilities(self.logits(tokens))
        for processor, state in zip(self.processors, self.processor_states, strict=True):
            shape, result = log_probs.shape, state.step(tokens, log_probs)
            name = type(processor).__name__
            if not isinstance(result, Tensor) or result.shape != shape:
                raise ValueError(
                    f"step of {name} returned {described(result)}; it must return log probabilities [N, V] of shape "
                    f"{list(shape)}"
                )
            if (result > POSITIVE).any():
                raise ValueError(f"{name} returned log probabilities above 0; search needs values of at most 0")
            log_probs = result
        return log_probs

    def step_unnormalized(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Appends `tokens` [N]. Returns scores N V and a normaliser N. Scores minus normaliser are log probabilities.

        The normaliser is None if the scores are log probabilities. If a single model on a CPU has many logits, the
        scores are the logits, which saves writing the log probabilities of all tokens.
        """
        if self.processors:
            return self.step(tokens), None
        logits = self.logits(tokens)
        many = len(logits) == 1 and logits[0].numel() > FEW_LOGITS
        if many and logits[0].device.type == "cpu" and logits[0].dtype == torch.float32:
            normalizer = logsumexp(logits[0])
            if math.isfinite(normalizer.sum().item()):
                return logits[0], normalizer
        return self.log_probabilities(logits), None

    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Appends `tokens` [N]. Returns the logits of each model, N V."""
        distributed.heartbeat()
        return [model.step(tokens, state) for model, state in zip(self.models, self.states, strict=True)]

    def log_probabilities(self, logits: Sequence[Tensor]) -> Tensor:
        mean = mean_log_probabilities(logits)
        column = mean[:, 0]
        if math.isnan((column if len(mean) == 1 else column.sum()).item()):  # a NaN makes all numbers of its row NaN
            mean.masked_fill_(mean[:, :1].isnan(), -math.inf)
        return mean

    def reorder(self, beam_index: Tensor) -> None:
        for state in self.states:
            state.reorder(beam_index)
        for processor_state in self.processor_states:
            processor_state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        for state in self.states:
            state.drop_finished(sentences)
        for processor_state in self.processor_states:
            processor_state.drop_finished(sentences)
