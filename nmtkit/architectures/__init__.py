"""The registered architectures. A plug-in needs no more than what this package exports."""

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary

# names that architectures import from here must stand above the architectures
# isort: split
from nmtkit.architectures import bytenet, convs2s, deep_att, gnmt, moe, neural_gpu, transformer  # noqa: F401  # register presets

__all__ = ["ARCHITECTURES", "Architecture", "DecoderState", "Vocabulary"]
