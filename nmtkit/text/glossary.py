"""A glossary: terms of a source language, and the translations that each of them may have.

The file has a term on each line: the source term, a tab, the target term; alternatives of this, such as inflected
forms, are separated by a vertical line. Terms are found as whole words, the longest first.
"""

import logging
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nmtkit.text.alignment import UNSPACED, Span, is_letter

ALTERNATIVES = "|"  # between the target terms of a source term
SENTENCE_ENDS = ".!?…:;。！？"  # after them a word may have a capital because of its place
EXPECTED = "a line is a source term, a tab, and a target term or several separated by |"

Trie = dict[str, Any]  # of terms by their segments; under "" the term that ends there

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Term:
    """A source term and its target terms, of which a translation must hold one."""

    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class TermResult:
    """An occurrence of a term, and the target that the translation holds for it, or None if it holds none."""

    source: str
    targets: tuple[str, ...]
    found: str | None


@dataclass(frozen=True)
class Occurrence:
    """A term in a text: its first character, and the one after its last."""

    start: int
    end: int
    term: Term


# --- the source side --------------------------------------------------------------------------------------------------


class Glossary:
    """Terms, each with another source."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        self._trie = _trie(terms, lambda segment: segment)

    @cached_property
    def _caseless(self) -> Trie:
        return _trie(self.terms, str.casefold)

    def find(self, text: str, capitals: bool = False) -> list[Occurrence]:
        """Returns where terms stand in a text, as whole words: of those that overlap the first, and then the longest.

        A word that begins a sentence with a capital is also looked for in small letters. With `capitals`, of a text
        that is all in them, case does not matter at all.
        """
        spans = segments(text)
        keys = [_key(text, span) for span in spans]
        if capitals:
            keys = [key.casefold() for key in keys]
        trie = self._caseless if capitals else self._trie
        found: list[Occurrence] = []
        index, begins = 0, True  # whether the segment may begin a sentence
        while index < len(spans):
            key = keys[index]
            end, term = _longest(trie, keys, index, key)
            small = key[0].lower() + key[1:]
            if begins and small != key and small.islower():
                end, term = max((end, term), _longest(trie, keys, index, small), key=lambda match: match[0])
            if is_letter(key[0]) or key in SENTENCE_ENDS:
                begins = key in SENTENCE_ENDS
            if term is None:
                index += 1
            else:
                found.append(Occurrence(spans[index][0], spans[end - 1][1], term))
                index = end
        return found


def segments(text: str) -> list[Span]:
    """Returns a text in parts that a term holds whole or not at all: a run of letters or of white space, else a sign.

    In scripts without spaces every character is such a part.
    """
    spans: list[Span] = []
    kinds: dict[str, int] = {}
    last = 0
    for index, char in enumerate(text):
        kind = kinds.get(char)
        if kind is None:
            kind = 1 if char.isspace() else 2 if is_letter(char) and not UNSPACED.match(char) else 0
            kinds[char] = kind
        if kind and kind == last:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
        last = kind
    return spans


def _key(text: str, span: Span) -> str:
    return " " if text[span[0]].isspace() else text[span[0] : span[1]]


def _trie(terms: Sequence[Term], case: Callable[[str], str]) -> Trie:
    root: Trie = {}
    for term in terms:
        node = root
        for span in segments(term.source):
            node = node.setdefault(case(_key(term.source, span)), {})
        node.setdefault("", term)
    return root


def _longest(trie: Trie, keys: Sequence[str], start: int, first: str) -> tuple[int, Term | None]:
    """Returns the end of the longest term from `start` on, and the term, or `start` and None; `first` is its key."""
    found: tuple[int, Term | None] = start, None
    node = trie.get(first)
    index = start + 1
    while node is not None:
        if "" in node:
            found = index, node[""]
        node = node.get(keys[index]) if index < len(keys) else None
        index += 1
    return found


# --- the target side --------------------------------------------------------------------------------------------------


def forms(target: str) -> list[str]:
    """Returns a target term, and with a capital at its beginning if its first word is in small letters."""
    first = target[slice(*segments(target)[0])]
    capital = target[0].title() + target[1:]
    return [target, capital] if first.islower() and len(capital) == len(target) and capital != target else [target]


def places(text: str, target: str, upper: bool) -> list[Span]:
    """Returns where one of the forms of a target term stands in a text as whole words, or `upper` all in capitals."""
    spans = []
    for form in [target.upper()] if upper else forms(target):
        start = text.find(form)
        while start >= 0:
            end = start + len(form)
            if not _joined(text, start) and not _joined(text, end):
                spans.append((start, end))
            start = text.find(form, start + 1)
    return sorted(spans)


def _joined(text: str, index: int) -> bool:
    """Returns whether the character at `index` goes on with the word of the one before."""
    pair = text[index - 1 : index + 1] if index else ""
    return len(pair) == 2 and all(is_letter(char) and not UNSPACED.match(char) for char in pair)


def term_results(text: str, terms: Sequence[Term], upper: bool = False) -> tuple[list[TermResult], list[Span]]:
    """Returns what became of each of the `terms` in a translation, and where those stand that it holds.

    Every occurrence in the translation counts for one term. Terms with fewer choices choose first, and the longest.
    With `upper` the translation has been put in capitals.
    """
    choices = [
        sorted(
            ((end - start, start, target) for target in term.targets for start, end in places(text, target, upper)),
            key=lambda choice: (-choice[0], choice[1]),
        )
        for term in terms
    ]
    taken: list[Span] = []
    found: list[str | None] = [None] * len(terms)
    for index in sorted(range(len(terms)), key=lambda index: len(choices[index])):
        for length, start, target in choices[index]:
            if not any(start < other[1] and other[0] < start + length for other in taken):
                taken.append((start, start + length))
                found[index] = target
                break
    return [TermResult(term.source, term.targets, which) for term, which in zip(terms, found, strict=True)], taken


# --- the file ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> Glossary:
    """Returns the glossary of a file, which is read anew only when it has changed.

    Raises OSError when it cannot be read, and ValueError, naming it and the line, for a line that is no term.
    """
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> Glossary:
    targets: dict[str, dict[str, None]] = {}
    first: dict[str, int] = {}
    repeated: list[str] = []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        place = f"{path}:{number}"
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{place}: byte {error.start + 1} is not UTF-8; convert the file with iconv") from None
        if not line.strip():
            continue
        source, new = _term(line.removesuffix("\r"), place)
        known = targets.setdefault(source, {})
        if known and not known.keys() >= set(new):
            repeated.append(f"{place}: {source!r} stands on line {first[source]} too")
        known |= dict.fromkeys(new)
        first.setdefault(source, number)
    if not targets:
        raise ValueError(f"{path} holds no terms; {EXPECTED}")
    if repeated:
        logger.warning(
            "%s, with another target%s; the targets of a term on several lines are alternatives",
            repeated[0], f", and so do {len(repeated) - 1} more" if len(repeated) > 1 else "",
        )  # fmt: skip
    return Glossary([Term(source, tuple(found)) for source, found in targets.items()])


def _term(line: str, place: str) -> tuple[str, list[str]]:
    """Reads a line. Raises ValueError, naming its place, for one that is no term."""
    fields = line.split("\t")
    if len(fields) != 2:
        raise ValueError(f"{place}: {len(fields) - 1 or 'no'} tab{'s' * (len(fields) > 2)}; {EXPECTED}")
    source, *targets = (_normal(text) for text in (fields[0], *fields[1].split(ALTERNATIVES)))
    if not source or not all(targets):
        empty = "the source term" if not source else "a target term"
        raise ValueError(f"{place}: {empty} is empty; {EXPECTED}")
    return source, targets


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def without(targets: Sequence[str], strings: Collection[str]) -> tuple[str, ...]:
    """Returns those of the target terms that hold none of these texts."""
    return tuple(target for target in targets if not any(string in target for string in strings))
