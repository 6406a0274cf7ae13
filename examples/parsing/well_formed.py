"""Plug-in for search: every output is a well-formed tree over exactly the words of its sentence.

    nmtkit generate data-bin --path averaged.pt --plugin well_formed.py --logits-processors well_formed_trees

At each step the plug-in allows only tokens after which the output can still become such a tree within the longest
length. A rule of trees is a rule about the next token, so that beam search, sampling and ensembles all obey it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.config import Config, option
from nmtkit.data.tokenizer import BOS, EOS, SPACE_SYMBOL, UNK, Tokenizer
from nmtkit.layers.packed import Packed
from nmtkit.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState

# N rows of a search, V target vocabulary


@dataclass(frozen=True, kw_only=True)
class WellFormedConfig(Config):
    max_depth: int = option(60, "most constituents that are open at a time", min=1, max=1000)
    max_unary: int = option(4, "most constituents that open one after another without a word between", min=1, max=100)


class TreeTokens:
    """The target vocabulary of a tokenizer, by kind of token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [piece.removeprefix(SPACE_SYMBOL) for piece in tokenizer.target_pieces(range(tokenizer.target_size))]
        labels = {piece[1:]: id for id, piece in enumerate(pieces) if piece.startswith("(") and len(piece) > 1}
        closing = {piece[1:]: id for id, piece in enumerate(pieces) if piece.startswith(")") and len(piece) > 1}
        special = {UNK, BOS, EOS}
        words = [id for id, piece in enumerate(pieces) if piece and piece[0] not in "()" and id not in special]
        if not words or not labels or set(labels) - set(closing):
            raise ValueError(
                "well_formed_trees needs a target vocabulary of trees, in which each token is one piece: "
                "(LABEL, )LABEL, and XX or parts of speech; examples/parsing/prepare.py makes one"
            )
        self.preterminals = torch.zeros(len(pieces), dtype=torch.bool)  # V
        self.preterminals[words] = True
        self.opening = torch.tensor([labels[label] for label in labels])  # the token that opens label i
        self.closing = torch.tensor([closing[label] for label in labels])  # the token that closes label i
        self.label_of = torch.full((len(pieces),), -1)  # V: the label that a token opens
        self.label_of[self.opening] = torch.arange(len(labels))
        self.closes = torch.zeros(len(pieces), dtype=torch.bool)  # V
        self.closes[self.closing] = True


class TreeState(LogitsProcessorState):
    """What each row has written: open constituents, words covered, and brackets opened since the last word."""

    def __init__(
        self, tokens: TreeTokens, words: Tensor, longest: Tensor, beams: int, config: WellFormedConfig
    ) -> None:
        """`words` [N] counts the words of each sentence; `longest` [N] is the most tokens of an output, without eos."""
        super().__init__(beams)
        self.tokens, self.config = tokens, config
        self.words, self.longest = words, longest
        self.stack = torch.zeros(len(words), config.max_depth, dtype=torch.int64)  # N max_depth: labels
        self.depth, self.covered, self.opened, self.written = (torch.zeros_like(words) for _ in range(4))

    def append(self, tokens: Tensor) -> None:
        """Takes in a token [N] of each row. A row that has ended, or bos, changes nothing."""
        label = self.tokens.label_of[tokens]
        opens, closes, is_word = label >= 0, self.tokens.closes[tokens], self.tokens.preterminals[tokens]
        rows = opens.nonzero().flatten()
        self.stack[rows, self.depth[rows]] = label[rows]
        self.depth = self.depth + opens.long() - closes.long()
        self.covered = self.covered + is_word
        self.opened = torch.where(opens, self.opened + 1, 0)
        self.written = self.written + (opens | closes | is_word)

    def allowed(self) -> Tensor:
        """Returns the tokens that may come next: N V, bool."""
        left, room = self.words - self.covered, self.longest - self.written
        result = torch.zeros(len(self.words), len(self.tokens.label_of), dtype=torch.bool)
        inside, complete = self.depth > 0, (left == 0) & (self.written > 0)
        # a further bracket costs itself, its end, and the words and ends that are owed anyway
        may_open = (left > 0) & (self.depth < self.config.max_depth) & (self.opened < self.config.max_unary)
        may_open &= room >= left + self.depth + 2
        result[:, self.tokens.opening] = may_open[:, None]
        result |= (inside & (left > 0))[:, None] & self.tokens.preterminals
        # the root closes after the last word only
        may_close = inside & (self.opened == 0) & ((self.depth > 1) | (left == 0))
        rows = may_close.nonzero().flatten()
        result[rows, self.tokens.closing[self.stack[rows, self.depth[rows] - 1]]] = True
        result[:, EOS] = complete & ~inside
        # one root: nothing follows its end
        result[(complete & ~inside)[:, None] & (torch.arange(result.shape[1]) != EOS)] = False
        return result

    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        self.append(tokens.cpu())
        return log_probs.masked_fill(~self.allowed().to(log_probs.device), -math.inf)

    def reorder(self, beam_index: Tensor) -> None:
        index = beam_index.cpu()
        for name in ("words", "longest", "stack", "depth", "covered", "opened", "written"):
            setattr(self, name, getattr(self, name)[index])


@LOGITS_PROCESSORS.register("well_formed_trees", WellFormedConfig())
class WellFormedTrees(LogitsProcessor):
    """Allows only outputs that are trees over the sentence's words, with as many preterminals as words."""

    def __init__(self, config: WellFormedConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokens = TreeTokens(tokenizer)
        begins = [piece.startswith(SPACE_SYMBOL) for piece in tokenizer.source_pieces(range(tokenizer.source_size))]
        self.begins_word = torch.tensor(begins)  # source vocabulary, bool

    def start(self, source: Packed, max_length: Tensor, beams: int) -> TreeState:
        ids, layout = source.values.cpu(), source.layout
        words = torch.zeros(layout.sentences, dtype=torch.int64)
        words.index_add_(0, layout.segment_ids.cpu(), self.begins_word[ids].long())
        if bool((max_length < words + 2).any()):
            raise ValueError("an output of the longest length has no room for the words; raise --max-len-a")
        rows = words.repeat_interleave(beams), max_length.repeat_interleave(beams)
        return TreeState(self.tokens, *rows, beams, self.config)
