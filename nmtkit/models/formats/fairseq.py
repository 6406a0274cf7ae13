"""Imports Transformer models of fairseq (Ott et al. 2019) that use SentencePiece to divide text into pieces.

A folder holds a checkpoint (checkpoint_best.pt), the dictionaries (dict.en.txt and dict.de.txt), and either one
SentencePiece model for both sides or two models, one for each side. The import does not need the package fairseq and
does not run code from the checkpoint.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nmtkit.config import derive
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.tokenizers.spm_model import pieces_of
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures.transformer_config import BASE, TransformerConfig
from nmtkit.models.formats import pickles
from nmtkit.models.formats.names import FAIRSEQ
from nmtkit.models.formats.reading import ModelSettings, naming, read_bytes, read_text
from nmtkit.models.formats.vocabulary import IdTable, read_model, table_of, tokenizer_of, unused
from nmtkit.models.formats.weights import Weights, transformer_checkpoint

NAMES = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt")  # the first file that exists is read
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # the first entries of every vocabulary
PADDING = 1  # id of the padding; the first position is PADDING + 1
# fairseq's defaults (fairseq/models/transformer/transformer_legacy.py)
DEFAULTS: dict[str, Any] = {
    "encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048, "encoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_layers": 6, "decoder_attention_heads": 8, "activation_fn": "relu", "dropout": 0.1,
    "max_source_positions": 1024, "max_target_positions": 1024,
}  # fmt: skip
BIG: dict[str, Any] = {
    "encoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "dropout": 0.3,
}  # fmt: skip
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "transformer_tiny": {
        "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_layers": 2, "decoder_attention_heads": 2,
    },
    "transformer_iwslt_de_en": {
        "encoder_ffn_embed_dim": 1024, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    },
    "transformer_wmt_en_de": {},
    "transformer_vaswani_wmt_en_de_big": BIG,
    "transformer_vaswani_wmt_en_fr_big": BIG | {"dropout": 0.1},
    "transformer_wmt_en_de_big": BIG | {"attention_dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": BIG | PRE_NORM | {"attention_dropout": 0.1, "activation_dropout": 0.1},
    "transformer_align": {},
    "transformer_wmt_en_de_big_align": BIG | {"attention_dropout": 0.1},
}  # fmt: skip
# Settings that must be off, because nmtkit's Transformer does not support them.
OFF = (
    "adaptive_input", "adaptive_softmax_cutoff", "base_layers", "char_inputs", "cross_self_attention",
    "decoder_layers_to_keep", "decoder_xformers_att_config", "encoder_layers_to_keep", "encoder_xformers_att_config",
    "no_cross_attention", "no_decoder_final_norm", "no_token_positional_embeddings", "scale_attn", "scale_fc",
    "scale_heads", "scale_resids",
)  # fmt: skip
TASKS = ("translation", "translation_multi_simple_epoch")
# Tensors that the import skips: versions, tables of sinusoids, and duplicates of the weights of encoder layers.
IGNORED = re.compile(
    r"(en|de)coder\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)


def is_model(source: Path) -> bool:
    """Returns whether `source` is a .pt file, or a folder with a .pt file or a dictionary of fairseq."""
    return source.suffix == ".pt" if source.is_file() else any((*source.glob("*.pt"), *source.glob("dict.*txt")))


def load(source: Path) -> Checkpoint:
    """Returns the checkpoint of the model in `source`, which is a checkpoint file or a folder with a checkpoint file.

    Raises FileNotFoundError or ValueError if a file or a setting is missing, damaged or not supported. The message
    names the file and the setting.
    """
    path = source if source.is_file() else checkpoint_file(source)
    contents = pickles.load(path)
    if "nmtkit" in contents:
        raise ValueError(f"{path} is already a checkpoint of nmtkit")
    with naming(path):
        settings = settings_of(contents, path)
    if not isinstance(contents.get("model"), dict):
        raise ValueError(f"{path} does not hold weights; it is not a checkpoint of fairseq")
    weights = Weights(contents["model"], path)
    weights.tensors = upgraded(weights.tensors)
    tables, tokenizer = vocabularies(settings, weights)
    config = config_of(settings, tokenizer.joint)
    equal = ("share_all_embeddings", "share_decoder_input_output_embed")
    tensors = weights.to_nmtkit(FAIRSEQ, config, tables, equal, IGNORED.pattern)
    return transformer_checkpoint(config, tokenizer, tensors, path)


# --- settings -------------------------------------------------------------------------------------------------------


def settings_of(contents: Mapping[str, Any], path: Path) -> ModelSettings:
    """Returns the settings of the model and the task, under the names of fairseq's flags.

    Missing settings get the defaults of the architecture. Checkpoints hold the settings in a Namespace under `args`.
    Since fairseq 0.10, they hold a config under `cfg`, with separate parts for the model and the task. Raises
    ValueError for an architecture or a task that is not supported.
    """
    arguments = pickles.to_plain(contents.get("args"))
    if not isinstance(arguments, dict):
        parts = pickles.to_plain(contents.get("cfg"))
        if not isinstance(parts, dict) or not isinstance(parts.get("model"), dict):
            raise ValueError(f"{path} holds neither args nor cfg; it is not a checkpoint of fairseq")
        model, task = parts["model"], parts.get("task")
        task = task if isinstance(task, dict) else {}
        arguments = {**task, **model}
        arguments["arch"] = model.get("arch") or model.get("_name")
        arguments["task"] = model.get("task") or task.get("task") or task.get("_name")
    for side in ("encoder", "decoder"):  # newer checkpoints have separate parts for the encoder and the decoder
        if isinstance(arguments.get(side), dict):
            arguments |= {f"{side}_{name}": value for name, value in arguments.pop(side).items()}
    stored = {name: value for name, value in arguments.items() if value is not None}
    stored["task"] = stored.get("task") or TASKS[0]
    settings = ModelSettings(stored, path)
    settings.one_of("task", TASKS)
    return ModelSettings(DEFAULTS | ARCHITECTURES[settings.one_of("arch", ARCHITECTURES)] | stored, path)


def config_of(settings: ModelSettings, joint: bool) -> TransformerConfig:
    """Returns the config of a model. Raises ValueError that names an unsupported setting."""
    path = settings.path
    for name in OFF:
        if settings.values.get(name):
            raise ValueError(f"{path} has {name} {settings.values[name]}, which nmtkit's Transformer does not support")
    width, inner = settings.integer("encoder_embed_dim"), settings.integer("encoder_ffn_embed_dim")
    learned = settings.same(settings.flag, "encoder_learned_pos", "decoder_learned_pos", default=False)
    shared = settings.flag("share_all_embeddings", False)
    if shared and not joint:
        raise ValueError(f"{path} has share_all_embeddings, but its source and target dictionaries differ")
    widths = ("encoder_embed_dim", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")
    longest = ("max_source_positions", "max_target_positions")
    changes = {
        "encoder_layers": settings.integer("encoder_layers"),
        "decoder_layers": settings.integer("decoder_layers"),
        "d_model": settings.same(settings.integer, *widths, default=width),
        "d_ff": settings.same(settings.integer, "encoder_ffn_embed_dim", "decoder_ffn_embed_dim", default=inner),
        "heads": settings.same(settings.integer, "encoder_attention_heads", "decoder_attention_heads"),
        "pre_norm": settings.same(settings.flag, "encoder_normalize_before", "decoder_normalize_before", default=False),
        "activation": settings.one_of("activation_fn", ("relu", "gelu")),
        "attention_bias": True,
        "output_bias": True,  # the bias hides entries that the original model does not have
        "positions": "learned" if learned else "sinusoidal_fairseq",
        "position_offset": 0 if learned else PADDING + 1,
        "max_positions": settings.same(settings.integer, *longest) if learned else settings.integer(longest[0]),
        "scale_embeddings": not settings.flag("no_scale_embedding", False),
        "embedding_norm": settings.flag("layernorm_embedding", False),
        "share_embeddings": shared,
        "tie_output": shared or settings.flag("share_decoder_input_output_embed", False),
        "dropout": settings.fraction("dropout"),
        "attention_dropout": settings.fraction("attention_dropout", 0.0),
        "activation_dropout": settings.fraction("activation_dropout", 0.0) or settings.fraction("relu_dropout", 0.0),
        "encoder_layerdrop": settings.fraction("encoder_layerdrop", 0.0),
        "decoder_layerdrop": settings.fraction("decoder_layerdrop", 0.0),
    }
    return derive(BASE, changes, str(path))


# --- vocabularies ---------------------------------------------------------------------------------------------------


def vocabularies(settings: ModelSettings, weights: Weights) -> tuple[list[IdTable], Tokenizer]:
    """Reads dictionaries and SentencePiece models. Returns the source and target tables, and the tokenizer."""
    folder = settings.path.parent
    files = dictionary_files(settings)
    models = tokenizer_files(folder, [file.name.split(".")[1] for file in files])
    names: dict[str, str] = {}
    by_side = [dictionary(file) for file in files]
    if settings.value("task") == TASKS[1]:
        with naming(settings.path):
            names = language_tokens(settings)
        if by_side[0] != by_side[1]:
            raise ValueError(f"{folder} has different dictionaries; a multilingual model needs a single dictionary")
        for by_id in by_side:
            by_id |= dict(enumerate((token for token in names if token not in by_id.values()), len(by_id)))
            if settings.values.get("lang_tok_style") == "mbart" and "<mask>" not in by_id.values():
                by_id[len(by_id)] = "<mask>"
    tables = []
    for side, file, by_id, model in zip(("encoder", "decoder"), files, by_side, models, strict=True):
        rows = len(weights.matrix(f"{side}.embed_tokens.weight"))
        if rows != len(by_id):
            raise ValueError(
                f"{file} makes a vocabulary of {len(by_id)} entries, but the {side} embeddings have {rows} rows: the "
                "dictionary belongs to a different model"
            )
        known = {piece.text for piece in pieces_of(model)}
        entries = [piece for piece in by_id.values() if not piece.startswith("madeupword") and piece not in names]
        if 2 * sum(piece in known for piece in entries) < len(entries):
            raise ValueError(
                f"{file} and the SentencePiece model in {folder} belong to different models: few pieces are in both"
            )
        pieces = {id: names.get(piece, piece) for id, piece in by_id.items()}
        both = models if by_side[0] == by_side[1] else [model]
        languages = set(names.values())
        tables.append(table_of(pieces, rows, both, None, file, stands_for_language=languages.__contains__))
    return tables, tokenizer_of(tables, models)


def dictionary(path: Path) -> dict[int, str]:
    """Returns the entries of a dict.txt by id, special entries first. Raises ValueError for an invalid line."""
    ids = {piece: id for id, piece in enumerate(SPECIAL)}
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip() and number == len(lines):
            continue
        word, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        overwrites = line.rstrip().endswith(" #fairseq:overwrite")
        if not word or not count.lstrip("-").isdigit() or (word in ids and not overwrites):
            raise ValueError(f"{path}, line {number}: {line[:60]!r} must be a new word and its count")
        if word in ids:  # the earlier entry keeps its row, but gets a name that text never produces
            id = ids.pop(word)
            ids[unused(id)] = id
        ids[word] = len(ids)
    return {id: piece for piece, id in ids.items()}


def language_tokens(settings: ModelSettings) -> dict[str, str]:
    """Maps the language tokens of fairseq, in the order of their ids, to the language tokens of nmtkit.

    Two arrangements are supported. In M2M-100, the source begins with the token of the source language, and the target
    with the token of the target language. Otherwise, only the source begins with a token, which is the token of the
    target language. Raises ValueError for any other arrangement.
    """
    values = settings.values
    main = (values.get("langtoks") or {}).get("main")
    places = tuple(main) if main else (values.get("encoder_langtok"), values.get("decoder_langtok") and "tgt")
    template = {("src", "tgt"): "__{}__", ("tgt", None): ">>{}<<", ("tgt", False): ">>{}<<"}.get(places)
    if template is None or values.get("lang_tok_replacing_bos_eos"):
        raise ValueError(
            f"{settings.path} has the language tokens {places} on source and target; nmtkit supports ('src', 'tgt') "
            "and ('tgt', None), and does not support lang_tok_replacing_bos_eos"
        )
    languages = listed(values.get("langs"))
    if not languages:
        languages = sorted({language for pair in listed(values.get("lang_pairs")) for language in pair.split("-")})
    theirs = "[{}]" if values.get("lang_tok_style") == "mbart" else "__{}__"
    return {theirs.format(language): template.format(language) for language in languages}


def listed(value: Any) -> list[str]:
    """Returns the elements of a list, or the parts of a text that are separated by commas."""
    return value.split(",") if isinstance(value, str) and value else list(value or ())


# --- weights --------------------------------------------------------------------------------------------------------


def upgraded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights under the names of fairseq 0.12."""
    norms = {
        "encoder": ["self_attn_layer_norm", "final_layer_norm"],
        "decoder": ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
    }
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        old_norm = re.fullmatch(r"((en|de)coder)(\.layers\.\d+)\.layer_norms\.([012])\.(weight|bias)", name)
        old_projections = re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name)
        if old_norm and int(old_norm[4]) < len(norms[old_norm[1]]):
            merged[f"{old_norm[1]}{old_norm[3]}.{norms[old_norm[1]][int(old_norm[4])]}.{old_norm[5]}"] = tensor
        elif old_projections and tensor.dim() and len(tensor) % 3 == 0:
            for part, values in zip("qkv", tensor.chunk(3), strict=True):
                merged[f"{old_projections[1]}{part}_proj.{old_projections[2]}"] = values
        else:
            merged["decoder.output_projection.weight" if name == "decoder.embed_out" else name] = tensor
    return merged


# --- files ----------------------------------------------------------------------------------------------------------


def checkpoint_file(folder: Path) -> Path:
    """Returns the first of `NAMES` in a folder, or else its only .pt file. Raises FileNotFoundError or ValueError."""
    files = sorted(folder.glob("*.pt"))
    named = [folder / name for name in NAMES if folder / name in files]
    if named:
        return named[0]
    if len(files) == 1:
        return files[0]
    if not files:
        raise FileNotFoundError(f"{folder} does not contain a checkpoint such as {NAMES[0]}")
    raise ValueError(
        f"{folder} contains {len(files)} checkpoints, but no {NAMES[0]}; give the path of one file, such as {files[0]}"
    )


def dictionary_files(settings: ModelSettings) -> list[Path]:
    """Returns the source dictionary and the target dictionary in the folder of a checkpoint.

    The checkpoint usually names the source language and the target language. Otherwise, the languages come from the
    name of the dataset (wmt14.en-de), or the files are dict.source.txt and dict.target.txt. Raises FileNotFoundError or
    ValueError with the files to add or to rename.
    """
    folder = settings.path.parent
    files = {file.name.split(".")[1]: file for file in sorted(folder.glob("dict.*.txt"))}
    if len(files) < 2 and (folder / "dict.txt").is_file():
        return [folder / "dict.txt"] * 2
    languages = (settings.text("source_lang", ""), settings.text("target_lang", ""))
    data = str(settings.values.get("data") or "")
    if not files or any(language and language not in files for language in languages):
        missing = next((language for language in languages if language and language not in files), "SRC")
        raise FileNotFoundError(
            f"{folder / f'dict.{missing}.txt'}: no such file; the dictionaries of fairseq's dataset "
            f"({data or 'data-bin'}) must be in the folder of the checkpoint"
        )
    if settings.value("task") == TASKS[1] or len({read_bytes(file) for file in files.values()}) == 1:
        chosen = [name for name in languages if name] if all(languages) else list(files)
        return [files[chosen[0]], files[chosen[-1]]]
    orders: list[tuple[Any, Any]] = [languages, ("source", "target")]
    orders += re.findall(r"(?=\b(\w+)-(\w+)\b)", data)
    for order in orders:
        if order[0] != order[1] and all(name in files for name in order):
            return [files[str(name)] for name in order]
    names = ", ".join(file.name for file in files.values())
    raise ValueError(
        f"{folder} contains {names}, but the checkpoint does not name its languages; rename the files to "
        "dict.source.txt and dict.target.txt"
    )


def tokenizer_files(folder: Path, languages: Sequence[str]) -> list[bytes]:
    """Returns the SentencePiece models of the source and the target. Raises FileNotFoundError or ValueError."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".model", ".spm"))
    if len(files) == 1:
        return [read_model(files[0])] * 2
    names = list(zip(languages, ("source", "target"), strict=True))
    sides = [[file for file in files if set(side) & set(re.split(r"[._-]", file.name))] for side in names]
    if len(files) > 1 and [len(side) for side in sides] == [1, 1] and sides[0] != sides[1]:
        return [read_model(file) for (file,) in sides]
    if files:
        listed = ", ".join(file.name for file in files)
        raise ValueError(
            f"{folder} contains the SentencePiece models {listed}; keep one model for both sides, or source.spm and "
            "target.spm"
        )
    codes = sorted(file.name for file in folder.iterdir() if "code" in file.name.lower())
    why = f"; {codes[0]} belongs to fastBPE or subword-nmt, which nmtkit does not support" if codes else ""
    raise FileNotFoundError(
        f"{folder} does not hold a SentencePiece model (sentencepiece.bpe.model, spm.model){why}. A model with a "
        "different segmentation cannot be imported; instead, translate text with fairseq, and train a model of "
        "nmtkit on the translations"
    )
