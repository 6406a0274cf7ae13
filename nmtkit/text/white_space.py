"""Puts no-break spaces and other special spaces of a source back into its translation.

If the vocabulary has no piece for such a space, the model reads and writes an ordinary space (U+0020) instead.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from nmtkit.text.alignment import UNSPACED, Link, Span, words
from nmtkit.text.edits import Parts, spliced

IDEOGRAPHIC_SPACE = "\u3000"


def with_source_spaces(
    source: str, target: str, links: Sequence[Link], spaces: re.Pattern[str]
) -> tuple[str, list[Link]]:  # fmt: skip
    """Returns a translation with the white space of its source, and the links of the result.

    `spaces` matches the special spaces. White space that contains a special space is restored at the edges of the text,
    and between two neighbouring words of the translation that come from two neighbouring words of the source. A word
    comes from the source word that is linked to it, or from an equal source word, such as a number or a unit. A text
    that one link covers, such as a protected text, is not changed. Between two words, an ideographic space next to a
    character of a script without spaces is restored only next to such a character. Any other ideographic space is
    restored only where no such character is next to the space.
    """
    if not target.strip() or not spaces.search(source):
        return target, list(links)
    start, end = len(source) - len(source.lstrip()), len(source.rstrip())
    edges = {
        (0, len(target) - len(target.lstrip())): source[:start],
        (len(target.rstrip()), len(target)): source[end:],
    }
    new = {span: text for span, text in edges.items() if spaces.search(text)}
    new |= _inner_spaces(source, target, links, spaces)
    widths = [1] * len(target)  # for each character of `target`: number of characters of the result
    before = 0  # number of characters that are inserted before the text
    for (start, end), space in new.items():
        if start == end == 0:
            before = len(space)
        elif start < end:
            widths[start:end] = [len(space)] + [0] * (end - start - 1)
    positions = [before, *(before + position for position in accumulate(widths))]
    moved = [link.with_target(positions[link.target_start], positions[link.target_end]) for link in links]
    return spliced(target, sorted((*span, space) for span, space in new.items())), moved


def _inner_spaces(source: str, target: str, links: Sequence[Link], spaces: re.Pattern[str]) -> dict[Span, str]:
    """Maps the position of each space to replace between words of the translation to the new white space."""
    by_start: dict[tuple[int, int], tuple[str, bool]] = {}  # positions of two source words -> (space, `_is_unspaced`)
    by_text: dict[tuple[str, str], tuple[str, bool]] = {}
    for (first, end), (second, last) in pairwise(words(source)):
        gap = source[end:second]
        if gap and spaces.search(gap):
            by_start[first, second] = by_start[second, first] = by_text[source[first:end], source[second:last]] = (
                gap, _is_unspaced(source, end, second)
            )  # fmt: skip
    linked = {link.target_start: link.source_start for link in links}
    wholes = Parts((link.target_start, link.target_end) for link in links)  # a link may cover a protected text
    new = {}
    for (first, end), (second, last) in pairwise(words(target)):
        pair = linked.get(first, -1), linked.get(second, -1)
        space = by_text.get((target[first:end], target[second:last])) or by_start.get(pair)
        if space is not None and target[end:second] == " " and not wholes.meet(end, second):
            gap, unspaced = space
            if IDEOGRAPHIC_SPACE not in gap or unspaced == _is_unspaced(target, end, second):
                new[end, second] = gap
    return new


def _is_unspaced(text: str, start: int, end: int) -> bool:
    """Returns whether a character of a script without spaces is next to the white space from `start` to `end`."""
    return any(map(UNSPACED.match, (text[start - 1], text[end])))
