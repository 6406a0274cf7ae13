"""tokenizer.json of the package tokenizers, as transformers 5 saves it in place of a SentencePiece model, turned back.

What was converted from a SentencePiece model says all that it did: its pieces by id, scores (unigram) or the order of
merges (BPE), and the table of its normaliser.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmtkit.data.spm_model import Piece, new_model
from nmtkit.data.tokenizer import SPACE_SYMBOL

SEVERAL_SPACES = {"Regex": " {2,}"}  # are made one by SentencePiece, too


def sentencepiece_model(contents: Mapping[str, Any], path: Path) -> tuple[bytes, dict[int, str]]:
    """Returns a model that segments text as `contents` of `path` say, and all pieces by id. Raises ValueError naming
    what SentencePiece has not."""
    model = contents["model"]
    kind = model.get("type")
    if kind not in ("BPE", "Unigram") or model.get("byte_fallback") or not splits_at_spaces(contents):
        raise ValueError(
            f"{path} was made from no SentencePiece model that nmtkit knows (it is a {kind} model); copy "
            "sentencepiece.bpe.model into the folder"
        )
    if kind == "BPE":
        by_id = {id: piece for piece, id in model["vocab"].items()}
        products = [by_piece(merge, model["vocab"]) for merge in model["merges"]]
        if products != sorted(products):
            raise ValueError(f"{path}: its merges are not in the order of its pieces, as those of SentencePiece are")
        scores = {piece: float(-id) for id, piece in by_id.items()}
    else:
        by_id = {id: piece for id, (piece, _) in enumerate(model["vocab"])}
        scores = dict(model["vocab"])
    added = {token["content"] for token in contents.get("added_tokens") or []} | {"<unk>", "<s>", "</s>", "<pad>"}
    pieces = [Piece(piece, scores[piece]) for _, piece in sorted(by_id.items()) if piece not in added]
    return new_model(pieces, "bpe" if kind == "BPE" else "unigram", charsmap(contents, path)), by_id


def by_piece(merge: Any, ids: Mapping[str, int]) -> int:
    """Returns the id of what a merge makes: two pieces, or in older files a text with a space between them."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return ids[left + right]


def splits_at_spaces(contents: Mapping[str, Any]) -> bool:
    """Returns whether each word begins with SentencePiece's sign of a space, the first one too."""
    outer = contents.get("pre_tokenizer") or {}
    parts = [part for part in outer.get("pretokenizers", [outer]) if part.get("type") != "WhitespaceSplit"]
    if len(parts) != 1 or parts[0].get("type") != "Metaspace" or parts[0].get("replacement") != SPACE_SYMBOL:
        return False
    always = parts[0].get("prepend_scheme", "always" if parts[0].get("add_prefix_space") else "never") == "always"
    return always and bool(parts[0].get("split", True))


def charsmap(contents: Mapping[str, Any], path: Path) -> bytes:
    """Returns the table of the normaliser, empty for none. Raises ValueError for another kind of normaliser."""
    outer = contents.get("normalizer") or {"normalizers": []}
    found = b""
    for part in outer.get("normalizers", [outer]):
        if part.get("type") == "Precompiled":
            found = base64.b64decode(part["precompiled_charsmap"])
        elif part.get("type") != "Replace" or part.get("pattern") != SEVERAL_SPACES:
            raise ValueError(
                f"{path}: its normalizer {part.get('type')} is none of SentencePiece; copy sentencepiece.bpe.model "
                "into the folder"
            )
    return found
