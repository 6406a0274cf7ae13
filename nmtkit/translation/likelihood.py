"""Computes the log probabilities that a translation model or a language model assigns to given texts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.requests import Request
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import WINDOW, Translator


@dataclass(frozen=True)
class Likelihood:
    """The log probability of a text (natural logarithm) and the number of pieces of the text. Both include eos."""

    log_probability: float
    pieces: int


@dataclass(frozen=True)
class Perplexity:
    """The log probability of a corpus (natural logarithm). `pieces` includes an eos for each line."""

    log_probability: float
    pieces: int
    lines: int

    @property
    def value(self) -> float:
        """The perplexity per piece: exp(-log probability / pieces)."""
        return math.exp(min(700.0, -self.log_probability / max(1, self.pieces)))

    @staticmethod
    def of(likelihoods: Sequence[Likelihood]) -> "Perplexity":
        return Perplexity(
            math.fsum(each.log_probability for each in likelihoods),
            sum(each.pieces for each in likelihoods),
            len(likelihoods),
        )


def is_language_model(translator: Translator) -> bool:
    """Returns whether all models of a translator are language models, which ignore the source."""
    return not any(model.reads_source for model in translator.models)


def likelihoods(
    translator: Translator,
    sources: Iterable[str] | None,
    targets: Iterable[str],
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> Iterator[Likelihood]:
    """Yields the likelihood of each target given its source. Without `sources`, all sources are empty.

    Raises ValueError for languages that the model does not have.
    """
    search = SearchOptions(score_reference=True, source_lang=source_lang, target_lang=target_lang)
    pipeline = Pipeline(translator.tokenizer, search)
    if sources is None:
        requests = (Request("", reference=text) for text in targets)
    else:
        requests = (Request(text, reference=other) for text, other in zip(sources, targets, strict=True))
    for translation in translator.run(iter(lambda: list(islice(requests, WINDOW)), []), pipeline):
        (hypothesis,) = translation.hypotheses
        yield Likelihood(hypothesis.log_probability, len(hypothesis.tokens) + 1)
