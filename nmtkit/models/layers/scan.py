"""Recurrences over packed sentences that need no matrix product between two tokens.

There are two recurrences: c_t = f_t c_{t-1} + (1 - f_t) x_t, the state of an SSRU (Kim et al. 2019, section 3.1), and
the average of the tokens so far (Zhang et al. 2018, equation 1). Both states are zero before the first token of a
sentence. Sums are taken in the dtype of the input; callers pass fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.data.packed import Layout, Packed

# B sentences, T tokens, L tokens of the longest sentence, D width of the state


def gated_scan(x: Tensor, forget: Tensor, layout: Layout) -> Tensor:
    """Returns c_t = forget_t c_{t-1} + (1 - forget_t) x_t within each sentence: T D, T D -> T D.

    `forget` is between 0 and 1, so that no term grows and any order of summation is stable.
    """
    update = torch.addcmul(x, forget, x, value=-1)
    if torch.compiler.is_compiling():
        padded = (Packed(part, layout).to_padded() for part in (update, forget))
        return Packed.from_padded(parallel_scan(*padded), layout).values
    return _Scan.apply(update, forget, layout)  # type: ignore[no-untyped-call]


def running_average(x: Tensor, layout: Layout) -> Tensor:
    """Returns the average of the tokens up to each token, within each sentence: T D -> T D."""
    padded = Packed(x, layout).to_padded()
    count = torch.arange(1, padded.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
    return Packed.from_padded(padded.cumsum(1) / count, layout).values


def sequential_scan_(update: Tensor, forget: Tensor, reverse: bool = False) -> Tensor:
    """Overwrites u (`update`) with c_t = f_t c_{t-1} + u_t, where f is `forget`: B L D.

    If `reverse`, c_t = f_{t+1} c_{t+1} + u_t. There is one operation for each token of the longest sentence.
    """
    states, gates = update.unbind(1), forget.unbind(1)
    states, gates = (states[::-1], gates[:0:-1]) if reverse else (states, gates[1:])
    for before, state, gate in zip(states, states[1:], gates, strict=False):
        state.addcmul_(gate, before)
    return update


def parallel_scan(update: Tensor, forget: Tensor) -> Tensor:
    """Returns c_t = f_t c_{t-1} + u_t for u = `update` and f = `forget`, by doubling (Hillis and Steele 1986): B L D.

    After n rounds, each token has the terms of the last 2^n tokens. On a GPU and in compiled code, log2(L)
    operations on all tokens are faster than L operations on one token of each sentence.
    """
    span, length = 1, update.shape[1]
    while span < length:
        later = torch.addcmul(update[:, span:], forget[:, span:], update[:, :-span])
        update = torch.cat([update[:, :span], later], 1)
        forget = torch.cat([forget[:, :span], forget[:, span:] * forget[:, :-span]], 1)
        span *= 2
    return update


class _Scan(torch.autograd.Function):
    """The scan as one autograd node. If g is the gradient of c, the gradient of u_t is G_t = g_t + f_{t+1} G_{t+1}."""

    @staticmethod
    def forward(ctx: Any, update: Tensor, forget: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        padded, gates = (_padded(part, layout) for part in (update, forget))
        states = parallel_scan(padded, gates) if update.is_cuda else sequential_scan_(padded, gates)
        ctx.save_for_backward(gates, states)
        return Packed.from_padded(states, layout).values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gates, states = ctx.saved_tensors
        padded = _padded(gradient, ctx.layout)
        if gradient.is_cuda:
            later_gates = F.pad(gates[:, 1:], (0, 0, 0, 1))
            total = parallel_scan(padded.flip(1), later_gates.flip(1)).flip(1)
        else:
            total = sequential_scan_(padded, gates, reverse=True)
        of_gates = F.pad(total[:, 1:] * states[:, :-1], (0, 0, 1, 0))  # the state before the first token is zero
        return *(Packed.from_padded(part, ctx.layout).values for part in (total, of_gates)), None


def _padded(x: Tensor, layout: Layout) -> Tensor:
    """Returns x [T, D] as a new tensor B L D with zeros as padding."""
    padded = Packed(x, layout).to_padded()
    return padded.clone() if layout.uniform else padded
