"""Pickles of other toolkits, read without running code of theirs: tensors, plain containers, and settings as dicts.

torch.load(weights_only=True) builds tensors and containers only. The settings beside them are objects of argparse and,
in newer files, of omegaconf and fairseq; for these stands `Inert`, which keeps what the file says and does nothing.
"""

import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

# names that the pickle may speak of, whole or by package; nothing of them is imported or called
HARMLESS = ["argparse.Namespace", "collections.defaultdict", "typing.Any", "pathlib.PosixPath", "pathlib.PurePosixPath"]
HARMLESS += [f"builtins.{name}" for name in ("dict", "list", "int", "str", "float", "bool", "tuple")]
PACKAGES = ("omegaconf", "fairseq")


class Inert:
    """Stands for an object of any class in a pickle: the arguments it was made with, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, {}

    def __new__(cls, *arguments: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(path: Path) -> dict[str, Any]:
    """Returns what torch.save wrote. Raises ValueError naming what would run code, or for a damaged file."""
    allowed = list(HARMLESS)
    with suppress(Exception):  # of the format before torch 1.6, or damaged: `torch.load` will tell
        allowed += [name for name in get_unsafe_globals_in_checkpoint(str(path)) if name.split(".")[0] in PACKAGES]
    try:
        with safe_globals([(Inert, name) for name in allowed]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # of many types, for files that are not what they should be
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found:
            raise ValueError(
                f"{path} asks for {found[1].rstrip(',')}, which is no part of a model; it was not imported, and "
                "nothing of the file was run"
            ) from error
        raise ValueError(f"{path} is no checkpoint of PyTorch, or is damaged or incomplete") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds a {type(contents).__name__}, and no checkpoint")
    return contents


def plain(value: Any) -> Any:
    """Returns settings as dicts, lists and values: attributes, a DictConfig's entries, an enum's value."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if not isinstance(value, Inert):
        return value
    state = value.state
    if isinstance(state, tuple):  # of an object with __slots__
        state = {key: entry for part in state if isinstance(part, dict) for key, entry in part.items()}
    if not isinstance(state, dict):
        return None
    for key in ("_content", "_val"):  # of omegaconf's containers and nodes
        if key in state:
            return plain(state[key])
    if not state and value.arguments:  # a member of an enum
        return plain(value.arguments[0])
    return plain(state)
