"""Checkpoint files: written completely or not at all, and read without running code. This module imports no models.

A checkpoint is one `.pt` file that holds a dict of plain tensors and plain types:

    nmtkit        format version, an int
    checksum      checksum of all other entries, an int
    architecture  registered name
    config        config of the architecture, a dict
    tokenizer     Tokenizer.state()
    plugins       names of the plug-ins to import before the model is built
    model         parameter name -> tensor
    scales        parameter name -> scales of the rows, if `model` has weights in 8 bits (models/layers/int8.py)
    update        number of updates made, an int
    scores        scores of the validation after this update, if any: name ("loss", "bleu", …) -> value
    signatures    signatures of these scores, for metrics that have a signature: name -> text
    maximized     names of the scores for which higher is better
    scheduled     true if the checkpoint was saved at an interval of epochs or updates; in a run without such
                  intervals, also true if it was saved at an interval of minutes or at the request of a callback
    run           facts about the run in plain types (training/run_facts.py)
    averaged      names of the averaged files, only in averaged checkpoints
    adapters      facts about low-rank adapters, if `model` holds only adapters: "base", the path of the adapted
                  checkpoint; "fingerprint", the fingerprint of the adapted model; "rank", "alpha" and "layers", the
                  values of --adapter-…
    shortlist     target pieces of each source piece for --shortlist, if any: three tensors
                  (translation/search/shortlist.py)
    origin        facts about an imported model, if any: "languages", and for a model of the Hugging Face Hub
                  "repository", "revision", "commit", "format" and "license"
    training      training state, only in the newest checkpoints of a run: optimizer and raw weights by parameter name,
                  schedule, position in the data, best score
"""

import pickle
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.config.files import RUN_CHECKPOINTS, atomic_write

FORMAT = 2
OTHERS = "For a model of another toolkit, nmtkit import makes a checkpoint"  # end of messages about wrong files
TYPES = {"architecture": str, "config": dict, "tokenizer": dict, "plugins": list, "model": dict, "update": int}

Checkpoint = dict[str, Any]


def save(path: Path, contents: Checkpoint) -> None:
    """Writes `path`, completely or not at all. Raises OSError, such as for a full disk, or if `path` is a folder."""
    contents = {name: value for name, value in contents.items() if name not in ("nmtkit", "checksum")}
    with atomic_write(path) as file:
        torch.save({"nmtkit": FORMAT, "checksum": checksum(contents), **contents}, file)


def read(path: Path, mmap: bool = False) -> Checkpoint:
    """Reads a checkpoint file onto the CPU. With `mmap`, tensors are read from the file when they are used.

    Raises FileNotFoundError, or ValueError for a truncated file, a file with code (which is never run), a file that is
    not a checkpoint of nmtkit and, without `mmap`, a file with a wrong checksum. All errors name the path.
    """
    if path.is_dir():
        reason = f"no {' or '.join(RUN_CHECKPOINTS)} in the folder; give a checkpoint or the folder of a run"
        raise FileNotFoundError(f"checkpoint {path}: {reason}. {OTHERS}")
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides warnings about files that are rejected below
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (
        pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, AttributeError, TypeError,
        zipfile.BadZipFile,
    ) as error:  # fmt: skip
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            reason = "the file was rejected, and no code was run"
            raise ValueError(f"{path} contains more than tensors and plain types; {reason}. {OTHERS}") from error
        raise ValueError(f"{path} is truncated, damaged or not a checkpoint. {OTHERS}") from error
    check_contents(contents, path)
    if not mmap:
        check_values(contents, path)
    return contents


# --- checks -----------------------------------------------------------------------------------------------------------


def check_contents(contents: Any, path: Path) -> None:
    """Raises ValueError unless `contents` has the entries of a checkpoint, with their types. Reads no tensor."""
    if not isinstance(contents, dict) or "nmtkit" not in contents:
        raise ValueError(f"{path} is not an nmtkit checkpoint. {OTHERS}")
    if contents["nmtkit"] != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {contents['nmtkit']}, but this version of nmtkit reads format {FORMAT}; "
            "use the version that wrote the file, or train again"
        )
    if missing := [name for name in TYPES if name not in contents]:
        raise ValueError(f"{path} is not a complete checkpoint: it lacks {', '.join(missing)}")
    for name, expected in (TYPES | ({"scales": dict} if "scales" in contents else {})).items():
        if not isinstance(contents[name], expected) or isinstance(contents[name], bool):
            raise ValueError(f"{path}: {name} is a {type(contents[name]).__name__}, not a {expected.__name__}")
    for name in ("tokenizer", "model", "scales"):
        if wrong := [key for key, value in contents.get(name, {}).items() if not isinstance(value, Tensor)]:
            raise ValueError(f"{path}: {name} holds {wrong[0]!r}, which is not a tensor")


def check_values(contents: Checkpoint, path: Path) -> None:
    """Raises ValueError if the checksum is wrong or a weight is not finite. Reads all tensors."""
    computed = checksum(contents)
    if contents.get("checksum") not in (computed, computed % 2**63):
        raise ValueError(f"{path} is damaged: its contents do not match their checksum")
    for name, tensor in contents["model"].items():
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"{path}: {name} holds weights that are not finite")


def checksum(contents: Checkpoint) -> int:
    """Returns a checksum that every flipped bit changes: the sum of all tensors as 64-bit words, and a CRC of the rest.

    The sum is four times as fast as the CRC-32 of zip files: the sum of the 707 MB of a big model takes 67 ms. Reading
    and building this model takes 3.3 s.

    New checksums are at least 2^64. Old files have the checksum modulo 2^63. An old checksum does not detect a flip of
    the highest bit of a word.
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
    return 2**64 + (words + text) % 2**64


def fingerprint(contents: Checkpoint) -> int:
    """Returns a number that identifies a model. The number does not depend on scores or training state."""
    return checksum({name: contents[name] for name in ("architecture", "config", "tokenizer", "model")}) % 2**63


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
    if not tensor.numel():  # an empty tensor of some types, such as uint16, cannot be copied
        return 0
    # sums of 64-bit integers on Apple GPUs depend on the version of macOS, so the CPU computes the sum
    plain = tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()
    data = plain.contiguous().flatten().view(torch.uint8)
    whole = len(data) // 8 * 8
    if data.data_ptr() % 8:
        data = data.clone()
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
