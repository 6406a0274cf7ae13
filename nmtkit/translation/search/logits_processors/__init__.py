"""Logits processors: components that change the log probabilities of the next tokens in every search."""

from nmtkit.translation.search.logits_processors.interface import (
    LOGITS_PROCESSORS,
    LogitsProcessor,
    LogitsProcessorState,
)

# the module below imports these names and registers processors, so the import must come after the names
# isort: split
from nmtkit.translation.search.logits_processors import second_model  # noqa: F401

__all__ = ["LOGITS_PROCESSORS", "LogitsProcessor", "LogitsProcessorState"]
