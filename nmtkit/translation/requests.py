"""Requests of a user, and the translations that the user gets."""

from collections.abc import Sequence
from dataclasses import dataclass

from nmtkit.translation.search.segments import Hypothesis


@dataclass(frozen=True)
class Request:
    """A line to translate, with its constraints as text. `ids` is set for a line of a dataset, and ends with eos."""

    source: str
    ids: list[int] | None = None
    prefix: str = ""
    required: Sequence[str] = ()
    avoided: Sequence[str] = ()
    reference: str | None = None  # used by SearchOptions.score_reference


@dataclass(frozen=True)
class Translation:
    """A line and its translations, best first; `id` counts lines from 0.

    `pivot` is the text in the pivot language, which the second step of the translation has read.
    """

    id: int
    source: str
    hypotheses: list[Hypothesis]
    pivot: str | None = None

    @property
    def text(self) -> str:
        return self.hypotheses[0].text
