"""The registered architectures. This package exports all names that a plug-in needs."""

from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary

# architectures import these names, so the import of architectures must come after them
# isort: split
from nmtkit.architectures import bytenet, convs2s, deep_att, gnmt, moe, neural_gpu, transformer  # noqa: F401  # register presets

__all__ = ["ARCHITECTURES", "Architecture", "DecoderState", "Vocabulary"]
