"""From a registered name and a config to a model, and between a model and its checkpoint."""

from pathlib import Path
from typing import Any

from nmtkit import checkpoint
from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.registry import derive, plain


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(source=tokenizer.source_size, target=tokenizer.target_size, joint=tokenizer.joint)


def build(architecture: str, config: Any, vocabulary: Vocabulary) -> Architecture:
    """A model with fresh parameters, drawn from torch's global generator."""
    return ARCHITECTURES[architecture].factory(config, vocabulary)


def to_checkpoint(
    model: Architecture, architecture: str, config: Any, tokenizer: Tokenizer, plugins: list[str], update: int
) -> checkpoint.Checkpoint:
    """What `checkpoint.save` writes; a trainer adds its `training` state."""
    return {
        "architecture": architecture,
        "config": plain(config),
        "tokenizer": tokenizer.state(),
        "plugins": plugins,
        "model": model.state_dict(),
        "update": update,
    }


def from_checkpoint(path: Path) -> tuple[Architecture, Tokenizer]:
    """The model, in evaluation mode on the CPU, and the tokenizer of a checkpoint file.

    A checkpoint names its plug-ins but never imports them: opening one runs no code that the user did not ask for.

    Raises ValueError when the architecture is not registered (naming the plug-ins to load), or the weights do not fit.
    """
    contents = checkpoint.load(path)
    return model_of(contents, path), Tokenizer.from_state(contents["tokenizer"])


def model_of(contents: checkpoint.Checkpoint, path: Path) -> Architecture:
    """The model of a loaded checkpoint; `path` is for the errors."""
    name = contents["architecture"]
    if name not in ARCHITECTURES and contents["plugins"]:
        flags = " ".join(f"--plugin {plugin}" for plugin in contents["plugins"])
        raise ValueError(f"{path}: architecture {name!r} comes from a plug-in that is not loaded; add {flags}")
    entry = ARCHITECTURES[name]
    config = derive(entry.preset, contents["config"], f"{path}: {name}")
    model = build(name, config, vocabulary_of(Tokenizer.from_state(contents["tokenizer"])))
    try:
        model.load_state_dict(contents["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit architecture {name!r}: {error}") from error
    return model.eval()
