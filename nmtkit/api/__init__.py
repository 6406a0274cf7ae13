"""nmtkit in Python: what the commands do, as functions; `import nmtkit` has all of it, and loads torch only when used.

Settings have the names of the flags, with underscores (`--max-len-a` is `max_len_a`), and are checked as flags are: an
unknown one is a ValueError that names the nearest, and so are a wrong type and a number out of range. Nothing is
printed; what the commands say goes to the logger "nmtkit".
"""

from nmtkit.api.commands import average, preprocess, score
from nmtkit.api.model import Model, load
from nmtkit.api.training import TrainingResult, train
from nmtkit.translation.requests import Request, Translation

__all__ = ["Model", "Request", "TrainingResult", "Translation", "average", "load", "preprocess", "score", "train"]
