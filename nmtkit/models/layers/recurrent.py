"""LSTM layers over packed sentences, and the attention of recurrent decoders.

Each layer serves training and decoding. If `states` has an entry for the layer, the layer continues from this entry and
replaces the entry. Otherwise the layer starts from zeros.
"""

import contextlib
import warnings
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers import multiplies_in_bf16

# B sentences, T target tokens, S source tokens, L and M tokens of the longest target and source sentence, R hypotheses
# of a sentence, N = B x R rows of a search (with teacher forcing R is 1)

LayerStates = dict[nn.Module, tuple[Tensor, ...]]  # per layer, one [N, …] tensor for each of its `state_shapes`


class PackedLSTM(nn.Module):
    """One LSTM layer (Hochreiter & Schmidhuber 1997) in one direction: [T, width] -> [T, hidden].

    Sentences are padded and computed in parallel. Padding follows the last token, so it does not change any output.
    With `reverse`, each sentence is reversed before and after the layer. With `projection`, the output of the cell is
    projected to width `projection` before it is fed back (Sak et al. 2014).

    Under bf16 autocast, the layer computes in fp32 on a CPU without bf16 products, where oneDNN has no bf16 LSTM.
    """

    def __init__(self, width: int, hidden: int, *, reverse: bool = False, projection: int = 0) -> None:
        super().__init__()
        self.reverse = reverse
        self.lstm = nn.LSTM(width, hidden, batch_first=True, proj_size=projection)
        if projection:  # suppresses a warning about a slower kernel, because there is no faster kernel
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        self.state_shapes = ((projection or hidden,), (hidden,))  # output and cell of the last step

    def forward(self, x: Tensor, layout: Layout, states: LayerStates | None = None) -> Tensor:
        order = reversal(layout) if self.reverse else None
        padded = Packed(x if order is None else x[order], layout).to_padded()  # [T, width] -> [N, L, width]
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and not multiplies_in_bf16():
            context, padded = torch.autocast("cpu", enabled=False), padded.float()
        with context:
            if states and self in states:
                assert not self.reverse and layout.uniform
                output, cell = (part.to(padded.dtype)[None] for part in states[self])
                y, (output, cell) = self.lstm(padded, (output, cell))
                states[self] = output[0], cell[0]
            else:
                y, _ = self.lstm(padded)
        y = Packed.from_padded(y, layout).values
        return y if order is None else y[order]

    def input_gates(self, x: Tensor, rows: int) -> Tensor:
        """Returns W x + b [T, rows] for the first `rows` rows of W: inputs of the gates without the recurrent part."""
        weight, bias = cast(Tensor, self.lstm.weight_ih_l0), cast(Tensor, self.lstm.bias_ih_l0)
        return F.linear(x, weight[:rows], bias[:rows])


class BidirectionalLSTM(nn.Module):
    """A forward and a backward LSTM layer, whose outputs are concatenated: [S, width] -> [S, 2 x output]."""

    def __init__(self, width: int, hidden: int, projection: int = 0) -> None:
        super().__init__()
        self.forwards = PackedLSTM(width, hidden, projection=projection)
        self.backwards = PackedLSTM(width, hidden, projection=projection, reverse=True)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return torch.cat([self.forwards(x, layout), self.backwards(x, layout)], -1)


def reversal(layout: Layout) -> Tensor:
    """Returns the token indices that reverse each sentence: T, int64. Applied twice, they restore the order."""
    first = layout.cu_seqlens.long()[:-1]
    return (2 * first + layout.lengths - 1)[layout.segment_ids] - torch.arange(layout.tokens, device=first.device)


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and cell from the pre-activations of the gates [N, 4 hidden], in torch's order i, f, g, o."""
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


# Attention


class AdditiveAttention(nn.Module):
    """Attention with score v · tanh(W query + U memory) (Bahdanau et al. 2015, appendix A.1.2)."""

    def __init__(self, query: int, memory: int, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(query, hidden)
        self.k_proj = nn.Linear(memory, hidden, bias=False)
        self.v = nn.Linear(hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Returns the terms of the scores that depend only on the memory: [… width] -> [… hidden]."""
        return self.k_proj(memory)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Returns scores [B, R, M] of queries [B, R, width] and keys [B, M, hidden]."""
        return self.v(torch.tanh(self.q_proj(query)[:, :, None] + keys[:, None]))[..., 0]


class ProductAttention(nn.Module):
    """Attention with score sum_d v_d tanh(W query)_d tanh(U memory)_d, in one product (Shazeer 2017, appendix G)."""

    def __init__(self, query: int, memory: int, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(query, hidden, bias=False)
        self.k_proj = nn.Linear(memory, hidden, bias=False)
        self.v = nn.Parameter(torch.empty(hidden).uniform_(-1, 1))

    def keys(self, memory: Tensor) -> Tensor:
        return torch.tanh(self.k_proj(memory))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return (torch.tanh(self.q_proj(query)) * self.v).to(keys.dtype) @ keys.transpose(1, 2)


class AttentionLSTMOutput(NamedTuple):
    output: Tensor  # [T, output]
    context: Tensor  # [T, memory width]: the attention context that the step of each token reads
    input_gates: Tensor  # [T, 4 hidden]: W x + C context, pre-activations of the gates without the recurrent part
    weights: Tensor  # [N, L, M]: attention weights, undefined beyond the end of a sentence


class AttentionLSTM(nn.Module):
    """An LSTM layer that attends to the memory at each token, with its previous output as the query.

    gates = W x_t + C context(h_{t-1}) + U h_{t-1}. The context depends on the previous output h_{t-1}, so tokens are
    computed one after another. W x is computed in one product for all tokens. With `projection`, the output is
    projected to width `projection`.
    """

    def __init__(
        self, width: int, hidden: int, attention: AdditiveAttention | ProductAttention, memory: int, projection: int = 0
    ) -> None:
        super().__init__()
        output = projection or hidden
        self.attention = attention
        self.input_proj = nn.Linear(width, 4 * hidden)
        self.context_proj = nn.Linear(memory, 4 * hidden, bias=False)
        self.recurrent_proj = nn.Linear(output, 4 * hidden, bias=False)
        self.out_proj = nn.Linear(hidden, projection, bias=False) if projection else nn.Identity()
        self.state_shapes = ((output,), (hidden,))
        for linear in (self.input_proj, self.context_proj, self.recurrent_proj):
            for parameter in linear.parameters():
                nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)  # same range as in torch's LSTM

    def forward(
        self, x: Tensor, layout: Layout, memory: Tensor, mask: Tensor, states: LayerStates | None = None
    ) -> AttentionLSTMOutput:
        """Runs the layer over x [T, width]. The N sentences of `layout` are R hypotheses for each of B memories.

        `memory` is the padded result of `with_keys`, [B, M, width + hidden]. `mask` [B, M] is true where the
        memory has a token.
        """
        values, keys = memory.tensor_split([self.context_proj.in_features], -1)
        gates = Packed(self.input_proj(x), layout).to_padded()  # [T, 4 hidden] -> [N, L, 4 hidden]
        if states and self in states:
            output, cell = (part.to(x.dtype) for part in states[self])
        else:
            output, cell = (x.new_zeros(layout.sentences, *shape) for shape in self.state_shapes)
        steps = []
        for token_gates in gates.unbind(1):
            context, weights = self.attend(output, values, keys, mask)
            input_gates = token_gates + self.context_proj(context)
            hidden, cell = lstm_cell(input_gates + self.recurrent_proj(output), cell)
            output = self.out_proj(hidden)
            steps.append((output, context, input_gates, weights))
        if states and self in states:
            states[self] = output, cell
        *padded, all_weights = (torch.stack(parts, 1) for parts in zip(*steps, strict=True))
        outputs, contexts, all_gates = (Packed.from_padded(part, layout).values for part in padded)
        return AttentionLSTMOutput(outputs, contexts, all_gates, all_weights)

    def with_keys(self, memory: Tensor) -> Tensor:
        """Returns the memory and the keys of the attention side by side: [S, width] -> [S, width + hidden]."""
        return torch.cat([memory, self.attention.keys(memory)], -1)

    def attend(self, query: Tensor, values: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns contexts [N, width] and weights [N, M] for queries [N, output]."""
        scores = self.attention.scores(query.unflatten(0, (len(values), -1)), keys)  # [B, R, M]
        weights = scores.float().masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        contexts = weights.to(values.dtype) @ values
        return contexts.flatten(0, 1), weights.flatten(0, 1)
