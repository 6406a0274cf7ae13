"""The output projection of two passes, their cross-entropies, and how far their distributions are apart."""

from typing import Any

import torch
from torch import Tensor, nn

from nmtkit.layers.linear_cross_entropy import CHUNK_BYTES, CHUNK_BYTES_GPU, cross_entropy
from nmtkit.packed import IGNORE_INDEX

# T tokens, R of them in a chunk, D model width, V vocabulary; p and q the distributions of the two passes


def output_r_drop_loss(
    output: nn.Module, first: Tensor, second: Tensor, target: Tensor, label_smoothing: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the tokens of T (those with target `IGNORE_INDEX` left out) of loss, negative log-likelihood,
    divergence.

    The likelihood is the mean of both passes', the divergence (KL(p || q) + KL(q || p)) / 2, and the loss

        mean of both passes' label-smoothed cross-entropy + alpha / 2 * divergence

    Natural logarithms. first and second, the passes' features, T D, target T -> three scalars; the last two, for the
    log, carry no gradient. With an nn.Linear as `output`, the logits of all tokens never exist at one time.
    """
    if type(output) is nn.Linear:
        arguments = first, second, output.weight, output.bias, target, label_smoothing, alpha
        return _LinearAgreement.apply(*arguments)  # type: ignore[no-untyped-call]
    first, second = output(first), output(second)
    first_loss, first_nll = cross_entropy(first, target, label_smoothing)
    second_loss, second_nll = cross_entropy(second, target, label_smoothing)
    divergence = symmetric_divergence(
        first.float().log_softmax(-1), second.float().log_softmax(-1), target != IGNORE_INDEX
    )
    loss = (first_loss + second_loss) / 2 + alpha / 2 * divergence
    return loss, (first_nll + second_nll) / 2, divergence.detach()


def symmetric_divergence(log_p: Tensor, log_q: Tensor, counted: Tensor) -> Tensor:
    """Sum over the counted tokens of (KL(p || q) + KL(q || p)) / 2; log_p, log_q T V, counted T."""
    # KL(p || q) + KL(q || p) = sum over V of (p - q)(log p - log q)
    per_token = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
    return per_token.where(counted, 0).sum() / 2


class _LinearAgreement(torch.autograd.Function):
    """Goes through the tokens in chunks, and takes the gradients of each while its logits are at hand.

    By the logits of p, the gradient of a row's divergence is (p (log p - log q - KL(p || q)) + p - q) / 2, and that
    of its cross-entropy p - eps / V - (1 - eps) [k = target].
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        first: Tensor,
        second: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        label_smoothing: float,
        alpha: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = first.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else first.dtype
        ctx.feature_type = first.dtype
        passes, w = (first.to(dtype), second.to(dtype)), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        ctx.feature_gradients = tuple(torch.empty_like(x) for x in passes)
        ctx.weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        ctx.bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        loss = nll = divergence = torch.zeros((), device=first.device)
        rows = max(1, (CHUNK_BYTES if device == "cpu" else CHUNK_BYTES_GPU) // (len(w) * 4))
        for start in range(0, len(target), rows):
            stretch = slice(start, start + rows)
            counted, goal = target[stretch] != IGNORE_INDEX, target[stretch].clamp(min=0)[:, None]
            logs = [torch.nn.functional.linear(x[stretch], w, b).float().log_softmax(-1) for x in passes]  # R V
            p, q = (log.exp() for log in logs)
            row_nll = (logs[0].gather(1, goal) + logs[1].gather(1, goal))[:, 0] / -2
            row_uniform = (logs[0].mean(-1) + logs[1].mean(-1)) / -2
            ratio = logs[0].sub_(logs[1])
            divergences = (p * ratio).sum(-1, keepdim=True), (q * ratio).sum(-1, keepdim=True).neg_()  # R 1
            row_divergence = (divergences[0] + divergences[1])[:, 0] / 2
            row_loss = (1 - label_smoothing) * row_nll + label_smoothing * row_uniform + alpha / 2 * row_divergence
            loss = loss + row_loss.where(counted, 0).sum()
            nll = nll + row_nll.where(counted, 0).sum()
            divergence = divergence + row_divergence.where(counted, 0).sum()
            # of p's logits: p / 2 + alpha / 4 (p (1 + ratio - KL(p || q)) - q) - eps / 2V - (1 - eps) / 2 [k = target]
            factors = ratio.add(1 - divergences[0]), ratio.neg().add_(1 - divergences[1])
            for number, (own, other, factor) in enumerate(((p, q, factors[0]), (q, p, factors[1]))):
                gradient = factor.mul_(alpha / 4).add_(0.5).mul_(own).sub_(other, alpha=alpha / 4)
                gradient.sub_(label_smoothing / (2 * len(w)))
                gradient.scatter_add_(1, goal, gradient.new_full(goal.shape, (label_smoothing - 1) / 2))
                gradient = gradient.mul_(counted[:, None]).to(dtype)
                torch.mm(gradient, w, out=ctx.feature_gradients[number][stretch])
                ctx.weight_gradient.add_(gradient.t() @ passes[number][stretch])
                if ctx.bias_gradient is not None:
                    ctx.bias_gradient += gradient.sum(0, dtype=torch.float32)
        ctx.mark_non_differentiable(nll, divergence)
        return loss, nll, divergence

    @staticmethod
    def backward(ctx, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        first, second = ((part.float() * gradient).to(ctx.feature_type) for part in ctx.feature_gradients)
        bias = None if ctx.bias_gradient is None else ctx.bias_gradient * gradient
        return first, second, ctx.weight_gradient * gradient, bias, None, None, None
