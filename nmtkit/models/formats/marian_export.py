"""Exports a Transformer for Marian, as a folder with model.npz, SentencePiece models and decoder.yml.

Marian's decoder starts from zeros, but nmtkit's decoder starts from b, the embedding of bos. The export therefore
subtracts b from all embeddings. Embeddings are multiplied by s = sqrt(d_model), so the input of the first layer changes
from x to x - s b. Two biases compensate for this change: W s b in the projection to queries, keys and values, whose
weight is W, and s b in the residual sum. If the embeddings are also the output projection, all logits change by the
same number, so the probabilities do not change. If the first decoder layer shares its weights with others, it gets
separate weights. An SSRU has no such bias, and the gates of average attention multiply x. A model with an SSRU or
average attention must therefore be trained with --zero-bos, so that its decoder starts from zeros, too.

Pieces keep their ids. Marian reads the ids of unk and eos from the SentencePiece model.
"""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from nmtkit.config.files import new_folder
from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import BOS, Tokenizer
from nmtkit.models import building, checkpoint
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.architectures.transformer_layers import DecoderLayer, Embedding, EncoderLayer, SelfAttention
from nmtkit.models.formats.marian import ACTIVATIONS, FIXED, NORM_EPS, POSITIONS, SELF_ATTENTION, SETTINGS
from nmtkit.models.formats.model_card import model_card
from nmtkit.models.formats.names import MARIAN, split
from nmtkit.models.formats.writing import (
    BEAM,
    LENGTH_EXPONENT,
    SEARCH_NOTE,
    SIZES,
    add_biases,
    check_expressible,
    write_files,
)

# Marian supports every value of the settings in SAME. ALLOWED maps further settings to the values that Marian supports.
SAME = SIZES | {"share_embeddings", "tie_output", "embedding_norm", "zero_bos", "ssru_norm", "decoder_tied_layers"}
SAME |= {"average_ffn", "average_gate", "average_separate_gates"}
# Marian adds 1e-6 to the variance in norms. With norm_eps 1e-5, log probabilities differ by about 1e-5 (relative).
ALLOWED = {"activation": ACTIVATIONS, "positions": (POSITIONS,), "norm_eps": (NORM_EPS, 1e-5)}
ALLOWED |= {"decoder_self_attention": tuple(SELF_ATTENTION.values())}
MODEL = "model.npz"
USAGE = """\
```sh
pip install pymarian
pymarian decode -c decoder.yml --cpu-threads 2 < text > translations    # or marian-decoder of a build of Marian
```
"""


def save(source: Path, destination: Path) -> None:
    """Writes `source`, the checkpoint of a Transformer, as a folder that Marian reads.

    Raises ValueError if Marian does not support the architecture or the tokenizer. The message names the reason.
    """
    contents = checkpoint.load(source)
    model, tokenizer = building.from_contents(contents, source)
    transformer = check_expressible(model, source, "Marian", SAME, ALLOWED)
    check_average_attention(transformer.config, source)
    check_tokenizer(tokenizer, source)
    weights = {name: tensor.contiguous().numpy() for name, tensor in to_marian(transformer).items()}
    settings = as_yaml(settings_of(transformer.config, tokenizer)).encode() + b"\0"
    card = model_card(contents, USAGE + SEARCH_NOTE.format("decoder.yml"))
    with new_folder(destination) as folder:
        np.savez(folder / MODEL, **weights, **{SETTINGS: np.frombuffer(settings, np.int8)})  # type: ignore[arg-type]
        write_files(folder, vocabularies(tokenizer))
        write_files(folder, {"decoder.yml": as_yaml(decoder_settings(tokenizer)), "README.md": card})


def check_average_attention(config: TransformerConfig, source: Path) -> None:
    """Raises ValueError for average attention that Marian does not support."""
    if config.decoder_self_attention != "average":
        return
    if config.average_gate and not config.average_separate_gates:
        raise ValueError(
            f"{source} has average attention whose gates read both inputs, which Marian does not support; train with "
            "--average-separate-gates or --no-average-gate, or give --format safetensors"
        )
    if config.average_ffn and config.d_ff == config.d_model:
        raise ValueError(
            f"{source} has average attention with d_ff {config.d_ff} and d_model {config.d_model}; Marian leaves out "
            "the second matrix of its feed-forward network if the widths are equal; train with a different --d-ff, or "
            "give --format safetensors"
        )


def check_tokenizer(tokenizer: Tokenizer, source: Path) -> None:
    """Raises ValueError for a tokenizer that Marian cannot use."""
    if tokenizer.languages:
        raise ValueError(
            f"{source} is multilingual, but Marian does not put language tokens before the source; give --format "
            "huggingface or safetensors"
        )
    if any(piece.startswith(FOREIGN) for piece in tokenizer.target_pieces(range(tokenizer.target_size))):
        raise ValueError(
            f"{source} has two BPE models with one table of ids, so some pieces would have an additional character in "
            "Marian's translations; give --format huggingface or safetensors"
        )


def vocabularies(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the SentencePiece models by file name."""
    if tokenizer.one_model:
        return {"vocab.spm": tokenizer.source_model}
    return {"source.spm": tokenizer.source_model, "target.spm": tokenizer.target_model}


def settings_of(config: TransformerConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns Marian's settings of the model."""
    shared = tokenizer.joint and config.share_embeddings
    settings: dict[str, Any] = {
        "tied-embeddings": config.tie_output and not shared,
        "tied-embeddings-all": config.tie_output and shared,
        "tied-embeddings-src": not config.tie_output and shared,
        "output-omit-bias": False,
        "layer-normalization": config.ssru_norm,
        "dim-emb": config.d_model,
        "dim-vocabs": [tokenizer.source_size, tokenizer.target_size],
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "transformer-dim-ffn": config.d_ff,
        "transformer-decoder-dim-ffn": 0,
        "transformer-heads": config.heads,
        "transformer-tied-layers": list(config.decoder_tied_layers),
        "transformer-ffn-activation": config.activation,
        "transformer-preprocess": '""',
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "nd" if config.embedding_norm else "d",
        "transformer-postprocess-top": '""',
    }
    if config.decoder_self_attention == "ssru":
        settings["dec-cell"] = "ssru"
    if config.decoder_self_attention == "average":
        settings |= {"transformer-aan-depth": 1 + config.average_ffn, "transformer-dim-aan": config.d_ff}
        settings |= {"transformer-aan-nogate": not config.average_gate, "transformer-aan-activation": config.activation}
    theirs = {kind: name for name, kind in SELF_ATTENTION.items()}
    settings |= {"transformer-decoder-autoreg": theirs[config.decoder_self_attention], "version": "v1.12.42"}
    fixed = {name: allowed[0] or "[]" for name, allowed in FIXED.items()}
    return fixed | {name: str(value).lower() for name, value in settings.items()}


def decoder_settings(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns Marian's settings for the search that is nearest to nmtkit's defaults."""
    names = list(vocabularies(tokenizer))
    files = {"relative-paths": "true", "models": f"[{MODEL}]", "vocabs": f"[{names[0]}, {names[-1]}]"}
    batches = {"mini-batch": "64", "maxi-batch": "100", "maxi-batch-sort": "src"}
    return files | {"beam-size": str(BEAM), "normalize": str(LENGTH_EXPONENT), "word-penalty": "0"} | batches


def as_yaml(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in sorted(settings.items()))


# --- weights --------------------------------------------------------------------------------------------------------


def to_marian(model: Transformer) -> dict[str, Tensor]:
    """Returns the weights in fp32 under Marian's names. Raises ValueError if the embedding of bos cannot become 0."""
    shift_bos_to_zero(model)
    config, state = model.config, {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    source, target = (state[f"{side}_embedding.tokens.weight"] for side in ("source", "target"))
    if model.source_embedding.tokens is model.target_embedding.tokens:
        tensors["Wemb"] = target
    else:
        tensors |= {"encoder_Wemb": source, "decoder_Wemb": target}
    if not config.tie_output:
        tensors["decoder_ff_logit_out_W"] = state["output_projection.weight"].T
    tensors["decoder_ff_logit_out_b"] = state.get("output_projection.bias", torch.zeros(len(target)))[None]
    for name, part in split(state, MARIAN.of(config)).items():
        tensors[name] = part.T if part.dim() == 2 else part[None]
    return tensors


def shift_bos_to_zero(model: Transformer) -> None:
    """Changes the weights in place: the embedding of bos becomes zero, and the probabilities stay the same."""
    add_biases(model)
    bos = model.target_embedding.tokens.weight.detach()[BOS].clone()
    if model.config.zero_bos or not bos.any():
        return
    kinds = {"ssru": "an SSRU", "average": "average attention"}
    obstacle, flag = kinds.get(model.config.decoder_self_attention), "--zero-bos"
    if obstacle is None and model.config.embedding_norm:
        obstacle, flag = "a model that normalises its embeddings", "--no-embedding-norm"
    if obstacle is not None:
        raise ValueError(
            "the decoder of this model starts from the embedding of bos, but Marian's decoder starts from zeros, and "
            f"{obstacle} cannot compensate for this difference: train with {flag}, or give --format safetensors"
        )
    if numbers := model.config.decoder_tied_layers:  # the biases change only in the layer that reads the embeddings
        stack = cast(nn.ModuleList, model.decoder)
        stack[0] = copy.deepcopy(stack[0])
        model.config = dataclasses.replace(model.config, decoder_tied_layers=(max(numbers) + 1, *numbers[1:]))
    sides: list[tuple[Embedding, EncoderLayer | DecoderLayer]] = [(model.target_embedding, model.decoder[0])]
    if model.source_embedding.tokens is model.target_embedding.tokens:
        sides.append((model.source_embedding, model.encoder[0]))
    with torch.no_grad():
        model.target_embedding.tokens.weight -= bos
        for embedding, layer in sides:
            entering, attention = embedding.scale * bos, layer.self_attention
            assert isinstance(attention, SelfAttention)
            attention.qkv_proj.bias.add_(attention.qkv_proj.weight @ entering)
            attention.out_proj.bias.add_(entering)
