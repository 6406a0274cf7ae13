"""Attention with one hidden layer, and the LSTM that asks it at every step."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmtkit.layers.recurrent import LSTMState, lstm_cell
from nmtkit.packed import Layout, Packed

# B sentences, S tokens of the longest source, L of the longest target, T tokens of all targets, Q queries a sentence
# D width of the memory, A hidden width of the attention, H width of a cell, I width of its input


class AdditiveAttention(nn.Module):
    """score = v · tanh(W query + U memory) (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, query: int, memory: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, hidden)
        self.key = nn.Linear(memory, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """What scores need of the memory, computed once: … D -> … A."""
        return self.key(memory)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """B Q H, B S A -> B Q S."""
        return self.score(torch.tanh(self.query(query)[:, :, None] + keys[:, None]))[..., 0]


class ProductAttention(nn.Module):
    """score = sum over d of v_d tanh(W query)_d tanh(U memory)_d, one product (Shazeer et al. 2017, appendix G)."""

    def __init__(self, query: int, memory: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, hidden, bias=False)
        self.key = nn.Linear(memory, hidden, bias=False)
        self.score = nn.Parameter(torch.empty(hidden).uniform_(-1, 1))

    def keys(self, memory: Tensor) -> Tensor:
        return torch.tanh(self.key(memory))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return (torch.tanh(self.query(query)) * self.score).to(keys.dtype) @ keys.transpose(1, 2)


def attend(scores: Tensor, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Contexts B Q D, and the weights B Q S, of scores B Q S over values B S D; valid B S says which exist."""
    weights = scores.float().masked_fill(~valid[:, None], -torch.inf).softmax(-1)
    return weights.to(values.dtype) @ values, weights


class Reading(NamedTuple):
    """What an AttentiveLSTM leaves of each target token."""

    output: Tensor  # T H
    context: Tensor  # T D, of this token: what the cell read beside its input
    fed: Tensor  # T 4H, the feed-forward part of the gates: W x + C context, before the recurrent part is added
    weights: Tensor  # B L S, of the attention; rows behind a sentence's end have no meaning


class AttentiveLSTM(nn.Module):
    """An LSTM layer that reads the memory before each token, asking with its own output of the token before.

    gates = W x_t + C context(h_{t-1}) + R h_{t-1}. The context depends on the output before, so tokens go one by one;
    what does not depend on it, W x, is one product for all. With `projection` the output is projected to that width.
    """

    def __init__(
        self, width: int, hidden: int, attention: AdditiveAttention | ProductAttention, memory: int, projection: int = 0
    ) -> None:
        super().__init__()
        output = projection or hidden
        self.attention = attention
        self.input = nn.Linear(width, 4 * hidden)
        self.context = nn.Linear(memory, 4 * hidden, bias=False)
        self.recurrent = nn.Linear(output, 4 * hidden, bias=False)
        self.projection = nn.Linear(hidden, projection, bias=False) if projection else nn.Identity()
        self.state_shapes = ((output,), (hidden,))
        for weight in (*self.input.parameters(), *self.context.parameters(), *self.recurrent.parameters()):
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)  # as torch's LSTM

    def forward(self, x: Tensor, layout: Layout, memory: Packed, keys: Packed) -> Reading:
        """x T I, memory values S D, keys (of `attention.keys`) on the same layout."""
        inputs = Packed(self.input(x), layout).to_padded()  # B L 4H
        values, scored, valid = memory.to_padded(), keys.to_padded(), memory.layout.mask
        output, cell = (x.new_zeros(layout.sentences, *shape) for shape in self.state_shapes)
        steps = []
        for gates in inputs.unbind(1):
            output, cell, context, fed, weights = self._read(gates, (output, cell), values, scored, valid, 1)
            steps.append((output, context, fed, weights))
        output, context, fed, weights = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        output, context, fed = (Packed.from_padded(part, layout).values for part in (output, context, fed))
        return Reading(output, context, fed, weights)

    def step(
        self, x: Tensor, state: LSTMState, memory: Tensor, keys: Tensor, valid: Tensor
    ) -> tuple[Reading, LSTMState]:
        """The next token of N = B x beams rows: x N I, memory B S D, keys B S A, valid B S."""
        beams = x.shape[0] // memory.shape[0]
        state = tuple(part.to(x.dtype) for part in state)
        output, cell, context, fed, weights = self._read(self.input(x), state, memory, keys, valid, beams)
        return Reading(output, context, fed, weights[:, None]), (output, cell)

    def _read(
        self, gates: Tensor, state: LSTMState, values: Tensor, keys: Tensor, valid: Tensor, queries: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """One step of B x queries rows: output, cell, context, fed, and weights N S."""
        output, cell = state
        scores = self.attention.scores(output.unflatten(0, (-1, queries)), keys)
        context, weights = (part.flatten(0, 1) for part in attend(scores, values, valid))
        fed = gates + self.context(context)
        output, cell = lstm_cell(fed + self.recurrent(output), cell)
        return self.projection(output), cell, context, fed, weights
