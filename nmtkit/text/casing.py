"""Converts lines in capitals to sentence case for the model, and their translations back to capitals."""

from collections.abc import Sequence
from itertools import accumulate

from nmtkit.text.alignment import Link, is_letter, words


def in_capitals(text: str) -> bool:
    """Returns whether a text has at least four capitals, two words with capitals, and no small letter.

    A single word in capitals may be an acronym.
    """
    capitals = [char for char in text if char.isupper()]
    with_capitals = sum(any(char.isupper() for char in text[start:end]) for start, end in words(text))
    return len(capitals) >= 4 and with_capitals >= 2 and not any(char.islower() for char in text)


def sentence_case(text: str) -> str:
    """Converts all letters after the first letter to small letters. Every character keeps its position."""
    first = next((index for index, char in enumerate(text) if is_letter(char)), 0)
    small = text.lower()  # lower() also gives a sigma at the end of a Greek word its final form
    if len(small) != len(text):
        small = "".join(lower if len(lower := char.lower()) == 1 else char for char in text)
    return text[: first + 1] + small[first + 1 :]


def capitals(text: str, links: Sequence[Link]) -> tuple[str, list[Link]]:
    """Returns a translation in capitals, and its adjusted links. Lengths can change: ß becomes two letters."""
    positions = [0, *accumulate(len(char.upper()) for char in text)]
    upper = "".join(char.upper() for char in text)
    return upper, [link.with_target(positions[link.target_start], positions[link.target_end]) for link in links]
