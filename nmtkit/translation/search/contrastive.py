"""Contrastive decoding: a search prefers tokens that the translation model finds likely and a second model does not.

Sources: Li et al. 2023, "Contrastive Decoding: Open-ended Text Generation as Optimization" (arXiv:2210.15097, section
3); O'Brien and Lewis 2023, "Contrastive Decoding Improves Reasoning in Large Language Models" (arXiv:2309.09117,
section 2); Sennrich et al. 2024, "Mitigating Hallucinations and Off-target Machine Translation with Source-Contrastive
and Language-Contrastive Decoding" (arXiv:2309.07098).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nmtkit.config import Config, option
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS, Tokenizer
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS
from nmtkit.translation.search.second_model import SecondModel

IMPLAUSIBLE = 100.0  # subtracted from the log probability of implausible tokens; only a constraint can then choose them


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(Config):
    """The contrasted model, its weight, and the input that it reads."""

    contrast: Path | None = option(
        None,
        "checkpoint, with the same target vocabulary, whose mistakes are avoided: a smaller or less trained model, or "
        "the translation model itself with another input",
        metavar="FILE",
    )
    contrast_weight: float = option(0.5, "weight w of the contrasted model", min=0, max=100)
    contrast_threshold: float = option(
        0.1, "only tokens with at least this share of the probability of the best token are chosen", min=0, max=1
    )
    contrast_source: Literal["same", "empty"] = option(
        "same", "source of the contrasted model: the same source, or a source without words (against hallucinations)"
    )
    contrast_lang: str | None = option(
        None, "language into which the contrasted model translates (against output in this language)", metavar="CODE"
    )


@LOGITS_PROCESSORS.register("contrastive", ContrastiveConfig())
class Contrastive(SecondModel):
    """Ranks tokens by (1 + w) log p - w log q, normalised over the vocabulary.

    p are the probabilities of the search, and q are the probabilities of the contrasted model. A token is plausible if
    p is at least `contrast_threshold` times the largest p. Other tokens have a score of log p - 100 before the
    normalisation.

    Raises ValueError if the checkpoint has other target pieces than `tokenizer`, or lacks the language.
    """

    def __init__(self, config: ContrastiveConfig, tokenizer: Tokenizer) -> None:
        if config.contrast is None:
            raise ValueError("--logits-processors contrastive needs --contrast FILE, a checkpoint")
        advice = "the contrasted model needs the vocabulary of the translation model (preprocess --tokenizer-from)"
        super().__init__(config.contrast, "--contrast", tokenizer, advice)
        self.weight, self.empty = config.contrast_weight, config.contrast_source == "empty"
        self.log_threshold = math.log(config.contrast_threshold) if config.contrast_threshold else -math.inf
        self.languages = self.tokenizer.languages
        self.language = None if config.contrast_lang is None else self._language(config.contrast_lang)

    def check_models(self, checkpoints: Sequence[Path]) -> None:
        same_input = self.language is None and not self.empty
        if same_input and len(checkpoints) == 1 and checkpoints[0].samefile(self.path):
            raise ValueError(
                f"--contrast {self.path} is the translation model itself, so both scores of a token are equal and "
                "cancel out; give another checkpoint, or another input for the contrasted model "
                "(--contrast-source empty, --contrast-lang CODE)"
            )

    def _language(self, code: str) -> int:
        """Returns the id of a language token. Raises ValueError if the checkpoint does not have the language."""
        if code not in self.languages:
            known = f"known: {', '.join(sorted(self.languages))}" if self.languages else "it has no language tokens"
            raise ValueError(f"--contrast-lang {code}: {self.path} does not have this language; {known}")
        return self.languages[code]

    def combine(self, log_probs: Tensor, second: Tensor) -> Tensor:
        plausible = log_probs >= log_probs.amax(1, keepdim=True) + self.log_threshold
        contrasted = torch.lerp(second, log_probs, 1 + self.weight)
        contrasted = contrasted.masked_fill(log_probs == -math.inf, -math.inf)
        scores = torch.where(plausible, contrasted, log_probs - IMPLAUSIBLE)
        return scores - scores.logsumexp(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)

    def input_source(self, source: Packed) -> Packed:
        target_only = self.tokenizer.has_target_languages_only
        if self.language is not None and target_only:
            source = source.with_values(self._replaced(source.values))
        if not self.empty:
            return source
        kept = {EOS, *self.languages.values(), *self.tokenizer.source_tags}
        sentences = [[token for token in ids.tolist() if token in kept] for ids in source.split()]
        return Packed.from_lists(sentences, source.values.device)

    def input_tokens(self, tokens: Tensor) -> Tensor:
        return tokens if self.language is None or self.tokenizer.has_target_languages_only else self._replaced(tokens)

    def _replaced(self, tokens: Tensor) -> Tensor:
        """Returns the tokens with `self.language` in place of every language token."""
        languages = torch.tensor(sorted(self.languages.values()), device=tokens.device)
        assert self.language is not None
        return tokens.masked_fill(torch.isin(tokens, languages), self.language)
