"""The models of a search as one: what comes next, and how probable it is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.packed import Packed

# B sentences, N = B x beam rows, V target vocabulary


class Scorer:
    """One model, or several whose probabilities are averaged; keeps their states in step with the search."""

    def __init__(self, models: Sequence[Architecture], source: Packed, beam: int) -> None:
        self.models = models
        self.states = [model.start(model.encode(source), beam) for model in models]

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` [N]; returns the log probability of everything that may come next, N V.

        A row that is not finite (a model overflowed) gets no continuation: it is all -inf.
        """
        each = [model.step(tokens, state) for model, state in zip(self.models, self.states, strict=True)]
        log_probabilities = [
            (logits.clone() if len(each) > 1 else logits)
            if getattr(model.output_projection, "normalises", False)
            else logits.log_softmax(1, dtype=torch.float32)
            for model, logits in zip(self.models, each, strict=True)
        ]
        mean = log_probabilities[0]
        if len(each) > 1:
            mean = torch.stack(log_probabilities).logsumexp(0).sub_(math.log(len(each)))
        broken = mean[:, :1].isnan()  # one number that is none spoils its whole row
        return mean.masked_fill_(broken, -math.inf) if broken.any() else mean

    def reorder(self, beam_index: Tensor) -> None:
        for state in self.states:
            state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        for state in self.states:
            state.drop_finished(sentences)
