"""How good a translation may be, without a reference: so that doubtful ones can be sent to a person.

The probabilities that the model gives to its own translation rank it best of all that costs nothing (Fomicheva et al.
2020, "Unsupervised Quality Estimation for Neural Machine Translation"); what they miss, as text that was left
untranslated, is told by flags.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nmtkit.text.alignment import words

UNCERTAIN = 0.3  # mean probability of a token below which a translation is flagged
SHORT, LONG = 0.5, 2.0  # target pieces for a source piece
FEW_PIECES = 5  # of the longer side: with fewer, a ratio says little
COPIED = 0.5  # share of words
FEW_WORDS = 2  # copied ones, as names, say little
ODD_FACTOR = 0.5  # of the score, for each flag that probabilities do not tell


@dataclass(frozen=True)
class Quality:
    """Signs of how good a translation is. An empty line has no tokens: all is as good as can be."""

    score: float  # 0 to 1, to sort by: the mean probability, halved for each flag but "uncertain"
    mean_probability: float  # geometric mean over tokens, eos included
    min_probability: float  # of the least probable token
    length_ratio: float  # target pieces for a source piece
    copied: float  # share of the words of the translation that stand in the source
    flags: list[str]


def assess(
    source: str,
    target: str,
    log_probabilities: Sequence[float],
    pieces: tuple[int, int],
    protected: Collection[str] = (),
) -> Quality:
    """Returns the signs of a translation; `pieces` are those of source and target that the model read and wrote.

    Words of `protected` texts, which are to be copied, do not count as copied.
    """
    if not log_probabilities:
        return Quality(1.0, 1.0, 1.0, 1.0, 0.0, [])
    mean = math.exp(sum(log_probabilities) / len(log_probabilities))
    least = math.exp(min(log_probabilities))
    ratio = pieces[1] / max(1, pieces[0])
    exempt = set(lettered(" ".join(protected)))
    written = [word for word in lettered(target) if word not in exempt]
    read = set(lettered(source))
    copies = sum(word in read for word in written)
    copied = copies / max(1, len(written))
    odd = {
        "too_short": max(pieces) >= FEW_PIECES and ratio < SHORT,
        "too_long": max(pieces) >= FEW_PIECES and ratio > LONG,
        "copied": copies > FEW_WORDS and copied > COPIED,
    }
    flags = [flag for flag, is_so in {"uncertain": mean < UNCERTAIN, **odd}.items() if is_so]
    return Quality(mean * ODD_FACTOR ** sum(odd.values()), mean, least, ratio, copied, flags)


def lettered(text: str) -> list[str]:
    """Returns the words of a text that have a letter, in small letters."""
    found = [text[start:end].casefold() for start, end in words(text)]
    return [word for word in found if any(char.isalpha() for char in word)]
