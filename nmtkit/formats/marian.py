"""Models of Marian (Junczys-Dowmunt et al. 2018), of type transformer.

Beside the weights, an .npz, stands decoder.yml, which names the vocabularies: SentencePiece models (.spm), or lists of
words (.yml) with the SentencePiece models source.spm and target.spm beside them, as OPUS-MT has them. The package
pymarian is not needed.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nmtkit.architectures.transformer import BASE, TransformerConfig
from nmtkit.checkpoint import Checkpoint
from nmtkit.config import derive
from nmtkit.data.spm_model import CONTROL, UNKNOWN, pieces_of, renumbered
from nmtkit.data.tokenizer import BOS, Tokenizer
from nmtkit.formats.weights import Weights, transformer_checkpoint

SETTINGS = "special:model.yml"  # among the tensors: YAML, one byte an element
ACTIVATIONS = ("relu", "swish", "gelu")
HIDDEN = -1e4  # the output bias of an entry that the original does not have: its probability is 0
NORM_EPS = 1e-6
POSITIONS = "sinusoidal_fairseq"
SIDES = ("source", "target")
# Settings with which a model computes what nmtkit's Transformer does not, unless they are as here.
FIXED: dict[str, tuple[str, ...]] = {
    "type": ("transformer",),
    "input-types": ("", "sequence"),
    "right-left": ("false",),
    "ulr": ("false",),
    "lemma-dim-emb": ("0",),
    "transformer-attention-mask": ("default",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-disable-position-embeddings": ("false",),
    "transformer-ffn-depth": ("2",),
    "transformer-decoder-ffn-depth": ("0", "2"),
    "transformer-no-affine": ("false",),
    "transformer-no-bias": ("false",),
    "transformer-no-projection": ("false",),
    "transformer-pool": ("false",),
    "transformer-rnn-projection": ("false",),
    "transformer-tied-layers": ("",),
    "transformer-train-position-embeddings": ("false",),
}


@dataclass(frozen=True)
class Table:
    """The vocabulary of one side: pieces by id, and the row of the original's embeddings for each.

    The decoder's first token, id 1, has none: Marian starts from zeros. `hidden` are the ids that Marian does not have.
    """

    pieces: list[str]
    rows: list[int]
    hidden: list[int]
    tokenizer: bytes


def load(source: Path) -> Checkpoint:
    """Returns the checkpoint of the model in `source`, an .npz, or a folder with one and its decoder.yml.

    Raises FileNotFoundError or ValueError naming the file, and the setting, that is missing, damaged or not supported.
    """
    decoder = decoder_file(source)
    facts = parse(decoder.read_text(encoding="utf-8"), decoder)
    path = source if source.is_file() else beside(decoder, first(facts, "models", decoder))
    weights = read_weights(path)
    settings = settings_of(weights, path)
    tables = [
        read_table(beside(decoder, name), side) for name, side in zip(vocabularies(facts, decoder), SIDES, strict=True)
    ]
    source_table, target_table = tables
    same = source_table == target_table
    tokenizer = Tokenizer(source_table.tokenizer, None if same else target_table.tokenizer)
    try:
        config = config_of(settings, path, tokenizer.joint)
    except KeyError as error:
        raise ValueError(f"{path}: the settings of the model lack {error}") from error
    return transformer_checkpoint(config, tokenizer, to_nmtkit(weights, config, *tables))


# --- settings -------------------------------------------------------------------------------------------------------


def config_of(settings: Mapping[str, Any], path: Path, joint: bool) -> TransformerConfig:
    """Returns the config of a model. Raises ValueError naming the setting that nmtkit's Transformer does not have."""
    for name, allowed in FIXED.items():
        value = settings.get(name, allowed[0])
        value = " ".join(value) if isinstance(value, list) else value
        if value not in allowed and set(value.split()) - set(allowed):
            raise ValueError(
                f"{path} has {name} {value}, which nmtkit's Transformer does not have; {allowed[-1] or 'none'} it has"
            )
    activation = settings["transformer-ffn-activation"]
    if activation not in ACTIVATIONS:
        raise ValueError(f"{path} has transformer-ffn-activation {activation}; nmtkit reads {', '.join(ACTIVATIONS)}")
    inner = settings.get("transformer-decoder-dim-ffn", "0")
    if inner not in ("0", settings["transformer-dim-ffn"]):
        raise ValueError(f"{path} has transformer-decoder-dim-ffn {inner}; nmtkit has one width for both stacks")
    tied = settings["tied-embeddings-all"] == "true"
    changes = {
        "encoder_layers": int(settings["enc-depth"]),
        "decoder_layers": int(settings["dec-depth"]),
        "d_model": int(settings["dim-emb"]),
        "d_ff": int(settings["transformer-dim-ffn"]),
        "heads": int(settings["transformer-heads"]),
        "activation": activation,
        "attention_bias": True,
        "output_bias": True,
        "positions": POSITIONS,
        "norm_eps": NORM_EPS,
        "share_embeddings": joint and (tied or settings["tied-embeddings-src"] == "true"),
        "tie_output": tied or settings["tied-embeddings"] == "true",
        "embedding_norm": embeddings_are_normalised(settings, path),
    }
    return derive(BASE, changes, str(path))


def embeddings_are_normalised(settings: Mapping[str, Any], path: Path) -> bool:
    """Returns whether they are. Raises ValueError for norms elsewhere than after each layer.

    Marian writes what is done in letters: d dropout, a the residual sum, n the norm. A norm before a layer is another
    than nmtkit's pre-norm: Marian makes the keys and values of self-attention of the input as it was before the norm.
    """
    places = ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")
    letters = [settings.get(f"transformer-{place}", "").replace("d", "") for place in places]
    if letters[:3] != ["", "an", ""] or letters[3] not in ("", "n"):
        found = ", ".join(f"transformer-{place} {settings.get(f'transformer-{place}', '')!r}" for place in places)
        raise ValueError(
            f"{path} has {found}; not supported: nmtkit reads models with 'dan' after each layer alone (and 'nd' after "
            "the embeddings, if any)"
        )
    return letters[3] == "n"


# --- vocabularies ---------------------------------------------------------------------------------------------------


def read_table(path: Path, side: str) -> Table:
    """Returns the vocabulary in a file. Raises ValueError or FileNotFoundError naming what is missing."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; decoder.yml names it as the {side} vocabulary")
    if path.suffix == ".spm":
        model = path.read_bytes()
        found = pieces_of(model)
        by_id = [piece.text for piece in found]
        control = {piece.text for piece in found if piece.type in (CONTROL, UNKNOWN)}
        unknown = next((piece.text for piece in found if piece.type == UNKNOWN), "<unk>")
    elif path.suffix in (".yml", ".yaml", ".json"):
        by_id, control, unknown = words_of(path), set(), "<unk>"
        tokenizer = path.parent / f"{side}.spm"
        if not tokenizer.is_file():
            raise FileNotFoundError(
                f"{tokenizer}: no such file; {path.name} lists pieces, and the SentencePiece model that makes them "
                "has to be there under this name"
            )
        model = tokenizer.read_bytes()
    else:
        raise ValueError(f"{path} is a vocabulary of another kind; nmtkit reads .spm and .yml")
    rows = {piece: row for row, piece in enumerate(by_id)}
    missing = [name for name in (unknown, "</s>") if name not in rows]
    if missing:
        raise ValueError(f"{path} has no {missing[0]}")
    start = "<s>" if "<s>" not in rows else "<start>"
    rest = [piece for piece in by_id if piece not in (unknown, "</s>")]
    own = {piece.text for piece in pieces_of(model) if piece.type not in (CONTROL, UNKNOWN)}
    absent = sorted(own - rows.keys())  # read as the unknown piece
    pieces = [unknown, start, "</s>", *rest, *absent]
    order = [rows[unknown], rows["</s>"], rows["</s>"], *(rows[piece] for piece in rest)]
    hidden = [BOS, *range(len(order), len(pieces))]
    order += [rows[unknown]] * len(absent)
    return Table(pieces, order, hidden, renumbered(model, pieces, control - {unknown, "</s>"}))


def words_of(path: Path) -> list[str]:
    """Returns the words of a vocabulary in YAML by id."""
    table = parse(path.read_text(encoding="utf-8"), path)
    try:
        by_id = {int(id): word for word, id in table.items()}
        return [by_id[id] for id in range(len(table))]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no table from words to the ids 0, 1, 2, …") from error


# --- weights --------------------------------------------------------------------------------------------------------


def to_nmtkit(weights: Weights, config: TransformerConfig, source: Table, target: Table) -> dict[str, Tensor]:
    """Returns the weights under nmtkit's names; rows of embeddings in the order of the tables."""
    found: dict[str, Tensor] = {}

    def embeddings(table: Table, *names: str) -> Tensor:
        rows = weights.first(*names)
        if max(table.rows) >= len(rows):
            raise ValueError(f"{weights.path} has {len(rows)} embeddings; its vocabulary has {max(table.rows) + 1}")
        rows = rows[table.rows]
        rows[BOS] = 0
        return rows

    found["source_embedding.tokens.weight"] = embeddings(source, "Wemb", "encoder_Wemb")
    found["target_embedding.tokens.weight"] = embeddings(target, "Wemb", "decoder_Wemb")
    if config.tie_output:
        found["output_projection.weight"] = found["target_embedding.tokens.weight"]
    else:
        weights.tensors["output"] = weights.take("decoder_ff_logit_out_W").T
        found["output_projection.weight"] = embeddings(target, "output")
    bias = weights.optional("decoder_ff_logit_out_b")
    found["output_projection.bias"] = torch.zeros(len(target.rows)) if bias is None else bias.flatten()[target.rows]
    found["output_projection.bias"][target.hidden] = HIDDEN
    for ours, theirs in layer_names(config):
        parts = [weights.take(name) for name in theirs]
        if parts[0].shape[0] == 1:
            found[ours] = torch.cat([part.flatten() for part in parts])
        else:
            found[ours] = torch.cat([part.T for part in parts])
    return found


def layer_names(config: TransformerConfig) -> list[tuple[str, list[str]]]:
    """Returns nmtkit's name of each weight of the layers, with the names of those of Marian that it is made of."""
    names: list[tuple[str, list[str]]] = []

    def linear(ours: str, prefix: str, parts: str) -> None:
        names.append((f"{ours}.weight", [f"{prefix}_W{part}" for part in parts]))
        names.append((f"{ours}.bias", [f"{prefix}_b{part}" for part in parts]))

    def norm(ours: str, theirs: str, suffix: str = "") -> None:
        names.append((f"{ours}.weight", [f"{theirs}_ln_scale{suffix}"]))
        names.append((f"{ours}.bias", [f"{theirs}_ln_bias{suffix}"]))

    for stack, side, depth in (
        ("encoder", "source", config.encoder_layers),
        ("decoder", "target", config.decoder_layers),
    ):
        if config.embedding_norm:
            norm(f"{side}_embedding.norm", f"{stack}_emb", "_pre")
        for index in range(depth):
            ours, theirs = f"{stack}.{index}", f"{stack}_l{index + 1}"
            linear(f"{ours}.self_attention.qkv_proj", f"{theirs}_self", "qkv")
            linear(f"{ours}.self_attention.out_proj", f"{theirs}_self", "o")
            norm(f"{ours}.self_attention_norm", f"{theirs}_self_Wo")
            if stack == "decoder":
                linear(f"{ours}.cross_attention.q_proj", f"{theirs}_context", "q")
                linear(f"{ours}.cross_attention.kv_proj", f"{theirs}_context", "kv")
                linear(f"{ours}.cross_attention.out_proj", f"{theirs}_context", "o")
                norm(f"{ours}.cross_attention_norm", f"{theirs}_context_Wo")
            linear(f"{ours}.feed_forward.fc1", f"{theirs}_ffn", "1")
            linear(f"{ours}.feed_forward.fc2", f"{theirs}_ffn", "2")
            norm(f"{ours}.feed_forward_norm", f"{theirs}_ffn_ffn")
    return names


# --- files ----------------------------------------------------------------------------------------------------------


def decoder_files(source: Path) -> list[Path]:
    """Returns those files with Marian's settings for decoding that belong to a model, or lie in a folder."""
    if source.is_dir():
        candidates = [source / "decoder.yml", *sorted(source.glob("*.npz.decoder.yml"))]
    else:
        candidates = [source.with_name(f"{source.name}.decoder.yml"), source.with_name("decoder.yml")]
    return [candidate for candidate in candidates if candidate.is_file()]


def decoder_file(source: Path) -> Path:
    """Returns the decoder.yml of a model. Raises FileNotFoundError saying where it has to be."""
    for candidate in decoder_files(source):
        return candidate
    raise FileNotFoundError(f"{source}.decoder.yml: no such file; Marian writes one beside a model: its vocabularies")


def beside(decoder: Path, name: str) -> Path:
    """Returns the path of a file that decoder.yml names, where it lies now: relative to it, or in its folder."""
    path = decoder.parent / name
    return path if path.is_file() else decoder.parent / Path(name).name


def first(facts: Mapping[str, Any], name: str, path: Path) -> str:
    values = facts.get(name)
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(f"{path} names {len(values or [])} {name}; nmtkit reads one model at a time")
    return str(values[0])


def vocabularies(facts: Mapping[str, Any], path: Path) -> list[str]:
    values = facts.get("vocabs")
    if not isinstance(values, list) or len(values) != 2:
        raise ValueError(f"{path} names {len(values or [])} vocabs; a model of one source and a target has two")
    return values


def read_weights(path: Path) -> Weights:
    """Returns all tensors by name. Runs no code of the file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Weights({name: torch.from_numpy(arrays[name]) for name in arrays.files}, path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; decoder.yml names it as the model") from None
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no .npz of Marian, or is damaged: {error}") from error


def settings_of(weights: Weights, path: Path) -> dict[str, Any]:
    if SETTINGS not in weights.tensors:
        raise ValueError(f"{path} holds no {SETTINGS}, in which Marian keeps the settings of a model")
    text = weights.tensors[SETTINGS].numpy().tobytes().rstrip(b"\0").decode()
    return parse(text, path)


PAIR = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^"'\s].*?)\s*:(?:\s+(.*))?""")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def parse(text: str, path: Path) -> dict[str, Any]:
    """Returns keys with strings, or lists of strings: the part of YAML that Marian writes. Raises ValueError."""
    found: dict[str, Any] = {}
    key = ""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        pair = PAIR.fullmatch(line.rstrip()) if not line.startswith((" ", "- ")) else None
        if not stripped or stripped.startswith(("# ", "---")):
            continue
        if pair:
            key, value = scalar(pair[1]), (pair[2] or "").strip()
            is_list = value.startswith("[") and value.endswith("]")
            found[key] = [scalar(part) for part in value[1:-1].split(",") if part.strip()] if is_list else scalar(value)
        elif stripped.startswith("- ") and key:
            found[key] = [*(found[key] or []), scalar(stripped[2:])]
        elif stripped == "[]" and key:
            found[key] = []
        else:
            raise ValueError(f"{path}, line {number}: {stripped[:60]!r} is no YAML as Marian writes it")
    return found


def scalar(text: str) -> str:
    """Returns what a scalar of YAML, perhaps in quotes, stands for."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        as_json = ESCAPE.sub(
            lambda match: chr(int(match[1] or match[2], 16)) if match[1] or match[2] else match[0], text
        )
        return str(json.loads(as_json, strict=False))
    return text
