"""Constraints on the translation of a sentence, as ids, and the processor that forbids continuations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.config import changed_flags, check_flags
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.translation.search.options import CONSTRAINTS_RULE, SearchOptions

# B sentences, R hypotheses of each, N = B x R rows, L tokens so far, V target vocabulary

Phrase = tuple[int, ...]
NONE, ANY = -1, -2  # NONE matches no token; ANY matches every token


class PieceEdges(NamedTuple):
    """Two masks of the target pieces: pieces that begin within a word, and pieces that end within a word.

    Two successive pieces belong to the same word if the first piece ends, and the second piece begins, within a word.
    """

    begins: Sequence[bool]
    ends: Sequence[bool]


@dataclass(frozen=True)
class RequiredPhrase:
    """A phrase that a translation must contain in one of several `alternatives`.

    With `whole_words`, an occurrence within a longer word does not count: "▁Hund e" does not contain "▁Hund".
    """

    alternatives: tuple[Phrase, ...]
    whole_words: bool = False


@dataclass(frozen=True)
class Constraints:
    """Constraints on a translation, as target ids without eos.

    An avoided phrase is forbidden only as this sequence of pieces; other pieces can spell the same text.
    """

    prefix: Phrase = ()  # the translation begins with this phrase
    language_tokens: int = 0  # number of language tokens at the start of the prefix; scores exclude them
    required: tuple[RequiredPhrase, ...] = ()  # the translation contains all these phrases, without overlap
    avoided: tuple[Phrase, ...] = ()  # the translation contains none of these phrases

    def check(self, options: SearchOptions) -> None:
        """Raises ValueError when the constraints contradict each other or `options`. The message names both."""
        required = [alternative for phrase in self.required for alternative in phrase.alternatives]
        if any(not phrase for phrase in (*required, *self.avoided)):
            raise ValueError("a required or avoided phrase is empty")
        if any(UNK in phrase for phrase in (self.prefix, *required)):
            raise ValueError("a prefix or required phrase has characters that the target vocabulary does not know")
        if self.required:
            if self.avoided:
                raise ValueError("required phrases and avoided phrases cannot be combined")
            rules = [CONSTRAINTS_RULE]
            check_flags(rules, changed_flags(options), {"--constraints"})


NO_CONSTRAINTS = Constraints()


class ConstraintProcessor:
    """Forbids continuations because of length, special tokens, prefixes, avoided phrases and repeated n-grams."""

    def __init__(self, options: SearchOptions, max_length: Sequence[int], constraints: Sequence[Constraints]) -> None:
        self.options = options
        needed = [
            len(sentence.prefix) + sum(max(map(len, phrase.alternatives)) for phrase in sentence.required)
            for sentence in constraints
        ]
        # B: maximum tokens of an output without eos, or more if the constraints need more
        self.max_length = torch.tensor([max(pair) for pair in zip(max_length, needed, strict=True)])
        width = max(len(sentence.prefix) for sentence in constraints)
        # the same for all sentences, because all have the same language
        self.language_tokens = max(sentence.language_tokens for sentence in constraints)
        self.prefix = torch.tensor(  # B width, with NONE after the end of each prefix
            [[*sentence.prefix, *[NONE] * (width - len(sentence.prefix))] for sentence in constraints],
            dtype=torch.int64,
        ).view(len(constraints), width)
        self.avoided = aligned_phrases([sentence.avoided for sentence in constraints])
        self.shortest = int(self.max_length.min())
        forbidden = [BOS] if options.unkpen is not None or options.replace_unknown else [BOS, UNK]
        self.forbidden, self.forbidden_at_first = torch.tensor(forbidden), torch.tensor([*forbidden, EOS])

    @property
    def reads_history(self) -> bool:
        """Whether `apply` uses the tokens of its `history`, and not only their number."""
        return bool(self.avoided.numel() or self.options.no_repeat_ngram)

    def apply(self, log_probs: Tensor, history: Tensor) -> Tensor:
        """Returns `log_probs` [N, V] with -inf where a continuation of `history` [B, R, L] is not allowed."""
        rows, length = history.shape[1:]
        forced = None
        if length < self.prefix.shape[1]:
            forced = self.prefix[:, length].repeat_interleave(rows).to(log_probs.device)[:, None]  # N 1
            kept = log_probs.gather(1, forced.clamp_min(0))
            if length < self.language_tokens:
                kept.zero_()
        if self.forbidden.device != log_probs.device:
            self.forbidden, self.forbidden_at_first = (
                tokens.to(log_probs.device) for tokens in (self.forbidden, self.forbidden_at_first)
            )
        log_probs.index_fill_(
            1, self.forbidden_at_first if length < self.options.min_len else self.forbidden, -math.inf
        )
        if self.options.unkpen is not None:
            log_probs[:, UNK] -= self.options.unkpen
        if self.avoided.numel():
            self.forbid_avoided(log_probs, history)
        if self.options.no_repeat_ngram:
            forbid_repeats(log_probs, history.flatten(0, 1), self.options.no_repeat_ngram)
        if length >= self.shortest:
            full = self.max_length <= length
            eos = log_probs[:, EOS].clone()
            log_probs.masked_fill_(full.repeat_interleave(rows).to(log_probs.device)[:, None], -math.inf)
            log_probs[:, EOS] = eos
        if forced is not None:
            log_probs = log_probs.masked_fill(forced >= 0, -math.inf)
            target = forced.clamp_min(0)
            log_probs.scatter_(1, target, torch.where(forced >= 0, kept, log_probs.gather(1, target)))
        return log_probs

    def forbid_avoided(self, log_probs: Tensor, history: Tensor) -> None:
        """Forbids the last token of each avoided phrase whose other tokens have just been produced."""
        sentences, rows, length = history.shape
        before = self.avoided.shape[2] - 1
        recent = F.pad(history, (before, 0), value=NONE)[:, :, length:]  # B R before
        begun = self.avoided[:, None, :, :before]
        hit = ((begun == ANY) | (begun == recent[:, :, None])).all(3)  # B R phrases
        last = self.avoided[:, None, :, before].expand(-1, rows, -1)
        hit &= last >= 0
        row = torch.arange(sentences * rows).view(sentences, rows, 1).expand_as(hit)[hit]
        log_probs[row.to(log_probs.device), last[hit].to(log_probs.device)] = -math.inf

    def drop_finished(self, kept: Tensor) -> None:
        self.max_length, self.prefix, self.avoided = self.max_length[kept], self.prefix[kept], self.avoided[kept]
        self.shortest = int(self.max_length.min())


def aligned_phrases(phrases: Sequence[Sequence[Phrase]]) -> Tensor:
    """Returns the phrases of each sentence as one tensor [B, phrases, tokens], padded with ANY at the start."""
    width = max((len(phrase) for sentence in phrases for phrase in sentence), default=0)
    aligned = torch.full((len(phrases), max(map(len, phrases)), width), ANY)
    for row, sentence in enumerate(phrases):
        for column, phrase in enumerate(sentence):
            aligned[row, column, width - len(phrase) :] = torch.tensor(phrase)
    return aligned


def forbid_repeats(log_probs: Tensor, history: Tensor, size: int) -> None:
    """Forbids in `log_probs` [N, V] each token that would repeat `size` successive tokens of `history` [N, L]."""
    if history.shape[1] < size:
        return
    runs = history.unfold(1, size, 1)  # N L-size+1 size
    recent = history[:, history.shape[1] - size + 1 :]
    hit = (runs[:, :, : size - 1] == recent[:, None]).all(2)
    row = torch.arange(len(history))[:, None].expand_as(hit)[hit]
    log_probs[row.to(log_probs.device), runs[:, :, size - 1][hit].to(log_probs.device)] = -math.inf
