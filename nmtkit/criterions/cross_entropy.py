"""The negative log-likelihood of the target, plain and with label smoothing (Vaswani et al. 2017, section 5.4)."""

from dataclasses import dataclass

from nmtkit.architectures import Architecture
from nmtkit.criterions.interface import CRITERIONS, Criterion, Loss, with_auxiliary
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.linear_cross_entropy import output_cross_entropy
from nmtkit.packed import Batch
from nmtkit.registry import option


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig:
    """No settings."""


@dataclass(frozen=True, kw_only=True)
class LabelSmoothedConfig:
    label_smoothing: float = option(0.1, "Share of the target's probability spread evenly over the vocabulary.")

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label-smoothing {self.label_smoothing} is not in [0, 1)")


@CRITERIONS.register("label_smoothed_cross_entropy", LabelSmoothedConfig())
@CRITERIONS.register("cross_entropy", CrossEntropyConfig())
class CrossEntropy(Criterion):
    """-log p(target | source), with the target mixed with the uniform distribution when smoothed."""

    def __init__(self, config: CrossEntropyConfig | LabelSmoothedConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.label_smoothing = config.label_smoothing if isinstance(config, LabelSmoothedConfig) else 0.0

    def forward(self, model: Architecture, batch: Batch) -> Loss:
        features = model(batch.source, batch.target_input)
        loss, nll = output_cross_entropy(model.output_projection, features, batch.target_output, self.label_smoothing)
        return with_auxiliary(Loss(loss, {"nll": nll}), model)
