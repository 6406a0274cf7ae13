"""A paragraph as its sentences, by the package sentencex (Wikimedia's; MIT; some 300 languages)."""

import re
from collections.abc import Callable

from nmtkit.text.alignment import Span

# A sentence's end and another's beginning, in a line that may have tags.
_BETWEEN = re.compile(
    r"\w\w(?:<[^<>]*>)*[.!?…](?:<[^<>]*>|[\"'”»)])*\s+(?:<[^<>]*>|[\"'“„«(¿¡])*[A-ZÄÖÜÀÉÈА-ЯΑ-Ω]|[。！？]\w"
)

Splitter = Callable[[str, str], list[str]]  # language, text -> its sentences end to end


def splitter() -> Splitter:
    """Raises ImportError, saying what to install, without the package."""
    try:
        import sentencex
    except ImportError:
        raise ImportError("--split-sentences needs the package sentencex: pip install 'nmtkit[text]'") from None
    return sentencex.segment


def sentences(text: str, language: str, split: Splitter) -> list[Span]:
    """Returns where the sentences of a text stand, without the white space around them; none if it has nothing else."""
    spans = []
    start = 0
    for sentence in split(language, text) if text.strip() else []:
        before, after = len(sentence) - len(sentence.lstrip()), len(sentence.rstrip())
        if before < after:
            spans.append((start + before, start + after))
        start += len(sentence)
    return spans


def is_language(code: str) -> bool:
    """Returns whether a text looks like the code of a language: de, zh-Hant, deu."""
    return re.fullmatch(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]+)*", code) is not None


def has_several(line: str) -> bool:
    """Returns whether a line looks like several sentences; no package is asked, and abbreviations may deceive."""
    return _BETWEEN.search(line) is not None
