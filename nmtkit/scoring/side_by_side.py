"""An HTML page that compares two systems: their scores, and their translations of each sentence.

The page marks the words that differ, and lists missing names and wrong numbers.
"""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from nmtkit.jobs import progress
from nmtkit.pages.charts import histogram
from nmtkit.pages.document import Html, render, visible
from nmtkit.scoring.lengths import TOKEN, WORDS_OF_BLEU, length_bands, word_count
from nmtkit.scoring.metrics import MetricSettings, Score, part_scores, sentence_scores
from nmtkit.scoring.segments import MetricName
from nmtkit.scoring.significance import Comparison
from nmtkit.scoring.texts import ScoredTexts

SHOWN = 3000  # maximum number of sentences on the page
LONGEST = 1000  # maximum number of compared tokens (words, spaces, punctuation); time grows with its square
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_WORD = re.compile(r"\w[\w.&'’/-]*\w|\w")

Mark = tuple[str, str]  # a part of a text, and its class: "" for common words, "right" or "wrong" for other words


@dataclass(frozen=True, kw_only=True)
class ComparedSentence:
    """A source sentence with the translations of two systems, and their scores.

    A difference is positive if the second system is better. It is the score of the second system minus the score of the
    first system. If lower scores are better, it has the opposite sign.
    """

    number: int
    source: str | None
    references: list[str]
    texts: tuple[list[Mark], list[Mark]]
    scores: tuple[list[float], list[float]]  # for each system: a score for each metric
    differences: list[float]  # one for each metric
    faults: tuple[list[str], list[str]]  # for each system: names and numbers that are missing or were added
    length: int  # number of words of the first reference

    @property
    def equal(self) -> bool:
        return self.texts[0] == self.texts[1] and not any(mark for _, mark in self.texts[0])


def sentences(texts: ScoredTexts, metrics: Sequence[str], settings: MetricSettings) -> list[ComparedSentence]:
    """Returns all sentences of the two systems of `texts`, with their scores."""
    systems = list(texts.systems.values())
    tables = [sentence_scores(system, texts.references, metrics, settings) for system in systems]
    rising = [MetricName.parse(name).higher_is_better for name in metrics]
    progress.begin("Comparing", "sentences", len(systems[0]))
    result = []
    for row, (first, second) in enumerate(zip(*systems, strict=True)):
        columns = [[column[row].value for column in table] for table in tables]
        references = [text[row] for text in texts.references]
        source = None if texts.sources is None else texts.sources[row]
        result.append(
            ComparedSentence(
                number=row + 1,
                source=source,
                references=references,
                texts=differences(first, second, references),
                scores=(columns[0], columns[1]),
                differences=[b - a if higher else a - b for a, b, higher in zip(*columns, rising, strict=True)],
                faults=(faults(first, references, source), faults(second, references, source)),
                length=word_count(references[0]),
            )
        )
        progress.advance(1)
    return result


def differences(first: str, second: str, references: Sequence[str]) -> tuple[list[Mark], list[Mark]]:
    """Splits both texts into parts. Words that only one text has are "right" if a reference has them, else "wrong"."""
    a, b = TOKEN.findall(first), TOKEN.findall(second)
    known = {token for reference in references for token in TOKEN.findall(reference)}
    matcher = difflib.SequenceMatcher(None, a[:LONGEST], b[:LONGEST], autojunk=False)
    common: tuple[set[int], set[int]] = set(), set()
    for start, other, size in matcher.get_matching_blocks():
        common[0].update(range(start, start + size))
        common[1].update(range(other, other + size))

    def parts(tokens: list[str], kept: set[int]) -> list[Mark]:
        marks = [
            "" if index in kept or index >= LONGEST or token.isspace() else "right" if token in known else "wrong"
            for index, token in enumerate(tokens)
        ]
        for index in range(1, len(tokens) - 1):
            if tokens[index].isspace() and index not in kept and marks[index - 1] == marks[index + 1]:
                marks[index] = marks[index - 1]  # a space between words with equal marks gets this mark
        groups = groupby(zip(tokens, marks, strict=True), key=itemgetter(1))
        return [("".join(token for token, _ in group), mark) for mark, group in groups]

    return parts(a, common[0]), parts(b, common[1])


def faults(text: str, references: Sequence[str], source: str | None) -> list[str]:
    """Returns the names and numbers that `text` lacks, as "- NAME", and the numbers that it adds, as "+ NUMBER".

    A missing name or number is in all references, but not in the text. A word is a name if it contains a digit or has a
    capital after its first letter. A word that begins with a capital is also a name if the source contains this word.
    An added number is in the text, but neither in the source nor in a reference.
    """
    own, wanted = Counter(_NUMBER.findall(text)), [Counter(_NUMBER.findall(each)) for each in references]
    in_source = Counter(_NUMBER.findall(source or ""))
    missing = [number for number in wanted[0] if all(each[number] for each in wanted) and not own[number]]
    added = [number for number in own if not in_source[number] and not any(each[number] for each in wanted)]
    words, of_source = set(_WORD.findall(text)), set(_WORD.findall(source or ""))
    names = [
        word
        for word in dict.fromkeys(_WORD.findall(references[0]))
        if not word.isdigit() and is_name(word, of_source) and all(word in each for each in references)
    ]
    lost = [name for name in names if name not in words and name not in text and not _NUMBER.fullmatch(name)]
    return [*(f"- {each}" for each in (*missing, *lost)), *(f"+ {each}" for each in added)]


def is_name(word: str, source_words: set[str]) -> bool:
    inside = any(char.isupper() for char in word[1:]) or any(map(str.isdigit, word))
    return inside or (word[0].isupper() and len(word) > 1 and word in source_words)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(
    texts: ScoredTexts,
    compared: Sequence[ComparedSentence],
    comparison: Sequence[Comparison],
    metrics: Sequence[str],
    settings: MetricSettings,
) -> str:
    """Returns the page as HTML. `comparison` has the scores of both systems, with p-values."""
    names = list(dict.fromkeys(each.score.name for each in comparison))
    differences = dict(zip(names, zip(*(each.differences for each in compared), strict=True), strict=True))
    by_size = sorted(compared, key=lambda each: -abs(each.differences[0]))[:SHOWN]
    return render(
        "side_by_side.html",
        title=" and ".join(texts.systems),
        systems=list(texts.systems),
        metrics=names,
        scores=[_score_row(name, comparison, differences[name]) for name in names],
        lengths=_by_length(texts, metrics, settings),
        chart=Html(_chart(differences[names[0]])),
        sentences=by_size,
        total=len(compared),
        equal=sum(each.equal for each in compared),
        languages=settings.target_lang,
        visible=visible,
        body=[],
    )


def _score_row(name: str, comparison: Sequence[Comparison], differences: Sequence[float]) -> list[str]:
    first, second = (each for each in comparison if each.score.name == name)
    better = sum(each < 0 for each in differences), sum(each > 0 for each in differences)
    p = "" if second.p_value is None else f"{second.p_value:.3f}"
    return [name, *_compared(first.score, second.score), p, *(f"{count:,}" for count in better)]


def _compared(first: Score, second: Score) -> list[str]:
    """Returns two scores and their difference for a row of a table."""
    return [f"{first.value:.1f}", f"{second.value:.1f}", f"{second.value - first.value:+.1f}"]


def _by_length(texts: ScoredTexts, metrics: Sequence[str], settings: MetricSettings) -> list[list[str]]:
    """Returns a table row for each band of lengths of the first reference, with scores by the first metric.

    If this metric is BLEU, bands of short lines have no row.
    """
    bands = length_bands(texts.references[0])
    if metrics[0] == "bleu":
        bands = [band for band in bands if band.fewest >= WORDS_OF_BLEU]
    rows = [band.rows for band in bands]
    tables = [part_scores(each, texts.references, rows, metrics[:1], settings)[0] for each in texts.systems.values()]
    return [
        [band.title.replace(" ", "\u00a0"), f"{len(band.rows):,}", *_compared(*scores)]
        for band, *scores in zip(bands, *tables, strict=True)
    ]


def _chart(differences: Sequence[float]) -> str:
    edge = max(1.0, *map(abs, differences))
    # with the range (-edge, edge), rounding errors would put some sentences with equal scores into the bar left of 0
    counts, edges = np.histogram(np.divide(differences, edge), bins=20, range=(-1, 1))
    return histogram("B − A", (edge * edges).tolist(), counts.tolist(), [], "points", "sentences")
