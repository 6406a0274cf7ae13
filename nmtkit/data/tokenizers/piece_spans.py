"""The span of each piece in its text. Pieces for spaces, unknown characters and single bytes have spans, too.

SentencePiece reports the part of the text that each piece stands for, even if its rules have changed the text, for
example the character "…" to three dots.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from nmtkit.data.tokenizers.spm_model import FOREIGN
from nmtkit.data.tokenizers.tokenizer import ESCAPE, SPACE_SYMBOL, SubwordModel
from nmtkit.text.alignment import Span

# matches escapes, the mark of pieces of the other side (FOREIGN), space symbols of unknown pieces, and newlines
_ENCODED = re.compile(f"{ESCAPE}([_{ESCAPE}])|{FOREIGN}|{SPACE_SYMBOL}|\n")


def source_spans(model: SubwordModel, ids: Sequence[int], line: str) -> list[Span]:
    """Returns the span in `line` of the piece of each id. A span includes the space before its piece.

    Pieces that stand for one character, such as the bytes of the character, share the span of the character. `ids` of
    a dataset can differ in number from the pieces of the line. In this case, the spans are positions in the text of the
    decoded `ids`, and positions after the end of the line become the end of the line.
    """
    prepared = model.prepared_line(line)
    encoded = {"text": prepared, **model.processor.encode(prepared, return_type="offset_mapping")}
    if len(encoded["ids"]) != len(ids):
        encoded = model.processor.decode([int(token) for token in ids], return_type="offset_mapping")
    _, spans = _without_escapes(encoded)
    return [(min(start, len(line)), min(end, len(line))) for start, end in spans]


def decoded_pieces(model: SubwordModel, pieces: Sequence[str]) -> tuple[str, list[Span]]:
    """Returns the text of a sentence, and the span of each piece. A piece outside the vocabulary is copied as text.

    A space symbol in such a piece stands for a space, as in the pieces of `copied_piece`.
    """
    return _without_escapes(model.processor.decode(list(pieces), return_type="offset_mapping"))


def copied_piece(text: str, after_space: bool) -> str:
    """Returns a part of a source text as a piece for `decoded_pieces`.

    With `after_space`, a space precedes the piece already, so a space at its start is left out.
    """
    words = text.replace(ESCAPE, ESCAPE * 2).replace(SPACE_SYMBOL, f"{ESCAPE}_")
    return (words.lstrip() if after_space else words).replace(" ", SPACE_SYMBOL)


def _without_escapes(encoded: dict[str, Any]) -> tuple[str, list[Span]]:
    """Returns the text of an offset mapping of SentencePiece without escapes, and the span of each piece in this text.

    The mapping has the "text", the "pieces" and their "offsets", which count characters.
    """
    text, pieces = encoded["text"], encoded["pieces"]
    kept = [1] * len(text)  # 1 for each character of `text` that is in the result
    parts, cursor = [], 0
    for match in _ENCODED.finditer(text):
        start, end = match.span()
        char = "" if match[0] == FOREIGN else SPACE_SYMBOL if match[1] == "_" else match[1] or " "
        kept[start:end] = [0] * (end - start - len(char)) + [1] * len(char)
        parts += [text[cursor:start], char]
        cursor = end
    index = [0, *accumulate(kept)]
    spans = [(index[start], index[end]) for start, end in encoded["offsets"]]
    for number in range(len(spans) - 2, -1, -1):
        start, end = spans[number]
        if start == end == spans[number + 1][0] and pieces[number] != SPACE_SYMBOL:
            spans[number] = spans[number + 1]
    return "".join([*parts, text[cursor:]]), spans
