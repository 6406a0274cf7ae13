"""The commands of nmtkit as Python functions. `import nmtkit` provides these functions, and loads torch when
one of them is first used.

Settings have the names of the flags, with underscores (`--max-len-a` is `max_len_a`), and are checked like flags. An
unknown name, a wrong type and a number out of range raise ValueError. For an unknown name, the message suggests the
most similar name. Nothing is printed; messages go to the logger "nmtkit".
"""

from nmtkit.api.commands import average, preprocess, score
from nmtkit.api.model import Model, load
from nmtkit.api.training import train
from nmtkit.training.run import TrainingResult
from nmtkit.translation.search.types import Request, Translation

__all__ = ["Model", "Request", "TrainingResult", "Translation", "average", "load", "preprocess", "score", "train"]
