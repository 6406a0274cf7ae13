"""Checks that another program can reproduce the computation of a model of nmtkit."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.config import flag_of
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig

# Settings that affect only training.
TRAINING = {"dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"}
TRAINING |= {"gradient_checkpointing"}


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
    width = config.d_model // config.heads  # default width of a head
    refused, wanted = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = allowed.get(field.name, (field.default,))
        if field.name in same or field.name in TRAINING or value in values:
            continue
        if not (field.name in ("d_key", "d_value") and value == width):
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
    return f"{flag} {'|'.join('none' if value is None else str(value) for value in values)}"
