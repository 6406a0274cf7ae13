"""Converts a tokenizer.json back into a SentencePiece model.

transformers 5 saves a tokenizer.json of the package tokenizers instead of a SentencePiece model. If the file was
converted from a SentencePiece model, it still contains all parts of this model: the pieces by id, the scores (unigram)
or the order of the merges (BPE), and the table of the normaliser.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmtkit.data.tokenizers.spm_model import ModelPiece, new_model
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL

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
            f"{path} was not made from a supported SentencePiece model (it is a {kind} model); copy "
            "sentencepiece.bpe.model into the folder"
        )
    if kind == "BPE":
        by_id = {id: piece for piece, id in model["vocab"].items()}
        products = [by_piece(merge, model["vocab"]) for merge in model["merges"]]
        if products != sorted(products):
            raise ValueError(f"{path}: its merges are not in the order of its pieces, so SentencePiece cannot use them")
        scores = {piece: float(-id) for id, piece in by_id.items()}
    else:
        by_id = {id: piece for id, (piece, _) in enumerate(model["vocab"])}
        scores = dict(model["vocab"])
    added = {token["content"] for token in contents.get("added_tokens") or []} | {"<unk>", "<s>", "</s>", "<pad>"}
    pieces = [ModelPiece(piece, scores[piece]) for _, piece in sorted(by_id.items()) if piece not in added]
    return new_model(pieces, "bpe" if kind == "BPE" else "unigram", charsmap(contents, path)), by_id


def by_piece(merge: Any, ids: Mapping[str, int]) -> int:
    """Returns the id of the piece that a merge makes. A merge is a pair of pieces, or a text in older files."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return ids[left + right]


def splits_at_spaces(contents: Mapping[str, Any]) -> bool:
    """Returns whether every word, including the first word, begins with SentencePiece's symbol for a space."""
    outer = contents.get("pre_tokenizer") or {}
    parts = [part for part in outer.get("pretokenizers", [outer]) if part.get("type") != "WhitespaceSplit"]
    if len(parts) != 1 or parts[0].get("type") != "Metaspace" or parts[0].get("replacement") != SPACE_SYMBOL:
        return False
    always = parts[0].get("prepend_scheme", "always" if parts[0].get("add_prefix_space") else "never") == "always"
    return always and bool(parts[0].get("split", True))


def charsmap(contents: Mapping[str, Any], path: Path) -> bytes:
    """Returns SentencePiece's normalisation table, or b"" without a table. Raises ValueError for other normalisers."""
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
