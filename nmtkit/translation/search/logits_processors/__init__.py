"""Registered logits processors: components that change the log probabilities of the next tokens in every search.

A processor may forbid tokens (-inf), lower log probabilities, or add the log probabilities of another model (shallow
fusion). Beam search, sampling and the search of ensembles call all processors at each step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.config.registry import Registry
from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Architecture

# B sentences still in the search, R hypotheses of each, N = B x R rows, V target vocabulary


class LogitsProcessorState(ABC):
    """The state of a processor for the hypotheses of one search. Methods change the state in place."""

    def __init__(self, beams: int) -> None:
        self.beams = beams  # number of hypotheses of each sentence

    @abstractmethod
    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Appends `tokens` [N] to the hypotheses and returns the changed log probabilities [N, V] of the next tokens.

        At the first step, `tokens` are bos. `log_probs` [N, V] in fp32 may be overwritten. Returned values must be at
        most 0, because the search assumes that scores never increase. The search ends when no open hypothesis can win.
        """

    @abstractmethod
    def reorder(self, beam_index: Tensor) -> None:
        """Makes row n continue the hypothesis of row beam_index[n], in the same sentence. `beam_index` is int64 [N]."""

    def drop_finished(self, sentences: Tensor) -> None:
        """Keeps only the sentences with the ascending indices `sentences` in the search."""
        rows = sentences[:, None] * self.beams + torch.arange(self.beams, device=sentences.device)
        self.reorder(rows.flatten())


class LogitsProcessor(ABC):
    """A registered processor. Factories are called as `factory(config, tokenizer)`."""

    models: Sequence[Architecture] = ()  # models that the processor runs; their positions limit sources and outputs

    @abstractmethod
    def start(self, source: Packed, max_length: Tensor, beams: int) -> LogitsProcessorState:
        """Returns the state before the first token of `beams` hypotheses for each of B sentences.

        `source` holds the ids of the sentences, eos last. `max_length` [B] is the largest number of tokens of
        an output, without eos. Rows are sentence-major: row n belongs to sentence n // beams.
        """

    def check_models(self, checkpoints: Sequence[Path]) -> None:  # noqa: B027  # most processors have an effect on every search
        """Raises ValueError if the processor has no effect on a search with the models of `checkpoints`."""


LOGITS_PROCESSORS: Registry[LogitsProcessor] = Registry("logits processor", "--logits-processors", several=True)

# the module below imports these names and registers processors, so the import must come after the names
# isort: split
from nmtkit.translation.search.logits_processors import second_model  # noqa: E402, F401
