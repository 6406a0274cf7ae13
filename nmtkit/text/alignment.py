"""Words of a text, and links between those of a source and those of its translation, as places in both texts."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

Span = tuple[int, int]  # first character, and the one after the last

# Scripts that put no spaces between words: Thai, Lao, Myanmar, Khmer, kana, Han. There every character is a word.
UNSPACED = re.compile(r"[฀-໿က-႟ក-៿⺀-〿぀-ヿ㐀-䶿一-鿿豈-﫿\U00020000-\U0003ffff]")
JOINERS = "'’-"  # between letters they belong to the word
ZERO_WIDTH_JOINER = "\u200d"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Link:
    """A word of a translation, and the word of the source that it translates. Characters; ends are exclusive."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int

    def moved(self, source: int, target: int) -> "Link":
        return Link(self.source_start + source, self.source_end + source, self.target_start + target,
                    self.target_end + target)  # fmt: skip

    def with_target(self, start: int, end: int) -> "Link":
        return replace(self, target_start=start, target_end=end)


def is_letter(char: str) -> bool:
    """Returns whether a character is a letter, a digit or a mark on one."""
    return unicodedata.category(char)[0] in "LMN"


def words(text: str) -> list[Span]:
    """Returns the words of a text: runs of letters and digits, and every other sign but white space by itself.

    >>> [text[start:end] for start, end in words(text := "It's 5 o'clock, isn't it?")]
    ["It's", '5', "o'clock", ',', "isn't", 'it', '?']
    """
    spans: list[Span] = []
    for index, char in enumerate(text):
        if char.isspace():
            continue
        if spans and spans[-1][1] == index and _goes_on(text, index):
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return spans


def _goes_on(text: str, index: int) -> bool:
    """Returns whether the character at `index` belongs to the word of the one before."""
    before, char, after = text[index - 1], text[index], text[index + 1 : index + 2]
    if unicodedata.category(char) in ("Mn", "Mc", "Me", "Cf", "Sk") or before == ZERO_WIDTH_JOINER:
        return True
    if UNSPACED.match(char) or UNSPACED.match(before):
        return False
    if char in JOINERS:
        return is_letter(before) and after != "" and is_letter(after) and not UNSPACED.match(after)
    return is_letter(char) and (is_letter(before) or (before in JOINERS and index > 1 and is_letter(text[index - 2])))


def piece_spans(pieces: Sequence[str], text: str) -> list[Span]:
    """Returns where the pieces of a SentencePiece encoding stand in a text; those of a run of bytes share a place.

    A piece that is not there, as one of bytes that make no character, has an empty place.
    """
    spans: list[Span] = []
    cursor = index = 0
    while index < len(pieces):
        end = index + 1
        if _BYTE.fullmatch(pieces[index]):
            while end < len(pieces) and _BYTE.fullmatch(pieces[end]):
                end += 1
            surface = bytes(int(piece[3:5], 16) for piece in pieces[index:end]).decode(errors="replace")
        else:
            surface = pieces[index].replace("▁", " ").strip()
        start = text.find(surface, cursor) if surface else -1
        if start >= 0:
            cursor = start + len(surface)
        spans += [(start, cursor) if start >= 0 else (cursor, cursor)] * (end - index)
        index = end
    return spans


def word_links(
    source: str, target: str, source_pieces: Sequence[Span], target_pieces: Sequence[Span],
    weights: Sequence[Sequence[float]],
) -> list[Link]:  # fmt: skip
    """Returns a link for each word of `target` that attends to any word of `source`: to the one it attends to most.

    `weights` has a row for each piece of the target, of the weights of all pieces of the source. A word's weights are
    the sums over its pieces.
    """
    source_words, target_words = words(source), words(target)
    owner = [_overlapping(source_words, span) for span in source_pieces]
    links = []
    rows = [_overlapping(target_words, span) for span in target_pieces]
    for index, (start, end) in enumerate(target_words):
        totals = [0.0] * len(source_words)
        for row, owners in zip(weights, rows, strict=True):
            if index in owners:
                for weight, columns in zip(row, owner, strict=True):
                    for column in columns:
                        totals[column] += weight / len(columns)
        best = max(range(len(totals)), key=totals.__getitem__, default=None)
        if best is not None and totals[best] > 0:
            links.append(Link(*source_words[best], start, end))
    return links


def _overlapping(spans: Sequence[Span], other: Span) -> list[int]:
    return [index for index, (start, end) in enumerate(spans) if start < other[1] and other[0] < end]


def position_after(place: int, source: str, target: str, links: Sequence[Link]) -> int:
    """Returns where in `target` something belongs that stands at `place` in `source`, at the edge of a word.

    That is after the translation of the word before it, or else before that of the word after it, or of the nearest
    word that has one. What begins the source begins the target; what ends it stands before the last punctuation,
    but after it if that is so in the source.
    """
    target_words = words(target)
    lettered = [(start, end) for start, end in target_words if is_letter(target[start])]
    if not any(is_letter(char) for char in source[:place]):
        return lettered[0][0] if lettered else 0
    if not any(is_letter(char) for char in source[place:]):
        if not source[place:].strip() and not is_letter(source[:place].rstrip()[-1]):
            return len(target)
        return lettered[-1][1] if lettered else len(target)
    source_words = [span for span in words(source) if is_letter(source[span[0]])]
    before = sum(end <= place for _, end in source_words)
    rank = {span: before - 1 - index if index < before else index - before + 0.5
            for index, span in enumerate(source_words)}  # fmt: skip
    near = [
        link for link in links if (link.source_start, link.source_end) in rank and is_letter(target[link.target_start])
    ]
    if not near:
        fraction = place / max(1, len(source))
        ends = [0, *(end for _, end in target_words)]
        return min(ends, key=lambda end: abs(end - fraction * len(target)))
    nearest = min(rank[link.source_start, link.source_end] for link in near)
    found = [link for link in near if rank[link.source_start, link.source_end] == nearest]
    if found[0].source_end <= place:
        return max(link.target_end for link in found)
    return min(link.target_start for link in found)
