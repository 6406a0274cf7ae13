"""nmtkit: neural machine translation from raw parallel text to a score you can believe."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Translator", "__version__"]

if TYPE_CHECKING:
    from nmtkit.generation.translator import Translator


def __getattr__(name: str) -> Any:
    # Lazy, so that `import nmtkit` and the command line's first line of help do not wait for torch.
    if name == "Translator":
        from nmtkit.generation.translator import Translator

        return Translator
    raise AttributeError(f"module 'nmtkit' has no attribute {name!r}")
