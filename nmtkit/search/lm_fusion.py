"""Shallow fusion: a search adds the log probabilities of a language model to its scores.

Source: Gulcehre et al. 2015, "On Using Monolingual Corpora in Neural Machine Translation", section 4.1.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nmtkit import models
from nmtkit.architectures import Architecture
from nmtkit.architectures.interface import DecoderState
from nmtkit.config import Config, option
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.layers.packed import Packed
from nmtkit.layers.prepack import prepack
from nmtkit.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState

# N rows of a search, V target vocabulary


@dataclass(frozen=True, kw_only=True)
class LMFusionConfig(Config):
    """A language model and its weight."""

    lm: Path | None = option(None, "checkpoint of a language model with the same target vocabulary", metavar="FILE")
    lm_weight: float = option(
        0.2, "weight of the log probabilities of the language model; the translation model has weight 1", min=0, max=100
    )


class FusionState(LogitsProcessorState):
    """The decoder state of the language model for the hypotheses of a search."""

    def __init__(self, model: Architecture, state: DecoderState, weight: float, beams: int) -> None:
        super().__init__(beams)
        self.model, self.state, self.weight = model, state, weight

    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        logits = self.model.step(tokens, self.state)
        return log_probs.add_(logits.log_softmax(1, dtype=torch.float32), alpha=self.weight)

    def reorder(self, beam_index: Tensor) -> None:
        self.state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        self.state.drop_finished(sentences)


@LOGITS_PROCESSORS.register("lm_fusion", LMFusionConfig())
class LMFusion(LogitsProcessor):
    """Ranks outputs y by log p(y | x) + weight * log p_lm(y). Both log probabilities include eos.

    The language model keeps its state between the steps of a search.

    Raises ValueError if the checkpoint is not a language model, or has other target pieces than `tokenizer`.
    """

    def __init__(self, config: LMFusionConfig, tokenizer: Tokenizer) -> None:
        if config.lm is None:
            raise ValueError("--logits-processors lm_fusion needs --lm FILE, the checkpoint of a language model")
        model, other = models.from_checkpoint(config.lm)
        models.check_language_model(config.lm, model)
        sizes = other.target_size, tokenizer.target_size
        if sizes[0] != sizes[1] or other.target_pieces(range(sizes[0])) != tokenizer.target_pieces(range(sizes[1])):
            raise ValueError(
                f"--lm {config.lm} has other target pieces than the translation model ({sizes[0]:,} and {sizes[1]:,}); "
                "preprocess the text of the language model with --tokenizer-from and the translation model"
            )
        self.path, self.model, self.weight = config.lm, model.requires_grad_(False), config.lm_weight
        self.device: torch.device | None = None  # device of the model; None before the first search

    def start(self, source: Packed, max_length: Tensor, beams: int) -> FusionState:
        device, limit = source.values.device, self.model.max_target_positions
        if limit is not None and int(max_length.max()) >= limit:
            raise ValueError(
                f"--lm {self.path} has learned {limit} positions, and an output may have {int(max_length.max())} "
                "pieces and eos; lower --max-len-a and --max-len-b"
            )
        if self.device is None and device.type == "cpu":
            with torch.inference_mode():
                prepack(self.model, "fp32")
        if self.device != device:
            self.device = device
            self.model.to(device)
        return FusionState(self.model, self.model.start(self.model.encode(source), beams), self.weight, beams)
