"""LSTM layers over packed sentences."""

import warnings
from typing import cast

import torch
from torch import Tensor, nn

from nmtkit.packed import Layout, Packed

# B sentences, T tokens in all of them, L tokens of the longest, N rows of a search, I width of the input, H of the cell

LSTMState = tuple[Tensor, ...]  # two tensors, output and cell of the last step: N O, N H


def backwards(layout: Layout) -> Tensor:
    """For each token the one that mirrors it in its sentence: T, int64. Its own inverse."""
    first = layout.cu_seqlens.long()[:-1]
    return (2 * first + layout.lengths - 1)[layout.segment_ids] - torch.arange(layout.tokens, device=first.device)


class PackedLSTM(nn.Module):
    """One LSTM layer (Hochreiter & Schmidhuber 1997), of either direction: T I -> T H.

    Sentences run side by side in a rectangle. What fills the cells behind a sentence's end comes after its last token
    and so changes nothing; a layer of the backward direction mirrors each sentence before and after. With `projection`
    the output of the cell is projected to that width before it is fed back (Sak et al. 2014).
    """

    def __init__(self, width: int, hidden: int, *, reverse: bool = False, projection: int = 0) -> None:
        super().__init__()
        self.reverse = reverse
        self.lstm = nn.LSTM(width, hidden, batch_first=True, proj_size=projection)
        if projection:  # nothing to mend: it only says that a slower kernel is used
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        self.state_shapes = ((projection or hidden,), (hidden,))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        order = backwards(layout) if self.reverse else None
        rectangle = Packed(x if order is None else x[order], layout).to_padded()  # T I -> B L I
        y = Packed.from_padded(self.lstm(rectangle)[0], layout).values
        return y if order is None else y[order]

    @property
    def input_parameters(self) -> tuple[Tensor, Tensor]:
        """Weight 4H I and bias 4H of the part of the gates that the input feeds."""
        return cast(Tensor, self.lstm.weight_ih_l0), cast(Tensor, self.lstm.bias_ih_l0)

    def step(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """The next token of N sentences: N I -> N H, and the state after it."""
        assert not self.reverse
        output, cell = (part.to(x.dtype)[None] for part in state)
        y, (output, cell) = self.lstm(x[:, None], (output, cell))
        return y[:, 0], (output[0], cell[0])


def lstm_cell(gates: Tensor, cell: Tensor) -> LSTMState:
    """Output and cell from the sums before the gates, N 4H, in torch's order: input, forget, new, output."""
    into, keep, new, out = gates.chunk(4, -1)
    cell = keep.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell
