"""The output projection and the label-smoothed cross-entropy behind it, summed over tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.packed import IGNORE_INDEX

# T tokens, R of them in a chunk, D model width, V vocabulary

CHUNK_BYTES = 8 << 20  # logits held at a time on a CPU: a chunk stays in its last-level cache
CHUNK_BYTES_GPU = 1 << 30


def output_cross_entropy(
    output: nn.Module, features: Tensor, target: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of T (those with target `IGNORE_INDEX` left out) of the smoothed loss, and of the plain one.

    The target distribution is mixed with the uniform one over all V entries, u(k) = 1 / V (Szegedy et al. 2015,
    section 7), so with eps = `label_smoothing` a token's loss is

        (1 - eps) * -log p(target) + eps / V * sum over the vocabulary of -log p(k)

    Natural logarithms. features T D, target T -> two scalars; the second, for the log, carries no gradient. With an
    nn.Linear as `output`, the logits of all tokens never exist at one time.
    """
    if type(output) is nn.Linear:
        arguments = features, output.weight, output.bias, target, label_smoothing
        return _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return cross_entropy(output(features), target, label_smoothing)


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """What `output_cross_entropy` computes, given the logits T V."""
    log_probabilities = F.log_softmax(logits.float(), -1)
    counted = target != IGNORE_INDEX
    nll = -log_probabilities.gather(1, target.clamp(min=0)[:, None])[:, 0].where(counted, 0).sum()
    if not label_smoothing:
        return nll, nll.detach()
    uniform = -log_probabilities.mean(-1).where(counted, 0).sum()
    return (1 - label_smoothing) * nll + label_smoothing * uniform, nll.detach()


class _LinearCrossEntropy(torch.autograd.Function):
    """Goes through the tokens in chunks, and takes the gradients of each while its logits are at hand.

    With p the softmax of a row's logits, the gradient of its loss by them is p - eps / V - (1 - eps) [k = target].
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, features: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        device = features.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        ctx.feature_type = features.dtype
        x, w = features.to(dtype), weight.to(dtype)
        needed = any(ctx.needs_input_grad)
        gradients = None
        if needed:
            gradients = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if needed and bias is not None else None
        # the sum of a row's logits, for the uniform part, is its product with the sum of the weight's rows
        total = w.sum(0, dtype=torch.float32)
        bias_total = bias.float().sum() if bias is not None else 0.0
        rows = max(1, (CHUNK_BYTES if device == "cpu" else CHUNK_BYTES_GPU) // (len(w) * x.element_size()))
        loss = nll = torch.zeros((), device=x.device)
        for start in range(0, len(x), rows):
            part, goal = x[start : start + rows], target[start : start + rows]
            counted, goal = goal != IGNORE_INDEX, goal.clamp(min=0)[:, None]
            logits = part @ w.t() if bias is None else torch.addmm(bias.to(dtype), part, w.t())  # R V
            chosen = logits.gather(1, goal)[:, 0].float()
            top = logits.amax(-1).float()
            p = torch.softmax(logits, -1, out=logits)
            normaliser = top - p.amax(-1).float().log()
            row_nll = (normaliser - chosen).where(counted, 0)
            mean_logit = (part.float() @ total + bias_total) / len(w)
            row_uniform = (normaliser - mean_logit).where(counted, 0)
            nll = nll + row_nll.sum()
            loss = loss + ((1 - label_smoothing) * row_nll + label_smoothing * row_uniform).sum()
            if gradients is None:
                continue
            at_target = (chosen - normaliser).exp() - (1 - label_smoothing) - label_smoothing / len(w)
            p.sub_(label_smoothing / len(w)).scatter_(1, goal, at_target[:, None].to(dtype))
            # to ask whether it is needed would stop a compiler, and wait for a GPU
            if device != "cpu" or torch.compiler.is_compiling() or not counted.all():
                p.mul_(counted[:, None])
            torch.mm(p, w, out=gradients[0][start : start + rows])
            gradients[1].add_(p.t() @ part)
            if bias_gradient is not None:
                bias_gradient += p.sum(0, dtype=torch.float32)
        ctx.gradients, ctx.bias_gradient = gradients, bias_gradient
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        features, weight = ctx.gradients
        bias = ctx.bias_gradient
        scaled_bias = None if bias is None else bias * gradient
        # in 32 bits, lest the rounding of `gradient` itself, 1 / tokens, scale all that lies below
        scaled = (features.float() * gradient).to(ctx.feature_type)
        return scaled, weight * gradient, scaled_bias, None, None
