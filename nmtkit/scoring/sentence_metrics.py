"""Metrics of single translations by name: sentence scores of sacreBLEU, GLEU, and neural metrics."""

from functools import cache
from typing import Any

from nmtkit.config.files import explained
from nmtkit.scoring.segments import SegmentMetric, TextLines, check_available, check_segment_metric
from nmtkit.scoring.tokenizers import characters_apart, sacrebleu_metric


class StringMetric(SegmentMetric):
    """A sentence score of sacreBLEU, or GLEU. Equal texts have the best score.

    BLEU has exponential smoothing, and a text of fewer than four words is scored only on n-grams up to its length. Text
    in a script without spaces is compared by characters.
    """

    def __init__(self, name: str) -> None:
        self.label = name
        self._scorer = None if name == "gleu" else sacrebleu_metric(name, sentence_level=True)
        if name == "ter":
            self.worst, self.best = 100.0, 0.0

    def scores(
        self, hypotheses: TextLines, *, sources: TextLines | None = None, references: TextLines | None = None
    ) -> list[float]:
        if references is None:
            raise ValueError(f"{self.label} compares a translation with a reference, but there is none")
        return [self._score(*pair) for pair in zip(hypotheses, references, strict=True)]

    def _score(self, hypothesis: str, reference: str) -> float:
        if hypothesis == reference:
            return self.best
        hypothesis, reference = characters_apart(hypothesis, reference), characters_apart(reference, reference)
        if self._scorer is None:
            return 100 * gleu(hypothesis, reference)
        return float(self._scorer.sentence_score(hypothesis, [reference]).score)


def gleu(candidate: str, reference: str) -> float:
    """Returns the minimum of precision and recall of all n-grams of one to four words (Wu et al. 2016, section 5)."""
    from sacrebleu.metrics.helpers import extract_all_word_ngrams

    tokenized = map(_tokenizer(), (candidate, reference))
    candidate_ngrams, reference_ngrams = (extract_all_word_ngrams(text, 1, 4)[0] for text in tokenized)
    total = max(candidate_ngrams.total(), reference_ngrams.total())
    return (candidate_ngrams & reference_ngrams).total() / total if total else 1.0


@cache
def _tokenizer() -> Any:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()  # type: ignore[no-untyped-call]


@cache
def segment_metric(text: str, device: str = "cpu") -> SegmentMetric:
    """Returns the metric that `text` names: NAME or NAME=MODEL. Loads a neural metric to `device` once in a process.

    Raises the errors of `check_segment_metric` and of loading a model, and ImportError without nmtkit[neural].
    """
    parsed = check_segment_metric(text, "metric")
    if parsed.model is None:
        return StringMetric(parsed.name)
    check_available(f"metric {text}", parsed)
    from nmtkit.scoring.neural.loading import load

    try:
        return load(parsed.name, parsed.model, device)
    except OSError as error:
        raise type(error)(f"metric {text}: {explained(error)}") from error
    except ValueError as error:
        raise ValueError(f"metric {text}: {error}") from error
