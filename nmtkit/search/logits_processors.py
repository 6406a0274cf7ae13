"""Registered logits processors: components that change the log probabilities of the next tokens in every search.

A processor may forbid tokens (-inf), lower log probabilities, or add those of another model (shallow fusion). Beam
search, sampling and the search of ensembles call it at each step.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nmtkit.layers.packed import Packed
from nmtkit.registry import Registry

# B sentences still in the search, R hypotheses of each, N = B x R rows, V target vocabulary


class LogitsProcessorState(ABC):
    """State of a processor for the hypotheses of one search. The methods change the state in place."""

    def __init__(self, beams: int) -> None:
        self.beams = beams  # R

    @abstractmethod
    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Appends `tokens` [N] to the hypotheses, first bos; returns the changed log probabilities [N, V].

        `log_probs` [N, V] in fp32 are those of the next tokens, and may be overwritten. Values must be at most 0:
        search ends when no open hypothesis can still win, and counts on scores that only fall.
        """

    @abstractmethod
    def reorder(self, beam_index: Tensor) -> None:
        """Row n continues row beam_index[n], which belongs to the same sentence: N, int64."""

    def drop_finished(self, sentences: Tensor) -> None:
        """Keeps only `sentences` (indices, ascending) of the sentences in the search."""
        rows = sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)
        self.reorder(rows.flatten())


class LogitsProcessor(ABC):
    """A registered processor. Factories are called as `factory(config, tokenizer)`."""

    @abstractmethod
    def start(self, source: Packed, max_length: Tensor, beams: int) -> LogitsProcessorState:
        """Returns the state before the first token of `beams` hypotheses for each of B sentences.

        `source` holds the ids of the sentences, eos last. `max_length` [B] is the most tokens of an output, without
        eos. Rows are sentence-major: row n belongs to sentence n // beams.
        """


LOGITS_PROCESSORS: Registry[LogitsProcessor] = Registry("logits processor", "--logits-processors", several=True)
