"""A checkpoint as safetensors, with its config and tokenizer beside: standard files that hold all of it.

Needs the package safetensors.
"""

import json
from pathlib import Path
from typing import Any

import torch

from nmtkit import checkpoint, models
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.files import write_folder

CONFIG_FILE, WEIGHTS_FILE = "nmtkit.json", "model.safetensors"


def save(source: Path, destination: Path) -> None:
    """Writes `source`, a checkpoint, as a folder: model.safetensors, nmtkit.json, and the SentencePiece models.

    A parameter that stands under several names is written once; nmtkit.json lists the others under `shared`.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("this needs the package safetensors: pip install 'nmtkit[export]'") from error
    contents = checkpoint.load(source)
    weights: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    for name, original in checkpoint.tied_to(contents["model"]).items():
        if original == name:
            weights[name] = contents["model"][name].contiguous()
        else:
            shared[name] = original
    facts = {key: contents[key] for key in ("architecture", "config", "plugins", "update")}

    def fill(folder: Path) -> None:
        save_file(weights, folder / WEIGHTS_FILE)
        text = json.dumps({"nmtkit": checkpoint.FORMAT, **facts, "shared": shared}, indent=2, ensure_ascii=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        models.tokenizer_of(contents, source).save(folder)

    write_folder(destination, fill)


def load(source: Path, destination: Path) -> None:
    """Inverts `save`: writes a checkpoint file. Raises ValueError naming what is missing or damaged."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError("this needs the package safetensors: pip install 'nmtkit[export]'") from error
    if destination.exists():
        raise ValueError(f"{destination} exists already; remove it or choose another name")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (source / name).is_file():
            raise ValueError(f"{source} holds no {name}; it is no export of nmtkit")
    try:
        facts: dict[str, Any] = json.loads((source / CONFIG_FILE).read_bytes())
        weights = load_file(source / WEIGHTS_FILE)
        weights |= {name: weights[original] for name, original in facts["shared"].items()}
        contents = {key: facts[key] for key in ("architecture", "config", "plugins", "update")}
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{source} is damaged: {error!r}") from error
    contents |= {"tokenizer": Tokenizer.load(source).state(), "model": weights}
    checkpoint.check_contents({"nmtkit": facts.get("nmtkit"), **contents}, source / CONFIG_FILE)
    checkpoint.save(destination, contents)
