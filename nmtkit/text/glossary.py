"""Glossaries: terms of the source language, each with its allowed translations.

Each line of the file is a source term, a tab, and a target term. Vertical lines separate alternative target terms, such
as inflected forms. Terms match whole words. If several terms begin at the same word, the longest term is used.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from unicodedata import category

from nmtkit.text.alignment import UNSPACED, Span, has_letter, is_joined, is_letter, is_spaced_letter
from nmtkit.text.normalization import normalized
from nmtkit.text.sentences import SENTENCE_ENDS

ALTERNATIVES = "|"  # separates the target terms of a source term
BEFORE_CAPITALS = SENTENCE_ENDS + ":;"  # after these characters, a capital may mark the beginning of a sentence
EXPECTED = "each line must have a source term, a tab, and one or more target terms separated by |"

Trie = dict[str, Any]  # nested by segment; at each node, the key "" holds the term that ends there

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Term:
    """A source term and its target terms. The translation must contain one of the target terms."""

    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class TermResult:
    """A term that occurs in the source, and the target term that the translation contains, if any."""

    source: str
    targets: tuple[str, ...]
    found: str | None


@dataclass(frozen=True)
class Occurrence:
    """A term in a text. `end` is exclusive."""

    start: int
    end: int
    term: Term


# --- the source side --------------------------------------------------------------------------------------------------


class Glossary:
    """Terms, each with a different source."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        self._trie = _trie(terms, lambda segment: segment)

    @cached_property
    def _caseless(self) -> Trie:
        return _trie(self.terms, str.casefold)

    def find(self, text: str, capitals: bool = False) -> list[Occurrence]:
        """Finds the terms that occur in a text as whole words.

        If terms overlap, the term that begins first wins. If several terms begin at the same word, the longest term
        wins.

        A word with a capital at the beginning of a sentence also matches a term in small letters. If the text is all in
        `capitals`, case is ignored.
        """
        spans = segments(text)
        keys = [_key(text, span) for span in spans]
        if capitals:
            keys = [key.casefold() for key in keys]
        trie = self._caseless if capitals else self._trie
        matches: list[Occurrence] = []
        index, begins = 0, True  # `begins`: the segment may begin a sentence
        while index < len(spans):
            key = keys[index]
            end, term = _longest(trie, keys, index, key)
            small = key[0].lower() + key[1:]
            if begins and small != key and small.islower():
                end, term = max((end, term), _longest(trie, keys, index, small), key=lambda match: match[0])
            if is_letter(key[0]) or key in BEFORE_CAPITALS:
                begins = key in BEFORE_CAPITALS
            if term is None:
                index += 1
            else:
                matches.append(Occurrence(spans[index][0], spans[end - 1][1], term))
                index = end
        return matches


def segments(text: str) -> list[Span]:
    """Splits a text into segments. A term begins and ends only at the edge of a segment.

    A segment is a run of letters, a run of white space, or any other single character. In scripts without spaces, each
    character is a segment.
    """
    kinds = {char: 1 if char.isspace() else 2 if is_spaced_letter(char) else 0 for char in set(text)}
    spans: list[Span] = []
    last = 0
    for index, char in enumerate(text):
        kind = kinds[char]
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


def is_within_word(term: str, before: str, after: str) -> bool:
    """Returns whether a term is part of a longer word, such as C++ in C++en.

    A term is part of a longer word if a letter follows the term, and the last character of the term is punctuation or a
    mathematical sign. The same rule applies to a letter before the term and to the first character of the term.
    `before` and `after` are the characters next to the term, or empty. A term without letters and digits is always a
    word.
    """
    return has_letter(term) and (is_attached(before, term[0]) or is_attached(after, term[-1]))


def is_attached(letter: str, sign: str) -> bool:
    spaced = letter != "" and category(letter)[0] in "LM" and not UNSPACED.match(letter)
    return spaced and category(sign) in ("Po", "Pd", "Pc", "Sm")


def _longest(trie: Trie, keys: Sequence[str], start: int, first: str) -> tuple[int, Term | None]:
    """Returns the end and the term of the longest match at `start`, or (`start`, None).

    `first` replaces `keys[start]`.
    """
    longest: tuple[int, Term | None] = start, None
    node = trie.get(first)
    before = keys[start - 1][-1] if start else ""
    index = start + 1
    while node is not None:
        after = keys[index][0] if index < len(keys) else ""
        if "" in node and not is_within_word(node[""].source, before, after):
            longest = index, node[""]
        node = node.get(keys[index]) if index < len(keys) else None
        index += 1
    return longest


# --- the target side --------------------------------------------------------------------------------------------------


def forms(target: str) -> list[str]:
    """Returns a target term, and its form with a capital first letter if the first word is in small letters."""
    first = target[slice(*segments(target)[0])]
    capital = target[0].title() + target[1:]
    return [target, capital] if first.islower() and len(capital) == len(target) and capital != target else [target]


def positions(text: str, target: str, upper: bool) -> list[Span]:
    """Returns the positions of the forms of a target term in a text, as whole words.

    If `upper`, the text is in capitals, and only the form in capitals is searched for.
    """
    spans = []
    for form in [target.upper()] if upper else forms(target):
        start = text.find(form)
        while start >= 0:
            end = start + len(form)
            before, after = text[start - 1 : start] if start else "", text[end : end + 1]
            if not is_joined(text, start) and not is_joined(text, end) and not is_within_word(form, before, after):
                spans.append((start, end))
            start = text.find(form, start + 1)
    return sorted(spans)


def term_results(text: str, terms: Sequence[Term], upper: bool = False) -> tuple[list[TermResult], list[Span]]:
    """Returns a result for each of the `terms`, and the positions of the terms that were found in the translation.

    Each occurrence in the translation counts for one term. Terms with the fewest matches are assigned first, each to
    its longest match. If `upper`, the translation is in capitals.
    """
    by_term: dict[Term, list[tuple[int, int, str]]] = {}  # matches as (length, start, target), the best match last
    for term in terms:
        if term not in by_term:
            matches = [(end - start, start, target) for target in term.targets
                       for start, end in positions(text, target, upper)]  # fmt: skip
            by_term[term] = sorted(matches, key=lambda match: (match[0], -match[1]))
    counts = [len(by_term[term]) for term in terms]
    taken = [False] * len(text)
    spans: list[Span] = []
    held: list[str | None] = [None] * len(terms)
    for index in sorted(range(len(terms)), key=counts.__getitem__):
        matches = by_term[terms[index]]
        while matches and held[index] is None:  # a match that overlaps an assigned match is dropped
            length, start, target = matches.pop()
            if not any(taken[start : start + length]):
                taken[start : start + length] = [True] * length
                spans.append((start, start + length))
                held[index] = target
    return [TermResult(term.source, term.targets, target) for term, target in zip(terms, held, strict=True)], spans


def without(targets: Sequence[str], strings: Collection[str]) -> tuple[str, ...]:
    """Returns the target terms that contain none of these strings as a whole word."""
    return tuple(target for target in targets if not any(positions(target, string, False) for string in strings))


# --- the file ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> Glossary:
    """Returns the glossary of a file. The file is read again only after it has changed.

    Raises OSError if the file cannot be read. Raises ValueError if the file has no terms. Also raises ValueError, with
    file and line, for a line that is not a term.
    """
    status = path.stat()
    return _load(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, modified: int, size: int) -> Glossary:
    targets: dict[str, dict[str, None]] = {}
    first_line: dict[str, int] = {}
    repeated: list[str] = []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        location = f"{path}:{number}"
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{location}: byte {error.start + 1} is not UTF-8; convert the file with iconv") from None
        if not line.strip():
            continue
        source, new = parse_term(line.removesuffix("\r"), location)
        known = targets.setdefault(source, {})
        if known and not known.keys() >= set(new):
            repeated.append(f"{location}: {source!r} is also on line {first_line[source]}")
        known |= dict.fromkeys(new)
        first_line.setdefault(source, number)
    if not targets:
        raise ValueError(f"{path} holds no terms; {EXPECTED}")
    if repeated:
        logger.warning(
            "%s, with a different target; all targets of a repeated term are alternatives%s",
            repeated[0], f" ({len(repeated) - 1} more repeated terms)" if len(repeated) > 1 else "",
        )  # fmt: skip
    return Glossary([Term(source, tuple(each)) for source, each in targets.items()])


def parse_term(line: str, location: str) -> tuple[str, list[str]]:
    """Returns the source and target terms of a line. Raises ValueError with `location` if a term is missing."""
    fields = line.split("\t")
    if len(fields) != 2:
        raise ValueError(f"{location}: {len(fields) - 1 or 'no'} tab{'s' * (len(fields) > 2)}; {EXPECTED}")
    source, *targets = (" ".join(normalized(text).split()) for text in (fields[0], *fields[1].split(ALTERNATIVES)))
    if not source or not all(targets):
        empty = "the source term" if not source else "a target term"
        raise ValueError(f"{location}: {empty} is empty; {EXPECTED}")
    return source, targets
