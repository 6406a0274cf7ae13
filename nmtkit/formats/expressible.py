"""Whether another program has a model that computes the same as one of ours."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nmtkit.architectures import Architecture
from nmtkit.architectures.transformer import Transformer, TransformerConfig

# settings that matter in training alone
TRAINING = {"dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"}
TRAINING |= {"gradient_checkpointing"}


def check_expressible(
    model: Architecture, source: Path, program: str, same: Collection[str], allowed: Mapping[str, Collection[Any]]
) -> Transformer:
    """Returns the model of the checkpoint `source` if `program` can compute the same; else raises ValueError.

    `same` are the settings of a Transformer that the program's models have too, `allowed` the values of others beside
    their defaults. A subclass may compute anything, and so may a setting that is named in neither: these are refused.
    """
    if type(model) is not Transformer or type(model.config) is not TransformerConfig:
        raise ValueError(
            f"{source} is a {type(model).__name__}, and {program} has no such model: one exports to it the plain "
            "Transformer only; or give --format safetensors"
        )
    config = model.config
    width = config.d_model // config.heads  # of a head, unless the config says otherwise
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in same or field.name in TRAINING or value == field.default:
            continue
        if value not in allowed.get(field.name, ()) and not (field.name in ("d_key", "d_value") and value == width):
            raise ValueError(
                f"{source} has {field.name} {value}, and {program} has no such Transformer; give --format safetensors"
            )
    return model
