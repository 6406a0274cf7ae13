"""Models in checkpoint files: merges adapters with their base, and stores weights as 8-bit integers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.config.files import checkpoint_of
from nmtkit.data.checkpoint_file import Checkpoint, check_values, checksum, fingerprint, read, save
from nmtkit.models.layers import adapters, int8

ADAPTERS = {"base": str, "fingerprint": int, "rank": int, "alpha": float, "layers": list}


def tied_to(model: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each name in `model` to the first name of the same tensor. Only tied weights have more than one name."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    return {
        name: first.setdefault((x.data_ptr(), tuple(x.shape), x.stride()), name) if x.numel() else name
        for name, x in model.items()
    }


# --- files ------------------------------------------------------------------------------------------------------------


def load(path: Path, mmap: bool = False) -> Checkpoint:
    """Reads a checkpoint like `checkpoint_file.read`, and makes the model complete.

    Adapters are merged with their base, and weights in 8 bits become fp32. The base is the file that training used, or
    else a file with the same name in the folder of the checkpoint. Raises OSError or ValueError like
    `checkpoint_file.read`, and also if both files are missing or if neither file is the base.
    """
    contents = read(path, mmap)
    if mmap and ("scales" in contents or "adapters" in contents):
        check_values(contents, path)  # without this check, the checksum of the complete model would hide damage
    contents = dequantized(contents, path)
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
    """Returns a checkpoint whose 8-bit weights are converted to fp32. `contents` is the checkpoint that `path` holds.

    Raises ValueError, which names `path`, if the scales of a weight matrix do not match its integers.
    """
    if "scales" not in contents:
        return contents
    scales, model = contents["scales"], dict(contents["model"])
    for name, first in tied_to(model).items():
        integers = model[name]
        if first != name:
            model[name] = model[first]
        elif (scale := scales.get(name)) is not None:
            if integers.dtype != torch.int8 or scale.shape != integers.shape[:-1] or not scale.isfinite().all():
                raise ValueError(f"{path} is damaged: the scales of {name} do not match its weights")
            model[name] = int8.dequantize(integers, scale)
    whole = {name: value for name, value in contents.items() if name not in ("scales", "checksum")} | {"model": model}
    return whole | {"checksum": checksum(whole)}


def _merged(contents: Checkpoint, path: Path, mmap: bool) -> Checkpoint:
    facts = contents["adapters"]
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != ADAPTERS:
        raise ValueError(f"{path}: its entry 'adapters' does not have the format of nmtkit")
    base = checkpoint_of(Path(facts["base"]))  # may be a model of the Hub
    candidates = [file for file in (base, path.parent / base.name) if file.is_file()]
    if not candidates:
        raise FileNotFoundError(
            f"{path} holds adapters of {base}, which does not exist; put {base.name} into the folder of {path.name}"
        )
    for file in candidates:
        whole = dequantized(read(file, mmap), file)
        if "adapters" not in whole and fingerprint(whole) == facts["fingerprint"]:
            break
    else:
        raise ValueError(
            f"{path} holds adapters of a different base than {' and '.join(map(str, candidates))}; make a new folder, "
            f"copy the file that --finetune-from named into this folder as {base.name}, and copy {path.name} into this "
            "folder under a different name"
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
