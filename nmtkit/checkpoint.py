"""Checkpoint files: written whole or not at all, read without running code. This module knows no model.

A checkpoint is one `.pt` file that holds a dict of plain tensors and plain types:

    nmtkit        format version, an int
    checksum      of all that follows, an int
    architecture  registered name            config     its config, a dict
    tokenizer     Tokenizer.state()           plugins    what to import before building the model
    model         parameter name -> tensor    update     updates done, an int
    scores        of the validation at that update by name, where there was one ("loss", "bleu", …)
    maximized     names of those scores of which more is better
    scheduled     whether it was saved at one of the run's intervals, and not at its end, by the clock or at a signal
    run           of a run's: what it is made of, in plain types (setup.run_facts)
    averaged      of averaged checkpoints: names of the files
    adapters      of low-rank adapters, which are then all that `model` holds: "base", the path of the checkpoint they
                  adapt; "fingerprint" of its model; "rank", "alpha" and "layers", as the flags --adapter-… say them
    training      only in the newest of a run: optimizer, scheduler, data position, best scores
"""

import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.files import atomic_write
from nmtkit.layers import adapters

FORMAT = 2
TYPES = {"architecture": str, "config": dict, "tokenizer": dict, "plugins": list, "model": dict, "update": int}

ADAPTERS = {"base": str, "fingerprint": int, "rank": int, "alpha": float, "layers": list}

NUMBERED = re.compile(r"update_(\d{8,})\.pt")

Checkpoint = dict[str, Any]


def file_name(update: int) -> str:
    """Returns the name of the checkpoint that a run writes after `update`."""
    return f"update_{update:08d}.pt"


def numbered(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first."""
    by_update = [(int(match[1]), path) for path in folder.iterdir() if (match := NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(by_update)]


@dataclass(frozen=True)
class Objective:
    """The validation score that a run goes by, and whether more of it is better."""

    name: str
    higher_is_better: bool = False

    def value(self, scores: Mapping[str, float]) -> float:
        """Returns the score as a number of which lower is better."""
        return -scores[self.name] if self.higher_is_better else scores[self.name]


def tied_to(model: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns for each name of a model's state the first name of the same memory: itself, unless weights are tied."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {
        name: first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) if tensor.numel() else name
        for name, tensor in model.items()
    }


# --- files ------------------------------------------------------------------------------------------------------------


def save(path: Path, contents: Checkpoint) -> None:
    """Writes `path`, whole or not at all. Raises OSError: for a full disk, say, and where `path` is no file."""
    contents = {name: value for name, value in contents.items() if name not in ("nmtkit", "checksum")}
    with atomic_write(path) as file:
        torch.save({"nmtkit": FORMAT, "checksum": checksum(contents), **contents}, file)


def load(path: Path, mmap: bool = False) -> Checkpoint:
    """Reads a checkpoint as `read` does; one of adapters is merged with its base, and then like any other.

    The base is taken from where it was in training, or beside the checkpoint. Raises OSError or ValueError as `read`
    does, and where there is no base, or another model.
    """
    contents = read(path, mmap)
    return contents if "adapters" not in contents else _merged(contents, path, mmap)


def _merged(contents: Checkpoint, path: Path, mmap: bool) -> Checkpoint:
    facts = contents["adapters"]
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != ADAPTERS:
        raise ValueError(f"{path}: what it says of its adapters is not what nmtkit writes")
    places = [Path(facts["base"]), path.parent / Path(facts["base"]).name]
    base_path = next((place for place in places if place.is_file()), None)
    if base_path is None:
        raise FileNotFoundError(f"{path} holds adapters of {places[0]}, which is not there; put that file beside it")
    base = read(base_path, mmap)
    if "adapters" in base or fingerprint(base) != facts["fingerprint"]:
        raise ValueError(
            f"{path} holds adapters of another model than {base_path} now is; put the file that the run had with "
            f"--finetune-from there, or beside it as {places[1].name}"
        )
    try:
        model = adapters.merge_state(base["model"], contents["model"], facts["alpha"] / facts["rank"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    left_out = ("adapters", "training", "checksum")
    whole = {name: value for name, value in contents.items() if name not in left_out} | {"model": model}
    return whole | {"checksum": checksum(whole)}


def read(path: Path, mmap: bool = False) -> Checkpoint:
    """Reads a checkpoint file onto the CPU; with `mmap`, tensors are read from the file as they are used.

    Raises FileNotFoundError, or ValueError for a truncated file, a file with code in it (never run), a file that is no
    nmtkit checkpoint and, unless with `mmap`, one whose checksum is wrong, each naming the path.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle's protocol, in files that are then refused
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path):
            raise ValueError(f"{path} holds more than plain tensors and types; refused, none of it was run") from error
        raise ValueError(f"{path} is no checkpoint, or a damaged one") from error
    except (RuntimeError, EOFError, LookupError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is truncated, damaged, or no checkpoint") from error
    check_contents(contents, path)
    if not mmap:
        check_values(contents, path)
    return contents


# --- checks -----------------------------------------------------------------------------------------------------------


def check_contents(contents: Any, path: Path) -> None:
    """Raises ValueError unless `contents` has the entries of a checkpoint, with their types. Reads no tensor."""
    if not isinstance(contents, dict) or "nmtkit" not in contents:
        raise ValueError(f"{path} is no nmtkit checkpoint")
    if contents["nmtkit"] != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {contents['nmtkit']}, and this nmtkit reads format {FORMAT}; "
            "use the version that wrote it, or train again"
        )
    missing = [name for name in TYPES if name not in contents]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it is no complete checkpoint")
    for name, expected in TYPES.items():
        if not isinstance(contents[name], expected) or isinstance(contents[name], bool):
            raise ValueError(f"{path}: {name} is a {type(contents[name]).__name__}, not a {expected.__name__}")
    for name in ("tokenizer", "model"):
        wrong = [key for key, value in contents[name].items() if not isinstance(value, Tensor)]
        if wrong:
            raise ValueError(f"{path}: {name} holds {wrong[0]!r}, which is no tensor")


def check_values(contents: Checkpoint, path: Path) -> None:
    """Raises ValueError when anything differs from what was saved, or a weight is not finite. Reads all tensors."""
    if contents.get("checksum") != checksum(contents):
        raise ValueError(f"{path} is damaged: its contents do not have the checksum they were saved with")
    for name, tensor in contents["model"].items():
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"{path}: {name} holds weights that are not finite")


def checksum(contents: Checkpoint) -> int:
    """Returns a number that any flipped bit changes: the sum of all tensors as 64-bit words, and a CRC of the rest.

    A sum costs a quarter of the CRC-32 of zip files: 67 ms for the 707 MB of a big model, which takes 3.3 s to read
    and build.
    """
    words, text = 0, 0
    for key, value in contents.items():
        if key in ("nmtkit", "checksum"):
            continue
        for leaf in _leaves(key, value):
            if isinstance(leaf, Tensor):
                words += _sum_of_words(leaf)
                leaf = (leaf.dtype, tuple(leaf.shape))
            text = zlib.crc32(repr(leaf).encode(), text)
    return (words + text) % 2**63


def fingerprint(contents: Checkpoint) -> int:
    """Returns a number that tells a model from others; it stays when scores or training state go."""
    return checksum({name: contents[name] for name in ("architecture", "config", "tokenizer", "model")})


def _leaves(key: Any, value: Any) -> Iterator[Any]:
    """Yields keys, tensors and plain values of a nested structure in order."""
    yield key
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(name, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves("", item)
    else:
        yield value


def _sum_of_words(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = len(data) // 8 * 8
    if data.data_ptr() % 8:
        data = data.clone()
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
