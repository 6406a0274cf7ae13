"""Cross-entropy of the target with label smoothing, and R-Drop and SimCut, which compare two passes."""

from dataclasses import dataclass

from torch import Tensor

from nmtkit.config import Config, option
from nmtkit.data.packed import Batch
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.dropout import token_cutoff
from nmtkit.models.layers.losses import output_cross_entropy, output_two_pass_loss
from nmtkit.training.criterions.interface import CRITERIONS, Criterion, Loss


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(Config):
    """Plain cross-entropy has no settings."""


@dataclass(frozen=True, kw_only=True)
class LabelSmoothedConfig(Config):
    label_smoothing: float = option(
        0.1, "Share of the target probability that is spread evenly over the vocabulary.", min=0, below=1
    )


@dataclass(frozen=True, kw_only=True)
class RDropConfig(LabelSmoothedConfig):
    r_drop_alpha: float = option(5.0, "Weight of the divergence between the two passes.", min=0)


@dataclass(frozen=True, kw_only=True)
class SimCutConfig(LabelSmoothedConfig):
    simcut_alpha: float = option(3.0, "Weight of the divergence between the two passes.", min=0)
    simcut_rate: float = option(0.05, "Share of the tokens whose embedding is zero in the second pass.", min=0, max=1)


@CRITERIONS.register("label_smoothed_cross_entropy", LabelSmoothedConfig())
@CRITERIONS.register("cross_entropy", CrossEntropyConfig())
class CrossEntropy(Criterion):
    """Cross-entropy -log p(target | source). Label smoothing mixes the target with the uniform distribution.

    Source: Vaswani et al. 2017, section 5.4.
    """

    def __init__(self, config: CrossEntropyConfig | LabelSmoothedConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.label_smoothing = config.label_smoothing if isinstance(config, LabelSmoothedConfig) else 0.0

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        features = model(batch.source, batch.target_input)
        loss, nll = output_cross_entropy(model.output_projection, features, batch.target_output, self.label_smoothing)
        return Loss(loss, {"nll": nll})


class TwoPasses(CrossEntropy):
    """Smoothed cross-entropy plus the divergence between two passes. Validation makes a single pass."""

    passes = 2.0
    share: float  # `output_two_pass_loss` explains `share` and `alpha`
    alpha: float

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        if not self.training:
            return super().compute_loss(model, batch)
        first, second = model(batch.source, batch.target_input), self.second_pass(model, batch)
        output, target, smoothing = model.output_projection, batch.target_output, self.label_smoothing
        loss, nll, divergence = output_two_pass_loss(
            output, first, second, target, smoothing, share=self.share, alpha=self.alpha
        )
        return Loss(loss, {"nll": nll, "divergence": divergence})

    def second_pass(self, model: Architecture, batch: Batch) -> Tensor:
        """Returns the features of the second pass, a tensor [tokens, model width]."""
        return model(batch.source, batch.target_input)


@CRITERIONS.register("r_drop", RDropConfig())
class RDrop(TwoPasses):
    """Smoothed cross-entropy plus alpha / 2 times the symmetric Kullback-Leibler divergence of two dropout passes.

    This loss is half of equation 4 of Liang et al. (2021, arXiv 2106.14448). It is the mean over the two passes instead
    of the sum, so that the loss is comparable with the losses of other criterions. Validation makes a single pass,
    because without dropout both passes would be equal.
    """

    share = 0.5

    def __init__(self, config: RDropConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.alpha = config.r_drop_alpha / 2


@CRITERIONS.register("simcut", SimCutConfig())
class SimCut(TwoPasses):
    """Smoothed cross-entropy plus alpha times the Kullback-Leibler divergences KL(p || q) + KL(q || p) of two passes.

    p and q are the distributions of the first and the second pass. In the second pass, the embedding of each source and
    target token is zero with probability `simcut_rate` (Gao et al. 2022, "Bi-SimCut", equations 5 and 6). Both passes
    have dropout and gradients. Validation makes a single pass.
    """

    share = 0.0

    def __init__(self, config: SimCutConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.alpha, self.rate = 2 * config.simcut_alpha, config.simcut_rate

    def second_pass(self, model: Architecture, batch: Batch) -> Tensor:
        with token_cutoff(model.token_embeddings(), self.rate):
            return super().second_pass(model, batch)
