"""R-Drop: two passes with different dropout are to agree (Liang et al. 2021, arXiv 2106.14448)."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from nmtkit.architectures import Architecture
from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss, with_auxiliary
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.linear_cross_entropy import output_cross_entropy
from nmtkit.packed import IGNORED, Batch
from nmtkit.registry import option

# T tokens, V vocabulary


@dataclass(frozen=True, kw_only=True)
class RDropConfig:
    label_smoothing: float = option(0.1, "Share of the target's probability spread evenly over the vocabulary.")
    r_drop_alpha: float = option(5.0, "Weight of the divergence between the two passes.")

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label-smoothing {self.label_smoothing} is not in [0, 1)")
        if self.r_drop_alpha < 0:
            raise ValueError(f"--r-drop-alpha {self.r_drop_alpha} is negative")


@CRITERIONS.register("r_drop", RDropConfig())
class RDrop(Criterion):
    """Smoothed cross-entropy and alpha / 2 times the symmetric Kullback-Leibler divergence of two passes.

    Half of the paper's equation 4 (the mean over the passes, not their sum), so that losses compare with those of the
    other criterions. Validation makes one pass: without dropout the two would be the same.
    """

    def __init__(self, config: RDropConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config = config

    def forward(self, model: Architecture, batch: Batch) -> Loss:
        smoothing = self.config.label_smoothing
        if not self.training:
            features = model(batch.source, batch.target_input)
            loss, nll = output_cross_entropy(model.output, features, batch.target_output, smoothing)
            return with_auxiliary(Loss(loss, {"nll": nll}), model)
        first = self._pass(model, batch)
        second = self._pass(model, batch)
        counted = batch.target_output != IGNORED
        divergence = symmetric_divergence(first[0], second[0], counted)
        total = (first[1].sum + second[1].sum) / 2 + self.config.r_drop_alpha / 2 * divergence
        counts = {name: (value + second[1].counts[name]) / 2 for name, value in first[1].counts.items()}
        return Loss(total, counts | {"divergence": divergence.detach()})

    def _pass(self, model: Architecture, batch: Batch) -> tuple[Tensor, Loss]:
        """Log-probabilities [T, V], which the divergence needs whole, and the loss from them."""
        log_p = F.log_softmax(model.output(model(batch.source, batch.target_input)).float(), -1)
        counted = batch.target_output != IGNORED
        nll = -log_p.gather(1, batch.target_output.clamp(min=0)[:, None])[:, 0].where(counted, 0).sum()
        uniform = -log_p.mean(-1).where(counted, 0).sum()
        smoothing = self.config.label_smoothing
        loss = (1 - smoothing) * nll + smoothing * uniform
        return log_p, with_auxiliary(Loss(loss, {"nll": nll.detach()}), model)


def symmetric_divergence(log_p: Tensor, log_q: Tensor, counted: Tensor) -> Tensor:
    """Sum over the counted tokens of (KL(p || q) + KL(q || p)) / 2; log_p, log_q T V, counted T."""
    # KL(p||q) + KL(q||p) = sum over V of (p - q)(log p - log q)
    per_token = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
    return per_token.where(counted, 0).sum() / 2
