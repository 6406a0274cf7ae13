"""Logits processors that run a second model in addition to the translation model, one step for each search step.

`lm_fusion` adds the log probabilities of a language model. `contrastive` prefers tokens that are likely for the
translation model and unlikely for a second model.

Sources: Gulcehre et al. 2015, "On Using Monolingual Corpora in Neural Machine Translation", section 4.1; Li et al.
2023, "Contrastive Decoding: Open-ended Text Generation as Optimization" (arXiv:2210.15097, section 3); O'Brien and
Lewis 2023, "Contrastive Decoding Improves Reasoning in Large Language Models" (arXiv:2309.09117, section 2); Sennrich
et al. 2024, "Mitigating Hallucinations and Off-target Machine Translation with Source-Contrastive and
Language-Contrastive Decoding" (arXiv:2309.07098).
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nmtkit.config import Config, option, suggestion
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS, Tokenizer
from nmtkit.models import building
from nmtkit.models.architectures.interface import DecoderState
from nmtkit.models.building import check_language_model
from nmtkit.models.layers.prepack import prepack
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState

# N rows of a search, V target vocabulary

IMPLAUSIBLE = 100.0  # subtracted from the log probability of implausible tokens; then only a constraint can force them


class SecondModelState(LogitsProcessorState):
    """The decoder state of the second model for the hypotheses of a search."""

    def __init__(self, processor: "SecondModel", state: DecoderState, beams: int) -> None:
        super().__init__(beams)
        self.processor, self.state = processor, state

    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        logits = self.processor.model.step(self.processor.input_tokens(tokens), self.state)
        return self.processor.combine(log_probs, logits.log_softmax(1, dtype=torch.float32))

    def reorder(self, beam_index: Tensor) -> None:
        self.state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        self.state.drop_finished(sentences)


class SecondModel(LogitsProcessor):
    """Combines the log probabilities of a search with the log probabilities of the model in the checkpoint `path`.

    For messages, `flag` is the flag that sets the checkpoint, and `advice` says how to get a checkpoint with the right
    pieces. Raises ValueError if the checkpoint has other target pieces than `tokenizer`.
    """

    def __init__(self, path: Path, flag: str, tokenizer: Tokenizer, advice: str) -> None:
        model, self.tokenizer = building.from_checkpoint(path)
        self.path, self.flag, self.model = path, flag, model.requires_grad_(False)
        self.models = [self.model]
        mine, other = (each.target_pieces(range(each.target_size)) for each in (self.tokenizer, tokenizer))
        if mine != other:
            raise ValueError(
                f"{flag} {path} has other target pieces than the translation model ({len(mine):,} and {len(other):,}); "
                f"{advice}"
            )
        self.device: torch.device | None = None  # device of the model; None before the first search

    @abstractmethod
    def combine(self, log_probs: Tensor, second: Tensor) -> Tensor:
        """Returns the log probabilities [N, V] by which the search ranks the next tokens.

        `log_probs` comes from the search, and `second` from the second model. Both are log probabilities in fp32
        [N, V], and this method may overwrite both.
        """

    def input_source(self, source: Packed) -> Packed:
        """Returns the source that the second model reads."""
        return source

    def input_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens [N] that the second model reads."""
        return tokens

    def start(self, source: Packed, max_length: Tensor, beams: int) -> SecondModelState:
        device = source.values.device
        if self.device is None and device.type == "cpu":
            with torch.inference_mode():
                prepack(self.model, "fp32")
        if self.device != device:
            self.device = device
            self.model.to(device)
        memory = self.model.encode(self.input_source(source))
        return SecondModelState(self, self.model.start(memory, beams), beams)


@dataclass(frozen=True, kw_only=True)
class LMFusionConfig(Config):
    """A language model and its weight."""

    lm: Path | None = option(
        None, "checkpoint of a language model with the same target vocabulary", metavar="RUN|FILE", checkpoint=True
    )
    lm_weight: float = option(
        0.2, "weight of the log probabilities of the language model; the translation model has weight 1", min=0, max=100
    )


@LOGITS_PROCESSORS.register("lm_fusion", LMFusionConfig())
class LMFusion(SecondModel):
    """Ranks outputs y by log p(y | x) + weight * log p_lm(y). Both log probabilities include eos.

    The language model keeps its state between the steps of a search.

    Raises ValueError if there is no checkpoint, if the checkpoint is not a language model, or if the checkpoint has
    other target pieces than `tokenizer`.
    """

    def __init__(self, config: LMFusionConfig, tokenizer: Tokenizer) -> None:
        if config.lm is None:
            raise ValueError("--logits-processors lm_fusion needs --lm FILE, the checkpoint of a language model")
        advice = "preprocess the text of the language model with --tokenizer-from CHECKPOINT of the translation model"
        super().__init__(config.lm, "--lm", tokenizer, advice)
        check_language_model(config.lm, self.model)
        self.weight = config.lm_weight

    def combine(self, log_probs: Tensor, second: Tensor) -> Tensor:
        return log_probs.add_(second, alpha=self.weight)


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(Config):
    """The contrasted model, its weight, and the input that it reads."""

    contrast: Path | None = option(
        None,
        "checkpoint, with the same target vocabulary, whose mistakes are avoided: a smaller or less trained model, or "
        "the translation model itself with another input",
        metavar="RUN|FILE",
        checkpoint=True,
    )
    contrast_weight: float = option(0.5, "weight w of the contrasted model", min=0, max=100)
    contrast_threshold: float = option(
        0.1,
        "share of the probability of the best token; tokens with a smaller share lose 100 of their log probability and "
        "are hardly ever chosen",
        min=0,
        max=1,
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

    Raises ValueError if there is no checkpoint, if the checkpoint has other target pieces than `tokenizer`, or if the
    checkpoint does not have the language `contrast_lang`.
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
            known = suggestion(code, sorted(self.languages)) if self.languages else "it has no language tokens"
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
