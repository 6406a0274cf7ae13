"""What one sentence's translation must or must not hold, as ids, and how a search keeps to it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.data.tokenizer import BOS, EOS, UNK
from nmtkit.generation.options import SearchOptions

# B sentences, R hypotheses (rows) of each, N = B x R, V target vocabulary, t tokens so far, A phrases, L their length

Phrase = tuple[int, ...]
NONE, ANY = -1, -2  # no token; matches every token


@dataclass(frozen=True)
class Constraints:
    """Target ids, without eos. An avoided phrase is avoided as these pieces; others may spell the same text."""

    prefix: Phrase = ()  # the translation begins with it
    required: tuple[Phrase, ...] = ()  # it holds each of these, without overlap
    avoided: tuple[Phrase, ...] = ()  # it holds none of these

    def check(self, options: SearchOptions) -> None:
        """Raises ValueError when the constraints contradict each other or `options`, naming both."""
        if any(not phrase for phrase in (*self.required, *self.avoided)):
            raise ValueError("a required or avoided phrase is empty")
        if any(UNK in phrase for phrase in (self.prefix, *self.required)):
            raise ValueError("a prefix or required phrase has characters that the target vocabulary does not know")
        if not self.required:
            return
        for name, wanted in (
            ("--sampling", options.sampling),
            ("--diverse-groups", options.diverse_groups > 1),
            ("--no-repeat-ngram", options.no_repeat_ngram > 0),
            ("avoided phrases", bool(self.avoided)),
        ):
            if wanted:
                raise ValueError(f"required phrases and {name} cannot be combined")


NO_CONSTRAINTS = Constraints()


class LogitsProcessor:
    """Which continuations are allowed: lengths, special tokens, prefixes, avoided phrases, repeated n-grams."""

    def __init__(self, options: SearchOptions, longest: Sequence[int], constraints: Sequence[Constraints]) -> None:
        self.options = options
        needed = [len(one.prefix) + sum(map(len, one.required)) for one in constraints]
        # B: the most tokens, without eos; raised where the constraints need more
        self.max_length = torch.tensor([max(pair) for pair in zip(longest, needed, strict=True)])
        self.prefix = _table([list(one.prefix) for one in constraints])  # B L, NONE after the end
        phrases = max((len(one.avoided) for one in constraints), default=0)
        padded = [[*one.avoided, *[()] * (phrases - len(one.avoided))] for one in constraints]
        length = max((len(phrase) for one in padded for phrase in one), default=0)
        rows = [[[ANY] * (length - len(phrase)) + list(phrase) for phrase in one] for one in padded]
        self.avoided = torch.tensor(rows, dtype=torch.int64).view(
            len(constraints), phrases, length
        )  # B A L, right-aligned

    def apply(self, steps: Tensor, history: Tensor) -> Tensor:
        """`steps` (log probabilities N V) with -inf where a continuation of `history` B R t is not allowed."""
        length, rows = history.shape[2:][0], history.shape[1]
        forced = self.prefix[:, length] if length < self.prefix.shape[1] else None
        kept = None
        if forced is not None:
            target = forced.clamp_min(0).repeat_interleave(rows).to(steps.device)[:, None]
            kept = steps.gather(1, target)
        steps[:, BOS] = -math.inf
        if not self.options.replace_unknown:
            steps[:, UNK] = -math.inf
        if length < self.options.min_len:
            steps[:, EOS] = -math.inf
        if self.avoided.numel():
            self.avoid(steps, history)
        if self.options.no_repeat_ngram:
            no_repeats(steps, history.flatten(0, 1), self.options.no_repeat_ngram)
        if (full := self.max_length <= length).any():
            self.only(steps, full, rows, EOS)
        if forced is not None and kept is not None:
            which = (forced >= 0).repeat_interleave(rows).to(steps.device)[:, None]
            steps = torch.where(which, steps.new_full((), -math.inf).expand_as(steps), steps)
            steps.scatter_(1, target, torch.where(which, kept, steps.gather(1, target)))
        return steps

    def only(self, steps: Tensor, sentences: Tensor, rows: int, token: int) -> None:
        """Leaves these sentences [B, bool] nothing but `token`."""
        kept = steps[:, token].clone()
        steps.masked_fill_(sentences.repeat_interleave(rows).to(steps.device)[:, None], -math.inf)
        steps[:, token] = kept

    def avoid(self, steps: Tensor, history: Tensor) -> None:
        """Forbids the last token of each avoided phrase whose others have just been produced."""
        sentences, rows, length = history.shape
        before = self.avoided.shape[2] - 1
        recent = torch.nn.functional.pad(history, (before, 0), value=NONE)[:, :, length:]  # B R L-1
        begun = self.avoided[:, None, :, :before]
        hit = ((begun == ANY) | (begun == recent[:, :, None])).all(3)  # B R A
        last = self.avoided[:, None, :, before].expand(-1, rows, -1)
        hit &= last >= 0
        row = torch.arange(sentences * rows).view(sentences, rows, 1).expand_as(hit)[hit]
        steps[row.to(steps.device), last[hit].to(steps.device)] = -math.inf

    def drop_finished(self, sentences: Tensor) -> None:
        self.max_length, self.prefix = self.max_length[sentences], self.prefix[sentences]
        self.avoided = self.avoided[sentences]


def no_repeats(steps: Tensor, history: Tensor, size: int) -> None:
    """Forbids in `steps` N V what would make a run of `size` tokens that `history` N t has already."""
    if history.shape[1] < size:
        return
    runs = history.unfold(1, size, 1)  # N t-size+1 size
    recent = history[:, history.shape[1] - size + 1 :]
    hit = (runs[:, :, : size - 1] == recent[:, None]).all(2)
    row = torch.arange(len(history))[:, None].expand_as(hit)[hit]
    steps[row.to(steps.device), runs[:, :, size - 1][hit].to(steps.device)] = -math.inf


def _table(lists: list[list[int]]) -> Tensor:
    """Lists of ids as one tensor, NONE after the end of each."""
    width = max(map(len, lists), default=0)
    return torch.tensor([ids + [NONE] * (width - len(ids)) for ids in lists], dtype=torch.int64).view(len(lists), width)
