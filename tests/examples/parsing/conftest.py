"""Adds the folder examples/parsing to the path, because its scripts import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/parsing"))
