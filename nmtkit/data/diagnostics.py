"""Signs that training text is sick, each told as one warning: unknown text, another tokenizer's, copies, shifted lines,
sides in each other's language.

The thresholds are far from healthy data: on Multi30k English-German no piece is unknown, no two sides are equal, and
the lengths of the sides have a correlation of 0.86, which is below 0 once the lines are shifted by one. The languages
of its blocks agree with those of its valid set by 0.9 to 1.0, see `agreement`, and by as much below 0 once exchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nmtkit.data.dataset_files import SIDES
from nmtkit.data.tokenizer import Encoded

UNKNOWN_SHARE = 0.02  # of pieces
UNKNOWN_WORD_SHARE = 0.2  # of a vocabulary of words, which has unknown words on purpose
PIECES_FACTOR = 1.5  # by which pieces per word differ from those of the dataset that the tokenizer is from
PIECES_PER_WORD = 4.0  # where that is not known
WORDS_PER_LINE = 5  # fewer are not a sign of words that are separated by spaces
EQUAL_SHARE = 0.05  # of pairs
CORRELATION = 0.3
MIN_PAIRS = 200  # in a window, to tell a correlation
MIN_DEVIATION = 1.0  # pieces; lengths that vary less have no correlation to tell
AGREEMENT = -0.3  # of a block's languages with the other text's; 1 where they agree, -1 where they are exchanged
MIN_DIVERGENCE = 0.1  # nats per character, between the sides: below, they may be in one language
MIN_BYTES = 2000  # of a side, to tell its language
PROFILE = 1024  # classes of byte pairs, whose frequencies tell a language
SLICES, SLICE_BYTES = 16, 4096  # that are read of a block's side for its profile

Profile = npt.NDArray[np.float64]  # counts of byte pairs by class, 2 x PROFILE, for each side


@dataclass(frozen=True, eq=False)
class TextStatistics:
    """Counts of one block of text. Arrays have an entry for each side."""

    first_line: int
    lines: int
    words: npt.NDArray[np.int64]
    pieces: npt.NDArray[np.int64]
    unknown: npt.NDArray[np.int64]  # pieces: unk, and single bytes of characters outside the vocabulary
    pairs: int  # that are kept; their lengths have these sums
    sums: npt.NDArray[np.float64]  # [2]
    products: npt.NDArray[np.float64]  # [2, 2]
    profile: Profile

    @staticmethod
    def of(
        first_line: int, texts: Sequence[bytes], sides: Sequence[Encoded], unknown: Sequence[int],
        keep: npt.NDArray[np.bool_],
    ) -> "TextStatistics":  # fmt: skip
        lengths = np.stack([side.lengths[keep] for side in sides]).astype(np.float64)
        return TextStatistics(
            first_line,
            len(keep),
            np.array([text.count(b" ") + len(keep) for text in texts], np.int64),
            np.array([len(side.ids) - len(keep) for side in sides], np.int64),
            np.array(unknown, np.int64),
            lengths.shape[1],
            lengths.sum(1),
            lengths @ lengths.T,
            profile_of(texts),
        )

    def correlation(self) -> float | None:
        """Returns the correlation of the lengths of the sides; None if the lengths are too few or too similar."""
        if self.pairs < MIN_PAIRS:
            return None
        covariance = self.products / self.pairs - np.outer(self.sums, self.sums) / self.pairs**2
        deviations = np.sqrt(np.maximum(np.diag(covariance), 0))
        return float(covariance[0, 1] / deviations.prod()) if deviations.min() >= MIN_DEVIATION else None


def profile_of(texts: Sequence[bytes]) -> Profile:
    """Returns the counts of byte pairs on both sides, in slices that lie evenly over the text."""
    rows = []
    for text in texts:
        data = np.frombuffer(text, np.uint8)
        starts = np.linspace(0, max(0, len(data) - SLICE_BYTES), SLICES).astype(np.int64)
        if len(data) > SLICES * SLICE_BYTES:
            data = np.concatenate([data[start : start + SLICE_BYTES] for start in starts.tolist()])
        pairs = (data[:-1].astype(np.int64) * 31 + data[1:]) * 2654435761 >> 16 & PROFILE - 1
        rows.append(np.bincount(pairs, minlength=PROFILE))
    return np.stack(rows).astype(np.float64)


def agreement(profile: Profile, reference: Profile) -> float | None:
    """Compares the languages of both sides with the reference: 1 if they are equal, -1 if they are exchanged.

    It is the mean log ratio of the reference's probabilities, of the right side over the other, as a share of what it
    is for the reference's own text. None for too little text, and where the reference's sides are too alike.
    """
    if min(profile.sum(1).min(), reference.sum(1).min()) < MIN_BYTES:
        return None
    own, other = ((it + 0.5) / (it + 0.5).sum(1, keepdims=True) for it in (profile, reference))
    ratio = np.log(other[0] / other[1])
    divergence = float((other[0] - other[1]) @ ratio)
    return float((own[0] - own[1]) @ ratio) / divergence if divergence >= MIN_DIVERGENCE else None


def pieces_per_word(blocks: Sequence[TextStatistics]) -> dict[str, float]:
    """Returns the pieces for each word on either side; words are what spaces separate. Empty without blocks."""
    if not blocks:
        return {}
    words = np.sum([block.words for block in blocks], axis=0)
    pieces = np.sum([block.pieces for block in blocks], axis=0)
    return dict(zip(SIDES, np.round(pieces / np.maximum(words, 1), 3).tolist(), strict=True))


def find_warnings(
    corpora: Mapping[str, Sequence[TextStatistics]],
    equal: Mapping[str, int],
    model_type: str,
    expected: Mapping[str, float] | None,
    trained_here: bool,
    held_out: Profile | None = None,
) -> list[str]:
    """Returns a warning, with its figure, for each sign of sick data.

    `corpora` are the blocks of each training corpus, `equal` its pairs with equal sides. `expected` are the pieces per
    word of the dataset that the tokenizer is from, if it is from one; `held_out` is the profile of valid and test sets.
    """
    blocks = [block for of_corpus in corpora.values() for block in of_corpus]
    if not blocks:
        return []
    result = _unknown(blocks, UNKNOWN_WORD_SHARE if model_type == "word" else UNKNOWN_SHARE)
    if not trained_here and model_type in ("bpe", "unigram"):
        result += _other_language(blocks, expected)
    for name, of_corpus in corpora.items():
        share = equal[name] / max(1, sum(block.lines for block in of_corpus))
        if share > EQUAL_SHARE:
            result.append(
                f"{share:.1%} of the pairs of {name} have equal sides: is one language missing? --drop-equal drops them"
            )
        result += _uncorrelated(name, of_corpus)
    reference, what = np.sum([block.profile for block in blocks], axis=0), "all training text"
    if held_out is not None and held_out.sum(1).min() >= MIN_BYTES:
        reference, what = held_out, "the valid and test sets"
    for name, of_corpus in corpora.items():
        result += _exchanged(name, of_corpus, reference, what)
    return result


def _unknown(blocks: Sequence[TextStatistics], limit: float) -> list[str]:
    unknown, pieces = (np.sum([getattr(block, name) for block in blocks], axis=0) for name in ("unknown", "pieces"))
    shares = dict(zip(SIDES, (unknown / np.maximum(pieces, 1)).tolist(), strict=True))
    return [
        f"{share:.1%} of the {side} pieces are unknown or single bytes: the tokenizer was not trained on such text, or "
        "the text has another encoding"
        for side, share in shares.items()
        if share > limit
    ]


def _other_language(blocks: Sequence[TextStatistics], expected: Mapping[str, float] | None) -> list[str]:
    result = []
    lines, words = sum(block.lines for block in blocks), np.sum([block.words for block in blocks], axis=0)
    for index, (side, per_word) in enumerate(pieces_per_word(blocks).items()):
        usual = (expected or {}).get(side)
        if usual and not 1 / PIECES_FACTOR < per_word / usual < PIECES_FACTOR:
            result.append(
                f"a {side} word has {per_word:.2f} pieces, and {usual:.2f} in the dataset that the tokenizer is from: "
                "are the languages right, and not exchanged?"
            )
        elif not usual and per_word > PIECES_PER_WORD and words[index] >= WORDS_PER_LINE * lines:
            result.append(f"a {side} word has {per_word:.2f} pieces: is the tokenizer for another language?")
    return result


def _uncorrelated(name: str, blocks: Sequence[TextStatistics]) -> list[str]:
    """Returns a warning if the lengths of the sides are uncorrelated from some block on to the end."""
    figures = [(block, figure) for block in blocks if (figure := block.correlation()) is not None]
    healthy = [index for index, (_, figure) in enumerate(figures) if figure >= CORRELATION]
    sick = figures[healthy[-1] + 1 if healthy else 0 :]
    if not sick:
        return []
    mean = float(np.mean([figure for _, figure in sick]))
    start = "" if len(sick) == len(figures) else f" from about line {sick[0][0].first_line:,} on"
    return [
        f"the lengths of the two sides of {name} have a correlation of {mean:.2f}{start}: are lines shifted "
        "or shuffled against each other?"
    ]


def _exchanged(name: str, blocks: Sequence[TextStatistics], reference: Profile, what: str) -> list[str]:
    """Returns a warning if the sides of some blocks are in each other's language, as the reference has them."""
    figures = [(block, figure) for block in blocks if (figure := agreement(block.profile, reference)) is not None]
    sick = [(block, figure) for block, figure in figures if figure < AGREEMENT]
    if not sick:
        return []
    mean = float(np.mean([figure for _, figure in sick]))
    first, lines = sick[0][0].first_line, sum(block.lines for block, _ in sick)
    where = "" if len(sick) == len(figures) else f" in about {lines:,} lines, the first near line {first:,}"
    return [
        f"the sides of {name} are in each other's language{where}: letters agree with {what} by {mean:.2f}, where 1 is "
        "alike and -1 exchanged; are files or columns exchanged?"
    ]
