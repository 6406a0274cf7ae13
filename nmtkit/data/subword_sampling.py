"""Segmentations of a sentence at random: BPE-dropout, and samples of a unigram model.

SentencePiece's own sampling is not used: it gives another result in another process, whatever its seed (0.2.3), so that
a resumed run would not repeat itself and processes would not agree.
"""

import bisect
import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import sentencepiece

from nmtkit.data.spm_model import model_facts, user_defined_symbols
from nmtkit.data.tokenizer import SPACE_SYMBOL

CACHED = 200_000  # words with the merges that were left out


class SubwordSampler:
    """Segments ids anew at random, word by word; their text stays the same.

    `alpha` is the share of merges left out (BPE-dropout, Provilkov et al. 2020), or for a unigram model the smoothing
    of the distribution that segmentations are drawn from (Kudo 2018, section 3.3). Bytes and symbols that a model keeps
    whole are left as they are. Raises ValueError, naming `side` and what to do, for a model with one segmentation.
    """

    def __init__(self, model: bytes, alpha: float, side: str) -> None:
        facts = model_facts(model)
        if facts.model_type not in ("bpe", "unigram"):
            raise ValueError(
                f"--transforms bpe_dropout has no other segmentation to choose with a {facts.model_type} vocabulary, "
                f"as the {side} side has; leave it out, or preprocess with --model-type bpe or unigram"
            )
        self.alpha = alpha
        self.unigram = facts.model_type == "unigram"
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = range(processor.get_piece_size())
        whole = set(user_defined_symbols(model))
        special = (processor.is_byte, processor.is_unknown, processor.is_control, processor.is_unused)
        names = [processor.id_to_piece(token) for token in ids]
        self.is_whole = [any(test(token) for test in special) or names[token] in whole for token in ids]
        self.ids = {name: token for token, name in enumerate(names) if not self.is_whole[token]}
        self.scores = {name: processor.get_score(token) for name, token in self.ids.items()}
        self.longest = max(map(len, self.ids), default=1)
        # a piece with a character that is no piece itself cannot be made from characters
        self.is_whole = [
            kept or any(character not in self.ids for character in name)
            for kept, name in zip(self.is_whole, names, strict=True)
        ]
        self.names = names
        self._cache: dict[tuple[str, bytes], list[int]] = {}

    def __call__(self, ids: npt.NDArray[np.integer], generator: np.random.Generator) -> list[int]:
        """Returns the ids of another segmentation of the sentence, without eos."""
        result: list[int] = []
        word: list[int] = []
        for token in ids.tolist():
            whole = self.is_whole[token]
            if word and (whole or self.names[token].startswith(SPACE_SYMBOL)):
                result += self._word(word, generator)
                word = []
            if whole:
                result.append(token)
            else:
                word.append(token)
        return result + (self._word(word, generator) if word else [])

    def _word(self, word: list[int], generator: np.random.Generator) -> list[int]:
        text = "".join(self.names[token] for token in word)
        if self.unigram:
            return self._sampled(text, generator.random(len(text)).tolist())
        # each merge is tried at most once for each of its two neighbours, and once at the beginning
        left_out = generator.random(3 * len(text)) < self.alpha
        key = (text, left_out.tobytes())
        if key not in self._cache:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[key] = self._merged(text, left_out.tolist())
        return self._cache[key]

    def _merged(self, text: str, left_out: Sequence[bool]) -> list[int]:
        """Merges characters in the order of the scores; the n-th merge that is tried is left out where `left_out`."""
        symbols: list[str] = list(text)
        after, before = list(range(1, len(symbols) + 1)), list(range(-1, len(symbols) - 1))
        agenda: list[tuple[float, int, int, str]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right < len(symbols) and (merged := symbols[left] + symbols[right]) in self.ids:
                heapq.heappush(agenda, (-self.scores[merged], left, right, merged))

        for left in range(len(symbols) - 1):
            consider(left, left + 1)
        tried = 0
        while agenda:
            _, left, right, merged = heapq.heappop(agenda)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != merged:
                continue  # one of them has been merged with another
            tried += 1
            if left_out[tried - 1]:
                continue
            symbols[left], symbols[right] = merged, ""
            after[left] = after[right]
            if after[right] < len(symbols):
                before[after[right]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [self.ids[symbol] for symbol in symbols if symbol]

    def _sampled(self, text: str, numbers: Sequence[float]) -> list[int]:
        """Draws a segmentation with probability in proportion to the product of its pieces' to the power of alpha.

        Sums over all segmentations of each beginning, then draws pieces from the end, the n-th by `numbers[n]`.
        """
        sums = [0.0] + [-math.inf] * len(text)
        pieces: list[list[tuple[int, float]]] = [[] for _ in sums]  # that end here: where they begin, their weight
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - self.longest), end):
                score = self.scores.get(text[start:end])
                if score is not None:
                    pieces[end].append((start, sums[start] + self.alpha * score))
            most = max(weight for _, weight in pieces[end])
            sums[end] = most + math.log(sum(math.exp(weight - most) for _, weight in pieces[end]))
        result: list[int] = []
        end = len(text)
        while end:
            bounds = list(accumulate(math.exp(weight - sums[end]) for _, weight in pieces[end]))
            start, _ = pieces[end][min(bisect.bisect(bounds, numbers[len(result)]), len(bounds) - 1)]
            result.append(self.ids[text[start:end]])
            end = start
        return result[::-1]
