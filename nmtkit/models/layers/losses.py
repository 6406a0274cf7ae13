"""The output projection fused with label-smoothed cross-entropy, or with a loss that compares two passes.

If the output projection is an `nn.Linear`, tokens are processed in chunks. The gradients of a chunk are computed in the
forward pass, so that the logits of all tokens never exist at the same time. Losses are sums over the tokens whose
target is not `IGNORE_INDEX`, in natural logarithms. The target distribution is mixed with the uniform distribution over
the vocabulary, u(k) = 1 / V (Szegedy et al. 2015, section 7). With eps = `label_smoothing`, the loss of a token is

    (1 - eps) * -log p(target) + eps / V * sum over the vocabulary of -log p(k)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.data.packed import IGNORE_INDEX
from nmtkit.models.layers import compute_dtype, is_unmodified
from nmtkit.models.layers.shape_padding import pad_rows

# T tokens, D model width, V vocabulary; p and q are the distributions of two passes

CHUNK_BYTES = 8 << 20  # maximum bytes of the logits of a chunk on a CPU, which fit into the last-level cache
CHUNK_BYTES_GPU = 1 << 30
# Minimum tokens of a chunk on a CPU, because each chunk reads and writes the gradient of the weight, V x D in fp32.
# With this minimum, 1,024 tokens at V = 37,000 take 0.9 s instead of 1.5 s on one core in bf16, and 1.6 to 1.8 s
# instead of 2.6 to 2.9 s in fp32.
MIN_CHUNK_TOKENS = 416
CHUNK_STEP = 32
ADDED_AT_ONCE = 1 << 19  # number of elements of a gradient that are added at a time


def output_cross_entropy(
    output: nn.Module, features: Tensor, target: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the smoothed losses, and the sum of the negative log-likelihoods (without gradient).

    `output` maps features [T, D] to logits [T, V]. `target` is [T].
    """
    if is_unmodified(output, nn.Linear):
        features = pad_rows(features)
        target = F.pad(target, (0, len(features) - len(target)), value=IGNORE_INDEX)  # padding rows have no loss
        arguments = features, output.weight, output.bias, target, label_smoothing, torch.is_grad_enabled()
        return _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return cross_entropy(output(features), target, label_smoothing)


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Computes `output_cross_entropy` from logits [T, V], without fusion."""
    log_p = F.log_softmax(logits.float(), -1)
    mask = target != IGNORE_INDEX
    nll = -log_p.gather(1, target.clamp(min=0)[:, None])[:, 0].where(mask, 0).sum()
    if not label_smoothing:
        return nll, nll.detach()
    uniform = -log_p.mean(-1).where(mask, 0).sum()
    return (1 - label_smoothing) * nll + label_smoothing * uniform, nll.detach()


def output_two_pass_loss(
    output: nn.Module, first: Tensor, second: Tensor, target: Tensor, smoothing: float, *, share: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, the negative log-likelihood and the divergence of two passes, summed over tokens.

    Only the loss has a gradient. p and q are the distributions of the first and the second pass. The divergence is
    (KL(p || q) + KL(q || p)) / 2. The loss is

        label-smoothed cross-entropy + alpha * divergence

    Cross-entropy and negative log-likelihood are weighted means of the passes. The second pass has the weight `share`.
    `output` maps the features [T, D] of a pass to logits [T, V]. `target` is [T].
    """
    if is_unmodified(output, nn.Linear):
        first, second = pad_rows(first), pad_rows(second)
        target = F.pad(target, (0, len(first) - len(target)), value=IGNORE_INDEX)  # padding rows have no loss
        settings = smoothing, share, alpha, torch.is_grad_enabled()
        arguments = first, second, output.weight, output.bias, target, *settings
        return _LinearTwoPassLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    first, second = output(first), output(second)
    first_loss, first_nll = cross_entropy(first, target, smoothing)
    second_loss, second_nll = cross_entropy(second, target, smoothing)
    log_p, log_q = first.float().log_softmax(-1), second.float().log_softmax(-1)
    # KL(p || q) + KL(q || p) = sum over V of (p - q)(log p - log q)
    by_token = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
    divergence = by_token.where(target != IGNORE_INDEX, 0).sum() / 2
    loss = (1 - share) * first_loss + share * second_loss + alpha * divergence
    return loss, (1 - share) * first_nll + share * second_nll, divergence.detach()


def _chunks(target: Tensor, token_bytes: int) -> list[slice]:
    """Splits tokens into chunks whose logits have at most `CHUNK_BYTES` bytes (`CHUNK_BYTES_GPU` on a GPU).

    `token_bytes` is the size of the logits of a token. On a CPU, a chunk has at least `MIN_CHUNK_TOKENS` tokens, even
    if its logits are larger.

    On a CPU, each chunk has one of few sizes, because oneDNN compiles three products for every new size, which takes
    20 ms with a vocabulary of 6,000. All chunks except the last have the same size, a multiple of `CHUNK_STEP`. The
    last chunk has few possible sizes if `pad_rows` has rounded the number of tokens up.
    """
    on_cpu = target.device.type == "cpu"
    size = max(MIN_CHUNK_TOKENS if on_cpu else 1, (CHUNK_BYTES if on_cpu else CHUNK_BYTES_GPU) // token_bytes)
    size -= size % CHUNK_STEP if on_cpu else 0
    return [slice(start, start + size) for start in range(0, len(target), size)]


class _Gradients:
    """Gradients of a loss with respect to features, weight and bias, summed chunk by chunk.

    Every element of the gradient with respect to logits contains the term -eps / V. In bf16, rounding would remove this
    term. So the rows passed to `add` do not contain this term. Two other sums replace this term: -eps / V times the sum
    of the rows of the weight is added to the gradient of the features, and -eps / V times the sum of the features is
    added to the gradient of the weight. `shares` are the weights of the passes in the cross-entropy.
    """

    def __init__(
        self,
        passes: tuple[Tensor, ...],
        weight: Tensor,
        bias: Tensor | None,
        mask: Tensor,
        smoothing: float,
        shares: tuple[float, ...] = (1.0,),
    ) -> None:
        uniform = smoothing / len(weight)
        weighted = zip(shares, passes, strict=True)
        feature_sum = torch.stack([s * (x * mask[:, None]).sum(0, dtype=torch.float32) for s, x in weighted]).sum(0)
        weight_sum = weight.sum(0, dtype=torch.float32)
        self.weight_sums = [(weight_sum * (-uniform * share)).to(weight.dtype) for share in shares]
        self.features = tuple(torch.empty_like(x) for x in passes)
        self.weight = (feature_sum * -uniform).expand(weight.shape).clone()
        self.bias = None if bias is None else (mask.sum() * -uniform).expand(bias.shape).clone()

    def add(self, number: int, chunk: slice, rows: Tensor, x: Tensor, weight: Tensor, mask: Tensor) -> None:
        """Adds the gradients of a chunk of pass `number`. `rows` [tokens, V] is the gradient of the logits.

        x [tokens, D] are the features of the chunk. Tokens outside `mask` get no gradient.
        """
        features = torch.addmm(self.weight_sums[number], rows, weight, out=self.features[number][chunk])
        # an `if` on the mask would break a compiled graph, and would wait for a GPU
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not mask.all():
            features.mul_(mask[:, None])
            x = x * mask[:, None]
            rows = rows if self.bias is None else rows * mask[:, None]
        _add_(self.weight, rows.t() @ x)
        if self.bias is not None:
            self.bias += rows.sum(0, dtype=torch.float32)

    def scaled(self, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Returns the gradients times `scale`, the gradient of the loss. A second call raises RuntimeError.

        Gradients of features are multiplied in fp32 and then converted to `dtype`, because rounding a scale of 1 /
        tokens to bf16 would bias every gradient.
        """
        if not hasattr(self, "weight"):
            raise RuntimeError("a second backward pass through this loss is not possible; compute the loss again")
        features = tuple((part.float() * scale).to(dtype) for part in self.features)
        weight, bias = self.weight, self.bias
        if torch.compiler.is_compiling():
            return *features, weight * scale, None if bias is None else bias * scale
        del self.weight, self.bias  # the next line scales both in place, so a second call would return wrong gradients
        return *features, weight.mul_(scale), None if bias is None else bias.mul_(scale)


def _add_(total: Tensor, part: Tensor) -> None:
    """Adds `part` to `total`, both [V, D].

    If dtypes differ, torch on a CPU converts `part` before the sum. So rows are added in groups whose converted copy
    fits into the cache.
    """
    if part.dtype == total.dtype or part.device.type != "cpu" or torch.compiler.is_compiling():
        total.add_(part)
        return
    rows = max(ADDED_AT_ONCE // total.shape[1], 1)
    for into, rows_of_part in zip(total.split(rows), part.split(rows), strict=True):
        into.add_(rows_of_part)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, *, previous: Tensor | None) -> Tensor:
    """Returns the logits [tokens, V] of a chunk x [tokens, D].

    `previous` are the logits of the previous chunk, or None. Their memory is overwritten and returned, because a CPU
    takes longer to write to new memory, which is not in its cache. This makes the loss of transformer_tiny 1.04 to 1.18
    times as fast.
    """
    if previous is None or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    out = previous[: len(x)]
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _softmax_(logits: Tensor, labels: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turns logits [tokens, V] into probabilities in place. Also returns the log probabilities of the labels in fp32.

    On a CPU, log probabilities are computed from the (rounded) probabilities. This is as exact as a computation from
    the logits, and saves two passes over the logits. If a label has a tiny probability, the logits of its token are
    computed again.
    """
    # an `if` on label probabilities would break a compiled graph, and would wait for a GPU
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        p = torch.softmax(logits, -1, out=logits)
        label_p = p.gather(1, labels)[:, 0].float()
        log_p = label_p.log()
        least = torch.finfo(p.dtype).tiny * 1024
        if label_p.min() < least:
            lost = (label_p < least).nonzero()[:, 0]  # tokens whose probabilities have lost precision
            exact = F.linear(x[lost], weight, bias).float().log_softmax(-1)
            log_p[lost] = exact.gather(1, labels[lost])[:, 0]
        return p, log_p
    label_logits, largest = logits.gather(1, labels)[:, 0].float(), logits.amax(-1).float()
    p = torch.softmax(logits, -1, out=logits)
    return p, label_logits - largest + p.amax(-1).float().log()


class _LinearCrossEntropy(torch.autograd.Function):
    """The fused cross-entropy. The gradient of logit k of a token is p(k) - eps / V - (1 - eps) [k = target].

    p is the softmax of the logits. `needs_gradient` is true if the caller has gradients enabled. The caller passes this
    fact as an argument, because torch disables gradients inside a Function.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        label_smoothing: float,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(features)
        ctx.feature_dtype = features.dtype
        x, w = features.to(dtype), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        mask = target != IGNORE_INDEX
        needed = needs_gradient and any(ctx.needs_input_grad)
        gradients = _Gradients((x,), w, bias, mask, label_smoothing) if needed else None
        # the uniform part needs the sum of the logits of a token: the product of x with the sum of the rows of the
        # weight
        weight_sum = w.sum(0, dtype=torch.float32)
        bias_sum = bias.float().sum() if bias is not None else 0.0
        loss = nll = torch.zeros((), device=x.device)
        logits = None
        for chunk in _chunks(target, len(w) * x.element_size()):
            labels = target[chunk].clamp(min=0)[:, None]
            logits = _logits(x[chunk], w, b, previous=logits)
            label_logits = logits.gather(1, labels)[:, 0].float()
            p, log_p = _softmax_(logits, labels, x[chunk], w, b)
            token_nll = (-log_p).where(mask[chunk], 0)
            mean_logit = (x[chunk].float() @ weight_sum + bias_sum) / len(w)
            token_uniform = (label_logits - log_p - mean_logit).where(mask[chunk], 0)
            nll = nll + token_nll.sum()
            loss = loss + ((1 - label_smoothing) * token_nll + label_smoothing * token_uniform).sum()
            if gradients is not None:
                at_label = log_p.exp() - (1 - label_smoothing)
                # on a CPU, torch's scatter_ would convert all of p to fp32 and back
                p.index_put_((torch.arange(len(p), device=p.device), labels[:, 0]), at_label.to(dtype))
                gradients.add(0, chunk, p, x[chunk], w, mask[chunk])
        ctx.gradients = gradients
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        return *ctx.gradients.scaled(gradient, ctx.feature_dtype), None, None, None


class _LinearTwoPassLoss(torch.autograd.Function):
    """The loss of `output_two_pass_loss`, fused with the output projection.

    The gradients of a token with respect to the logits of pass p are

        divergence:     (p (log p - log q - KL(p || q)) + p - q) / 2
        cross-entropy:  p - eps / V - (1 - eps) [k = target]
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
        share: float,
        alpha: float,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = compute_dtype(first)
        ctx.feature_dtype = first.dtype
        passes, w = (first.to(dtype), second.to(dtype)), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        mask = target != IGNORE_INDEX
        needed = needs_gradient and any(ctx.needs_input_grad)
        shares = 1 - share, share
        gradients = _Gradients(passes, w, bias, mask, label_smoothing, shares) if needed else None
        loss = nll = divergence = torch.zeros((), device=first.device)
        for chunk in _chunks(target, len(w) * 4):
            labels = target[chunk].clamp(min=0)[:, None]
            logs = [F.linear(x[chunk], w, b).float().log_softmax(-1) for x in passes]  # [tokens, V]
            p, q = (log.exp() for log in logs)
            first_log_p, second_log_p = (log.gather(1, labels)[:, 0] for log in logs)
            token_nll = -torch.lerp(first_log_p, second_log_p, share)
            token_uniform = -torch.lerp(logs[0].mean(-1), logs[1].mean(-1), share)
            ratio = logs[0].sub_(logs[1])
            kl_pq, kl_qp = (p * ratio).sum(-1, keepdim=True), (q * ratio).sum(-1, keepdim=True).neg_()
            token_divergence = (kl_pq + kl_qp)[:, 0] / 2
            token_loss = (1 - label_smoothing) * token_nll + label_smoothing * token_uniform
            loss = loss + (token_loss + alpha * token_divergence).where(mask[chunk], 0).sum()
            nll = nll + token_nll.where(mask[chunk], 0).sum()
            divergence = divergence + token_divergence.where(mask[chunk], 0).sum()
            if gradients is None:
                continue
            # gradient of the logits of p, with its share s:
            # s (p - eps / V - (1 - eps) [k = target]) + alpha / 2 (p (1 + ratio - KL(p || q)) - q)
            factors = ratio.add(1 - kl_pq), ratio.neg().add_(1 - kl_qp)
            for number, (probabilities, other, factor) in enumerate(((p, q, factors[0]), (q, p, factors[1]))):
                s = shares[number]
                rows = factor.mul_(alpha / 2).add_(s).mul_(probabilities).sub_(other, alpha=alpha / 2)
                rows.scatter_add_(1, labels, rows.new_full(labels.shape, s * (label_smoothing - 1)))
                gradients.add(number, chunk, rows.to(dtype), passes[number][chunk], w, mask[chunk])
        ctx.gradients = gradients
        ctx.mark_non_differentiable(nll, divergence)
        return loss, nll, divergence

    @staticmethod
    def backward(ctx, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        return *ctx.gradients.scaled(gradient, ctx.feature_dtype), None, None, None, None, None
