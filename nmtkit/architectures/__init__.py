"""The registered architectures. A plug-in needs no more than what this package exports."""

from nmtkit.architectures import transformer  # noqa: F401  # registers its presets
from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary

__all__ = ["ARCHITECTURES", "Architecture", "DecoderState", "Vocabulary"]
