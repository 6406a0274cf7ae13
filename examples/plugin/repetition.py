"""Makes a token less likely if the hypothesis already has the token, against translations that repeat words."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.extend import LOGITS_PROCESSORS, Config, LogitsProcessor, LogitsProcessorState, Packed, Tokenizer, option


@dataclass(frozen=True, kw_only=True)
class RepetitionConfig(Config):
    repetition_penalty: float = option(0.5, "Subtracted from the log probability of a repeated token.", min=0)


class RepetitionState(LogitsProcessorState):
    def __init__(self, beams: int, penalty: float, seen: Tensor) -> None:
        super().__init__(beams)
        self.penalty, self.seen = penalty, seen  # N V, bool: tokens of each hypothesis

    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        self.seen[torch.arange(len(tokens)), tokens] = True
        return log_probs - self.penalty * self.seen

    def reorder(self, beam_index: Tensor) -> None:
        self.seen = self.seen[beam_index]


@LOGITS_PROCESSORS.register("repetition", RepetitionConfig())
class Repetition(LogitsProcessor):
    def __init__(self, config: RepetitionConfig, tokenizer: Tokenizer) -> None:
        self.penalty, self.size = config.repetition_penalty, tokenizer.target_size

    def start(self, source: Packed, max_length: Tensor, beams: int) -> RepetitionState:
        rows, device = source.layout.sentences * beams, source.values.device
        return RepetitionState(beams, self.penalty, torch.zeros(rows, self.size, dtype=torch.bool, device=device))
