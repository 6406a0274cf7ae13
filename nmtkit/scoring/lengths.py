"""Groups the lines of a text into bands by their number of words, for scores by length."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from nmtkit.text.alignment import UNSPACED_LETTERS

_BLOCKS = (*range(0x300, 0x1E00), *range(0xA800, 0xAC00))  # blocks of alphabets with combining marks
MARKS = "".join(char for char in map(chr, _BLOCKS) if unicodedata.category(char)[0] == "M")
# single characters of scripts without spaces, words with their combining marks, white space, other characters
TOKEN = re.compile(rf"[{UNSPACED_LETTERS}]|(?:[^\W{UNSPACED_LETTERS}][{MARKS}]*)+|\s+|[^\w\s]")
BANDS = ((0, 0), (1, 3), (4, 10), (11, 20), (21, 40), (41, None))  # fewest and most words; None: no upper bound
WORDS_OF_BLEU = 4  # BLEU compares up to 4 words in a row, so the BLEU of shorter lines is unreliable


@dataclass(frozen=True, kw_only=True)
class LengthBand:
    """The lines of a text whose number of words is at least `fewest` and at most `most`."""

    fewest: int
    most: int | None
    rows: Sequence[int]  # indices of the lines

    @property
    def title(self) -> str:
        if self.most is None:
            return f"{self.fewest} or more"
        return f"{self.fewest} to {self.most}" if self.most > self.fewest else str(self.fewest)


def is_word(token: str) -> bool:
    return token[0].isalnum()


def word_count(text: str) -> int:
    """Returns the number of words and numbers. A character of a script without spaces counts as a word."""
    return sum(map(is_word, TOKEN.findall(text)))


def length_bands(lines: Sequence[str]) -> list[LengthBand]:
    """Returns the bands that have lines, from few words to many."""
    counts = list(map(word_count, lines))
    bands = []
    for fewest, most in BANDS:
        rows = [row for row, count in enumerate(counts) if fewest <= count and (most is None or count <= most)]
        if rows:
            bands.append(LengthBand(fewest=fewest, most=most, rows=rows))
    return bands
