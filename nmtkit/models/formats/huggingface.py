"""Imports models of Hugging Face's transformers: Marian (OPUS-MT), M2M-100, NLLB and mBART-50.

A folder holds config.json, the weights, and the SentencePiece models of the tokenizer with a table of ids. The weights
are in model.safetensors or pytorch_model.bin, as one file or in parts. The import does not run code from the files and
does not need the package transformers.
"""

import base64
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nmtkit.config import derive
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.tokenizers.spm_model import ModelPiece, new_model, pieces_of
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, Tokenizer
from nmtkit.models.architectures.transformer_config import BASE, TransformerConfig
from nmtkit.models.formats import pickles
from nmtkit.models.formats.names import TRANSFORMERS
from nmtkit.models.formats.reading import ModelSettings, naming, read_json
from nmtkit.models.formats.safetensors import load_safetensors
from nmtkit.models.formats.vocabulary import SPECIAL, IdTable, is_language, read_model, table_of, tokenizer_of
from nmtkit.models.formats.weights import Weights, transformer_checkpoint

CONFIG_FILE, TOKENIZER_FILE, GENERATION_FILE = "config.json", "tokenizer_config.json", "generation_config.json"
TOKENIZER_JSON, SPM_FILE, VOCAB_FILE = "tokenizer.json", "sentencepiece.bpe.model", "vocab.json"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
# tensors that the import may skip: versions and tables of sinusoids
IGNORED = r"model\.(en|de)coder\.(version|embed_positions\.weights?)"
# Defaults of transformers that depend on the model type, for settings that config.json leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "marian": {"activation_function": "gelu", "scale_embedding": False, "attention_dropout": 0.0, "layerdrop": 0.0},
    "m2m_100": {"activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1, "layerdrop": 0.05},
    "mbart": {"activation_function": "gelu", "scale_embedding": False, "attention_dropout": 0.0, "layerdrop": 0.0},
}
# Settings that depend only on the model type.
FIXED: dict[str, dict[str, Any]] = {
    "marian": {"positions": "sinusoidal_halves", "output_bias": True},
    "m2m_100": {"positions": "sinusoidal_fairseq", "pre_norm": True},
    "mbart": {"positions": "learned", "pre_norm": True, "embedding_norm": True, "output_bias": True},
}
# Search setting -> value without effect. The settings are in generation_config.json; older models use config.json.
SEARCH_SETTINGS: dict[str, float | None] = {
    "num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0, "min_length": 0,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "do_sample": False, "forced_bos_token_id": None,
}  # fmt: skip

log = logging.getLogger("nmtkit")


def load(folder: Path) -> Checkpoint:
    """Returns the checkpoint of the model in `folder`.

    Raises FileNotFoundError or ValueError naming the file if a file is missing, damaged or not supported. Raises
    ImportError if the weights need the package safetensors and the package is missing. Warns about search settings and
    added tokens, which are not imported.
    """
    path = folder / CONFIG_FILE
    settings = ModelSettings(read_json(path, "a folder of transformers contains this file"), path)
    kind = settings.one_of("model_type", LOADERS)
    config = config_of(settings, kind)
    weights = Weights(read_weights(folder), folder)
    if not config.output_bias:
        leave_out_bias(weights, folder)
    sizes = vocabulary_sizes(settings, weights)
    tables, tokenizer = LOADERS[kind](folder, settings, sizes)
    shared = tokenizer.joint and settings.flag("share_encoder_decoder_embeddings", True)
    config = replace(config, output_bias=config.output_bias or bool(tables[1].hidden), share_embeddings=shared)
    equal = ("share_encoder_decoder_embeddings", "tie_word_embeddings")
    tensors = weights.to_nmtkit(TRANSFORMERS, config, tables, equal, IGNORED)
    contents = transformer_checkpoint(config, tokenizer, tensors, folder)
    warn_of_search_settings(folder, settings)
    about = {} if tokenizer.languages else optional_json(folder / TOKENIZER_FILE)
    languages = [about.get("source_lang"), about.get("target_lang")]
    if all(isinstance(language, str) for language in languages):  # a bilingual model
        contents["origin"] = {"languages": languages}
    return contents


def optional_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty dict if there is no such file."""
    return read_json(path) if path.exists() else {}


# --- settings -------------------------------------------------------------------------------------------------------


def config_of(settings: ModelSettings, kind: str) -> TransformerConfig:
    """Returns the config of a model. Raises ValueError that names an unsupported setting."""
    defaults = DEFAULTS[kind]
    activation = settings.one_of("activation_function", ACTIVATIONS, defaults["activation_function"])
    changes = {
        "encoder_layers": settings.integer("encoder_layers"),
        "decoder_layers": settings.integer("decoder_layers"),
        "d_model": settings.integer("d_model"),
        "d_ff": settings.same(settings.integer, "encoder_ffn_dim", "decoder_ffn_dim"),
        "heads": settings.same(settings.integer, "encoder_attention_heads", "decoder_attention_heads"),
        "dropout": settings.fraction("dropout", 0.1),
        "attention_dropout": settings.fraction("attention_dropout", defaults["attention_dropout"]),
        "activation_dropout": settings.fraction("activation_dropout", 0.0),
        "encoder_layerdrop": settings.fraction("encoder_layerdrop", defaults["layerdrop"]),
        "decoder_layerdrop": settings.fraction("decoder_layerdrop", defaults["layerdrop"]),
        "activation": ACTIVATIONS[activation],
        "attention_bias": True,
        "max_positions": settings.integer("max_position_embeddings"),
        "scale_embeddings": settings.flag("scale_embedding", defaults["scale_embedding"]),
        "tie_output": settings.flag("tie_word_embeddings", True),
    }
    if kind == "m2m_100":  # the first position is the id of the padding + 1
        changes["position_offset"] = settings.integer("pad_token_id", 1) + 1
    return derive(BASE, changes | FIXED[kind], str(settings.path))


def vocabulary_sizes(settings: ModelSettings, weights: Weights) -> tuple[int, int]:
    """Returns the sizes of the source vocabulary and the target vocabulary.

    Raises ValueError if the embeddings of a side have more or fewer rows than the size of its vocabulary.
    """
    source = target = settings.integer("vocab_size")
    if not settings.flag("share_encoder_decoder_embeddings", True):
        target = settings.integer("decoder_vocab_size", source)
    sides = (("vocab_size", source, TRANSFORMERS.source), ("decoder_vocab_size", target, TRANSFORMERS.target))
    for name, size, embeddings in sides:
        rows = len(weights.matrix(*embeddings))
        if rows != size:
            raise ValueError(f"{settings.path}: {name} is {size}, but the embeddings have {rows} rows")
    return source, target


def warn_of_search_settings(folder: Path, settings: ModelSettings) -> None:
    """Warns if the model has search settings, because a checkpoint of nmtkit does not hold search settings."""
    path = folder / GENERATION_FILE
    values = {**settings.values, **optional_json(path)}
    found = {name: values.get(name) for name in SEARCH_SETTINGS}
    asked = [f"{name} {value}" for name, value in found.items() if value not in (None, SEARCH_SETTINGS[name])]
    if asked:
        log.warning(
            "%s: search settings are not imported: %s; give flags of generate instead, such as --beam",
            path if path.exists() else settings.path, ", ".join(asked),
        )  # fmt: skip


# --- tokenizers -----------------------------------------------------------------------------------------------------


def marian_tokenizer(folder: Path, settings: ModelSettings, sizes: tuple[int, int]) -> tuple[list[IdTable], Tokenizer]:
    """Reads two SentencePiece models, and either one table of ids for both models or one table for each model."""
    models = [read_model(folder / f"{side}.spm") for side in ("source", "target")]
    start = settings.integer("decoder_start_token_id", settings.integer("pad_token_id"))
    sides: list[tuple[str, list[bytes], int | None]] = [(VOCAB_FILE, models, start)]
    if not settings.flag("share_encoder_decoder_embeddings", True):  # the target table has the decoder's first token
        sides = [(VOCAB_FILE, models[:1], None), ("target_vocab.json", models[1:], start)]
    tables = []
    for (name, side, first), size in zip(sides, sizes, strict=False):
        tables.append(table_of(pieces_by_id(folder / name), size, side, first, folder / name))
    known = set(tables[0].pieces)
    warn_of_added_tokens(folder, added_tokens(folder, known, len(known)), known)
    tables = [tables[0], tables[-1]]
    return tables, tokenizer_of(tables, models)


MBART_50 = "MBart50Tokenizer"
# The languages of M2M-100, and of the models of WMT 2021, in the order of their tokens. transformers 5 does not save
# these tokens.
M2M_100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
    "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
    "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
LANGUAGE_CODES = {"m2m100": M2M_100, "wmt21": "en ha is ja cs ru zh de"}


def m2m_tokenizer(folder: Path, settings: ModelSettings, sizes: tuple[int, int]) -> tuple[list[IdTable], Tokenizer]:
    """Reads one SentencePiece model. The ids come from vocab.json (M2M-100), or follow the numbering of fairseq."""
    path = folder / TOKENIZER_FILE
    about = optional_json(path)
    if settings.value("model_type") == "mbart" and MBART_50 not in (
        settings.values.get("tokenizer_class"),
        str(about.get("tokenizer_class")).removesuffix("Fast"),
    ):
        raise ValueError(
            f"{folder} is not an mBART-50 model: its tokenizer is not {MBART_50}. Earlier mBART models (cc25, en-ro) "
            "put the language token after the source, which is not supported"
        )
    if about.get("legacy_behaviour"):
        raise ValueError(
            f"{path}: legacy_behaviour (a language token after the source) is not supported. NLLB "
            "was trained with the token before the source; set legacy_behaviour to false unless this model was "
            "trained with the token after the source"
        )
    if (folder / SPM_FILE).exists() or not (folder / TOKENIZER_JSON).exists():
        model = read_model(folder / SPM_FILE)
        by_id = dict(enumerate(["<s>", "<pad>", "</s>", "<unk>", *(piece.text for piece in pieces_of(model)[3:])]))
    else:
        with naming(folder / TOKENIZER_JSON):
            model, by_id = sentencepiece_model(read_json(folder / TOKENIZER_JSON), folder / TOKENIZER_JSON)
    if (folder / VOCAB_FILE).exists():
        by_id = pieces_by_id(folder / VOCAB_FILE)
    size, known = len(by_id), set(by_id.values())
    added = added_tokens(folder, known, size)
    by_id |= added
    if about.get("language_codes") is not None:
        codes = LANGUAGE_CODES[ModelSettings(about, path).one_of("language_codes", LANGUAGE_CODES)].split()
        if "__en__" not in by_id.values():
            by_id |= dict(enumerate((f"__{code}__" for code in codes), size))
    eos = settings.integer("eos_token_id", 2)
    start = settings.integer("decoder_start_token_id", eos)
    path = folder / (VOCAB_FILE if (folder / VOCAB_FILE).exists() else SPM_FILE)
    table = table_of(by_id, sizes[0], [model], None if start == eos else start, path)
    warn_of_added_tokens(folder, added, known | table.control)
    return [table, table], tokenizer_of([table], [model])


LOADERS = {"marian": marian_tokenizer, "m2m_100": m2m_tokenizer, "mbart": m2m_tokenizer}


def added_tokens(folder: Path, pieces: Collection[str], size: int) -> dict[int, str]:
    """Returns the added tokens by id. Different releases of transformers write these tokens to different files.

    The oldest releases write a list of names without ids and without <mask>. Names that are not in `pieces` get
    successive ids from `size` on.
    """
    tokens_by_id: dict[int, str] = {}
    for name, key in ((TOKENIZER_FILE, "added_tokens_decoder"), (TOKENIZER_JSON, "added_tokens")):
        with naming(folder / name):
            tokens = optional_json(folder / name).get(key, {})
            entries = tokens.items() if isinstance(tokens, dict) else ((token["id"], token) for token in tokens)
            tokens_by_id |= {check_id(id, folder / name): str(token["content"]) for id, token in entries}
    if (folder / "added_tokens.json").exists():
        tokens_by_id |= pieces_by_id(folder / "added_tokens.json")
    path = folder / "special_tokens_map.json"
    if not any(map(is_language, tokens_by_id.values())):
        with naming(path):
            names = optional_json(path).get("additional_special_tokens", [])
            texts = [name if isinstance(name, str) else str(name["content"]) for name in names]
        tokens_by_id |= dict(enumerate((text for text in texts if text not in pieces), size))
    return tokens_by_id


def warn_of_added_tokens(folder: Path, added: Mapping[int, str], known: Collection[str]) -> None:
    """Warns about the tokens in `added` that are neither `known` nor special. The import leaves these tokens out.

    transformers separates added tokens from the text before SentencePiece divides the text into pieces.
    """
    tokens = sorted(set(added.values()) - {*known, *SPECIAL})
    if tokens:
        more = f" and {len(tokens) - 5} more" if len(tokens) > 5 else ""
        log.warning(
            "%s: the added tokens %s%s are not imported, so text with these tokens is divided into different pieces",
            folder, ", ".join(tokens[:5]), more,
        )  # fmt: skip


def check_id(id: Any, path: Path) -> int:
    """Returns `id`, a number or text, as a number. Raises ValueError naming the path if `id` is not a valid id."""
    if isinstance(id, bool) or not isinstance(id, int | str) or not str(id).isascii() or not str(id).isdigit():
        raise ValueError(f"{path}: {str(id)[:40]!r} is not an id of a piece; ids are whole numbers from 0 up")
    return int(id)


def pieces_by_id(path: Path) -> dict[int, str]:
    """Returns the pieces of a table by id. Raises ValueError for an empty table, a negative id or a repeated id."""
    contents = read_json(path)
    by_id = {check_id(id, path): piece for piece, id in contents.items()}
    if not by_id or len(by_id) < len(contents):
        raise ValueError(f"{path} has {'several pieces with the same id' if contents else 'no entries'}")
    return by_id


# --- weights --------------------------------------------------------------------------------------------------------


def leave_out_bias(weights: Weights, folder: Path) -> None:
    """Removes `final_logits_bias` from the weights of an M2M-100 model.

    M2M100ForConditionalGeneration of transformers has no output bias and ignores this tensor, so the import ignores the
    tensor too. Logs a warning if the tensor is not 0.
    """
    bias = weights.tensors.pop("final_logits_bias", None)
    if bias is not None and bias.any():
        log.warning(
            "%s: final_logits_bias is not imported, because M2M100ForConditionalGeneration has no output bias", folder
        )


# --- files ----------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors by name. Reads a single file, or all files of an index."""
    weights: dict[str, Tensor] = {}
    for name, read in (("model.safetensors", load_safetensors), ("pytorch_model.bin", pickles.load)):
        index = folder / f"{name}.index.json"
        if index.exists():
            for part in part_names(index):
                weights |= read(folder / part)
            return weights
        if (folder / name).exists():
            return read(folder / name)
    raise FileNotFoundError(f"{folder} contains neither model.safetensors nor pytorch_model.bin")


def part_names(index: Path) -> list[str]:
    """Returns the names of the weight files that an index lists. The files are in the folder of the index."""
    parts = read_json(index).get("weight_map")
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, str) for part in parts.values()):
        raise ValueError(f"{index}: weight_map is not a table from weights to files")
    outside = [part for part in parts.values() if Path(part).name != part]
    if outside:
        raise ValueError(f"{index}: weight_map names {outside[0]!r}, which is not a file of this folder")
    return sorted(set(parts.values()))


# --- tokenizer.json -------------------------------------------------------------------------------------------------

# transformers 5 saves a tokenizer.json of the package tokenizers instead of a SentencePiece model. If the file was
# converted from a SentencePiece model, it still contains all parts of this model: the pieces by id, the scores
# (unigram) or the order of the merges (BPE), and the table of the normaliser.

SEVERAL_SPACES = {"Regex": " {2,}"}  # SentencePiece also replaces several spaces by one space


def sentencepiece_model(contents: Mapping[str, Any], path: Path) -> tuple[bytes, dict[int, str]]:
    """Returns a SentencePiece model that divides text like the tokenizer in `contents`, and all pieces by id.

    `contents` is the JSON object in the file `path`. Raises ValueError for a tokenizer that SentencePiece cannot
    reproduce; the message names the reason.
    """
    model = contents["model"]
    kind = model.get("type")
    if kind not in ("BPE", "Unigram") or model.get("byte_fallback") or not splits_at_spaces(contents):
        raise ValueError(
            f"{path} has a tokenizer of type {kind} that was not made from a supported SentencePiece model; copy "
            "sentencepiece.bpe.model into the folder"
        )
    if kind == "BPE":
        by_id = {id: piece for piece, id in model["vocab"].items()}
        # older files store a merge as the text "LEFT RIGHT", newer files as a list of two pieces
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        products = [model["vocab"][left + right] for left, right in pairs]
        if products != sorted(products):
            raise ValueError(f"{path}: its merges are not in the order of its pieces, so SentencePiece cannot use them")
        scores = {piece: float(-id) for id, piece in by_id.items()}
    else:
        by_id = {id: piece for id, (piece, _) in enumerate(model["vocab"])}
        scores = dict(model["vocab"])
    added = {token["content"] for token in contents.get("added_tokens") or []} | {"<unk>", "<s>", "</s>", "<pad>"}
    pieces = [ModelPiece(piece, scores[piece]) for _, piece in sorted(by_id.items()) if piece not in added]
    return new_model(pieces, "bpe" if kind == "BPE" else "unigram", charsmap(contents, path)), by_id


def splits_at_spaces(contents: Mapping[str, Any]) -> bool:
    """Returns whether every word, including the first word, begins with SentencePiece's symbol for a space."""
    outer = contents.get("pre_tokenizer") or {}
    parts = [part for part in outer.get("pretokenizers", [outer]) if part.get("type") != "WhitespaceSplit"]
    if len(parts) != 1 or parts[0].get("type") != "Metaspace" or parts[0].get("replacement") != SPACE_SYMBOL:
        return False
    always = parts[0].get("prepend_scheme", "always" if parts[0].get("add_prefix_space") else "never") == "always"
    return always and bool(parts[0].get("split", True))


def charsmap(contents: Mapping[str, Any], path: Path) -> bytes:
    """Returns the normalisation table of SentencePiece that a tokenizer.json has, or b"" if the file has no table.

    `contents` is the JSON object in `path`. Raises ValueError for a normaliser that SentencePiece cannot express.
    """
    outer = contents.get("normalizer") or {"normalizers": []}
    compiled = b""
    for part in outer.get("normalizers", [outer]):
        if part.get("type") == "Precompiled":
            compiled = base64.b64decode(part["precompiled_charsmap"])
        elif part.get("type") != "Replace" or part.get("pattern") != SEVERAL_SPACES:
            raise ValueError(
                f"{path}: its normalizer {part.get('type')} does not exist in SentencePiece; copy "
                "sentencepiece.bpe.model into the folder"
            )
    return compiled
