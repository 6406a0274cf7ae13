"""Imports Transformer models of Marian (Junczys-Dowmunt et al. 2018).

A model is an .npz file, with a decoder.yml in the same folder. decoder.yml names the vocabularies. A vocabulary is a
SentencePiece model (.spm) or a list of pieces (.yml). With lists, as in OPUS-MT, the folder also holds the
SentencePiece models source.spm and target.spm. The import does not need the package pymarian.

This module parses YAML itself, because PyYAML rejects plain scalars that begin with a comma. Marian writes such
scalars, for example in the vocabularies of OPUS-MT.
"""

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmtkit.config import derive
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.tokenizers.spm_model import UNKNOWN, pieces_of
from nmtkit.data.tokenizers.tokenizer import BOS
from nmtkit.models.architectures.transformer_config import BASE, TransformerConfig
from nmtkit.models.formats.names import MARIAN
from nmtkit.models.formats.reading import ModelSettings, check_file, read_text
from nmtkit.models.formats.vocabulary import IdTable, read_model, table_of, tokenizer_of
from nmtkit.models.formats.weights import Weights, transformer_checkpoint

SETTINGS = "special:model.yml"  # the name of the tensor that holds the settings as YAML text
ACTIVATIONS = ("relu", "swish", "gelu")
NORM_EPS = 1e-6
POSITIONS = "sinusoidal_fairseq"
SIDES = ("source", "target")
# name in Marian -> name in nmtkit
SELF_ATTENTION = {"self-attention": "attention", "rnn": "ssru", "average-attention": "average"}
# Setting -> the values that nmtkit's Transformer supports. The first value is the default.
FIXED: dict[str, tuple[str, ...]] = {
    "type": ("transformer",),
    "input-types": ("", "sequence"),
    "right-left": ("false",),
    "ulr": ("false",),
    "lemma-dim-emb": ("0",),
    "transformer-attention-mask": ("default",),
    "transformer-decoder-autoreg": ("self-attention", "rnn", "average-attention"),
    "transformer-disable-position-embeddings": ("false",),
    "transformer-ffn-depth": ("2",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-no-affine": ("false",),
    "transformer-no-bias": ("false",),
    "transformer-no-projection": ("false",),
    "transformer-pool": ("false",),
    "transformer-rnn-projection": ("false",),
    "transformer-train-position-embeddings": ("false",),
}


def load(source: Path) -> Checkpoint:
    """Returns the checkpoint of the model in `source`, which is an .npz file or a folder with a decoder.yml.

    Raises FileNotFoundError or ValueError if a file or a setting is missing, damaged or not supported. The message
    names the file and the setting.
    """
    decoder = next(iter(decoder_files(source)), None)
    if decoder is None:
        raise FileNotFoundError(
            f"{source}.decoder.yml: no such file; Marian writes this file, which names the vocabularies of a model"
        )
    facts = parse(read_text(decoder), decoder)
    path = source if source.is_file() else beside(decoder, names(facts, "models", 1, decoder)[0])
    weights = read_weights(path)
    paths = [beside(decoder, name) for name in names(facts, "vocabs", 2, decoder)]
    vocabularies = [read_vocabulary(path, side) for path, side in zip(paths, SIDES, strict=True)]
    tables = [table for table, _ in vocabularies]
    tokenizer = tokenizer_of(tables, [model for _, model in vocabularies])
    config = config_of(settings_of(weights, path), tokenizer.joint)
    return transformer_checkpoint(config, tokenizer, to_nmtkit(weights, config, tables), path)


# --- settings -------------------------------------------------------------------------------------------------------


def config_of(settings: ModelSettings, joint: bool) -> TransformerConfig:
    """Returns the config of a model. Raises ValueError that names an unsupported setting."""
    path = settings.path
    for name, allowed in FIXED.items():
        words = words_of(settings, name, allowed[0])
        if set(words) - set(allowed):
            raise ValueError(
                f"{path} has {name} {' '.join(words)}, which nmtkit's Transformer does not support; supported: "
                f"{' and '.join(value for value in allowed if value) or 'none'}"
            )
    activation = settings.one_of("transformer-ffn-activation", ACTIVATIONS)
    inner = settings.integer("transformer-dim-ffn")
    check_value(settings, "transformer-decoder-dim-ffn", ("0", str(inner)), "0")
    kind = SELF_ATTENTION[settings.text("transformer-decoder-autoreg", "self-attention")]
    if kind == "ssru":
        settings.one_of("dec-cell", ("ssru",), "gru")
    tied = settings.flag("tied-embeddings-all")
    changes = {
        "decoder_self_attention": kind,
        "ssru_norm": kind == "ssru" and settings.flag("layer-normalization"),
        **(average_attention(settings, inner, activation) if kind == "average" else {}),
        "decoder_tied_layers": tied_layers(settings),
        "zero_bos": kind != "attention",
        "encoder_layers": settings.integer("enc-depth"),
        "decoder_layers": settings.integer("dec-depth"),
        "d_model": settings.integer("dim-emb"),
        "d_ff": inner,
        "heads": settings.integer("transformer-heads"),
        "activation": activation,
        "attention_bias": True,
        "output_bias": True,
        "positions": POSITIONS,
        "norm_eps": NORM_EPS,
        "share_embeddings": joint and (tied or settings.flag("tied-embeddings-src")),
        "tie_output": tied or settings.flag("tied-embeddings"),
        "embedding_norm": embeddings_are_normalised(settings),
    }
    return derive(BASE, changes, str(path))


def average_attention(settings: ModelSettings, inner: int, activation: str) -> dict[str, bool]:
    """Returns the settings of average attention. With depth 2, average attention has a feed-forward network.

    Raises ValueError if the depth is not 1 or 2. Also raises ValueError if this network does not have the width `inner`
    and the activation `activation`. All other feed-forward networks of the model have this width and this activation.
    """
    gated = not settings.flag("transformer-aan-nogate")
    deep = check_value(settings, "transformer-aan-depth", ("1", "2"), "2") == "2"
    if deep:
        check_value(settings, "transformer-dim-aan", (str(inner),))
        check_value(settings, "transformer-aan-activation", (activation,))
    return {"average_ffn": deep, "average_gate": gated, "average_separate_gates": gated}


def check_value(settings: ModelSettings, name: str, supported: tuple[str, ...], default: str | None = None) -> str:
    """Returns a setting. Raises ValueError if the value is not in `supported`."""
    value = settings.text(name, default)
    if value not in supported:
        fitting = " and ".join(supported)
        raise ValueError(
            f"{settings.path} has {name} {value}; with the other settings of this model, nmtkit supports only {fitting}"
        )
    return value


def tied_layers(settings: ModelSettings) -> tuple[int, ...]:
    """Returns a group number for each decoder layer, or () without groups. Layers of one group share all weights."""
    words = words_of(settings, "transformer-tied-layers", "")
    if not all(map(str.isdecimal, words)):
        raise ValueError(
            f"{settings.path} has transformer-tied-layers {' '.join(words)}; a list of numbers is expected"
        )
    return tuple(map(int, words))


def words_of(settings: ModelSettings, name: str, default: str) -> list[str]:
    """Returns the words of a setting, which is a list or a text."""
    value: str | list[str] = settings.value(name, default)
    return value if isinstance(value, list) else value.split()


def embeddings_are_normalised(settings: ModelSettings) -> bool:
    """Returns whether a norm follows the embeddings. Raises ValueError if the model is not post-norm.

    In a post-norm model, a residual sum and a norm follow each sublayer, and there are no other norms.

    Marian describes the operations around a layer with letters: d is dropout, a is the residual sum, n is the norm.
    Marian's pre-norm differs from nmtkit's pre-norm, because keys and values of self-attention in Marian are computed
    from the input before the norm.
    """
    names = [f"transformer-{name}" for name in ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")]
    letters = [settings.text(name, "").replace("d", "") for name in names]
    if letters[:3] != ["", "an", ""] or letters[3] not in ("", "n"):
        shown = ", ".join(f"{name} {settings.text(name, '')!r}" for name in names)
        raise ValueError(
            f"{settings.path} has {shown}; nmtkit supports only models with transformer-postprocess 'dan' and "
            "transformer-postprocess-emb 'd' or 'nd', without norms and residual sums in the other settings"
        )
    return letters[3] == "n"


# --- vocabularies ---------------------------------------------------------------------------------------------------


def read_vocabulary(path: Path, side: str) -> tuple[IdTable, bytes]:
    """Returns the table of a vocabulary, and its SentencePiece model.

    Raises ValueError for an invalid file and FileNotFoundError for a missing file. The message names the file.
    """
    purpose, unknown = f"decoder.yml names it as the {side} vocabulary", "<unk>"
    if path.suffix == ".spm":
        model = read_model(path, purpose)
        pieces = pieces_of(model)
        by_id = dict(enumerate(piece.text for piece in pieces))
        unknown = next((piece.text for piece in pieces if piece.type == UNKNOWN), unknown)
    elif path.suffix in (".yml", ".yaml", ".json"):
        table = parse(read_text(path, purpose), path)
        by_id = {}
        with suppress(ValueError, TypeError):
            by_id = {int(id): word for word, id in table.items()}
        if not by_id or sorted(by_id) != list(range(len(table))):
            raise ValueError(f"{path} is not a table from pieces to the ids 0, 1, 2, …")
        purpose = f"{path.name} lists pieces, so the SentencePiece model that makes these pieces is needed"
        model = read_model(path.parent / f"{side}.spm", purpose)
    else:
        raise ValueError(f"{path} has an unknown format; nmtkit reads vocabularies in .spm and .yml files")
    return table_of(by_id, len(by_id), [model], None, path, unknown), model


# --- weights --------------------------------------------------------------------------------------------------------


def to_nmtkit(weights: Weights, config: TransformerConfig, tables: Sequence[IdTable]) -> dict[str, Tensor]:
    """Returns the weights under nmtkit's names. `tables` gives the order of the rows of both embeddings."""
    old = MARIAN.output.removesuffix("t")  # older releases write the transposed matrix under this name
    if old in weights.tensors and MARIAN.output not in weights.tensors:
        weights.tensors[MARIAN.output] = weights.matrix(old).T
    for table, embeddings in zip(tables, (MARIAN.source, MARIAN.target), strict=True):
        rows, entries = len(weights.matrix(*embeddings)), max(table.rows) + 1
        if rows != entries:
            raise ValueError(f"{weights.path} has embeddings for {rows} entries, but its vocabulary has {entries}")
    tied = ("tied-embeddings-all or tied-embeddings-src", "tied-embeddings-all or tied-embeddings")
    tensors = weights.to_nmtkit(
        MARIAN, config, tables, tied, re.escape(SETTINGS), lambda part: part.flatten() if len(part) == 1 else part.t()
    )
    for side in SIDES:
        tensors[f"{side}_embedding.tokens.weight"][BOS] = 0  # Marian's decoder starts from zeros
    return tensors


# --- files ----------------------------------------------------------------------------------------------------------


def decoder_files(source: Path) -> list[Path]:
    """Returns the files with Marian's search settings for `source`, which is a model file or a folder."""
    if source.is_dir():
        candidates = [source / "decoder.yml", *sorted(source.glob("*.npz.decoder.yml"))]
    else:
        candidates = [source.with_name(f"{source.name}.decoder.yml"), source.with_name("decoder.yml")]
    return [candidate for candidate in candidates if candidate.is_file()]


def beside(decoder: Path, name: str) -> Path:
    """Returns the path of the file `name` in the folder of decoder.yml.

    `name` may contain folders. If no file has this path, the folders are left out.
    """
    path = decoder.parent / name
    return path if path.is_file() else decoder.parent / Path(name).name


def names(facts: Mapping[str, Any], entry: str, count: int, path: Path) -> list[str]:
    """Returns the file names in an entry of decoder.yml. Raises ValueError unless there are `count` names."""
    values = facts.get(entry)
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(
            f"{path}: {entry} is {str(values)[:60]!r}, but must be a list of {count} file names; nmtkit imports "
            "neither ensembles nor models with several sources"
        )
    return values


def read_weights(path: Path) -> Weights:
    """Returns all tensors by name. Runs no code of the file."""
    check_file(path, "decoder.yml names it as the model")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Weights({name: torch.from_numpy(arrays[name]) for name in arrays.files}, path)
    except (ValueError, OSError, EOFError, TypeError, AttributeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an .npz file of Marian, or is damaged: {error}") from error


def settings_of(weights: Weights, path: Path) -> ModelSettings:
    """Returns the settings of the model. The tensor SETTINGS holds them as text."""
    if SETTINGS not in weights.tensors:
        raise ValueError(f"{path} does not hold {SETTINGS}, where Marian saves the settings of a model")
    try:
        text = weights.tensors[SETTINGS].numpy().tobytes().rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {SETTINGS} is not UTF-8: {error}") from error
    return ModelSettings(parse(text, path), path)


SPACES = " \t\r"  # white space of YAML within a line, and a carriage return at its end; other spaces are text
PAIR = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^"' \t].*?)[ \t]*:(?:[ \t]+(.*))?""")
LIST_ITEM = re.compile(r"""[ \t]*((?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*')?[^,]*),?""")  # a comma in quotes is text
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def parse(text: str, path: Path) -> dict[str, Any]:
    """Parses the subset of YAML that Marian writes. Returns a dict whose values are strings or lists of strings.

    Raises ValueError naming path and line for text outside this subset.
    """
    settings: dict[str, Any] = {}
    key = ""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip(SPACES)
        pair = PAIR.fullmatch(line.rstrip(SPACES)) if not line.startswith((" ", "- ")) else None
        if not stripped or stripped.startswith(("# ", "---")):
            continue
        try:
            if pair:
                key, value = scalar(pair[1]), (pair[2] or "").strip(SPACES)
                is_list = value.startswith("[") and value.endswith("]")
                parts = [part for part in LIST_ITEM.findall(value[1:-1]) if part.strip(SPACES)]
                settings[key] = [scalar(part) for part in parts] if is_list else scalar(value)
            elif stripped.startswith("- ") and key:
                settings[key] = [*(settings[key] if isinstance(settings[key], list) else []), scalar(stripped[2:])]
            elif stripped == "[]" and key:
                settings[key] = []
            else:
                raise ValueError("neither a pair nor an element of a list")
        except (ValueError, OverflowError) as error:  # for example, an escape of an invalid character
            raise ValueError(
                f"{path}, line {number}: {stripped[:60]!r} is not YAML in the form that Marian writes: {error}"
            ) from error
    return settings


def scalar(text: str) -> str:
    """Returns the text of a YAML scalar. Removes quotes and resolves escapes."""
    text = text.strip(SPACES)
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        as_json = ESCAPE.sub(
            lambda match: chr(int(match[1] or match[2], 16)) if match[1] or match[2] else match[0], text
        )
        return str(json.loads(as_json, strict=False))
    return text
