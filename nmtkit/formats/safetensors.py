"""Writes a checkpoint as standard files: weights in safetensors, config as JSON, and SentencePiece models.

Needs the package safetensors.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from nmtkit import checkpoint, models
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.files import write_folder
from nmtkit.formats.reading import naming, read_json
from nmtkit.formats.weights import check_safetensors, load_safetensors, save_safetensors

CONFIG_FILE, WEIGHTS_FILE = "nmtkit.json", "model.safetensors"
FACTS = ("architecture", "config", "plugins", "update", "run")  # entries of a checkpoint in nmtkit.json

log = logging.getLogger("nmtkit")


def save(source: Path, destination: Path) -> None:
    """Writes the checkpoint `source` as a folder: model.safetensors, nmtkit.json, and the SentencePiece models.

    A parameter with several names is written once; nmtkit.json lists its other names under `shared`.
    """
    check_safetensors()
    contents = checkpoint.load(source)
    weights: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    for name, original in checkpoint.tied_to(contents["model"]).items():
        if original == name:
            weights[name] = contents["model"][name].contiguous()
        else:
            shared[name] = original
    facts = {key: contents[key] for key in FACTS if key in contents}

    def fill(folder: Path) -> None:
        save_safetensors(weights, folder / WEIGHTS_FILE)
        text = json.dumps({"nmtkit": checkpoint.FORMAT, **facts, "shared": shared}, indent=2, ensure_ascii=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        models.tokenizer_of(contents, source).save(folder)

    write_folder(destination, fill)
    if contents.get("shortlist"):
        log.warning("the shortlist is not exported; add it again with nmtkit shortlist")


def load(source: Path, destination: Path) -> None:
    """Writes a checkpoint file from a folder that `save` wrote. Raises ValueError naming a missing or damaged file."""
    check_safetensors()
    if destination.exists():
        raise ValueError(f"{destination} exists already; remove it or choose another name")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (source / name).is_file():
            raise ValueError(f"{source} does not hold {name}; it is not an export of nmtkit")
    facts = read_json(source / CONFIG_FILE)
    weights = load_safetensors(source / WEIGHTS_FILE)
    with naming(source / CONFIG_FILE):
        weights |= {name: weights[original] for name, original in facts["shared"].items()}
        contents: dict[str, Any] = {key: facts[key] for key in FACTS if key != "run" or key in facts}
        if not isinstance(contents.get("run", {}), dict):
            raise TypeError("run is not an object")
    contents |= {"tokenizer": Tokenizer.load(source).state(), "model": weights}
    checkpoint.check_contents({"nmtkit": facts.get("nmtkit"), **contents}, source / CONFIG_FILE)
    checkpoint.save(destination, contents)
