"""Whether another program has a model that computes the same as one of ours."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmtkit.architectures import Architecture
from nmtkit.architectures.transformer import Transformer, TransformerConfig
from nmtkit.config import flag_of

# settings that matter in training alone
TRAINING = {"dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"}
TRAINING |= {"gradient_checkpointing"}


def check_expressible(
    model: Architecture, source: Path, program: str, same: Collection[str], allowed: Mapping[str, Sequence[Any]]
) -> Transformer:
    """Returns the model of the checkpoint `source` if `program` can compute the same; else raises ValueError.

    `same` are the settings of a Transformer that the program's models have too, `allowed` the values that others may
    have there; of those named in neither, the default. A subclass may compute anything, and is refused.
    """
    if type(model) is not Transformer or type(model.config) is not TransformerConfig:
        raise ValueError(
            f"{source} is a {type(model).__name__}, and {program} has no such model: one exports to it the plain "
            "Transformer only; or give --format safetensors"
        )
    config = model.config
    width = config.d_model // config.heads  # of a head, unless the config says otherwise
    found, wanted = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = allowed.get(field.name, (field.default,))
        if field.name in same or field.name in TRAINING or value in values:
            continue
        if not (field.name in ("d_key", "d_value") and value == width):
            found.append(f"{field.name} {value}")
            wanted.append(as_flag(field, values))
    if found:
        raise ValueError(
            f"{source} has {', '.join(found)}, and {program} has no such Transformer; it has those trained with "
            f"{' '.join(wanted)}; or give --format safetensors"
        )
    return model


def as_flag(field: dataclasses.Field[Any], values: Sequence[Any]) -> str:
    """Returns a flag of `train` with the values that a setting may have."""
    flag = flag_of(field)
    if isinstance(field.default, bool):
        return flag if values[0] else f"--no-{flag[2:]}"
    return f"{flag} {'|'.join('none' if value is None else str(value) for value in values)}"
