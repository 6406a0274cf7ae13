"""The interface of the filters that `clean` applies to pairs, and their registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from nmtkit.cleaning.filters.text_block import ScoreMatrix, Scores, TextBlock
from nmtkit.config.registry import Registry
from nmtkit.data.corpora.corpus import Corpus, Pairs
from nmtkit.data.corpora.dropping import Mask, first_reasons
from nmtkit.data.corpora.pairs import pairs

MIN_SAMPLE = 1000  # minimum number of pairs of a sample from which filters learn statistics of languages and words


@dataclass(frozen=True)
class FilterContext:
    """Inputs of filters in addition to their config."""

    source_lang: str
    target_lang: str
    exclude: tuple[Corpus, ...] = ()
    domain: tuple[Corpus, ...] = ()
    lid_model: Path | None = None
    mend: Callable[[Pairs], Pairs] | None = None  # mends pairs in the same way as the pairs to score
    shared: dict[str, Any] = field(default_factory=dict)  # fitted objects that several filters share

    def pairs(self, corpora: Iterable[Corpus]) -> Iterator[Pairs]:
        """Yields the pairs of corpora such as `exclude`. If `mend` is given, mends them like the pairs to score."""
        for part in chain.from_iterable(map(pairs, corpora)):
            yield part if self.mend is None else self.mend(part)


@dataclass(eq=False)
class Limits:
    """Drops a pair if its score is below `lowest` or above `highest`. `unit` is the unit of the score, for charts."""

    lowest: float = -np.inf
    highest: float = np.inf
    unit: str = ""
    in_probability: ClassVar[bool] = True  # whether the probability of a pair depends on the score

    def drops(self, scores: Scores) -> Mask:
        return (scores < self.lowest) | (scores > self.highest)


def first_limits(limits: Iterable[Limits], scores: ScoreMatrix) -> npt.NDArray[np.int16]:
    """Returns the index of the first limits that drop each pair, or -1 for a kept pair. `scores` is [pairs, limits]."""
    return first_reasons((each.drops(column) for each, column in zip(limits, scores.T, strict=True)), len(scores))


class Filter(Limits, ABC):
    """Gives each pair a score, and drops pairs whose score is beyond the limits of the class or of the config.

    Filters run in worker processes: `fit` is called once before the workers start, and `score` in every worker.

    `in_probability` is true for filters that judge the words of a pair. The probability does not use scores of rules,
    such as the length ratio: its regression learns from the best pairs, and the best pairs have a narrow range of
    length ratios. Many good pairs are outside this range, and would get a low probability. If no chosen filter has
    `in_probability`, the scores of all filters count.
    """

    in_probability = False
    lowest_setting: str | None = None  # name of the field of `config` that has the limit `lowest`
    highest_setting: str | None = None  # name of the field of `config` that has the limit `highest`

    def __init__(self, config: Any, context: FilterContext) -> None:
        self.config, self.context = config, context
        if self.lowest_setting is not None:
            self.lowest = getattr(config, self.lowest_setting)
        if self.highest_setting is not None:
            self.highest = getattr(config, self.highest_setting)

    def fit(self, sample: TextBlock) -> None:
        """Learns statistics of the corpus from a sample of the pairs that all earlier filters keep."""

    @abstractmethod
    def score(self, block: TextBlock) -> Scores:
        """Returns the score of each pair, without NaN."""


FILTERS: Registry[Filter] = Registry("filter", "--filters", several=True)
