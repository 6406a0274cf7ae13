"""The interface of the filters that `clean` applies to pairs, and their registry."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nmtkit.corpora.corpus import Corpus
from nmtkit.corpora.texts import Mask, Scores, TextBlock
from nmtkit.registry import Registry


@dataclass(frozen=True)
class FilterContext:
    """Facts that filters need beside their config."""

    source_lang: str
    target_lang: str
    exclude: tuple[Corpus, ...] = ()
    lid_model: Path | None = None
    shared: dict[str, Any] = field(default_factory=dict)  # objects that several filters fit together


class Filter(ABC):
    """Gives each pair a score. A pair is dropped if its score is below `lowest` or above `highest`.

    Filters run in worker processes: `fit` is called once before the workers start, and `score` in every worker.
    """

    lowest: float = -np.inf
    highest: float = np.inf
    unit: ClassVar[str] = ""  # meaning of the score, for the report page

    def __init__(self, config: Any, context: FilterContext) -> None:
        self.config, self.context = config, context

    def fit(self, sample: TextBlock) -> None:  # noqa: B027 - most filters need no statistics
        """Learns statistics of the corpus from a sample that the filters before this filter have kept."""

    @abstractmethod
    def score(self, block: TextBlock) -> Scores:
        """Returns the score of each pair, without NaN."""

    def drops(self, scores: Scores) -> Mask:
        return (scores < self.lowest) | (scores > self.highest)


FILTERS: Registry[Filter] = Registry("filter", "--filters", several=True)
