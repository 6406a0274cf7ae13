"""The files of examples/parsing are scripts beside each other: their folder is put on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/parsing"))
