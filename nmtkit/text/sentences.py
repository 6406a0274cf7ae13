"""Finds the sentences of a paragraph with the package sentencex (Wikimedia, MIT licence, about 300 languages).

`part_ends` divides a text that is too long for a model. This function does not need the package.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache

from nmtkit.text.alignment import Span
from nmtkit.text.languages import subtags
from nmtkit.text.patterns import is_message

# The end of a sentence and the beginning of the next sentence, in a line that may hold tags.
_BOUNDARY = re.compile(
    r"\w\w(?:<[^<>]*>)*[.!?…](?:<[^<>]*>|[\"'”»)])*\s+(?:<[^<>]*>|[\"'“„«(¿¡])*[A-ZÄÖÜÀÉÈА-ЯΑ-Ω]|[。！？]\w"
)
SENTENCE_ENDS = ".!?…。！？؟।"

Splitter = Callable[[str, str], list[str]]  # (language, text) -> sentences that together are the whole text

logger = logging.getLogger("nmtkit")


def splitter() -> Splitter:
    """Returns the function that splits a text. Raises ImportError with the install command if sentencex is missing."""
    try:
        import sentencex
    except ImportError:
        raise ImportError("--split-sentences needs the package sentencex: pip install 'nmtkit[text]'") from None
    return sentencex.segment


def sentences(text: str, language: str, split: Splitter) -> list[Span]:
    """Returns the positions of the sentences of a text, without the white space around them.

    A text of white space alone has no sentence. A plural or select message of ICU is one sentence. If the splitter
    fails, the text is one sentence, and a warning is logged once.
    """
    if not text.strip():
        return []
    try:
        # sentencex has rules for the code de, but does not know the codes deu_Latn and de-DE
        parts = [text] if is_message(text) else split(subtags(language)[0], text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust code raises a BaseException that is not an Exception
        _warn_once(f"the sentence splitter fails ({type(error).__name__})")
        parts = [text]
    if "".join(parts) != text:
        _warn_once("the sentence splitter does not return all of a text")
        parts = [text]
    spans = []
    start = 0
    for sentence in parts:
        first, last = len(sentence) - len(sentence.lstrip()), len(sentence.rstrip())
        if first < last:
            spans.append((start + first, start + last))
        start += len(sentence)
    return spans


@cache
def _warn_once(reason: str) -> None:
    logger.warning("%s; texts with this problem are translated without splitting them", reason)


def has_several(line: str) -> bool:
    """Returns whether a line looks like several sentences. The test is quick, but wrong for some abbreviations."""
    return _BOUNDARY.search(line) is not None


def part_ends(pieces: Sequence[str], limit: int) -> list[int]:
    """Divides `pieces` into parts of at most `limit` pieces, and returns the index of the end of each part.

    A piece that follows a space in the line begins with this space. A part ends after the last complete sentence within
    the limit. If no sentence is complete, the part ends after the last complete word, or else at the limit.
    """
    ends: list[int] = []
    start = 0
    while len(pieces) - start > limit:
        positions = range(start + limit, start, -1)
        words = [i for i in positions if pieces[i].startswith(" ")]
        end = next((i for i in words if pieces[i - 1].endswith((*SENTENCE_ENDS, ";"))), None)
        start = end or next(iter(words), start + limit)
        ends.append(start)
    return [*ends, len(pieces)]
