"""Models of fairseq (Ott et al. 2019), of type transformer, whose text is segmented by SentencePiece.

A folder holds a checkpoint (checkpoint_best.pt), the dictionaries (dict.en.txt and dict.de.txt) and the SentencePiece
model, or one for each side. The package fairseq is not needed, and no code of the checkpoint is run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmtkit.architectures.transformer import BASE, TransformerConfig
from nmtkit.checkpoint import Checkpoint
from nmtkit.config import derive
from nmtkit.data.spm_model import pieces_of, renumbered
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.formats import pickles
from nmtkit.formats.transformer_names import stacks
from nmtkit.formats.vocabulary import HIDDEN, Table, read_model, table_of, unused
from nmtkit.formats.weights import Weights, transformer_checkpoint

NAMES = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt")  # in the order in which a folder is asked for them
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # before the entries of a dictionary
PADDING = 1  # the first position is the one after it
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
# settings with which a model computes what nmtkit's Transformer does not, unless they are off
OFF = (
    "adaptive_input", "adaptive_softmax_cutoff", "base_layers", "char_inputs", "cross_self_attention",
    "decoder_layers_to_keep", "decoder_xformers_att_config", "encoder_layers_to_keep", "encoder_xformers_att_config",
    "no_cross_attention", "no_decoder_final_norm", "no_token_positional_embeddings", "scale_attn", "scale_fc",
    "scale_heads", "scale_resids",
)  # fmt: skip
TASKS = ("translation", "translation_multi_simple_epoch")
# what a checkpoint holds beside the weights: versions, tables of sinusoids, and second copies of an encoder layer's
BESIDE = re.compile(
    r"(en|de)coder\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)


def is_model(source: Path) -> bool:
    """Returns whether `source` is a checkpoint of PyTorch, or a folder with one, or with a dictionary of fairseq."""
    return source.suffix == ".pt" if source.is_file() else any((*source.glob("*.pt"), *source.glob("dict.*txt")))


def load(source: Path) -> Checkpoint:
    """Returns the checkpoint of the model in `source`, a file, or a folder with one.

    Raises FileNotFoundError or ValueError naming the file, and the setting, that is missing, damaged or not supported.
    """
    path = source if source.is_file() else checkpoint_file(source)
    contents = pickles.load(path)
    if "nmtkit" in contents:
        raise ValueError(f"{path} is a checkpoint of nmtkit already")
    settings = settings_of(contents, path)
    if not isinstance(contents.get("model"), dict):
        raise ValueError(f"{path} holds no weights; it is no checkpoint of fairseq")
    weights = Weights(upgraded({name: it for name, it in contents["model"].items() if torch.is_tensor(it)}), path)
    source_table, target_table, tokenizer = vocabularies(path, settings, weights)
    config = config_of(settings, path, tokenizer.joint)
    return transformer_checkpoint(config, tokenizer, to_nmtkit(weights, config, source_table, target_table))


# --- settings -------------------------------------------------------------------------------------------------------


def settings_of(contents: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings of model and task by the names of fairseq's flags, with the defaults of the architecture.

    They are a Namespace under `args`, or since 0.10 a config under `cfg`, with parts for the model and the task.
    Raises ValueError for an architecture, or a task, that is not supported.
    """
    found = pickles.plain(contents.get("args"))
    if not isinstance(found, dict):
        parts = pickles.plain(contents.get("cfg"))
        if not isinstance(parts, dict) or not isinstance(parts.get("model"), dict):
            raise ValueError(f"{path} holds neither args nor cfg; it is no checkpoint of fairseq")
        model, task = parts["model"], parts.get("task")
        task = task if isinstance(task, dict) else {}
        found = {**task, "task": task.get("_name"), **model}
        found["arch"] = model.get("arch") or model.get("_name")
        found["task"] = model.get("task") or task.get("task") or task.get("_name")
    for side in ("encoder", "decoder"):  # newer models have a part for each
        if isinstance(found.get(side), dict):
            found |= {f"{side}_{name}": value for name, value in found.pop(side).items()}
    arch, task = found.get("arch"), found.get("task") or TASKS[0]
    if arch not in ARCHITECTURES:
        raise ValueError(f"{path} is of architecture {arch}, which is not supported; {', '.join(ARCHITECTURES)} are")
    if task not in TASKS:
        raise ValueError(f"{path} was trained for the task {task}, which is not supported; {' and '.join(TASKS)} are")
    given = {name: value for name, value in found.items() if value is not None}
    return DEFAULTS | ARCHITECTURES[arch] | given | {"task": task}


def config_of(settings: Mapping[str, Any], path: Path, joint: bool) -> TransformerConfig:
    """Returns the config of a model. Raises ValueError naming the setting that nmtkit's Transformer does not have."""

    def same(*names: str, default: Any = None) -> Any:
        values = [settings.get(name, default) for name in names]
        if any(value != values[0] for value in values):
            given = ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
            raise ValueError(f"{path} has {given}; nmtkit's Transformer has one setting for all of these")
        return values[0]

    for name in OFF:
        if settings.get(name):
            raise ValueError(f"{path} has {name} {settings[name]}, which nmtkit's Transformer does not have")
    if settings["activation_fn"] not in ("relu", "gelu"):
        raise ValueError(f"{path} has activation_fn {settings['activation_fn']}; supported are relu and gelu")
    width = settings["encoder_embed_dim"]
    learned = same("encoder_learned_pos", "decoder_learned_pos", default=False)
    shared = bool(settings.get("share_all_embeddings"))
    if shared and not joint:
        raise ValueError(f"{path} has share_all_embeddings, and dictionaries of source and target that differ")
    longest = ("max_source_positions", "max_target_positions")
    changes = {
        "encoder_layers": settings["encoder_layers"],
        "decoder_layers": settings["decoder_layers"],
        "d_model": same(
            "encoder_embed_dim", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim", default=width
        ),
        "d_ff": same("encoder_ffn_embed_dim", "decoder_ffn_embed_dim", default=settings["encoder_ffn_embed_dim"]),
        "heads": same("encoder_attention_heads", "decoder_attention_heads"),
        "pre_norm": bool(same("encoder_normalize_before", "decoder_normalize_before", default=False)),
        "activation": settings["activation_fn"],
        "attention_bias": True,
        "output_bias": True,  # for the entries that the original does not have
        "positions": "learned" if learned else "sinusoidal_fairseq",
        "position_offset": 0 if learned else PADDING + 1,
        "max_positions": same(*longest) if learned else settings[longest[0]],
        "scale_embeddings": not settings.get("no_scale_embedding"),
        "embedding_norm": bool(settings.get("layernorm_embedding")),
        "share_embeddings": shared,
        "tie_output": shared or bool(settings.get("share_decoder_input_output_embed")),
        "dropout": settings["dropout"],
        "attention_dropout": settings.get("attention_dropout", 0.0),
        "activation_dropout": settings.get("activation_dropout") or settings.get("relu_dropout", 0.0),
        "encoder_layerdrop": settings.get("encoder_layerdrop", 0.0),
        "decoder_layerdrop": settings.get("decoder_layerdrop", 0.0),
    }
    return derive(BASE, changes, str(path))


# --- vocabularies ---------------------------------------------------------------------------------------------------


def vocabularies(path: Path, settings: Mapping[str, Any], weights: Weights) -> tuple[Table, Table, Tokenizer]:
    """Returns the tables of source and target and the tokenizer, from the files beside a checkpoint."""
    folder = path.parent
    files = dictionary_files(path, settings)
    models = tokenizer_files(folder, [file.name.split(".")[1] for file in files])
    names: dict[str, str] = {}
    by_side = [dictionary(file) for file in files]
    if settings["task"] == TASKS[1]:
        names = language_tokens(path, settings)
        if by_side[0] != by_side[1]:
            raise ValueError(f"{folder} has dictionaries that differ; of a model of several languages they are one")
        for by_id in by_side:
            by_id |= dict(enumerate((token for token in names if token not in by_id.values()), len(by_id)))
            if settings.get("lang_tok_style") == "mbart" and "<mask>" not in by_id.values():
                by_id[len(by_id)] = "<mask>"
    tables = []
    for side, file, by_id, model in zip(("encoder", "decoder"), files, by_side, models, strict=True):
        rows = len(weights.take(f"{side}.embed_tokens.weight"))
        if rows != len(by_id):
            raise ValueError(
                f"{file} makes a vocabulary of {len(by_id)} entries, and the {side}'s embeddings have {rows} rows; it "
                "is the dictionary of another model"
            )
        own = {piece.text for piece in pieces_of(model)}
        entries = [piece for piece in by_id.values() if not piece.startswith("madeupword") and piece not in names]
        if 2 * sum(piece in own for piece in entries) < len(entries):
            raise ValueError(
                f"{file} and the SentencePiece model in {folder} have few pieces in common; that model is of other text"
            )
        # <s> is the decoder's first token in nmtkit; the original's has its part in the sum of the softmax
        pieces = {id: unused(id) if piece == "<s>" else names.get(piece, piece) for id, piece in by_id.items()}
        both = models if by_side[0] == by_side[1] else [model]
        tables.append(table_of(pieces, both, None, "<unk>", "</s>", lambda piece: piece in names.values()))
    source, target = tables
    renamed = [renumbered(model, table.pieces, table.control) for model, table in zip(models, tables, strict=True)]
    return source, target, Tokenizer(renamed[0], None if renamed[0] == renamed[1] else renamed[1])


def dictionary(path: Path) -> dict[int, str]:
    """Returns the entries of a dict.txt by id, after the special ones. Raises ValueError naming a line."""
    by_id = dict(enumerate(SPECIAL))
    known = set(SPECIAL)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() and number == len(lines):
            continue
        word, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        overwrites = line.rstrip().endswith(" #fairseq:overwrite")
        if not word or not count.lstrip("-").isdigit() or (word in known and not overwrites):
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is no word with its count, or stands there twice")
        if word in known:  # the earlier entry keeps its row, and no text leads to it
            by_id |= {id: unused(id) for id, piece in by_id.items() if piece == word}
        known.add(word)
        by_id[len(by_id)] = word
    return by_id


def language_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tokens of the languages, in the order in which fairseq appends them, each with nmtkit's name for it.

    A model has those of both languages, before the source and at the beginning of the target (M2M-100), or that of the
    target language before the source. Raises ValueError for another arrangement.
    """
    main = (settings.get("langtoks") or {}).get("main")
    places = tuple(main) if main else (settings.get("encoder_langtok"), settings.get("decoder_langtok") and "tgt")
    template = {("src", "tgt"): "__{}__", ("tgt", None): ">>{}<<", ("tgt", False): ">>{}<<"}.get(places)
    if template is None or settings.get("lang_tok_replacing_bos_eos"):
        raise ValueError(
            f"{path} has tokens of languages {places} on its two sides; supported are ('src', 'tgt') and "
            "('tgt', None), without lang_tok_replacing_bos_eos"
        )
    languages = settings.get("langs") or []
    if not languages:
        pairs = settings.get("lang_pairs") or []
        pairs = pairs.split(",") if isinstance(pairs, str) else pairs
        languages = sorted({language for pair in pairs for language in pair.split("-")})
    if isinstance(languages, str):
        languages = languages.split(",")
    theirs = "[{}]" if settings.get("lang_tok_style") == "mbart" else "__{}__"
    return {theirs.format(language): template.format(language) for language in languages}


# --- weights --------------------------------------------------------------------------------------------------------


def upgraded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights under the names of fairseq 0.12, without what is beside them."""
    norms = {
        "encoder": ["self_attn_layer_norm", "final_layer_norm"],
        "decoder": ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        old_norm = re.fullmatch(r"((en|de)coder)(\.layers\.\d+)\.layer_norms\.([012])\.(weight|bias)", name)
        old_projections = re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name)
        if BESIDE.fullmatch(name):
            continue
        if old_norm and int(old_norm[4]) < len(norms[old_norm[1]]):
            found[f"{old_norm[1]}{old_norm[3]}.{norms[old_norm[1]][int(old_norm[4])]}.{old_norm[5]}"] = tensor
        elif old_projections and len(tensor) % 3 == 0:
            for part, values in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{old_projections[1]}{part}_proj.{old_projections[2]}"] = values
        else:
            found["decoder.output_projection.weight" if name == "decoder.embed_out" else name] = tensor
    return found


def to_nmtkit(weights: Weights, config: TransformerConfig, source: Table, target: Table) -> dict[str, Tensor]:
    """Returns the weights under nmtkit's names; rows of embeddings in the order of the tables."""
    embeddings = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
    if config.share_embeddings:
        weights.check_equal(embeddings[:2], "share_all_embeddings")
    if config.tie_output:
        weights.check_equal(embeddings[1:], "share_decoder_input_output_embed")
    found = {
        "source_embedding.tokens.weight": weights.rows(source.rows, embeddings[0]),
        "target_embedding.tokens.weight": weights.rows(target.rows, embeddings[1]),
        "output_projection.weight": weights.rows(target.rows, embeddings[1 if config.tie_output else 2]),
        "output_projection.bias": torch.zeros(len(target.rows)),
    }
    found["output_projection.bias"][target.hidden] = HIDDEN
    found |= stacks(weights, config)
    weights.check_all_taken()
    return found


# --- files ----------------------------------------------------------------------------------------------------------


def checkpoint_file(folder: Path) -> Path:
    """Returns the checkpoint in a folder. Raises FileNotFoundError, or ValueError where it is not clear which."""
    found = sorted(folder.glob("*.pt"))
    for name in NAMES:
        if folder / name in found:
            return folder / name
    if len(found) == 1:
        return found[0]
    if not found:
        raise FileNotFoundError(f"{folder} holds no checkpoint, such as {NAMES[0]}")
    raise ValueError(f"{folder} holds {len(found)} checkpoints, and no {NAMES[0]}; name one, as {found[0]}")


def dictionary_files(path: Path, settings: Mapping[str, Any]) -> list[Path]:
    """Returns the dictionaries of source and target beside a checkpoint.

    Which is which says the checkpoint, the name of its dataset (wmt14.en-de), or the files' own names, source and
    target. Raises FileNotFoundError or ValueError saying what to do.
    """
    files = {file.name.split(".")[1]: file for file in sorted(path.parent.glob("dict.*.txt"))}
    if len(files) < 2 and (path.parent / "dict.txt").is_file():
        return [path.parent / "dict.txt"] * 2
    languages = (settings.get("source_lang"), settings.get("target_lang"))
    data = str(settings.get("data") or "")
    if not files or any(language and language not in files for language in languages):
        missing = next((language for language in languages if language and language not in files), "SRC")
        raise FileNotFoundError(
            f"{path.parent / f'dict.{missing}.txt'}: no such file; the dictionaries of fairseq's dataset "
            f"({data or 'data-bin'}) have to be beside the checkpoint"
        )
    if settings["task"] == TASKS[1] or len({file.read_bytes() for file in files.values()}) == 1:
        chosen = [name for name in languages if name] if all(languages) else list(files)
        return [files[chosen[0]], files[chosen[-1]]]
    orders: list[tuple[Any, Any]] = [languages, ("source", "target")]
    orders += re.findall(r"(?=\b(\w+)-(\w+)\b)", data)
    for order in orders:
        if order[0] != order[1] and all(name in files for name in order):
            return [files[str(name)] for name in order]
    names = ", ".join(file.name for file in files.values())
    raise ValueError(
        f"{path.parent} holds {names}, and the checkpoint does not say which is the source's; name them "
        "dict.source.txt and dict.target.txt"
    )


def tokenizer_files(folder: Path, languages: Sequence[str]) -> list[bytes]:
    """Returns the SentencePiece models of source and target. Raises FileNotFoundError or ValueError."""
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
            f"{folder} holds the SentencePiece models {listed}; leave one for both sides, or source.spm and target.spm"
        )
    codes = sorted(file.name for file in folder.iterdir() if "code" in file.name.lower())
    why = f"; {codes[0]} is of fastBPE or subword-nmt, which nmtkit does not have" if codes else ""
    raise FileNotFoundError(
        f"{folder} holds no SentencePiece model (sentencepiece.bpe.model, spm.model){why}. A model whose text another "
        "tool segments cannot be imported; let fairseq translate text, and train a model here on its translations"
    )
