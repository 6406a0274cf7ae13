"""nmtkit: neural machine translation from raw parallel text to a score you can believe.

Names of `nmtkit.api` are imported at their first use, so `import nmtkit` does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nmtkit.config import moved

__version__ = "0.1.0"
__all__ = ["Model", "Request", "TrainingResult", "Translation", "__version__"]
__all__ += ["average", "load", "preprocess", "score", "train"]

if TYPE_CHECKING:
    from nmtkit.api import Model, Request, TrainingResult, Translation, average, load, preprocess, score, train

moved.install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("nmtkit.api"), name)
    raise AttributeError(f"module 'nmtkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
