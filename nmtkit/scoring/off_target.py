"""Measures the share of translations in a wrong language, with the language identifier of `nmtkit serve`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Metric, Score, Signature

from nmtkit.text.language_identification import BatchIdentifier, columns_of
from nmtkit.text.languages import subtags


class OffTarget(Metric):
    """Percentage of lines whose language, as identified by py3langid, is not the target language; lower is better.

    `languages` restricts the identifier to these languages and the target language. Without `languages`, the identifier
    chooses among all languages that it knows, and confuses some short lines with a related language. The details of a
    score show how often such mistakes occur: they contain the percentage for the references. A line without letters
    counts as correct. The statistics of a line are [100 if the language is wrong, else 0; 1].
    """

    def __init__(self, target_lang: str | None, languages: Sequence[str] = ()) -> None:
        """Raises ImportError without py3langid, and ValueError for a missing or unknown target language."""
        super().__init__()  # type: ignore[no-untyped-call]
        if target_lang is None:
            raise ValueError("off-target needs the language of the translations: add --target-lang, for example da")
        try:
            self.identifier = BatchIdentifier()
        except ImportError:
            raise ImportError("off-target needs a language identifier: pip install 'nmtkit[detect]'") from None
        for code in (target_lang, *languages):
            if not columns_of(self.identifier.languages, code):
                raise ValueError(f"off-target: py3langid cannot identify the language {code!r}; choose other metrics")
        if languages:
            chosen = {subtags(code)[0] for code in (target_lang, *languages)}
            self.identifier = self.identifier.restricted(
                [x for x in self.identifier.languages if subtags(x)[0] in chosen]
            )
        self.target_lang = target_lang
        self.languages = ",".join(sorted({*languages, target_lang})) if languages else "all"
        self.share_of_references = 0.0

    def off_target(self, lines: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns a mask [lines] of the lines with letters whose most probable language is not the target language."""
        best = self.identifier.probabilities(lines).argmax(1)
        has_letters = np.array([any(map(str.isalpha, line)) for line in lines], np.bool_)
        return has_letters & ~np.isin(best, columns_of(self.identifier.languages, self.target_lang))

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> list[list[float]]:
        self.num_refs = len(references or ())
        if references:
            self.share_of_references = 100 * float(np.mean([self.off_target(text).mean() for text in references]))
        return [[100.0 * value, 1.0] for value in self.off_target(hypotheses).tolist()]

    def _aggregate_and_compute(self, stats: list[list[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        score = Score("off-target", float(stats[0] / stats[1]))
        score._verbose = f"{self.share_of_references:.1f} % of the references"
        return score

    def get_signature(self) -> Signature:
        from importlib.metadata import version

        signature = Signature(self.__dict__)
        signature.update("lang", self.target_lang)
        signature.update("among", self.languages)
        signature.update("version", f"py3langid-{version('py3langid')}")
        return signature

    # sacreBLEU calls the methods below only for metrics that compare n-grams.
    def _preprocess_segment(self, sent: str) -> str:
        raise NotImplementedError

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[Any]:
        raise NotImplementedError
