"""Metrics with the interface of sacreBLEU that need an extra package: tokenized BLEU and COMET."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.base import Metric, Score, Signature
from sacrebleu.metrics.bleu import BLEU, BLEUScore

TOKENIZED_BLEU = "tokenized BLEU (not comparable with BLEU)"

logger = logging.getLogger("nmtkit")


def split_compounds(tokenized: str) -> str:
    """Turns `a-b` into `a ##AT##-##AT## b`. If matches overlap (`a-b-c`), only the first match changes.

    The original script has the same result, because it also makes a single pass.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenized)


class TokenizedBLEU(BLEU):
    """The English-German BLEU in papers from 2016 to 2019. The scores are not comparable with sacreBLEU's BLEU.

    The Moses tokenizer splits translations and references, and every hyphen between two other characters becomes a
    separate token (`rich-text` to `rich ##AT##-##AT## text`). N-grams are counted without smoothing, as in
    multi-bleu.perl of Moses. This is the recipe of get_ende_bleu.sh in tensor2tensor, the code of "Attention Is All You
    Need".
    Split compounds add tokens that are easy to match, so the score is higher than the sacreBLEU score of the same
    translations.
    """

    def __init__(self, target_lang: str | None, effective_order: bool = False) -> None:
        """Raises ImportError if sacremoses is missing, and ValueError if no language is given."""
        try:
            import sacremoses
        except ImportError:
            raise ImportError("tokenized-bleu needs the Moses tokenizer: pip install 'nmtkit[moses]'") from None
        if target_lang is None:
            raise ValueError("tokenized-bleu needs the language of the translations: add --target-lang, for example de")
        logger.warning(
            "tokenized BLEU counts Moses tokens and splits compounds: do not compare it with sacreBLEU's BLEU"
        )
        super().__init__(tokenize="none", smooth_method="none", effective_order=effective_order, force=True)
        self.moses = sacremoses.MosesTokenizer(target_lang)
        self.tokenizer_signature = f"moses-{target_lang}+compounds"
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


class Comet(Metric):
    """COMET, a learnt metric that also reads the source. The score of a corpus is 100 x the mean over sentences.

    COMET needs the extra `nmtkit[comet]` and downloads its model. The statistics of a sentence are [100 x score, 1].
    """

    def __init__(self, model: str, sources: Sequence[str] | None) -> None:
        """Raises ImportError if the package is missing, and ValueError if there are no source sentences."""
        super().__init__()  # type: ignore[no-untyped-call]
        try:
            import comet
        except ImportError:
            raise ImportError(
                "comet is not installed: pip install 'nmtkit[comet]' (it downloads a large model)"
            ) from None
        if sources is None:
            raise ValueError("COMET also reads the source: give --src FILE, or --data")
        self.model_name = model
        self.sources = sources
        self.model: Any = comet.load_from_checkpoint(comet.download_model(model))

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> list[list[float]]:
        import torch

        if references is None or len(references) != 1:
            raise ValueError(f"COMET takes one reference, not {len(references or ())}")
        if len(self.sources) != len(hypotheses):
            raise ValueError(f"there are {len(self.sources)} source sentences and {len(hypotheses)} translations")
        self.num_refs = 1
        data = [
            {"src": source, "mt": hypothesis, "ref": reference}
            for source, hypothesis, reference in zip(self.sources, hypotheses, references[0], strict=True)
        ]
        prediction = self.model.predict(data, batch_size=32, gpus=int(torch.cuda.is_available()), progress_bar=False)
        return [[100 * float(value), 1.0] for value in prediction.scores]

    def _aggregate_and_compute(self, stats: list[list[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score("COMET", float(stats[0] / stats[1]))

    def get_signature(self) -> Signature:
        from importlib.metadata import version

        signature = Signature(self.__dict__)
        signature.update("model", self.model_name.rsplit("/", 1)[-1])
        signature.update("scale", 100)
        signature.update("version", version("unbabel-comet"))
        return signature

    # sacreBLEU calls the methods below only for metrics that compare n-grams.
    def _preprocess_segment(self, sent: str) -> str:
        raise NotImplementedError

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[Any]:
        raise NotImplementedError
