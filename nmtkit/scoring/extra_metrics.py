"""Metrics with sacreBLEU's interface that need optional packages: tokenized BLEU, neural metrics and off-target."""

import logging
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.base import Score, Signature
from sacrebleu.metrics.bleu import BLEU, BLEUScore

from nmtkit.config.extras import imported
from nmtkit.jobs.distributed import rank_device
from nmtkit.scoring.segments import MetricName
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.text.language_identification import BatchIdentifier, columns_of
from nmtkit.text.languages import same_language, subtags

TOKENIZED_BLEU = "tokenized BLEU (not comparable with BLEU)"

logger = logging.getLogger("nmtkit")


def split_compounds(tokenized: str) -> str:
    """Turns `a-b` into `a ##AT##-##AT## b`. If matches overlap (`a-b-c`), only the first match changes.

    get_ende_bleu.sh (see `TokenizedBLEU`) has the same result, because the script also makes a single pass.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenized)


class TokenizedBLEU(BLEU):
    """The English-German BLEU in papers from 2016 to 2019. The scores are not comparable with sacreBLEU's BLEU.

    The Moses tokenizer splits translations and references, and every hyphen between two characters that are not
    spaces becomes a separate token (`rich-text` to `rich ##AT##-##AT## text`). N-grams are counted without smoothing,
    as in multi-bleu.perl of Moses. This is the recipe of get_ende_bleu.sh in tensor2tensor, the code of "Attention Is
    All You Need". Split compounds add tokens that are easy to match, so the score is higher than the sacreBLEU score of
    the same translations.
    """

    def __init__(self, target_lang: str | None, effective_order: bool = False) -> None:
        """Raises ImportError if sacremoses is missing, and ValueError if no language is given."""
        need = "tokenized-bleu needs the Moses tokenizer: pip install 'nmtkit[moses]'"
        sacremoses = imported("sacremoses", need=need)
        if target_lang is None:
            raise ValueError("tokenized-bleu needs the language of the translations: add --target-lang, for example de")
        logger.warning(
            "tokenized BLEU counts Moses tokens and splits compounds: do not compare it with sacreBLEU's BLEU"
        )
        super().__init__(tokenize="none", smooth_method="none", effective_order=effective_order, force=True)
        language = subtags(target_lang)[0]  # sacremoses has rules for de, but not for deu_Latn
        self.moses = sacremoses.MosesTokenizer(language)
        self.tokenizer_signature = f"moses-{language}+compounds"
        self.sacremoses_version = sacremoses.__version__

    def _preprocess_segment(self, sent: str) -> str:
        return split_compounds(self.moses.tokenize(sent, return_str=True))

    def _compute_score_from_stats(self, stats: list[Any]) -> BLEUScore:
        result = super()._compute_score_from_stats(stats)
        result.name = TOKENIZED_BLEU
        return result

    def get_signature(self) -> Signature:
        signature = super().get_signature()
        signature.update("sacremoses", self.sacremoses_version)
        return signature


class SentenceMetric:
    """Base class of metrics whose corpus score is the mean over sentences.

    Scores, confidence intervals and significance tests call some methods of sacreBLEU's metrics. The class has these
    methods, except `_extract_corpus_statistics`, which each subclass adds. The statistics of a sentence are
    [score of the sentence, 1].

    `label` is the name of the metric in the output, and `facts` are the settings of the metric for the signature. For
    the signature, sacreBLEU also reads the attributes num_refs, n_bootstrap and seed.
    """

    label: str
    facts: Mapping[str, str]

    def _aggregate_and_compute(self, stats: list[list[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score(self.label, float(stats[0] / stats[1]))

    def get_signature(self) -> Signature:
        signature = Signature(self.__dict__)
        for key, value in self.facts.items():
            signature.update(key, value)
        return signature


class SegmentScores(SentenceMetric):
    """A neural metric such as COMET: `name` is NAME or NAME=MODEL. The score of a corpus is the mean over sentences."""

    def __init__(self, name: str, sources: Sequence[str] | None, device: str) -> None:
        """Raises ValueError if there are no source sentences, and the errors of `segment_metric`."""
        if sources is None:
            metric = MetricName.parse(name).name
            raise ValueError(f"{metric} also reads the source: give --src FILE, --data or --test-set")
        self.sources = sources
        self.metric = segment_metric(name, rank_device(device, 1))
        self.label, self.facts = self.metric.label, self.metric.signature()

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> list[list[float]]:
        references = references or ()
        if self.metric.reads_reference and len(references) != 1:
            raise ValueError(f"{self.label} takes one reference, not {len(references)}")
        reference = references[0] if self.metric.reads_reference else None
        self.num_refs = int(self.metric.reads_reference)
        scores = self.metric.scores(hypotheses, sources=self.sources, references=reference)
        return [[score, 1.0] for score in scores]


class OffTarget(SentenceMetric):
    """Percentage of lines whose language, as identified by py3langid, is not the target language; lower is better.

    `languages` restricts the identifier to these languages and the target language. Without `languages`, the identifier
    chooses among all languages that it knows, and confuses related languages in some short lines. The details of a
    score show how often such mistakes occur: they contain the percentage for the references. A line without letters
    counts as correct. The score of a line is 100 if the language is wrong, else 0. The statistics of a sentence also
    contain the mean score of its references.
    """

    label = "off-target"

    def __init__(self, target_lang: str | None, languages: Sequence[str] = ()) -> None:
        """Raises ImportError without py3langid, and ValueError for a missing or unknown target language."""
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
            known, chosen = self.identifier.languages, (target_lang, *languages)
            self.identifier = self.identifier.restricted(
                [code for code in known if any(same_language(code, each) for each in chosen)]
            )
        self.target_lang = target_lang
        among = ",".join(sorted({*languages, target_lang})) if languages else "all"
        version = f"py3langid-{metadata.version('py3langid')}"
        self.facts = {"lang": target_lang, "among": among, "version": version}

    def off_target(self, lines: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns a mask [lines] of the lines with letters whose most probable language is not the target language."""
        best = self.identifier.probabilities(lines).argmax(1)
        has_letters = np.array([any(map(str.isalpha, line)) for line in lines], np.bool_)
        return has_letters & ~np.isin(best, columns_of(self.identifier.languages, self.target_lang))

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> list[list[float]]:
        self.num_refs = len(references or ())
        texts = [hypotheses, *(references or ())]
        shares = [(100.0 * self.off_target(text)).tolist() for text in texts]
        return [[own, 1.0, sum(others) / max(1, len(others))] for own, *others in zip(*shares, strict=True)]

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        score = super()._compute_score_from_stats(stats)
        score._verbose = f"{stats[2] / stats[1]:.1f} % of the references"
        return score
