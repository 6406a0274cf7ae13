"""Counts the letters of each script in lines."""

import sys
from functools import cache

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.texts import Counts, Side

# First and last code point of the Unicode ranges of each script. Characters outside of these ranges are not counted.
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF), (0xFF21, 0xFF3A), (0xFF41, 0xFF5A)),
    "Greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "Cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "Armenian": ((0x531, 0x58F),),
    "Hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "Arabic": ((0x620, 0x65F), (0x66E, 0x6EF), (0x6FA, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFDFF),
               (0xFE70, 0xFEFC)),
    "Syriac and Thaana": ((0x700, 0x74F), (0x780, 0x7BF)),
    "Devanagari": ((0x900, 0x963), (0x970, 0x97F)),
    "Bengali": ((0x980, 0x9E5), (0x9F0, 0x9FF)),
    "Gurmukhi": ((0xA00, 0xA65), (0xA70, 0xA7F)),
    "Gujarati": ((0xA80, 0xAE5), (0xAF0, 0xAFF)),
    "Odia": ((0xB00, 0xB65), (0xB70, 0xB7F)),
    "Tamil": ((0xB80, 0xBE5),),
    "Telugu": ((0xC00, 0xC65),),
    "Kannada": ((0xC80, 0xCE5),),
    "Malayalam": ((0xD00, 0xD65),),
    "Sinhala": ((0xD80, 0xDFF),),
    "Thai": ((0xE00, 0xE4F),),
    "Lao": ((0xE80, 0xECF),),
    "Tibetan": ((0xF00, 0xFFF),),
    "Burmese": ((0x1000, 0x103F), (0x1050, 0x109F)),
    "Georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF)),
    "Ethiopic": ((0x1200, 0x139F),),
    "Khmer": ((0x1780, 0x17DD),),
    "Mongolian": ((0x1820, 0x18AF),),
    "Kana": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7AF)),
    "Han": ((0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
            (0x20000, 0x3FFFF)),
}  # fmt: skip


@cache
def _table() -> npt.NDArray[np.uint8]:
    """Returns the number of the script of each code point, from 1; 0 stands for all other characters."""
    table = np.zeros(sys.maxunicode + 1, np.uint8)
    for number, ranges in enumerate(SCRIPTS.values(), 1):
        for first, last in ranges:
            table[first : last + 1] = number
    table[[0xD7, 0xF7]] = 0  # × and ÷ are not letters
    return table


def script_counts(side: Side) -> Counts:
    """Returns the number of letters of each script in each line: [lines, scripts]."""
    numbers = _table().take(side.codes, mode="clip")
    present = numbers.tobytes()
    counts = np.zeros((len(side), len(SCRIPTS)), np.int64)
    for number in range(1, len(SCRIPTS) + 1):
        if number in present:
            counts[:, number - 1] = side.sums(numbers == number)
    return counts
