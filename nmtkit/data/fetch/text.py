"""The result of opening a corpus by name, before it is written."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nmtkit.data.corpora.corpus import Pairs


@dataclass(frozen=True, kw_only=True)
class FetchedText:
    """The pairs of a corpus, facts about their origin, and further references of a test set."""

    pairs: Iterator[Pairs]
    facts: dict[str, Any]
    references: list[list[str]] = field(default_factory=list)
