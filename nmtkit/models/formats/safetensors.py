"""Writes and reads a checkpoint as standard files: weights in safetensors, config as JSON, SentencePiece models.

Needs the package safetensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nmtkit.config.extras import imported
from nmtkit.config.files import new_folder
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.formats.reading import check_file, naming, read_json
from nmtkit.models.formats.writing import write_files

CONFIG_FILE, WEIGHTS_FILE, SHORTLIST_FILE = "nmtkit.json", "model.safetensors", "shortlist.safetensors"
REQUIRED = ("architecture", "config", "plugins", "update")  # entries of a checkpoint that nmtkit.json holds
OPTIONAL: dict[str, type[Any]] = {"run": dict, "origin": dict, "scores": dict, "signatures": dict}
OPTIONAL |= {"maximized": list, "averaged": list, "scheduled": bool}


def save(source: Path, destination: Path) -> None:
    """Writes the checkpoint `source` as a folder: model.safetensors, nmtkit.json, and the SentencePiece models.

    A shortlist is in shortlist.safetensors. A parameter with several names is written once, under its first name. In
    nmtkit.json, `shared` maps each other name to the first name, and `parameters` lists all names in the order of the
    model. The fingerprint of a model depends on this order.
    """
    safetensors_package()
    contents = checkpoint.load(source)
    originals = checkpoint.tied_to(contents["model"])
    shared = {name: original for name, original in originals.items() if original != name}
    weights = {name: tensor.contiguous() for name, tensor in contents["model"].items() if name not in shared}
    facts: dict[str, Any] = {"nmtkit": checkpoint_file.FORMAT}
    facts |= {key: contents[key] for key in (*REQUIRED, *OPTIONAL) if key in contents}
    facts |= {"parameters": [*contents["model"]], "shared": shared}
    with new_folder(destination) as folder:
        save_safetensors(weights, folder / WEIGHTS_FILE)
        if "shortlist" in contents:
            save_safetensors(contents["shortlist"], folder / SHORTLIST_FILE)
        write_files(folder, {CONFIG_FILE: facts})
        building.tokenizer_of(contents, source).save(folder)


def load(source: Path) -> checkpoint_file.Checkpoint:
    """Returns the checkpoint in a folder that `save` wrote. Raises ValueError naming a missing or damaged file."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (source / name).is_file():
            raise ValueError(f"{source} does not hold {name}; it is not an export of nmtkit")
    facts = read_json(source / CONFIG_FILE)
    weights = load_safetensors(source / WEIGHTS_FILE)
    with naming(source / CONFIG_FILE):
        weights |= {name: weights[original] for name, original in facts["shared"].items()}
        weights = {name: weights[name] for name in facts.get("parameters", weights)}
        optional = [key for key in OPTIONAL if key in facts]
        contents: checkpoint_file.Checkpoint = {key: facts[key] for key in (*REQUIRED, *optional)}
        for key in optional:
            if not isinstance(contents[key], OPTIONAL[key]):
                raise TypeError(f"{key} is not a {OPTIONAL[key].__name__}")
    contents |= {"tokenizer": Tokenizer.load(source).state(), "model": weights}
    if (source / SHORTLIST_FILE).is_file():
        contents["shortlist"] = load_safetensors(source / SHORTLIST_FILE)
    checkpoint_file.check_contents({"nmtkit": facts.get("nmtkit"), **contents}, source / CONFIG_FILE)
    return contents


def safetensors_package() -> Any:
    """Returns the package safetensors. Raises ImportError with the install command if the package is missing."""
    return imported("safetensors", "torch", need="this needs the package safetensors: pip install 'nmtkit[export]'")


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a file by name. Raises ValueError naming a damaged file."""
    safetensors = safetensors_package()
    check_file(path)
    try:
        loaded: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error
    return loaded


def save_safetensors(weights: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes tensors to a file. Raises OSError with the file name if writing fails, for example on a full disk."""
    safetensors = safetensors_package()
    try:
        safetensors.torch.save_file(dict(weights), path, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
