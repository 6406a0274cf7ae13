"""Builds models from registered names and configs, and converts between models and checkpoints."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nmtkit.config import derive, to_dict
from nmtkit.config.files import parse_json
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.dataset_files import MANIFEST
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.text.languages import same_language


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(source=tokenizer.source_size, target=tokenizer.target_size, joint=tokenizer.joint)


def build(architecture: str, config: Any, vocabulary: Vocabulary) -> Architecture:
    """Returns a model with random parameters, drawn from the global generator of torch."""
    return ARCHITECTURES[architecture].factory(config, vocabulary)


class NoInitialisation(TorchFunctionMode):
    """Inside this context, parameters are not filled with random numbers. This saves 0.3 s for transformer_base.

    Use this context only if all parameters are then loaded from a checkpoint.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        fills = func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == nn.init.__name__
        return filled if fills and isinstance(filled, nn.Parameter) else func(*args, **kwargs)


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Inside this context, a model has names and shapes of tensors, but no memory and no random values.

    Drawing numbers for such tensors would import torch._dynamo, which takes a second.
    """
    with torch.device("meta"), NoInitialisation():
        yield


def to_checkpoint(
    model: Architecture, architecture: str, config: Any, tokenizer: Tokenizer, plugins: list[str], update: int
) -> checkpoint_file.Checkpoint:
    """Returns the contents of a checkpoint for `checkpoint_file.save`. A training run adds `run` and `training`."""
    return {
        "architecture": architecture,
        "config": to_dict(config),
        "tokenizer": tokenizer.state(),
        "plugins": plugins,
        "model": model.state_dict(),
        "update": update,
        **({} if model.shortlist is None else {"shortlist": model.shortlist}),
    }


def from_checkpoint(path: Path) -> tuple[Architecture, Tokenizer]:
    """Returns the model, in evaluation mode on the CPU, and the tokenizer of a checkpoint file.

    The plug-ins that the checkpoint names are not imported, so opening a file runs no foreign code.

    Raises ValueError if the weights do not match the architecture, or if the architecture is not registered; the
    message names the plug-ins to load.
    """
    return from_contents(checkpoint.load(path), path)


def from_contents(contents: checkpoint_file.Checkpoint, path: Path) -> tuple[Architecture, Tokenizer]:
    """Returns the model and the tokenizer like `from_checkpoint`, from the contents of the file `path`."""
    tokenizer = tokenizer_of(contents, path)
    name = contents["architecture"]
    if name not in ARCHITECTURES and contents["plugins"]:
        flags = " ".join(f"--plugin {plugin}" for plugin in contents["plugins"])
        raise ValueError(f"{path}: architecture {name!r} comes from a plug-in that is not loaded; add {flags}")
    entry = ARCHITECTURES[name]
    config = derive(entry.preset, contents["config"], f"{path}: {name}")
    with NoInitialisation():
        model = build(name, config, vocabulary_of(tokenizer))
    load_weights(model, contents["model"], f"{path} does not match architecture {name!r}")
    model.shortlist = contents.get("shortlist")
    model.directions = directions_of(contents)
    return model.eval(), tokenizer


def tokenizer_of(contents: checkpoint_file.Checkpoint, path: Path) -> Tokenizer:
    """Returns the tokenizer of a loaded checkpoint. Raises ValueError with `path` if there is no valid tokenizer."""
    try:
        return Tokenizer.from_state(contents["tokenizer"])
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} has no valid tokenizer: {error}") from error


def reads_source(contents: checkpoint_file.Checkpoint) -> bool:
    """Returns whether the model of a checkpoint reads a source. A language model has no encoder."""
    return contents["config"].get("encoder_layers") != 0


def check_translation_models(paths: Sequence[Path], models: Sequence[Architecture]) -> None:
    """Raises ValueError if one of the models, loaded from `paths`, is a language model."""
    for path, model in zip(paths, models, strict=True):
        if not model.reads_source:
            raise language_model_error(path)


def language_model_error(path: Path) -> ValueError:
    """Returns the error to raise if the user gives `path`, a language model, where a translation model is needed."""
    return ValueError(
        f"{path} is a language model, which reads no source; give a translation model. A language model is for nmtkit "
        "score --path, nmtkit rerank --lm, and nmtkit generate --logits-processors lm_fusion --lm"
    )


def check_language_model(path: Path, model: Architecture) -> None:
    """Raises ValueError if the model that the user gave as `--lm path` is a translation model."""
    if model.reads_source:
        raise ValueError(f"--lm {path} is not a language model; train one with nmtkit train DATA --arch transformer_lm")


def directions_of(contents: checkpoint_file.Checkpoint) -> frozenset[tuple[str, str]]:
    """Returns the directions that a model was trained on: pairs of a source and a target language code.

    The directions of a fine-tuned multilingual model include the directions of its base model. The result is empty if
    the checkpoint does not record all directions. This is the case for bilingual models, for imported models, and for
    models that were fine-tuned from an imported multilingual model.
    """
    run = contents.get("run", {})
    if "base_directions" not in run:
        known = run.get("directions") or ()
    else:  # fine-tuned from a multilingual model, perhaps on a bilingual dataset
        base = run["base_directions"]
        known = [*(run.get("directions") or [run["languages"]]), *base] if base else ()
    return frozenset((source, target) for source, target in known)


def languages_of(path: Path) -> tuple[str, str] | None:
    """Returns the source and the target language of a bilingual model, or None if the languages are unknown.

    If the checkpoint does not record the languages, the function reads the manifest of the training data. Raises
    ValueError for a file that is not a checkpoint.
    """
    contents = checkpoint.load(path, mmap=True)
    run = contents.get("run", {})
    languages = run.get("languages") or contents.get("origin", {}).get("languages")
    if languages is None and "directions" not in run:
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = parse_json((Path(run["data"]) / MANIFEST).read_bytes())
            languages = manifest["source_lang"], manifest["target_lang"]
    return None if languages is None else (languages[0], languages[1])


def check_not_reversed(flag: str, path: Path, languages: tuple[str, str]) -> None:
    """Raises ValueError if a bilingual model translates in the opposite direction.

    `languages` are the source and the target language of the text to translate. `path` is the checkpoint of the model,
    and `flag` is the flag that the user has written before this path. The message names the flag and the path.
    """
    own = languages_of(path) or languages
    straight, reverse = (all(map(same_language, own, wanted)) for wanted in (languages, languages[::-1]))
    if reverse and not straight:
        raise ValueError(
            f"{flag} {path} translates from {own[0]} into {own[1]}, but the text needs a model from {languages[0]} "
            f"into {languages[1]}"
        )


def load_weights(model: Architecture, weights: dict[str, Tensor], mistake: str) -> None:
    """Copies `weights` into the model. If names, shapes or types differ, raises ValueError beginning with `mistake`."""
    for name, tensor in model.state_dict().items():
        if name in weights and weights[name].is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{mistake}: {name} is of type {weights[name].dtype}, not {tensor.dtype}")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        # the first line is a heading, and each of the other lines describes a difference
        lines = [line.strip() for line in str(error).split("\n")]
        more = f"; and {len(lines) - 2} more" if len(lines) > 2 else ""
        raise ValueError(f"{mistake}: {lines[min(1, len(lines) - 1)]}{more}") from error
