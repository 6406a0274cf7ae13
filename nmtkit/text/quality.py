"""Quality estimation without a reference, to send doubtful translations to a person.

The score is the probability that the model gives to its own translation (Fomicheva et al. 2020, "Unsupervised Quality
Estimation for Neural Machine Translation"). Flags report faults that the probability misses, such as text that was not
translated.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nmtkit.text.alignment import words

UNCERTAIN = 0.3  # mean probability of a token below which a translation is flagged
SHORT, LONG = 0.5, 2.0  # a translation with a ratio of target to source pieces outside these limits is flagged
FEW_PIECES = 5  # if both sides have fewer pieces, the ratio is ignored
COPIED = 0.5  # share of copied words above which a translation is flagged
FEW_WORDS = 2  # up to this number of copied words is ignored, because the words may be names
ODD_FACTOR = 0.5  # factor of the score for each flag except "uncertain"


@dataclass(frozen=True)
class Quality:
    """Quality figures of a translation. An empty line has no tokens and gets the best possible figures."""

    score: float  # 0 to 1: the mean probability, halved for each flag except "uncertain"
    mean_probability: float  # geometric mean over tokens, eos included
    min_probability: float  # probability of the least probable token
    length_ratio: float  # target pieces per source piece
    copied: float  # share of the words of the translation that also occur in the source
    flags: list[str]


def assess(
    source: str,
    target: str,
    log_probabilities: Sequence[float],
    pieces: tuple[int, int],
    protected: Collection[str] = (),
) -> Quality:
    """Returns the quality figures of a translation.

    `log_probabilities` [target tokens] are in nats. `pieces` are the numbers of source and target pieces. Words of
    `protected` texts do not count as copied, because a translation must copy them.
    """
    if not log_probabilities:
        return Quality(1.0, 1.0, 1.0, 1.0, 0.0, [])
    mean = math.exp(sum(log_probabilities) / len(log_probabilities))
    least = math.exp(min(log_probabilities))
    ratio = pieces[1] / max(1, pieces[0])
    exempt = set(lettered(" ".join(protected)))
    target_words = [word for word in lettered(target) if word not in exempt]
    source_words = set(lettered(source))
    copies = sum(word in source_words for word in target_words)
    copied = copies / max(1, len(target_words))
    odd = {
        "too_short": max(pieces) >= FEW_PIECES and ratio < SHORT,
        "too_long": max(pieces) >= FEW_PIECES and ratio > LONG,
        "copied": copies > FEW_WORDS and copied > COPIED,
    }
    flags = [flag for flag, is_set in {"uncertain": mean < UNCERTAIN, **odd}.items() if is_set]
    return Quality(mean * ODD_FACTOR ** sum(odd.values()), mean, least, ratio, copied, flags)


def lettered(text: str) -> list[str]:
    """Returns the words of a text that contain a letter, converted to small letters."""
    folded = [text[start:end].casefold() for start, end in words(text)]
    return [word for word in folded if any(char.isalpha() for char in word)]
