"""The fields of a SentencePiece model file that decide how nmtkit may use it.

A model is a protocol buffer (sentencepiece_model.proto). Reading a few of its fields needs no protobuf package: a
message is a sequence of (field number, wire type, value), and the wire types are variable-length integers, fixed 4 or 8
bytes, and byte strings.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TRAINER_SPEC, NORMALIZER_SPEC = 2, 3  # fields of ModelProto
MODEL_TYPE, SPLIT_BY_WHITESPACE, WHITESPACE_AS_SUFFIX, USER_DEFINED, BYTE_FALLBACK = 3, 22, 24, 31, 35  # of TrainerSpec
CHARSMAP, DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 3, 4, 5  # of NormalizerSpec
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True)
class ModelFacts:
    """Fields of a model file; defaults are those of the format."""

    model_type: str
    byte_fallback: bool
    rewrites: bool  # its normaliser changes text beyond runs of spaces
    splits_at_spaces: bool  # no piece and no rule of its normaliser spans a space, as far as the settings can tell


def model_facts(model: bytes) -> ModelFacts:
    """Reads the facts of a model file. Raises ValueError when it is no protocol buffer."""
    fields = dict(_fields(model, only=(TRAINER_SPEC, NORMALIZER_SPEC)))
    trainer = dict(_fields(_message(fields.get(TRAINER_SPEC, b""))))
    normalizer = dict(_fields(_message(fields.get(NORMALIZER_SPEC, b""))))
    model_type = MODEL_TYPES.get(int(trainer.get(MODEL_TYPE, 1)), "unknown")
    spaces_mark_words = (
        bool(trainer.get(SPLIT_BY_WHITESPACE, 1))
        and not trainer.get(WHITESPACE_AS_SUFFIX, 0)
        and all(normalizer.get(field, 1) for field in (DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES))
    )
    charsmap = _message(normalizer.get(CHARSMAP, b""))
    byte_fallback = bool(trainer.get(BYTE_FALLBACK, 0))
    splits_at_spaces = spaces_mark_words and not _rules_contain_space(charsmap)
    return ModelFacts(model_type, byte_fallback, bool(charsmap), splits_at_spaces)


def _rules_contain_space(charsmap: bytes) -> bool:
    """Returns whether a normalisation rule applies to text with a space in it, so that words affect their neighbours.

    The rules' keys are in a double array of 32-bit units, as in the library darts-clone, after its size in bytes. From
    a node whose unit has the offset o, a byte b leads to the node at its index ^ o ^ b, if the label there is b.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size // 4 * 4], "<u4").astype(np.int64)
    if not len(units):
        return False
    labels = np.where(units >> 31, -1, units & 0xFF)  # a unit with the highest bit is no node, but a value
    index = np.arange(len(units))
    children_of = index ^ ((units >> 10) << ((units & (1 << 9)) >> 6))  # without the label of the child
    reached = index == 0
    while True:
        bases = np.unique(children_of[reached])
        grown = reached | ((labels > 0) & np.isin(index ^ labels, bases))
        if (grown == reached).all():
            return bool((reached & (labels == ord(" "))).any())
        reached = grown


def user_defined_symbols(model: bytes) -> list[str]:
    """Returns the symbols that a model was trained to keep whole, tags among them."""
    fields = dict(_fields(model, only=(TRAINER_SPEC,)))
    trainer = _fields(_message(fields.get(TRAINER_SPEC, b"")), only=(USER_DEFINED,))
    return [_message(value).decode() for _, value in trainer]


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("no SentencePiece model")
    return value


def _fields(message: bytes, only: tuple[int, ...] = ()) -> Iterator[tuple[int, int | bytes]]:
    position = 0
    try:
        while position < len(message):
            key, position = _varint(message, position)
            field, wire = key >> 3, key & 7
            value: int | bytes
            if wire == 0:
                value, position = _varint(message, position)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
                value, position = message[position : position + size], position + size
            elif wire == 2:
                size, position = _varint(message, position)
                wanted = not only or field in only  # the pieces, nearly all of the file, are not
                value, position = message[position : position + size] if wanted else b"", position + size
            else:
                raise ValueError("no SentencePiece model")
            if not only or field in only:
                yield field, value
    except IndexError as error:
        raise ValueError("no SentencePiece model") from error


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
