"""The rules of a search, which every engine follows: length penalty, stop rule, lengths, forbidden continuations.

`gpu_beam_search.py` uses the same functions as `beam_search.Search`, apart from `ConstraintProcessor`, whose
tensors change their shapes. Tests compare the compiled search with these functions, option by option.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK, Tokenizer
from nmtkit.translation.search.constraints import NO_CONSTRAINTS, Constraints
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.scorer import SearchModel
from nmtkit.translation.search.types import Segment

# B sentences, R hypotheses of each, N = B x R rows, L tokens so far, V target vocabulary

TokenCount = TypeVar("TokenCount", float, Tensor)  # a number of tokens, or a number for each sentence

NONE = -1  # in tensors of phrases, NONE matches no token


# --- scores and lengths -----------------------------------------------------------------------------------------------


def length_penalty(tokens: TokenCount, lenpen: float, *, language_tokens: int) -> TokenCount:
    """Returns the divisor of the log probability of an output of `tokens` tokens, eos included.

    The first `language_tokens` tokens of the output do not count in its length.

    Source: Wu et al. 2016, equation 14, without the coverage term; Vaswani et al. 2017, section 6.1.
    """
    length: Any = tokens.double() if isinstance(tokens, Tensor) else tokens
    penalty: TokenCount = ((5.0 + length - language_tokens) / 6.0) ** lenpen
    return penalty


def is_over(log_probability: Tensor, largest_penalty: Tensor, threshold: Tensor, greedy: bool) -> Tensor:
    """Returns a bool for each sentence, [B]: whether no open hypothesis can become a best finished hypothesis.

    `log_probability` [B, R] has the log probabilities of the open hypotheses. `largest_penalty` [B] is the largest
    divisor of their final scores: the divisor of the next length or of the maximum length. `threshold` [B] is the score
    of the worst kept hypothesis, -inf until enough hypotheses are finished. Log probabilities only fall, so the best
    score within reach is the current log probability divided by the largest penalty. A greedy search is over as soon as
    its hypothesis ends.
    """
    over = log_probability.amax(1) / largest_penalty <= threshold
    return over | (threshold > -math.inf) if greedy else over


def open_hypotheses(options: SearchOptions) -> int:
    """Returns the number of open hypotheses of a sentence, R."""
    return options.nbest if options.sampling else options.beam


def max_lengths(
    options: SearchOptions, sources: Iterable[int], constraints: Iterable[Constraints], models: Iterable[SearchModel]
) -> list[int]:
    """Returns the maximum number of tokens of each output, without eos. `sources` are the source tokens with eos.

    The options limit pieces: language tokens of the output are added, and tokens before the text of the source do not
    count. The positions of the models limit the outputs. If the constraints of an output need more tokens, the
    maximum is the number that they need. `pipeline.ModelInput` checks that the models have these positions.
    """
    limits = [model.max_target_positions - 1 for model in models if model.max_target_positions is not None]
    lengths = []
    for source, sentence in zip(sources, constraints, strict=True):
        pieces = source - 1 - sentence.source_tokens
        wanted = max(options.min_len, int(options.max_len_a * pieces + options.max_len_b)) + sentence.language_tokens
        longest = min([wanted, *limits])
        lengths.append(longest if sentence is NO_CONSTRAINTS else max(longest, sentence.needed_tokens))
    return lengths


# --- forbidden continuations ------------------------------------------------------------------------------------------


def forbidden_tokens(options: SearchOptions) -> list[int]:
    """Returns the tokens that no output contains. Eos, which is forbidden below `options.min_len`, is not included."""
    return [BOS] if options.unkpen is not None or options.replace_unknown else [BOS, UNK]


class ConstraintProcessor:
    """Forbids continuations because of length, special tokens, prefixes, avoided phrases and repeated n-grams."""

    def __init__(self, options: SearchOptions, max_length: Sequence[int], constraints: Sequence[Constraints]) -> None:
        self.options = options
        self.max_length = torch.tensor(max_length)  # B: maximum tokens of an output, from `max_lengths`
        width = max(len(sentence.prefix) for sentence in constraints)
        # the same number for all sentences, because all sentences have the same target language
        self.language_tokens = max(sentence.language_tokens for sentence in constraints)
        self.prefix = torch.tensor(  # B width, with NONE after the end of each prefix
            [[*sentence.prefix, *[NONE] * (width - len(sentence.prefix))] for sentence in constraints],
            dtype=torch.int64,
        ).view(len(constraints), width)
        self.after_prefix = [(len(sentence.prefix), list(sentence.after_prefix)) for sentence in constraints]
        self.avoided = [sentence.avoided for sentence in constraints]
        self.shortest = int(self.max_length.min())
        self.forbidden = torch.tensor(forbidden_tokens(options))
        self.forbidden_at_first = torch.tensor([*forbidden_tokens(options), EOS])  # until the minimum length

    def apply(self, log_probs: Tensor, history: Tensor) -> Tensor:
        """Returns `log_probs` [N, V] with -inf where a continuation of `history` [B, R, L] is not allowed."""
        rows, length = history.shape[1:]
        forced = None
        if length < self.prefix.shape[1]:
            forced = self.prefix[:, length].repeat_interleave(rows).to(log_probs.device)[:, None]  # N 1
            kept = log_probs.gather(1, forced.clamp_min(0))
            if length < self.language_tokens:
                kept.zero_()
        too_short = length - self.language_tokens < self.options.min_len
        if self.forbidden.device != log_probs.device:
            self.forbidden, self.forbidden_at_first = (
                tokens.to(log_probs.device) for tokens in (self.forbidden, self.forbidden_at_first)
            )
        log_probs.index_fill_(1, self.forbidden_at_first if too_short else self.forbidden, -math.inf)
        if self.options.unkpen is not None:
            log_probs[:, UNK] -= self.options.unkpen
        for sentence, (end, allowed) in enumerate(self.after_prefix):
            if length == end and allowed:
                own = log_probs[sentence * rows : (sentence + 1) * rows]
                columns = torch.tensor(allowed, device=own.device)
                kept_scores = own.index_select(1, columns)
                own.fill_(-math.inf).index_copy_(1, columns, kept_scores)
        if any(self.avoided):
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
        """Forbids the tokens after which the text of a hypothesis contains an avoided text."""
        rows = history.shape[1]
        for sentence, avoided in enumerate(self.avoided):
            for row in range(rows) if avoided else ():
                tokens = history[sentence, row].tolist()
                forbidden = [token for text in avoided for token in text.forbidden(tokens)]
                columns = torch.tensor(forbidden, dtype=torch.int64, device=log_probs.device)
                log_probs[sentence * rows + row].index_fill_(0, columns, -math.inf)

    def drop_finished(self, kept: Tensor) -> None:
        self.max_length, self.prefix = self.max_length[kept], self.prefix[kept]
        self.after_prefix = [self.after_prefix[index] for index in kept.tolist()]
        self.avoided = [self.avoided[index] for index in kept.tolist()]
        self.shortest = int(self.max_length.min())


def forbid_repeats(log_probs: Tensor, history: Tensor, size: int) -> None:
    """Forbids in `log_probs` [N, V] each token that would repeat `size` successive tokens of `history` [N, L]."""
    if history.shape[1] < size:
        return
    runs = history.unfold(1, size, 1)  # N L-size+1 size
    recent = history[:, history.shape[1] - size + 1 :]
    hit = (runs[:, :, : size - 1] == recent[:, None]).all(2)
    row = torch.arange(len(history))[:, None].expand_as(hit)[hit]
    log_probs[row.to(log_probs.device), runs[:, :, size - 1][hit].to(log_probs.device)] = -math.inf


# --- loops ------------------------------------------------------------------------------------------------------------

# A run of k is a text that stands k times in direct succession. An output is a loop if it has a run of more than
# LONGEST_RUN repetitions, and of more repetitions than any run of its source and of its prefix. Runs do not depend on
# the segmentation: a word that stands four times in a source stands four times in its translation, with any pieces.
# Two kinds of runs are not loops: the digits of a number, because a source may write the number in another way (for
# example 1 trillion), and signs (punctuation and symbols) if the source has a series of signs, such as the dots of
# a table of contents.
# None of 109,155 human translations (captions and package descriptions) is a loop by this rule. A small model wrote 9
# loops for 1,000 captions, and all 9 are wrong.

LONGEST_RUN = 3  # with --no-repeat-ngram LONGEST_RUN, no output has a longer run
LONGEST_NUMBER = 24  # maximum characters of a number that is not a loop; 1.000.000.000.000.000 has 21
NUMBER = re.compile(r"\S*\d\S*|(?:\s?\d{3})+")  # without spaces, or in groups of three digits
ROW_OF_SIGNS = re.compile(r"(?:[^\w\s]|_)(?:\W|_)*")


def longest_run(symbols: str, least: int = 1) -> int:
    """Returns the number of repetitions of the longest run in `symbols`, or `least` if no run is longer."""
    while (found := first_run(symbols, least)) is not None:
        least = len(found[0]) // len(found[1])
    return least


def first_run(symbols: str, least: int) -> re.Match[str] | None:
    """Returns the first run of more than `least` repetitions; group 1 is the repeated text."""
    return re.search(rf"(.+?)\1{{{least},}}", symbols, re.DOTALL)


def is_loop(tokens: Sequence[int], segment: Segment, tokenizer: Tokenizer) -> bool:
    """Returns whether an output for `segment` is a loop. `tokens` are ids without eos.

    Each <unk> counts as a different piece, because it can stand for any word.
    """
    if len(tokens) - len(set(tokens)) < LONGEST_RUN or max(Counter(tokens).values()) <= LONGEST_RUN:
        return False
    symbols = as_symbols(tokens)
    if first_run(symbols, LONGEST_RUN) is None:
        return False
    source = tokenizer.decode_source(segment.ids)
    least = max(LONGEST_RUN, word_runs(source), longest_run(as_symbols(segment.constraints.prefix)))
    start = 0
    while (found := first_run(symbols[start:], least)) is not None:
        first, start = start + found.start(), start + found.end()
        if not may_repeat(tokenizer.decode_target(tokens[first:start]), source):
            return True
    return False


def word_runs(text: str) -> int:
    """Returns the number of repetitions of the longest run in a source without its signs and spaces.

    "no, no, No, no" has a run of four, although no comma follows the last word.
    """
    return longest_run("".join(filter(str.isalnum, text.casefold())))


def may_repeat(run: str, source: str) -> bool:
    """Returns whether a run is part of a number, or a series of signs at most twice as long as in the source."""
    if any(map(str.isalpha, run)):
        return False
    if any(map(str.isdigit, run)):
        return len(run) <= LONGEST_NUMBER and NUMBER.fullmatch(run.strip()) is not None
    rows = max((_signs(row) for row in ROW_OF_SIGNS.findall(source)), default=0)
    return _signs(run) <= 2 * rows


def _signs(text: str) -> int:
    """Returns the number of characters without spaces. The character … counts as three dots."""
    return len("".join(unicodedata.normalize("NFKC", text).split()))


def as_symbols(tokens: Sequence[int]) -> str:
    """Returns a character for each token: equal characters for equal tokens, except <unk>."""
    unknown = max(tokens, default=0) + 1
    return "".join(chr(unknown + index if token == UNK else token) for index, token in enumerate(tokens))


def searches_again(options: SearchOptions) -> bool:
    """Returns whether the source of a loop is decoded again, with `no_repeat_ngram` set to LONGEST_RUN."""
    return not (options.keep_loops or options.no_repeat_ngram or options.sampling or options.score_reference)
