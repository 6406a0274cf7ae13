"""From a registered name and a config to a model, and between a model and its checkpoint."""

import contextlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nmtkit import checkpoint
from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.config import derive, to_dict
from nmtkit.data.dataset_files import MANIFEST
from nmtkit.data.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(source=tokenizer.source_size, target=tokenizer.target_size, joint=tokenizer.joint)


def build(architecture: str, config: Any, vocabulary: Vocabulary) -> Architecture:
    """Returns a model with fresh parameters, drawn from torch's global generator."""
    return ARCHITECTURES[architecture].factory(config, vocabulary)


class NoInitialisation(TorchFunctionMode):
    """While entered, parameters are not filled with random numbers, which takes 0.3 s for a base model: for a model
    all of whose parameters are loaded from a checkpoint.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        fills = func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == nn.init.__name__
        return filled if fills and isinstance(filled, nn.Parameter) else func(*args, **kwargs)


def to_checkpoint(
    model: Architecture, architecture: str, config: Any, tokenizer: Tokenizer, plugins: list[str], update: int
) -> checkpoint.Checkpoint:
    """Returns what `checkpoint.save` writes; a trainer adds its `training` state."""
    return {
        "architecture": architecture,
        "config": to_dict(config),
        "tokenizer": tokenizer.state(),
        "plugins": plugins,
        "model": model.state_dict(),
        "update": update,
    }


def from_checkpoint(path: Path) -> tuple[Architecture, Tokenizer]:
    """Returns the model, in evaluation mode on the CPU, and the tokenizer of a checkpoint file.

    A checkpoint names its plug-ins but never imports them: opening one runs no code that the user did not ask for.

    Raises ValueError when the architecture is not registered (naming the plug-ins to load), or the weights do not fit.
    """
    contents = checkpoint.load(path)
    tokenizer = tokenizer_of(contents, path)
    name = contents["architecture"]
    if name not in ARCHITECTURES and contents["plugins"]:
        flags = " ".join(f"--plugin {plugin}" for plugin in contents["plugins"])
        raise ValueError(f"{path}: architecture {name!r} comes from a plug-in that is not loaded; add {flags}")
    entry = ARCHITECTURES[name]
    config = derive(entry.preset, contents["config"], f"{path}: {name}")
    with NoInitialisation():
        model = build(name, config, vocabulary_of(tokenizer))
    load_weights(model, contents["model"], f"{path} does not fit architecture {name!r}")
    return model.eval(), tokenizer


def tokenizer_of(contents: checkpoint.Checkpoint, path: Path) -> Tokenizer:
    """Returns the tokenizer of a loaded checkpoint. Raises ValueError naming `path` when it is none."""
    try:
        return Tokenizer.from_state(contents["tokenizer"])
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} holds no tokenizer of nmtkit: {error}") from error


def languages_of(path: Path) -> tuple[str, str] | None:
    """Returns the source and the target language that a checkpoint was trained for, if the checkpoint or its dataset
    says so. Raises ValueError for a file that is not a checkpoint.
    """
    run = checkpoint.load(path, mmap=True).get("run", {})
    languages = run.get("languages")
    if languages is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = json.loads((Path(run["data"]) / MANIFEST).read_bytes())
            languages = manifest["source_lang"], manifest["target_lang"]
    return None if languages is None else (languages[0], languages[1])


def load_weights(model: Architecture, weights: dict[str, Tensor], mistake: str) -> None:
    """Copies `weights` into the model. Raises ValueError, `mistake` first, for other names, shapes or types."""
    for name, tensor in model.state_dict().items():
        if name in weights and weights[name].is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{mistake}: {name} is of type {weights[name].dtype}, not {tensor.dtype}")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]  # a heading, then a line for each difference
        more = f"; and {len(lines) - 2} more" if len(lines) > 2 else ""
        raise ValueError(f"{mistake}: {lines[min(1, len(lines) - 1)]}{more}") from error
