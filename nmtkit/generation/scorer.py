"""The models of a search as one: what comes next, and how probable it is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.packed import Packed

# B sentences, N = B x beam rows, V target vocabulary

BLOCK = 32  # rows normalised together


class Scorer:
    """One model, or several whose probabilities are averaged; keeps their states in step with the search."""

    def __init__(self, models: Sequence[Architecture], source: Packed, beam: int) -> None:
        self.models = models
        self.states = [model.start(model.encode(source), beam) for model in models]

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [N]; returns the log probability of everything that may come next, N V.

        A row that is not finite (a model overflowed) gets no continuation: it is all -inf.
        """
        each = [log_softmax_(model.step(tokens, state)) for model, state in zip(self.models, self.states, strict=True)]
        mean = each[0] if len(each) == 1 else torch.stack(each).logsumexp(0).sub_(math.log(len(each)))
        broken = mean[:, :1].isnan()  # a single NaN spoils its whole row
        return mean.masked_fill_(broken, -math.inf) if broken.any() else mean

    def reorder(self, beam_index: Tensor) -> None:
        for state in self.states:
            state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        for state in self.states:
            state.drop_finished(sentences)


def log_softmax_(logits: Tensor) -> Tensor:
    """Returns the log probabilities of `logits` [N, V] in fp32, in the memory of the logits where these are fp32.

    On a CPU they are normalised a few rows at a time, which stay in the processor's cache: 8 % of a projection of 128
    rows onto 37,000 entries.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.log_softmax(1, dtype=torch.float32)
    for rows in logits.split(BLOCK):
        torch.log_softmax(rows, 1, out=rows)
    return logits
