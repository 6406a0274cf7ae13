"""Plug-in for search: every output is a well-formed tree over exactly the words of its sentence.

    nmtkit generate data-bin --path averaged.pt --plugin well_formed.py --logits-processors well_formed_trees

At each step, the plug-in allows only tokens after which the output can still become such a tree within the maximum
length. The plug-in restricts only the next token, so that it works with beam search, sampling and ensembles.

`--tag-dictionary train.mrg` also restricts the parts of speech: a word of the training trees only gets a part of speech
that it has there (the tag dictionary of Ratnaparkhi 1996). This keeps a model from skipping a word, because the tags of
the following words would then not be allowed.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.extend import (
    BOS,
    EOS,
    LOGITS_PROCESSORS,
    SPACE_SYMBOL,
    UNK,
    Config,
    LogitsProcessor,
    LogitsProcessorState,
    Packed,
    Tokenizer,
    option,
)

# N rows of a search, V target vocabulary


@dataclass(frozen=True, kw_only=True)
class WellFormedConfig(Config):
    max_depth: int = option(60, "maximum number of constituents that are open at a time", min=1, max=1000)
    max_unary: int = option(4, "maximum number of constituents that open without a word between", min=1, max=100)
    tag_dictionary: Path | None = option(
        None, "file of trees; its words get only parts of speech that they have in it", metavar="FILE.mrg"
    )


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


class TagDictionary:
    """The parts of speech of each word in a file of trees."""

    def __init__(self, path: Path, tokenizer: Tokenizer, tokens: TreeTokens) -> None:
        pieces = tokenizer.target_pieces(range(tokenizer.target_size))
        ids = {piece.removeprefix(SPACE_SYMBOL): id for id, piece in enumerate(pieces) if tokens.preterminals[id]}
        self.tags: dict[str, set[int]] = defaultdict(set)
        for tag, word in re.findall(r"\(([^\s()]+) ([^\s()]+)\)", path.read_text(encoding="utf-8")):
            if tag in ids:
                self.tags[word].add(ids[tag])
        if not self.tags:
            raise ValueError(f"{path}: no word has a part of speech of the target vocabulary, {', '.join(ids)}")
        self.tokenizer, self.preterminals = tokenizer, tokens.preterminals

    def allowed(self, sentences: list[list[int]]) -> Tensor:
        """Returns the tags that each word may have: [sentences, words, V], bool. An unknown word may have all tags."""
        words = [self.tokenizer.decode_source(ids).split(" ") for ids in sentences]
        result = self.preterminals.repeat(len(words), max(map(len, words)), 1)
        for sentence, row in zip(words, result, strict=True):
            for word, tags in zip(sentence, row, strict=False):
                if known := self.tags.get(word):
                    tags[:] = False
                    tags[list(known)] = True
        return result


class TreeState(LogitsProcessorState):
    """The state of each row: open constituents, number of covered words, and brackets opened since the last word."""

    def __init__(
        self, tokens: TreeTokens, words: Tensor, longest: Tensor, tags: Tensor, beams: int, config: WellFormedConfig
    ) -> None:
        """Takes the number of words of each row (`words` [N]) and the maximum length of its output (`longest` [N]).

        `longest` does not count eos. `tags` [B, words, V] says which tags each word of each sentence may have.
        """
        super().__init__(beams)
        self.tokens, self.config = tokens, config
        self.words, self.longest, self.tags = words, longest, tags
        self.sentence = torch.arange(len(tags)).repeat_interleave(beams)  # N: index into `tags`
        self.stack = torch.zeros(len(words), config.max_depth, dtype=torch.int64)  # N max_depth: labels
        self.depth, self.covered, self.opened, self.written = (torch.zeros_like(words) for _ in range(4))

    def append(self, tokens: Tensor) -> None:
        """Updates the state with the newest token [N] of each row. bos, and tokens of finished rows, change nothing."""
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
        # room for a new bracket and its end, besides the remaining words and the ends of open constituents
        may_open = (left > 0) & (self.depth < self.config.max_depth) & (self.opened < self.config.max_unary)
        may_open &= room >= left + self.depth + 2
        result[:, self.tokens.opening] = may_open[:, None]
        next_word = self.covered.clamp(max=self.tags.shape[1] - 1)
        result |= (inside & (left > 0))[:, None] & self.tags[self.sentence, next_word]
        # the root can close only after the last word
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
        for name in ("words", "longest", "sentence", "stack", "depth", "covered", "opened", "written"):
            setattr(self, name, getattr(self, name)[index])


@LOGITS_PROCESSORS.register("well_formed_trees", WellFormedConfig())
class WellFormedTrees(LogitsProcessor):
    """Allows only outputs that are trees over the words of the sentence, with as many preterminals as words."""

    def __init__(self, config: WellFormedConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokens = TreeTokens(tokenizer)
        begins = [piece.startswith(SPACE_SYMBOL) for piece in tokenizer.source_pieces(range(tokenizer.source_size))]
        self.begins_word = torch.tensor(begins)  # source vocabulary, bool
        path = config.tag_dictionary
        self.dictionary = None if path is None else TagDictionary(path, tokenizer, self.tokens)

    def start(self, source: Packed, max_length: Tensor, beams: int) -> TreeState:
        ids, layout = source.values.cpu(), source.layout
        words = torch.zeros(layout.sentences, dtype=torch.int64)
        words.index_add_(0, layout.segment_ids.cpu(), self.begins_word[ids].long())
        if bool((max_length < words + 2).any()):
            raise ValueError("the maximum length of an output is too small for the words; raise --max-len-a")
        tags = self.tokens.preterminals.expand(layout.sentences, 1, -1)
        if self.dictionary is not None:
            tags = self.dictionary.allowed([ids.tolist() for ids in ids.split(layout.lengths.tolist())])
        rows = words.repeat_interleave(beams), max_length.repeat_interleave(beams)
        return TreeState(self.tokens, *rows, tags, beams, self.config)
