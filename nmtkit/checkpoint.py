"""Checkpoint files: written completely or not at all, and read without running code. This module knows no model.

A checkpoint is one `.pt` file that holds a dict of plain tensors and plain types:

    nmtkit        format version, an int
    checksum      checksum of all other entries, an int
    architecture  registered name
    config        config of the architecture, a dict
    tokenizer     Tokenizer.state()
    plugins       names of the plug-ins to import before the model is built
    model         parameter name -> tensor
    scales        parameter name -> scales of the rows, if `model` has weights in 8 bits (layers/int8.py)
    update        number of updates made, an int
    scores        scores of the validation after this update, if any: name ("loss", "bleu", …) -> value
    maximized     names of the scores for which higher is better
    scheduled     whether the checkpoint was saved at an interval of the run. False if it was saved only because of the
                  end of the run, the clock or a signal
    run           facts about the run in plain types (training/run_facts.py)
    averaged      names of the averaged files, only in averaged checkpoints
    adapters      facts about low-rank adapters, if `model` holds only adapters: "base", the path of the adapted
                  checkpoint; "fingerprint" of its model; "rank", "alpha" and "layers", the values of --adapter-…
    shortlist     target pieces of each source piece for --shortlist, if any: three tensors (search/shortlist.py)
    training      training state, only in the newest checkpoints of a run: optimizer and raw weights by parameter name,
                  schedule, position in the data, best score
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
from nmtkit.layers import adapters, int8

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
    """The validation score that selects the best checkpoint, and whether higher is better."""

    name: str
    higher_is_better: bool = False

    def value(self, scores: Mapping[str, float]) -> float:
        """Returns the score with its sign changed if higher is better, so that lower is better."""
        return -scores[self.name] if self.higher_is_better else scores[self.name]


def tied_to(model: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each name in `model` to the first name of the same tensor. Only tied weights have more than one name."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {
        name: first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) if tensor.numel() else name
        for name, tensor in model.items()
    }


# --- files ------------------------------------------------------------------------------------------------------------


def save(path: Path, contents: Checkpoint) -> None:
    """Writes `path`, completely or not at all. Raises OSError, for example for a full disk or a folder."""
    contents = {name: value for name, value in contents.items() if name not in ("nmtkit", "checksum")}
    with atomic_write(path) as file:
        torch.save({"nmtkit": FORMAT, "checksum": checksum(contents), **contents}, file)


def load(path: Path, mmap: bool = False) -> Checkpoint:
    """Reads a checkpoint like `read`, and returns a complete model: merges adapters with their base, and turns weights
    in 8 bits into fp32.

    The base is the file that training used, or else a file with the same name in the folder of the checkpoint. Raises
    OSError or ValueError like `read`, and also if the base is missing or is a different model.
    """
    contents = dequantized(read(path, mmap), path)
    return contents if "adapters" not in contents else _merged(contents, path, mmap)


def export(contents: Checkpoint, path: Path, in_8_bits: bool) -> None:
    """Writes a model that was loaded with `load` to a new file, without training state, in fp32 or in 8 bits.

    Raises OSError, or ValueError if the file exists.
    """
    if path.exists():
        raise ValueError(f"{path} exists already; remove it or choose another name")
    model = {name: value for name, value in contents.items() if name != "training"}
    save(path, quantized(model) if in_8_bits else model)


def quantized(contents: Checkpoint) -> Checkpoint:
    """Returns a checkpoint whose weight matrices are stored as 8-bit integers, with an fp32 scale for each row.

    Vectors, such as biases, stay in fp32. A weight that several modules share is stored once.
    """
    model, scales = dict(contents["model"]), {}
    for name, first in tied_to(model).items():
        if first != name:
            model[name] = model[first]
        elif int8.is_quantizable(model[name]):
            model[name], scales[name] = int8.quantize(model[name])
    return contents | {"model": model, "scales": scales}


def dequantized(contents: Checkpoint, path: Path) -> Checkpoint:
    """Returns a checkpoint with all weights in fp32: the inverse of `quantized`.

    Raises ValueError, with `path`, if the scales of a matrix do not match its integers.
    """
    if "scales" not in contents:
        return contents
    scales, model = contents["scales"], dict(contents["model"])
    for name, first in tied_to(model).items():
        integers, scale = model[name], scales.get(first)
        if scale is not None and first == name:
            if integers.dtype != torch.int8 or scale.shape != integers.shape[:-1] or not scale.isfinite().all():
                raise ValueError(f"{path} is damaged: the scales of {name} do not match its weights")
            model[name] = int8.dequantize(integers, scale)
        elif first != name:
            model[name] = model[first]
    whole = {name: value for name, value in contents.items() if name not in ("scales", "checksum")} | {"model": model}
    return whole | {"checksum": checksum(whole)}


def _merged(contents: Checkpoint, path: Path, mmap: bool) -> Checkpoint:
    facts = contents["adapters"]
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != ADAPTERS:
        raise ValueError(f"{path}: its facts about adapters do not have the format of nmtkit")
    base, beside = Path(facts["base"]), path.parent / Path(facts["base"]).name
    base_path = next((candidate for candidate in (base, beside) if candidate.is_file()), None)
    if base_path is None:
        raise FileNotFoundError(
            f"{path} holds adapters of {base}, which does not exist; put {base.name} into the folder of {path.name}"
        )
    whole = dequantized(read(base_path, mmap), base_path)
    if "adapters" in whole or fingerprint(whole) != facts["fingerprint"]:
        raise ValueError(
            f"{path} holds adapters of a different model than {base_path}; replace that file by the file of "
            "--finetune-from"
        )
    try:
        model = adapters.merge_state(whole["model"], contents["model"], facts["alpha"] / facts["rank"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    left_out = ("adapters", "training", "checksum")
    merged = {name: value for name, value in contents.items() if name not in left_out} | {"model": model}
    if "shortlist" in whole:
        merged.setdefault("shortlist", whole["shortlist"])
    return merged | {"checksum": checksum(merged)}


def read(path: Path, mmap: bool = False) -> Checkpoint:
    """Reads a checkpoint file onto the CPU. With `mmap`, tensors are read from the file when they are used.

    Raises FileNotFoundError, or ValueError for a truncated file, a file with code (which is never run), a file that is
    not a checkpoint of nmtkit and, without `mmap`, a file with a wrong checksum. All errors name the path.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides warnings about files that are rejected below
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if zipfile.is_zipfile(path):
            raise ValueError(
                f"{path} contains more than tensors and plain types; the file was rejected, and no code was run"
            ) from error
        raise ValueError(f"{path} is damaged or not a checkpoint") from error
    except (RuntimeError, EOFError, LookupError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is truncated, damaged or not a checkpoint") from error
    check_contents(contents, path)
    if not mmap:
        check_values(contents, path)
    return contents


# --- checks -----------------------------------------------------------------------------------------------------------


def check_contents(contents: Any, path: Path) -> None:
    """Raises ValueError unless `contents` has the entries of a checkpoint, with their types. Reads no tensor."""
    if not isinstance(contents, dict) or "nmtkit" not in contents:
        raise ValueError(f"{path} is not an nmtkit checkpoint")
    if contents["nmtkit"] != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {contents['nmtkit']}, but this version of nmtkit reads format {FORMAT}; "
            "use the version that wrote the file, or train again"
        )
    missing = [name for name in TYPES if name not in contents]
    if missing:
        raise ValueError(f"{path} is not a complete checkpoint: it lacks {', '.join(missing)}")
    for name, expected in (TYPES | ({"scales": dict} if "scales" in contents else {})).items():
        if not isinstance(contents[name], expected) or isinstance(contents[name], bool):
            raise ValueError(f"{path}: {name} is a {type(contents[name]).__name__}, not a {expected.__name__}")
    for name in ("tokenizer", "model", "scales"):
        wrong = [key for key, value in contents.get(name, {}).items() if not isinstance(value, Tensor)]
        if wrong:
            raise ValueError(f"{path}: {name} holds {wrong[0]!r}, which is not a tensor")


def check_values(contents: Checkpoint, path: Path) -> None:
    """Raises ValueError if the checksum is wrong or a weight is not finite. Reads all tensors."""
    if contents.get("checksum") != checksum(contents):
        raise ValueError(f"{path} is damaged: its contents do not match their checksum")
    for name, tensor in contents["model"].items():
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"{path}: {name} holds weights that are not finite")


def checksum(contents: Checkpoint) -> int:
    """Returns a checksum that every flipped bit changes: the sum of all tensors as 64-bit words, and a CRC of the rest.

    A sum takes a quarter of the time of the CRC-32 of zip files: 67 ms for the 707 MB of a big model. Reading and
    building this model takes 3.3 s.
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
    """Returns a number that identifies a model. The number does not depend on scores and training state."""
    return checksum({name: contents[name] for name in ("architecture", "config", "tokenizer", "model")})


def _leaves(key: Any, value: Any) -> Iterator[Any]:
    """Yields the keys, tensors and plain values of a nested structure in order."""
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
