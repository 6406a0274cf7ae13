"""The registered architectures. A plug-in needs no more than what this package exports."""

from nmtkit.architectures import bytenet, convs2s, deep_att, gnmt, moe, transformer  # noqa: F401  # register presets
from nmtkit.architectures.interface import ARCHITECTURES, Architecture, DecoderState, Vocabulary

__all__ = ["ARCHITECTURES", "Architecture", "DecoderState", "Vocabulary"]
