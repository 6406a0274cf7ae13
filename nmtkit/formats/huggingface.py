"""Models of Hugging Face's transformers: Marian (OPUS-MT), M2M-100, NLLB and mBART-50.

A folder holds config.json, the weights (model.safetensors, perhaps in parts, or pytorch_model.bin, of which no code is
run) and the tokenizer's SentencePiece models with a table of ids. The package transformers is not needed.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.architectures.transformer import BASE, TransformerConfig
from nmtkit.checkpoint import Checkpoint
from nmtkit.config import derive
from nmtkit.data.spm_model import pieces_of, renumbered
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.formats.tokenizer_json import sentencepiece_model
from nmtkit.formats.transformer_names import stacks
from nmtkit.formats.vocabulary import HIDDEN, Table, is_language, read_model, table_of, unused
from nmtkit.formats.weights import Weights, transformer_checkpoint

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer_config.json"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
BESIDE = r"model\.(en|de)coder\.(version|embed_positions\.weights?)|final_logits_bias"  # what is computed, or zeros
# what the settings of a model type do not say
SPECIAL: dict[str, dict[str, Any]] = {
    "marian": {"positions": "sinusoidal_halves", "output_bias": True},
    "m2m_100": {"positions": "sinusoidal_fairseq", "position_offset": 2, "pre_norm": True},
    "mbart": {"positions": "learned", "pre_norm": True, "embedding_norm": True, "output_bias": True},
}


def load(folder: Path) -> Checkpoint:
    """Returns the checkpoint of the model in `folder`.

    Raises FileNotFoundError or ValueError, naming the file, for one that is missing, damaged or not supported, and
    ImportError for weights in safetensors without that package.
    """
    settings = read_json(folder / CONFIG_FILE)
    kind = settings.get("model_type")
    if kind not in LOADERS:
        raise ValueError(f"{folder / CONFIG_FILE}: model type {kind!r} is not supported; {', '.join(LOADERS)} are")
    try:
        config = config_of(settings)
        source, target, tokenizer = LOADERS[kind](folder, settings)
    except KeyError as error:
        raise ValueError(f"{folder} is no complete folder of transformers: its files have no entry {error}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is no folder of transformers: {error}") from error
    shared = tokenizer.joint and settings.get("share_encoder_decoder_embeddings", True)
    config = replace(config, output_bias=config.output_bias or bool(target.hidden), share_embeddings=shared)
    weights = Weights(read_weights(folder), folder)
    return transformer_checkpoint(config, tokenizer, to_nmtkit(weights, config, source, target, settings))


# --- settings -------------------------------------------------------------------------------------------------------


def config_of(settings: Mapping[str, Any]) -> TransformerConfig:
    """Returns the config of a model. Raises ValueError naming the setting that nmtkit's Transformer does not have."""

    def same(one: str, other: str) -> int:
        if settings[one] != settings[other]:
            raise ValueError(f"{one} {settings[one]} and {other} {settings[other]}: nmtkit has one number for both")
        return settings[one]

    activation = settings.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_function {activation!r} is not supported; {', '.join(ACTIVATIONS)} are")
    changes = {
        "encoder_layers": settings["encoder_layers"],
        "decoder_layers": settings["decoder_layers"],
        "d_model": settings["d_model"],
        "d_ff": same("encoder_ffn_dim", "decoder_ffn_dim"),
        "heads": same("encoder_attention_heads", "decoder_attention_heads"),
        "dropout": settings.get("dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "activation_dropout": settings.get("activation_dropout", 0.0),
        "activation": ACTIVATIONS[activation],
        "attention_bias": True,
        "max_positions": settings["max_position_embeddings"],
        "scale_embeddings": settings.get("scale_embedding", False),
        "tie_output": settings.get("tie_word_embeddings", True),
    }
    return derive(BASE, changes | SPECIAL[settings["model_type"]], CONFIG_FILE)


# --- tokenizers -----------------------------------------------------------------------------------------------------


def marian_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[Table, Table, Tokenizer]:
    """Two SentencePiece models, and a table of ids for both or for each."""
    models = [read_model(folder / f"{side}.spm") for side in ("source", "target")]
    files = ["vocab.json"]
    if not settings.get("share_encoder_decoder_embeddings", True):
        files.append("target_vocab.json")
    tables = [pieces_by_id(folder / name) for name in files]
    sizes = [settings["vocab_size"], settings.get("decoder_vocab_size") or settings["vocab_size"]]
    for name, table, size in zip(files, tables, sizes, strict=False):
        if max(table) >= size:
            raise ValueError(f"{folder / name} has ids up to {max(table)}, and the model {size} entries")
    sides = [models] if len(tables) == 1 else [models[:1], models[1:]]
    start = settings.get("decoder_start_token_id", settings.get("pad_token_id"))
    found = [table_of(table, side, start, "<unk>", "</s>") for table, side in zip(tables, sides, strict=True)]
    source, target = found[0], found[-1]
    both = [
        renumbered(model, table.pieces, table.control) for model, table in zip(models, (source, target), strict=True)
    ]
    return source, target, Tokenizer(*both)


MBART_50 = "MBart50Tokenizer"
# of M2M-100, in the order of their tokens: transformers 5 does not write them
M2M_100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
    "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
    "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)


def m2m_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[Table, Table, Tokenizer]:
    """One SentencePiece model, and ids in vocab.json (M2M-100), or those of fairseq and the tokens of languages."""
    about = read_json(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else {}
    if settings["model_type"] == "mbart" and MBART_50 not in (
        settings.get("tokenizer_class"),
        str(about.get("tokenizer_class")).removesuffix("Fast"),
    ):
        raise ValueError(
            f"{folder} is no mBART-50: its tokenizer is no {MBART_50}. mBART before it (cc25, en-ro) writes the "
            "language after the source, which is not supported"
        )
    if about.get("legacy_behaviour"):
        raise ValueError(
            f"{folder / TOKENIZER_FILE}: legacy_behaviour, a language after the source, is not supported. NLLB "
            "itself was trained with the language before it: unless this model was trained otherwise, set it to false"
        )
    if (folder / "sentencepiece.bpe.model").is_file() or not (folder / "tokenizer.json").is_file():
        model = read_model(folder / "sentencepiece.bpe.model")
        by_id = dict(enumerate(["<s>", "<pad>", "</s>", "<unk>", *(piece.text for piece in pieces_of(model)[3:])]))
    else:
        model, by_id = sentencepiece_model(read_json(folder / "tokenizer.json"), folder / "tokenizer.json")
    if (folder / "vocab.json").is_file():
        by_id = pieces_by_id(folder / "vocab.json")
    size = len(by_id)
    by_id |= added_tokens(folder, set(by_id.values()), size)
    if about.get("language_codes") == "m2m100" and "__af__" not in by_id.values():
        by_id |= dict(enumerate((f"__{code}__" for code in M2M_100.split()), size))
    if max(by_id) >= settings["vocab_size"]:
        raise ValueError(f"{folder} has ids up to {max(by_id)}, and the model {settings['vocab_size']} entries")
    by_id |= {id: unused(id) for id in range(settings["vocab_size"]) if id not in by_id}
    start = settings.get("decoder_start_token_id", settings["eos_token_id"])
    if start == settings["eos_token_id"]:
        start = None
        # <s> is the decoder's first token in nmtkit; the original's has its part in the sum of the softmax
        by_id |= {id: unused(id) for id, piece in by_id.items() if piece == "<s>"}
    table = table_of(by_id, [model], start, "<unk>", "</s>")
    return table, table, Tokenizer(renumbered(model, table.pieces, table.control))


LOADERS: dict[str, Callable[[Path, Mapping[str, Any]], tuple[Table, Table, Tokenizer]]] = {
    "marian": marian_tokenizer,
    "m2m_100": m2m_tokenizer,
    "mbart": m2m_tokenizer,
}


def added_tokens(folder: Path, pieces: Collection[str], size: int) -> dict[int, str]:
    """Returns the tokens that are no pieces of the table, by id, from where a release of transformers writes them.

    The oldest have only the names in order, the first after the `size` entries of the table, and no <mask> there.
    """
    found: dict[int, str] = {}
    for name, key in ((TOKENIZER_FILE, "added_tokens_decoder"), ("tokenizer.json", "added_tokens")):
        tokens = read_json(folder / name).get(key, {}) if (folder / name).is_file() else {}
        entries = tokens.items() if isinstance(tokens, dict) else ((token["id"], token) for token in tokens)
        found |= {int(id): str(token["content"]) for id, token in entries}
    if (folder / "added_tokens.json").is_file():
        found |= pieces_by_id(folder / "added_tokens.json")
    path = folder / "special_tokens_map.json"
    if not any(is_language(token) for token in found.values()) and path.is_file():
        names = read_json(path).get("additional_special_tokens", [])
        texts = [name if isinstance(name, str) else str(name["content"]) for name in names]
        found |= dict(enumerate((text for text in texts if text not in pieces), size))
    return found


# --- weights --------------------------------------------------------------------------------------------------------


def to_nmtkit(
    weights: Weights, config: TransformerConfig, source: Table, target: Table, settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the weights under nmtkit's names; rows of embeddings in the order of the tables."""
    found: dict[str, Tensor] = {}
    shared = ["model.shared.weight", "model.encoder.embed_tokens.weight"]
    decoder = shared if config.share_embeddings else ["model.decoder.embed_tokens.weight", shared[0]]
    output = decoder if config.tie_output else ["lm_head.weight"]
    for names, size in ((shared, "vocab_size"), (decoder, "decoder_vocab_size" if decoder != shared else "vocab_size")):
        rows = len(weights.first(*names))
        if rows != (settings.get(size) or settings["vocab_size"]):
            raise ValueError(f"{weights.path}: {size} is {settings.get(size)}, and the embeddings have {rows} rows")
    if config.share_embeddings:
        weights.check_equal([*shared, "model.decoder.embed_tokens.weight"], "share_encoder_decoder_embeddings")
    if config.tie_output:
        weights.check_equal([decoder[0], "lm_head.weight"], "tie_word_embeddings")
    found["source_embedding.tokens.weight"] = weights.rows(source.rows, *shared)
    found["target_embedding.tokens.weight"] = weights.rows(target.rows, *decoder)
    found["output_projection.weight"] = weights.rows(target.rows, *output)
    if config.output_bias:
        bias = weights.optional("final_logits_bias")
        found["output_projection.bias"] = torch.zeros(len(target.rows)) if bias is None else bias.flatten()[target.rows]
        found["output_projection.bias"][target.hidden] = HIDDEN
    found |= stacks(weights, config, "model.")
    weights.check_all_taken(BESIDE)
    return found


# --- files ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; a folder of transformers has one") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, or is damaged: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds no JSON object")
    return contents


def pieces_by_id(path: Path) -> dict[int, str]:
    contents = read_json(path)
    if not all(type(id) is int for id in contents.values()):
        raise ValueError(f"{path} is no table from piece to id")
    return {id: piece for piece, id in contents.items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors by name. Runs no code of the file."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    if (folder / names[0]).is_file():
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError("this needs the package safetensors: pip install 'nmtkit[export]'") from error
        for name in names:
            try:
                weights |= load_file(folder / name)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / name} is damaged or incomplete: {error}") from error
        return weights
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # of many types, for files that are not what they should be
        raise ValueError(f"{path} is damaged, or holds more than tensors; none of it was run") from error
