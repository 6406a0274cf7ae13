"""Shallow fusion: a search adds the log probabilities of a language model to its scores.

Source: Gulcehre et al. 2015, "On Using Monolingual Corpora in Neural Machine Translation", section 4.1.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nmtkit.config import Config, option
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.building import check_language_model
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS
from nmtkit.translation.search.second_model import SecondModel


@dataclass(frozen=True, kw_only=True)
class LMFusionConfig(Config):
    """A language model and its weight."""

    lm: Path | None = option(None, "checkpoint of a language model with the same target vocabulary", metavar="FILE")
    lm_weight: float = option(
        0.2, "weight of the log probabilities of the language model; the translation model has weight 1", min=0, max=100
    )


@LOGITS_PROCESSORS.register("lm_fusion", LMFusionConfig())
class LMFusion(SecondModel):
    """Ranks outputs y by log p(y | x) + weight * log p_lm(y). Both log probabilities include eos.

    The language model keeps its state between the steps of a search.

    Raises ValueError if the checkpoint is not a language model, or has other target pieces than `tokenizer`.
    """

    def __init__(self, config: LMFusionConfig, tokenizer: Tokenizer) -> None:
        if config.lm is None:
            raise ValueError("--logits-processors lm_fusion needs --lm FILE, the checkpoint of a language model")
        advice = "preprocess the text of the language model with --tokenizer-from CHECKPOINT of the translation model"
        super().__init__(config.lm, "--lm", tokenizer, advice)
        check_language_model(config.lm, self.model)
        self.weight = config.lm_weight

    def combine(self, log_probs: Tensor, second: Tensor) -> Tensor:
        return log_probs.add_(second, alpha=self.weight)
