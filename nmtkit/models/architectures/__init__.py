"""The registered architectures. This package exports all names that a plug-in needs."""

from nmtkit.models.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary

# the modules below import these names and register presets, so they must come after the names
# isort: split
from nmtkit.models.architectures import bytenet, convs2s, deep_att, gnmt, moe, neural_gpu, transformer  # noqa: F401

__all__ = ["ARCHITECTURES", "Architecture", "DecoderState", "Vocabulary"]
