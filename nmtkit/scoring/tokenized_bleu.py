"""The BLEU of the paper's tables: Moses tokens, compounds split, no smoothing. Not comparable with sacreBLEU's BLEU.

Papers from 2016 to 2019 report it for English-German: translation and reference go through the Moses tokenizer, every
hyphen between two other characters becomes a token of its own (`rich-text` to `rich ##AT##-##AT## text`), and Moses'
multi-bleu.perl counts. The recipe is get_ende_bleu.sh of tensor2tensor, the paper's own code. Splitting compounds adds
easy tokens, so that these figures lie above those of sacreBLEU on the same translations.
"""

import logging
import re
from typing import Any

from sacrebleu.metrics.base import Signature
from sacrebleu.metrics.bleu import BLEU, BLEUScore

logger = logging.getLogger("nmtkit")

NAME = "tokenized BLEU (not comparable with BLEU)"


def split_compounds(tokenized: str) -> str:
    """`a-b` to `a ##AT##-##AT## b`; of overlapping places (`a-b-c`) the first, as the original's one pass does."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenized)


class TokenizedBLEU(BLEU):
    """sacreBLEU's BLEU over other tokens. Without smoothing it counts as multi-bleu.perl does."""

    def __init__(self, target_lang: str | None, effective_order: bool = False) -> None:
        """Raises ImportError without sacremoses, ValueError without a language."""
        try:
            import sacremoses
        except ImportError:
            raise ImportError("tokenized-bleu needs the Moses tokenizer: pip install 'nmtkit[moses]'") from None
        if target_lang is None:
            raise ValueError("tokenized-bleu needs the language of the translations: add --target-lang de, say")
        logger.warning("tokenized BLEU counts Moses tokens with compounds split: not comparable with sacreBLEU's BLEU")
        super().__init__(tokenize="none", smooth_method="none", effective_order=effective_order, force=True)
        self.moses = sacremoses.MosesTokenizer(target_lang)
        self.tokenizer_signature = f"moses-{target_lang}+compounds"
        self.sacremoses_version = sacremoses.__version__

    def _preprocess_segment(self, sent: str) -> str:
        return split_compounds(self.moses.tokenize(sent, return_str=True))

    def _compute_score_from_stats(self, stats: list[Any]) -> BLEUScore:
        result = super()._compute_score_from_stats(stats)
        result.name = NAME
        return result

    def get_signature(self) -> Signature:
        signature = super().get_signature()
        signature.update("sacremoses", self.sacremoses_version)
        return signature
