"""Cross-entropy with less weight on easy words: (1 - p)^gamma * -log p (Lin et al. 2017, equation 4)."""

from dataclasses import dataclass

from torch.nn import functional as F

from nmtkit.extend import CRITERIONS, IGNORE_INDEX, Architecture, Batch, Config, Criterion, Loss, Tokenizer, option


@dataclass(frozen=True, kw_only=True)
class FocalConfig(Config):
    focal_gamma: float = option(2.0, "Exponent of 1 - p; 0 is plain cross-entropy.", min=0, max=10)


@CRITERIONS.register("focal_loss", FocalConfig())
class FocalLoss(Criterion):
    def __init__(self, config: FocalConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.gamma = config.focal_gamma

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        logits = model.output_projection(model(batch.source, batch.target_input)).float()  # T V
        nll = F.cross_entropy(logits, batch.target_output, reduction="none", ignore_index=IGNORE_INDEX)  # T
        weight = (1 - (-nll).exp()) ** self.gamma
        return Loss((weight * nll).sum(), {"nll": nll.detach().sum()})
