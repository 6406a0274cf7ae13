"""Converts vocabularies of other toolkits. A table maps each id of nmtkit to a row of the original embeddings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from nmtkit.data.tokenizers.spm_model import CONTROL, UNKNOWN, pieces_of, renumbered, with_preparation
from nmtkit.data.tokenizers.tokenizer import BOS, Tokenizer
from nmtkit.models.formats.reading import read_bytes

HIDDEN = -1e4  # output bias of entries that the original model does not have, so that their probability is 0
EOS = "</s>"
SPECIAL = frozenset(("<unk>", "<s>", EOS, "<pad>", "<mask>"))


@dataclass(frozen=True)
class IdTable:
    """The vocabulary of one side: pieces by id. The ids 0, 1 and 2 are <unk>, the first token of the decoder and </s>.

    `rows` maps each id to a row of the original embeddings. `hidden` lists the ids that the original model does not
    have. `control` is the set of pieces that text never produces.
    """

    pieces: list[str]
    rows: list[int]
    hidden: list[int]
    control: frozenset[str]


def tokenizer_of(tables: Sequence[IdTable], models: Sequence[bytes]) -> Tokenizer:
    """Returns a tokenizer with SentencePiece models and the ids of their tables.

    There is one table and one model for both sides, or a table and a model for each side.
    """
    pairs = zip(tables, models, strict=True)
    made = [with_preparation(renumbered(model, table.pieces, table.control)) for table, model in pairs]
    return Tokenizer(made[0], None if made[0] == made[-1] else made[-1])


def is_language(piece: str) -> bool:
    """Returns whether a piece that text never produces stands for a language: >>deu<<, __de__, deu_Latn or de_DE."""
    if piece.startswith(">>") and piece.endswith("<<"):
        return True
    code = piece.removeprefix("__").removesuffix("__")
    return 2 <= len(code) <= 8 and code.replace("_", "").isalpha() and (code != piece or "_" in code)


def table_of(
    by_id: Mapping[int, str],
    size: int,
    models: Sequence[bytes],
    start: int | None,
    path: Path,
    unk: str = "<unk>",
    stands_for_language: Callable[[str], bool] = is_language,
) -> IdTable:
    """Returns the table of the vocabulary in `path`, which has `size` entries and the SentencePiece models `models`.

    The decoder starts from the entry `start`. If `start` is None, the decoder starts from eos. Then <s> gets the row of
    eos, and an entry <s> of the original vocabulary counts as unused. Pieces that are in `models` but not in the
    vocabulary get the row of <unk>. Pieces that text never produces become language tokens if `stands_for_language`
    accepts them. Raises ValueError naming the path if an entry is missing, if an id is not below
    `size`, or if `start` is the entry of <unk> or eos.
    """
    if max(by_id) >= size:
        raise ValueError(f"{path} has ids up to {max(by_id)}, but the model has {size} entries")
    taken = {"<s>"} if start is None else set()
    by_id = {id: unused(id) if by_id.get(id) in (None, *taken) else by_id[id] for id in range(size)}
    ids = {piece: id for id, piece in by_id.items()}
    missing = [name for name in (unk, EOS) if name not in ids]
    if missing:
        raise ValueError(f"{path} has no {missing[0]}")
    if start is not None and start not in by_id:
        raise ValueError(f"{path} has no entry {start}, which is the decoder's first token")
    first = by_id[start] if start is not None else "<s>"
    if first in (unk, EOS):
        raise ValueError(f"{path}: the decoder starts from {first}, which is not supported")
    in_models = {piece.text for model in models for piece in pieces_of(model) if piece.type not in (CONTROL, UNKNOWN)}
    special = SPECIAL | {unk, first} | {piece for id, piece in by_id.items() if piece == unused(id)}
    languages = [
        piece for id, piece in sorted(by_id.items()) if piece not in in_models | special and stands_for_language(piece)
    ]
    known = [piece for id, piece in sorted(by_id.items()) if piece not in {unk, EOS, first, *languages}]
    known.sort(key=lambda piece: piece not in special)  # sorts special pieces, such as <pad>, to the beginning
    unknown = sorted(in_models - ids.keys())
    pieces = [unk, first, EOS, *known, *unknown, *languages]
    rows = [ids[unk], start if start is not None else ids[EOS], ids[EOS]]
    rows += [ids[piece] for piece in known] + [ids[unk]] * len(unknown) + [ids[piece] for piece in languages]
    hidden = [] if start is not None else [BOS]
    hidden += range(3 + len(known), 3 + len(known) + len(unknown))
    return IdTable(pieces, rows, hidden, frozenset(languages) | {piece for piece in special if piece in known})


def unused(id: int) -> str:
    """Returns the name of an entry whose embedding is not used."""
    return f"<unused {id}>"


def is_unused(piece: str) -> bool:
    """Returns whether `piece` is a name that `unused` returns."""
    return piece.startswith("<unused ") and piece.endswith(">")


def read_model(path: Path, purpose: str = "the SentencePiece model of the tokenizer is needed") -> bytes:
    """Returns a SentencePiece model file. Raises ValueError or FileNotFoundError naming the path."""
    model = read_bytes(path, purpose)
    try:
        pieces_of(model)
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a SentencePiece model, or is damaged") from error
    return model
