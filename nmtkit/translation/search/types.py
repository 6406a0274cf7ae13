"""The types of a translation from start to end: `Request`, `Segment`, `Hypothesis`, `Translation`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from nmtkit.text.alignment import Link
from nmtkit.text.glossary import TermResult
from nmtkit.text.quality import Quality
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints


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
class Segment:
    """Ids that the model reads as one sentence, with constraints on the translation. A batch is a list of segments."""

    ids: list[int]  # ids of the source, eos last
    constraints: Constraints = NO_CONSTRAINTS
    seed: int = 0  # seed of the random numbers, if the search draws samples
    reference: list[int] | None = None  # ids without eos; scored by SearchOptions.score_reference


@dataclass(frozen=True)
class Hypothesis:
    """One translation.

    A search fills the fields up to `token_log_probabilities`, and `no_repeat_ngram`. The text pipeline fills the other
    fields. For a line that was split, `score` and `log_probability` are sums over its segments. Hypotheses of a line
    are sorted by `score`, or by `utility` if `utility` is computed.
    """

    tokens: list[int]  # target ids without eos
    score: float  # length-penalised log probability
    log_probability: float  # natural logarithm, eos included
    attention: list[list[float]] | None = None  # if requested: for each token the weights of all source tokens and eos
    token_log_probabilities: list[float] | None = None  # if requested: natural logarithms of each token and of eos
    text: str = ""
    pieces: list[str] = field(default_factory=list)  # pieces of the target vocabulary, without eos
    links: list[Link] = field(default_factory=list)  # links between the words of the source and of `text`
    # hard: [source piece, target piece]. soft: the weights of all source pieces and eos for each target piece. words:
    # [start, end, start, end] for each target word: the character positions of the source word with the highest
    # attention (in the source in Unicode form NFC), then of the target word.
    alignment: list[list[int]] | list[list[float]] | None = None
    utility: float | None = None  # set by SearchOptions.mbr: `SegmentMetric.utilities`, mostly 0 to 100
    quality: Quality | None = None  # set by SearchOptions.quality
    no_repeat_ngram: int | None = None  # set if the line was decoded again with this option, because of a loop
    terms: list[TermResult] | None = None  # set with a glossary: the result of each term of the source, in order

    def without_first(self, count: int) -> "Hypothesis":
        """Returns the hypothesis of a search without its first `count` tokens, such as language tokens."""
        attention, each = self.attention, self.token_log_probabilities
        return replace(
            self,
            tokens=self.tokens[count:],
            attention=None if attention is None else attention[count:],
            token_log_probabilities=None if each is None else each[count:],
        )


@dataclass(frozen=True)
class Translation:
    """A line and its translations, best first; `id` counts lines from 0.

    `pivot` is the text in the pivot language, which the second step of the translation has read. `direction`, such as
    en-de, is set for a row of a dataset of several directions, and `untagged` is the text of a line that begins with
    tags.
    """

    id: int
    source: str
    hypotheses: list[Hypothesis]
    pivot: str | None = None
    direction: str | None = None
    untagged: str | None = None

    @property
    def text(self) -> str:
        return self.hypotheses[0].text

    @property
    def decoded_again(self) -> bool:
        """Whether a part of the line was decoded again, because its first translation was a loop."""
        return self.hypotheses[0].no_repeat_ngram is not None


SegmentBatch = list[Segment]
BatchHypotheses = list[list[Hypothesis]]  # hypotheses of each segment, best first
# Decodes batches, in any order, perhaps several at a time. Yields the number of each batch with its hypotheses.
BatchDecoder = Callable[[Iterable[SegmentBatch]], Iterator[tuple[int, BatchHypotheses]]]
