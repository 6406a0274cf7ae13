"""The filter `domain`, which drops pairs that are more probable in the cleaned corpus than in text of a domain."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nmtkit.cleaning.filters.interface import FILTERS, MIN_SAMPLE, Filter
from nmtkit.cleaning.filters.text_block import Scores, TextBlock
from nmtkit.cleaning.filters.word_statistics import BigramTable, StemVocabulary, bigrams_of, stems_of
from nmtkit.config import Config, option


@dataclass(frozen=True, kw_only=True)
class DomainConfig(Config):
    min_domain: float = option(
        0.0,
        "with --domain, drop pairs whose score is below X: the mean of log(p(word in the domain) / p(word in the "
        "corpus)) over the source words, plus the same mean over the target words",
    )


@FILTERS.register("domain", DomainConfig())
class Domain(Filter):
    """The difference of two cross-entropies in nats per word, added for both sides (Axelrod et al. 2011, section 3.2).

    For text of the domain, a bigram model of the corpora of --domain has a lower cross-entropy than a bigram model of
    the cleaned corpus, so the score is positive. Both models learn from the same number of pairs (Moore and Lewis 2010,
    section 3). Bigrams with a rare word are left out. All pairs have the score 0 without --domain.
    """

    unit = "nats per word"
    lowest_setting = "min_domain"
    _vocabularies: Sequence[StemVocabulary] = ()
    _tables: Sequence[list[BigramTable]] = ()  # [sides, corpus and domain]

    def fit(self, sample: TextBlock) -> None:
        """Trains the bigram models. Raises ValueError if the sample or --domain has fewer than 1,000 pairs."""
        if not self.context.domain:
            return
        parts = list(self.context.pairs(self.context.domain))
        domain = TextBlock([line for part in parts for line in part.sources],
                           [line for part in parts for line in part.targets])  # fmt: skip
        size = min(len(sample), len(domain))
        if size < MIN_SAMPLE:
            raise ValueError(
                f"the filter named domain compares {len(sample):,} pairs of the corpus with {len(domain):,} pairs of "
                f"--domain; each needs at least {MIN_SAMPLE:,} pairs"
            )
        texts = [stems_of(each.rows(np.linspace(0, len(each) - 1, size).astype(np.int64))) for each in (sample, domain)]
        self._vocabularies = [StemVocabulary([*own, *of_domain]) for own, of_domain in zip(*texts, strict=True)]
        self._tables = [
            [BigramTable(vocabulary.encode(lines), vocabulary.size) for lines in side]
            for vocabulary, *side in zip(self._vocabularies, *texts, strict=True)
        ]

    def score(self, block: TextBlock) -> Scores:
        scores = np.zeros(len(block))
        for lines, vocabulary, (corpus, domain) in zip(stems_of(block), self._vocabularies, self._tables, strict=False):
            bigrams, row = bigrams_of(vocabulary.encode(lines), vocabulary.size)
            differences = domain.log_probabilities(bigrams) - corpus.log_probabilities(bigrams)
            counts = np.bincount(row, minlength=len(block))
            scores += np.bincount(row, differences, len(block)) / np.maximum(counts, 1)
        return scores.astype(np.float32)
