"""SentencePiece model files: reads the fields that nmtkit needs, and writes models with given pieces or ids.

A model is a protocol buffer (sentencepiece_model.proto). This module reads a few of its fields without the package
protobuf, which SentencePiece does not install. A message is a sequence of (field number, wire type, value). The wire
types are variable-length integers, fixed 4 or 8 bytes, and byte strings.
"""

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PIECES, TRAINER_SPEC, NORMALIZER_SPEC = 1, 2, 3  # fields of ModelProto
PIECE, SCORE, TYPE = 1, 2, 3  # fields of ModelProto.SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED_PIECE, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNK_PIECE, BOS_PIECE, EOS_PIECE = 45, 46, 47  # fields of TrainerSpec
FOREIGN = "\ufdd1"  # a noncharacter, so that a piece that begins with FOREIGN never matches text
# further fields of TrainerSpec, then fields of NormalizerSpec
MODEL_TYPE, SPLIT_BY_WHITESPACE, WHITESPACE_AS_SUFFIX, USER_DEFINED, BYTE_FALLBACK = 3, 22, 24, 31, 35
CHARSMAP, DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 3, 4, 5
# An extension field of ModelProto, which other readers ignore, marks the rule that prepares text.
PREPARATION, PREPARATION_MARK = 200, b"nmtkit text preparation "
NEWEST_PREPARATION = 2  # rule of new tokenizers, see `SubwordModel.prepared`
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True)
class SubwordFacts:
    """Properties of a model file. If the file lacks a field, the property has the default value of the format."""

    model_type: str
    byte_fallback: bool
    rewrites: bool  # the normaliser changes more than runs of spaces
    splits_at_spaces: bool  # according to the settings, no piece and no rule of the normaliser spans a space


def model_facts(model: bytes) -> SubwordFacts:
    """Returns the properties of a model file. Raises ValueError if the file is not a protocol buffer."""
    trainer, normalizer = dict(_settings(model, TRAINER_SPEC)), dict(_settings(model, NORMALIZER_SPEC))
    model_type = MODEL_TYPES.get(int(trainer.get(MODEL_TYPE, 1)), "unknown")
    spaces_mark_words = (
        bool(trainer.get(SPLIT_BY_WHITESPACE, 1))
        and not trainer.get(WHITESPACE_AS_SUFFIX, 0)
        and all(normalizer.get(field, 1) for field in (DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES))
    )
    charsmap = _message(normalizer.get(CHARSMAP, b""))
    splits_at_spaces = spaces_mark_words and not _rules_contain_space(charsmap)
    return SubwordFacts(model_type, bool(trainer.get(BYTE_FALLBACK, 0)), bool(charsmap), splits_at_spaces)


def _rules_contain_space(charsmap: bytes) -> bool:
    """Returns whether a normalisation rule contains a space. Such a rule can change a word and its neighbour together.

    The table begins with the size of an array in bytes, and the array follows. The array holds the keys of the rules as
    a trie of 32-bit units, in the double-array format of the library darts-clone. From the node with index i, whose
    unit has the offset o, a byte b leads to the node with index i ^ o ^ b if that node has the label b.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size // 4 * 4], "<u4").astype(np.int64)
    if not len(units):
        return False
    labels = np.where(units >> 31, -1, units & 0xFF)  # a unit with the highest bit set is a value, not a node
    index = np.arange(len(units))
    children_of = index ^ ((units >> 10) << ((units & (1 << 9)) >> 6))  # index of each child before XOR with its label
    reached = index == 0
    while True:
        bases = np.unique(children_of[reached])
        grown = reached | ((labels > 0) & np.isin(index ^ labels, bases))
        if (grown == reached).all():
            return bool((reached & (labels == ord(" "))).any())
        reached = grown


def preparation_of(model: bytes) -> int:
    """Returns the number of the rule that prepares text for a model. A model without a mark has rule 1.

    Searches the bytes for the mark, because reading all fields of a large model takes a second.
    """
    marks = re.findall(re.escape(PREPARATION_MARK) + rb"(\d+)", model)
    return int(marks[-1]) if marks else 1


def with_preparation(model: bytes) -> bytes:
    """Returns the model file with the mark of the newest rule for preparing text."""
    if preparation_of(model) == NEWEST_PREPARATION:
        return model
    return model + _bytes_field(PREPARATION, PREPARATION_MARK + b"%d" % NEWEST_PREPARATION)


def user_defined_symbols(model: bytes) -> list[str]:
    """Returns the user-defined symbols of a model, such as tags. The model never splits these symbols."""
    return [_message(value).decode() for field, value in _settings(model, TRAINER_SPEC) if field == USER_DEFINED]


def charsmap_of(model: bytes) -> bytes:
    """Returns the table of the normaliser of a model file, or b"" if the normaliser changes only spaces."""
    return _message(dict(_settings(model, NORMALIZER_SPEC)).get(CHARSMAP, b""))


def _settings(model: bytes, spec: int) -> list[tuple[int, int | bytes]]:
    """Returns the fields of the settings `spec` of a model file. `spec` is TRAINER_SPEC or NORMALIZER_SPEC."""
    return list(_fields(_message(dict(_fields(model, only=spec)).get(spec, b""))))


@dataclass(frozen=True)
class ModelPiece:
    """A piece of a model. `score` is a log probability in a unigram model, and a rank in other models."""

    text: str
    score: float = 0.0
    type: int = NORMAL


def pieces_of(model: bytes) -> list[ModelPiece]:
    """Returns the pieces of a model file by id. Raises ValueError if `model` is not a SentencePiece model."""
    pieces = []
    for _, value in _fields(model, only=PIECES):
        fields = dict(_fields(_message(value)))
        packed = _message(fields.get(SCORE, bytes(4)))
        if len(packed) != 4:
            raise ValueError("not a SentencePiece model")
        score = struct.unpack("<f", packed)[0]
        pieces.append(ModelPiece(_message(fields.get(PIECE, b"")).decode(), score, int(fields.get(TYPE, NORMAL))))
    if not pieces:
        raise ValueError("not a SentencePiece model")
    return pieces


def with_pieces(model: bytes, pieces: Sequence[ModelPiece]) -> bytes:
    """Returns a model file with the settings of `model` and a new table of pieces."""
    rest = b"".join(_bytes_field(field, _message(value)) for field, value in _fields(model) if field != PIECES)
    return _table(pieces) + rest


def renumbered(model: bytes, pieces: Sequence[str], control: Collection[str] = ()) -> bytes:
    """Returns a model file that segments text into the same pieces as `model`, but with new ids.

    The new id of a piece is its index in `pieces`. If a source model and a target model are renumbered with the same
    `pieces`, both models share a table of ids. `pieces` begins with <unk>, <s> and </s>. The rest of `pieces`
    must include every piece of the model except unknown and control pieces. The new model never produces a piece that
    `model` does not have. If `model` lacks a piece in `control`, such as a language token, the new model decodes this
    piece to the empty text.

    Raises ValueError if `pieces` lacks pieces of the model or has duplicates.
    """
    by_text = {piece.text: piece for piece in pieces_of(model) if piece.type not in (UNKNOWN, CONTROL)}
    missing = by_text.keys() - set(pieces)
    if missing:
        raise ValueError(f"{len(missing)} pieces of a tokenizer have no id, such as {sorted(missing)[:3]}")
    if len(set(pieces)) < len(pieces):
        raise ValueError("the vocabulary has two ids for one piece")
    # without FOREIGN, a BPE model would merge characters into an unused piece, then split the piece again
    foreign = "" if model_facts(model).model_type == "unigram" else FOREIGN
    table = [ModelPiece(pieces[0], type=UNKNOWN), *(ModelPiece(text, type=CONTROL) for text in pieces[1:3])]
    for text in pieces[3:]:
        other = ModelPiece(text, type=CONTROL) if text in control else ModelPiece(foreign + text, type=UNUSED)
        table.append(by_text.get(text, other))
    numbers = (UNK_PIECE, BOS_PIECE, EOS_PIECE)
    names = b"".join(_bytes_field(number, text.encode()) for number, text in zip(numbers, pieces, strict=False))
    settings = b"".join(
        # readers use the last value of a field that occurs twice
        _bytes_field(field, _message(value) + (names if field == TRAINER_SPEC else b""))
        for field, value in _fields(model)
    )
    return with_pieces(settings, table)


def new_model(pieces: Sequence[ModelPiece], model_type: str, charsmap: bytes) -> bytes:
    """Returns a model file of <unk>, <s>, </s> and `pieces`. An empty `charsmap` means no normaliser.

    The scores of a unigram model are log probabilities. A BPE model merges pieces with higher scores first.
    """
    special = ModelPiece("<unk>", type=UNKNOWN), ModelPiece("<s>", type=CONTROL), ModelPiece("</s>", type=CONTROL)
    number = {name: number for number, name in MODEL_TYPES.items()}[model_type]
    trainer = _bytes_field(TRAINER_SPEC, bytes([MODEL_TYPE << 3, number]))
    normalizer = _bytes_field(NORMALIZER_SPEC, _bytes_field(CHARSMAP, charsmap) if charsmap else b"")
    return _table([*special, *pieces]) + trainer + normalizer


def with_control_pieces(model: bytes, pieces: Sequence[str]) -> bytes:
    """Returns the model file with control pieces, such as language tokens, at the end of its table.

    Encoding never produces a control piece. Raises ValueError if the model already has one of the pieces.
    """
    if not pieces:
        return model
    present = {piece.text for piece in pieces_of(model)}.intersection(pieces)
    if present:
        raise ValueError(f"the tokenizer already has the piece {min(present)!r}")
    return model + _table([ModelPiece(text, type=CONTROL) for text in pieces])


def _table(pieces: Iterable[ModelPiece]) -> bytes:
    return b"".join(_bytes_field(PIECES, _piece_message(piece)) for piece in pieces)


def _piece_message(piece: ModelPiece) -> bytes:
    score = bytes([SCORE << 3 | 5]) + struct.pack("<f", piece.score)
    return _bytes_field(PIECE, piece.text.encode()) + score + bytes([TYPE << 3, piece.type])


def _bytes_field(field: int, value: bytes) -> bytes:
    return _as_varint(field << 3 | 2) + _as_varint(len(value)) + value


def _as_varint(number: int) -> bytes:
    encoded = b""
    while number >= 0x80:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("not a SentencePiece model")
    return value


def _fields(message: bytes, only: int | None = None) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field of a message, or of the fields with the number `only`."""
    position = 0
    try:
        while position < len(message):
            key, position = _varint(message, position)
            field, wire = key >> 3, key & 7
            wanted = only in (None, field)
            value: int | bytes
            if wire == 0:
                value, position = _varint(message, position)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
                value, position = message[position : position + size], position + size
            elif wire == 2:
                size, position = _varint(message, position)
                # copies only the requested fields, because the pieces are nearly the whole file
                value, position = message[position : position + size] if wanted else b"", position + size
            else:
                raise ValueError("not a SentencePiece model")
            if position > len(message):
                raise ValueError("a truncated SentencePiece model")
            if wanted:
                yield field, value
    except IndexError as error:
        raise ValueError("not a SentencePiece model") from error


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
