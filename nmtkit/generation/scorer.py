"""The models of a search as one: what comes next, and how probable it is."""

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

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Appends `tokens` [N]; returns `logits` [N, V] and `norm` [N]: log p(next) = logits - norm.

        A row whose norm is not finite (a model that overflowed) gets no continuation: its logits are all -inf.
        """
        if len(self.models) == 1:
            logits = self.models[0].step(tokens, self.states[0]).float()
            norm = logits.logsumexp(1)
        else:
            each = [model.step(tokens, state).float() for model, state in zip(self.models, self.states, strict=True)]
            stacked = torch.stack([one.log_softmax(1) for one in each])
            logits = stacked.logsumexp(0).sub_(torch.log(torch.tensor(float(len(each)))).item())
            norm = logits.new_zeros(len(logits))
        broken = ~norm.isfinite() | logits[:, 0].isnan()
        if broken.any():
            logits = logits.masked_fill(broken[:, None], float("-inf"))
            norm = norm.masked_fill(broken, 0.0)
        return logits, norm

    def select(self, parents: Tensor) -> None:
        for state in self.states:
            state.select(parents)

    def keep(self, sentences: Tensor) -> None:
        for state in self.states:
            state.keep(sentences)
