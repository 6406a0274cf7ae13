"""Reads tensors, plain containers and settings from pickles of other toolkits. Does not run code from the file.

torch.load(weights_only=True) builds only tensors and plain containers. But the settings are objects of argparse, or of
omegaconf and fairseq in newer files. `PickledObject` replaces the classes of these objects.
"""

import re
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from nmtkit.models.formats.reading import check_file

# `PickledObject` replaces these classes and all classes of some packages, so they are never imported or called.
HARMLESS = ["argparse.Namespace", "collections.defaultdict", "typing.Any", "pathlib.PosixPath", "pathlib.PurePosixPath"]
HARMLESS += [f"builtins.{name}" for name in ("dict", "list", "int", "str", "float", "bool", "tuple")]
PACKAGES = ("omegaconf", "fairseq")


class PickledObject:
    """The constructor arguments and the state of a pickled object of any class."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "PickledObject":  # unpickling may create an object without calling __init__
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(path: Path, packages: Collection[str] = PACKAGES) -> dict[str, Any]:
    """Returns the dict in a file that torch.save wrote. Objects of classes of `packages` become `PickledObject`.

    Raises FileNotFoundError for a missing file, and ValueError for a file that is damaged or would run code.
    """
    check_file(path)
    allowed = list(HARMLESS)
    with suppress(Exception):  # if the file is damaged or older than torch 1.6, `torch.load` below raises an error
        allowed += [name for name in get_unsafe_globals_in_checkpoint(str(path)) if name.split(".")[0] in packages]
    try:
        with safe_globals([(PickledObject, name) for name in allowed]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many types for damaged files
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match:
            raise ValueError(
                f"{path} needs {match[1].rstrip(',')}, which is not part of a model; nothing was imported, and no "
                "code of the file was run"
            ) from error
        raise ValueError(f"{path} is not a checkpoint of PyTorch, or is damaged or incomplete") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds a {type(contents).__name__}, not a checkpoint")
    return contents


def to_plain(value: Any) -> Any:
    """Converts objects to dicts of attributes, omegaconf containers to dicts and lists, and enum members to values."""
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if not isinstance(value, PickledObject):
        return value
    state = value.state
    if isinstance(state, tuple):  # the object has __slots__
        state = {key: entry for part in state if isinstance(part, dict) for key, entry in part.items()}
    if not isinstance(state, dict):
        return None
    for key in ("_content", "_val"):  # omegaconf's containers and nodes
        if key in state:
            return to_plain(state[key])
    if not state and value.arguments:  # a member of an enum
        return to_plain(value.arguments[0])
    return to_plain(state)
