"""Vocabularies of other toolkits: which row of the original's embeddings each id of nmtkit has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nmtkit.data.spm_model import CONTROL, UNKNOWN, pieces_of
from nmtkit.data.tokenizer import BOS

HIDDEN = -1e4  # the output bias of an entry that the original does not have: its probability is 0


@dataclass(frozen=True)
class Table:
    """The vocabulary of one side: pieces by id, with <unk>, the decoder's first token and </s> at 0, 1 and 2.

    `rows` are the rows of the original's embeddings for each; `hidden` the ids that the original does not have.
    """

    pieces: list[str]
    rows: list[int]
    hidden: list[int]
    control: frozenset[str]


def is_language(piece: str) -> bool:
    """Returns whether a token that text never holds stands for a language: >>deu<<, __de__, deu_Latn or de_DE."""
    if piece.startswith(">>") and piece.endswith("<<"):
        return True
    code = piece.removeprefix("__").removesuffix("__")
    return 2 <= len(code) <= 8 and code.replace("_", "").isalpha() and (code != piece or "_" in code)


def table_of(
    by_id: Mapping[int, str],
    models: list[bytes],
    start: int | None,
    unk: str,
    eos: str,
    stands_for_language: Callable[[str], bool] = is_language,
) -> Table:
    """Returns the table of a vocabulary whose tokenizers are `models`.

    The token that the decoder starts from is `start`; none is eos, whose row then stands twice. Pieces of the tokenizer
    that the vocabulary does not have are entries of their own, with the row of <unk>.
    """
    ids = {piece: id for id, piece in by_id.items()}
    missing = [name for name in (unk, eos) if name not in ids]
    if missing:
        raise ValueError(f"the vocabulary has no {missing[0]}")
    first = by_id[start] if start is not None else "<s>"
    own = {piece.text for model in models for piece in pieces_of(model) if piece.type not in (CONTROL, UNKNOWN)}
    special = {unk, eos, first, "<s>", "<pad>", "<mask>"} | {
        piece for id, piece in by_id.items() if piece == unused(id)
    }
    languages = [
        piece for id, piece in sorted(by_id.items()) if piece not in own | special and stands_for_language(piece)
    ]
    known = [piece for id, piece in sorted(by_id.items()) if piece not in {unk, eos, first, *languages}]
    known.sort(key=lambda piece: piece not in special)  # apart from the languages, which stand last
    unknown = sorted(own - ids.keys())
    pieces = [unk, first, eos, *known, *unknown, *languages]
    rows = [ids[unk], start if start is not None else ids[eos], ids[eos]]
    rows += [ids[piece] for piece in known] + [ids[unk]] * len(unknown) + [ids[piece] for piece in languages]
    hidden = [] if start is not None else [BOS]
    hidden += range(3 + len(known), 3 + len(known) + len(unknown))
    return Table(pieces, rows, hidden, frozenset(languages) | {piece for piece in special if piece in known})


def unused(id: int) -> str:
    """Returns what an entry of the embeddings is called that stands for no piece."""
    return f"<unused {id}>"


def read_model(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; the tokenizer's SentencePiece model is needed")
    model = path.read_bytes()
    try:
        pieces_of(model)
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no SentencePiece model, or is damaged") from error
    return model
