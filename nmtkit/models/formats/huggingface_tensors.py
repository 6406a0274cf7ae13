"""Weights, settings and JSON files in the form of Hugging Face transformers, for the exports of a Transformer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.formats.transformer_names import layer_names

WRITES = ("out_proj", "fc2")  # linear layers that write to the residual stream; all other linear layers read from it


def layer_tensors(state: Mapping[str, Tensor], config: TransformerConfig, axes: Tensor) -> dict[str, Tensor]:
    """Returns the weights of all encoder and decoder layers. A missing bias becomes zeros.

    `axes` [D] is the new order of the dimensions of the residual stream: the old index of each new dimension.
    """
    tensors: dict[str, Tensor] = {}
    for stack in ("encoder", "decoder"):
        for index in range(config.encoder_layers if stack == "encoder" else config.decoder_layers):
            for ours, theirs in layer_names(stack):
                weight = state[f"{stack}.{index}.{ours}.weight"]
                bias = state.get(f"{stack}.{index}.{ours}.bias", torch.zeros(len(weight)))
                if ours.endswith(("norm", *WRITES)):
                    weight, bias = weight[axes], bias[axes]
                else:
                    weight = weight[:, axes]
                parts = zip(theirs, weight.chunk(len(theirs)), bias.chunk(len(theirs)), strict=True)
                for name, part, of_part in parts:
                    tensors[f"model.{stack}.layers.{index}.{name}.weight"] = part
                    tensors[f"model.{stack}.layers.{index}.{name}.bias"] = of_part
    return tensors


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def common_settings(config: TransformerConfig) -> dict[str, Any]:
    """Returns the entries of config.json that MarianMTModel and M2M100ForConditionalGeneration share."""
    sides: dict[str, int] = {}
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        sides |= {f"{side}_layers": layers, f"{side}_ffn_dim": config.d_ff, f"{side}_attention_heads": config.heads}
    return {
        "tie_word_embeddings": True,
        "d_model": config.d_model,
        **sides,
        "activation_function": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embeddings,
        "is_encoder_decoder": True,
        "dtype": "float32",
    }
