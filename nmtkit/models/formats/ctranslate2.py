"""Exports a Transformer as a model of CTranslate2, an inference engine in C++. Needs the package ctranslate2."""

import importlib.util
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from nmtkit.config.files import new_folder
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.models import building
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS
from nmtkit.models.formats.names import CTRANSLATE2, split
from nmtkit.models.formats.writing import SIZES, check_expressible
from nmtkit.models.layers.feed_forward import GATED

# CTranslate2 supports every value of these settings
SAME = SIZES | {"pre_norm", "norm", "share_embeddings", "tie_output", "embedding_norm", "scale_embeddings"}
SAME |= {"activation", "position_offset", "norm_eps", "kv_heads", "rotary_base", "max_distance"}
SAME |= {"d_key", "d_value"}  # `save` checks that both are equal
ALLOWED = {"positions": (*ADDED_POSITIONS, "rotary", "relative", "none")}
POSITIONS = 4096  # number of positions in the exported table of sinusoids


def save(source: Path, destination: Path, quantization: Literal["float32", "int8"]) -> None:
    """Writes `source`, the checkpoint of a Transformer, as a folder that `ctranslate2.Translator` loads.

    The translator reads and writes SentencePiece pieces, so the folder also holds the SentencePiece models. By default,
    CTranslate2 sorts hypotheses by log probability / pieces. `length_penalty` in `translate_batch` changes this order.

    Raises ValueError if CTranslate2 does not support an option of the architecture. The message names the option.
    Raises ImportError if the package ctranslate2 is missing.
    """
    require()
    model, tokenizer = building.from_checkpoint(source)
    transformer = check_expressible(model, source, "CTranslate2", SAME, ALLOWED)
    widths = transformer.config.key_width, transformer.config.value_width
    if widths[0] != widths[1]:
        raise ValueError(
            f"{source} has keys of width {widths[0]} and values of width {widths[1]}. CTranslate2 needs equal widths: "
            "train with equal --d-key and --d-value, or give --format safetensors"
        )
    source_pieces = tokenizer.source_pieces(range(tokenizer.source_size))
    spec = specification(transformer, source_pieces, tokenizer.target_pieces(range(tokenizer.target_size)))
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    with new_folder(destination) as folder:
        spec.save(str(folder))
        tokenizer.save(folder)


def require() -> None:
    """Raises ImportError with the install command if the package ctranslate2 is missing."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ImportError("this needs the package ctranslate2: pip install 'nmtkit[export]'")


def specification(model: Transformer, source_pieces: list[str], target_pieces: list[str]) -> Any:
    """Returns CTranslate2's specification of a model. The method `save` of the specification writes the files.

    `source_pieces` and `target_pieces` are the vocabularies by id.
    """
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

    config = model.config
    settings: dict[str, Any] = {
        "num_heads": config.heads,
        "num_heads_kv": config.kv_heads,
        "head_dim": config.key_width,
        "pre_norm": config.pre_norm,
        "rms_norm": config.norm == "rms",
        "layernorm_embedding": config.embedding_norm,
        "activation": Activation[GATED.get(config.activation, config.activation).upper()],
        "ffn_glu": config.activation in GATED,
        "relative_position": config.positions == "relative",
    }
    if config.positions == "rotary":  # not interleaved: elements i and i + key_width / 2 of a head are a pair
        settings |= {"rotary_dim": config.key_width, "rotary_interleave": False, "rotary_base": config.rotary_base}
    encoder = TransformerEncoderSpec(config.encoder_layers, **settings)
    spec = TransformerSpec(encoder, TransformerDecoderSpec(config.decoder_layers, **settings))
    if config.positions == "rotary":
        del encoder.position_encodings  # with rotary positions, the decoder has no such table either
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = config.scale_embeddings
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = (target_pieces[id] for id in (UNK, BOS, EOS))
    spec.config.decoder_start_token = spec.config.bos_token
    spec.register_source_vocabulary(source_pieces)
    spec.register_target_vocabulary(target_pieces)
    names = CTRANSLATE2
    if config.activation in GATED:
        names = replace(names, rows={**names.rows, "feed_forward.fc1": "ffn.linear_0 ffn.linear_0_noact"})
    tensors = split(model.state_dict(), names.of(config))
    embeddings = {"encoder.embeddings.0": model.source_embedding, "decoder.embeddings": model.target_embedding}
    for name, embedding in embeddings.items():
        tensors[f"{name}.weight"] = embedding.tokens.weight
        positions = f"{name.partition('.')[0]}.position_encodings.encodings"
        if config.positions == "none":
            # Without a table, CTranslate2 adds sinusoids.
            tensors[positions] = embedding.tokens.weight.new_zeros(POSITIONS, config.d_model)
        elif config.positions in ADDED_POSITIONS:
            tensors[positions] = embedding.table(POSITIONS if embedding.positions is None else 1)
    tensors |= {f"decoder.projection.{name}": tensor for name, tensor in model.output_projection.named_parameters()}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        layer = reduce(lambda part, key: part[int(key)] if key.isdigit() else getattr(part, key), path, spec)
        setattr(layer, last, tensor.detach().numpy())
    spec.validate()
    return spec
