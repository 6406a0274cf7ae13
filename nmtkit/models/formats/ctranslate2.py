"""Exports a Transformer as a model of CTranslate2, an inference engine in C++. Needs the package ctranslate2."""

import importlib.util
from pathlib import Path
from typing import Any, Literal

from torch import nn

from nmtkit.config.files import write_folder
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.models import building
from nmtkit.models.architectures.transformer import CrossAttention, Embedding, SelfAttention, Transformer
from nmtkit.models.formats.expressible import check_expressible
from nmtkit.models.layers.feed_forward import GATED

# settings of which CTranslate2 supports every value
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "positions", "max_positions", "pre_norm"}
SAME |= {"share_embeddings", "tie_output", "output_bias", "attention_bias", "embedding_norm", "scale_embeddings"}
SAME |= {"activation", "position_offset", "norm_eps"}
POSITIONS = 4096  # number of positions in the exported table of sinusoids


def save(source: Path, destination: Path, quantization: Literal["float32", "int8"]) -> None:
    """Writes `source`, the checkpoint of a Transformer, as a folder that `ctranslate2.Translator` loads.

    The translator reads and writes SentencePiece pieces, so the folder also holds the SentencePiece models. By default,
    CTranslate2 sorts hypotheses by log probability / pieces. `length_penalty` in `translate_batch` changes this order.

    Raises ValueError if CTranslate2 does not support an option of the architecture. The message names the option.
    """
    require()
    model, tokenizer = building.from_checkpoint(source)
    transformer = check_expressible(model, source, "CTranslate2", SAME, {})
    source_pieces = tokenizer.source_pieces(range(tokenizer.source_size))
    spec = specification(transformer, source_pieces, tokenizer.target_pieces(range(tokenizer.target_size)))
    spec.optimize(quantization=None if quantization == "float32" else quantization)

    def fill(folder: Path) -> None:
        spec.save(str(folder))
        tokenizer.save(folder)

    write_folder(destination, fill)


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

    config = model.config
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=config.pre_norm,
        activation=Activation[GATED.get(config.activation, config.activation).upper()],
        ffn_glu=config.activation in GATED,
        layernorm_embedding=config.embedding_norm,
    )
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = config.scale_embeddings
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = (target_pieces[id] for id in (UNK, BOS, EOS))
    spec.config.decoder_start_token = spec.config.bos_token
    spec.register_source_vocabulary(source_pieces)
    spec.register_target_vocabulary(target_pieces)
    _fill(spec, model)
    spec.validate()
    return spec


def _fill(spec: Any, model: Transformer) -> None:
    """Copies the weights into CTranslate2's specification of a Transformer."""
    _embedding(spec.encoder.embeddings[0], spec.encoder, model.source_embedding)
    _embedding(spec.decoder.embeddings, spec.decoder, model.target_embedding)
    if model.config.pre_norm:
        _norm(spec.encoder.layer_norm, model.encoder_norm)
        _norm(spec.decoder.layer_norm, model.decoder_norm)
    for ours, theirs in zip(model.encoder, spec.encoder.layer, strict=True):
        _attention(theirs.self_attention, ours.self_attention, ours.self_attention_norm)
        _feed_forward(theirs.ffn, ours.feed_forward, ours.feed_forward_norm)
    for layer, theirs in zip(model.decoder, spec.decoder.layer, strict=True):
        assert isinstance(layer.self_attention, SelfAttention) and layer.feed_forward is not None
        _attention(theirs.self_attention, layer.self_attention, layer.self_attention_norm)
        assert layer.cross_attention is not None
        _attention(theirs.attention, layer.cross_attention, layer.cross_attention_norm)
        _feed_forward(theirs.ffn, layer.feed_forward, layer.feed_forward_norm)
    _linear(spec.decoder.projection, model.output_projection)


def _embedding(tokens: Any, side: Any, ours: Embedding) -> None:
    tokens.weight = ours.tokens.weight.detach().numpy()
    if ours.config.embedding_norm:
        _norm(side.layernorm_embedding, ours.norm)
    side.position_encodings.encodings = ours.table(POSITIONS if ours.positions is None else 1).detach().numpy()


def _attention(theirs: Any, ours: SelfAttention | CrossAttention, norm: nn.LayerNorm) -> None:
    inputs = [ours.qkv_proj] if isinstance(ours, SelfAttention) else [ours.q_proj, ours.kv_proj]
    for target, linear in zip(theirs.linear, [*inputs, ours.out_proj], strict=True):
        _linear(target, linear)
    _norm(theirs.layer_norm, norm)


def _feed_forward(theirs: Any, ours: Any, norm: nn.LayerNorm) -> None:
    if ours.gated:
        parts = zip(ours.fc1.weight.detach().chunk(2), ours.fc1.bias.detach().chunk(2), strict=True)
        for target, (weight, bias) in zip((theirs.linear_0, theirs.linear_0_noact), parts, strict=True):
            target.weight, target.bias = weight.numpy(), bias.numpy()
    else:
        _linear(theirs.linear_0, ours.fc1)
    _linear(theirs.linear_1, ours.fc2)
    _norm(theirs.layer_norm, norm)


def _linear(theirs: Any, ours: Any) -> None:
    theirs.weight = ours.weight.detach().numpy()
    if ours.bias is not None:
        theirs.bias = ours.bias.detach().numpy()


def _norm(theirs: Any, ours: Any) -> None:
    theirs.gamma, theirs.beta = ours.weight.detach().numpy(), ours.bias.detach().numpy()
