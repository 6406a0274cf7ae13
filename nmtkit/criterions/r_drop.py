"""R-Drop: two passes with different dropout are to agree (Liang et al. 2021, arXiv 2106.14448)."""

from dataclasses import dataclass

from nmtkit.architectures import Architecture
from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss, with_auxiliary
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.linear_cross_entropy import output_cross_entropy
from nmtkit.layers.r_drop_loss import output_r_drop_loss
from nmtkit.packed import Batch
from nmtkit.registry import option


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
            loss, nll = output_cross_entropy(model.output_projection, features, batch.target_output, smoothing)
            return with_auxiliary(Loss(loss, {"nll": nll}), model)
        first, of_first = model(batch.source, batch.target_input), model.auxiliary_losses()
        second, of_second = model(batch.source, batch.target_input), model.auxiliary_losses()
        loss, nll, divergence = output_r_drop_loss(
            model.output_projection, first, second, batch.target_output, smoothing, self.config.r_drop_alpha
        )
        counts = {"nll": nll, "divergence": divergence}
        for name in of_first:
            mean = (of_first[name] + of_second[name]) / 2
            loss, counts[name] = loss + mean, mean.detach()
        return Loss(loss, counts)
