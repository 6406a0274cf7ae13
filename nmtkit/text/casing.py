"""Lines in capitals, which a model has seen few of: translated as a sentence, and put back in capitals."""

from collections.abc import Sequence
from itertools import accumulate

from nmtkit.text.alignment import Link, is_letter, words


def in_capitals(text: str) -> bool:
    """Returns whether a text is in capitals: two words or more with a capital, four capitals or more, nothing small.

    One word alone may be an acronym.
    """
    capitals = [char for char in text if char.isupper()]
    with_capitals = sum(any(char.isupper() for char in text[start:end]) for start, end in words(text))
    return len(capitals) >= 4 and with_capitals >= 2 and not any(char.islower() for char in text)


def sentence_case(text: str) -> str:
    """Returns a text in small letters but for its first one. Every character keeps its place."""
    first = next((index for index, char in enumerate(text) if is_letter(char)), 0)
    small = (low if len(low := char.lower()) == 1 else char for char in text[first + 1 :])
    return text[: first + 1] + "".join(small)


def capitals(text: str, links: Sequence[Link]) -> tuple[str, list[Link]]:
    """Returns a translation in capitals, and its links: a ß becomes two letters."""
    places = [0, *accumulate(len(char.upper()) for char in text)]
    upper = "".join(char.upper() for char in text)
    return upper, [link.with_target(places[link.target_start], places[link.target_end]) for link in links]
