"""The common part of the exports: checks that a program, such as Marian, can reproduce a model, and writes files."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nmtkit.config import flag_of, setting_text
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.layers.fixed_state import SSRU

# All programs support every value of these settings.
SIZES = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "max_positions"}
SIZES |= {"attention_bias", "output_bias"}
# Settings that affect only training.
TRAINING = {"dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"}
TRAINING |= {"gradient_checkpointing"}


# The search defaults of nmtkit (`SearchOptions`) for programs that divide log probabilities by length ** exponent. For
# outputs of 5 to 40 pieces, ((5 + length) / 6) ** 0.6 is nearly proportional to length ** 0.45.
BEAM, LENGTH_EXPONENT = 4, 0.45
SEARCH_NOTE = f"""
{{}} has the search settings that are nearest to the defaults of nmtkit: the beam, and a length penalty. With these
settings, log probabilities are divided by length ** {LENGTH_EXPONENT}. nmtkit divides them by
((5 + length) / 6) ** 0.6, so a few translations differ (in transformers, 6 of 1,000 lines of a test set of captions).
"""


def check_expressible(
    model: Architecture,
    source: Path,
    program: str,
    same: Collection[str],
    allowed: Mapping[str, Sequence[Any]],
    otherwise: str = "give --format safetensors",
) -> Transformer:
    """Returns `model`, the model of the checkpoint `source`. Raises ValueError if `program` cannot reproduce `model`.

    The program supports every value of the settings in `same`. `allowed` maps further settings to the values that the
    program supports. All other settings must have their default values. Subclasses of Transformer are rejected, because
    their computation can differ. `otherwise` is advice for a model that the program does not support.
    """
    if type(model) is not Transformer or type(model.config) is not TransformerConfig:
        raise ValueError(
            f"{source} is a {type(model).__name__}, which {program} does not support: use a Transformer, or {otherwise}"
        )
    if not model.reads_source:
        raise ValueError(
            f"{source} is a language model, which {program} does not support: use a model with an encoder, or "
            f"{otherwise}"
        )
    config = model.config
    width = config.d_model / config.heads  # the only supported value of --d-key and --d-value
    refused, wanted = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = allowed.get(field.name, (field.default,))
        is_usual_width = field.name in ("d_key", "d_value") and value == width
        if field.name not in {*same, *TRAINING} and value not in values and not is_usual_width:
            refused.append(f"{field.name} {value}")
            wanted.append(as_flag(field, values))
    if refused:
        raise ValueError(
            f"{source} has {', '.join(refused)}, which {program} does not support; train with {' '.join(wanted)}, or "
            f"{otherwise}"
        )
    return model


def as_flag(field: dataclasses.Field[Any], values: Sequence[Any]) -> str:
    """Returns the flag of `train` for a setting, followed by the permitted values."""
    flag = flag_of(field)
    if isinstance(field.default, bool):
        return flag if values[0] else f"--no-{flag[2:]}"
    return f"{flag} {'|'.join(map(setting_text, values))}"


def add_biases(model: Transformer) -> None:
    """Gives a bias of zeros to each linear layer without a bias, except the output projection and SSRUs."""
    ssrus = [module for module in model.modules() if isinstance(module, SSRU)]
    without = {model.output_projection, *(part for ssru in ssrus for part in (ssru.proj, ssru.forget_proj))}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is None and module not in without:
            module.bias = torch.nn.Parameter(module.weight.new_zeros(module.out_features))
    model.config = dataclasses.replace(model.config, attention_bias=True)


def write_files(folder: Path, files: Mapping[str, bytes | str | Mapping[str, Any]]) -> None:
    """Writes files by name: bytes, text in UTF-8, or an object as JSON."""
    for name, contents in files.items():
        if isinstance(contents, Mapping):
            contents = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)
