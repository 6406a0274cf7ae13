"""Random segmentations of a sentence: BPE-dropout, and samples of a unigram model.

The sampling of SentencePiece is not used: in version 0.2.3, two processes with the same seed get different samples.
Therefore, a resumed run would not be reproducible, and the processes of a run would get different ids.
"""

import bisect
import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from nmtkit.data.tokenizers.spm_model import user_defined_symbols
from nmtkit.data.tokenizers.tokenizer import SPACE_SYMBOL, SubwordModel

CACHED = 200_000  # largest number of cache entries; the key of an entry is (word, merges left out)


class SubwordSampler:
    """Replaces the ids of each word by a random segmentation of the same text.

    For a BPE model, `alpha` is the share of merges that are left out (BPE-dropout, Provilkov et al. 2020). For a
    unigram model, `alpha` is the smoothing exponent of the distribution of segmentations (Kudo 2018, section 3.3). Byte
    pieces, and symbols that a model never splits, do not change. Raises ValueError for a model that is neither BPE nor
    unigram. The message names `side`.
    """

    def __init__(self, model: SubwordModel, alpha: float, side: str) -> None:
        facts, processor = model.facts, model.processor
        if facts.model_type not in ("bpe", "unigram"):
            raise ValueError(
                f"--transforms bpe_dropout needs several segmentations of a word, but the {facts.model_type} "
                f"vocabulary of the {side} side has only one; leave bpe_dropout out, or preprocess with "
                "--model-type bpe or unigram"
            )
        self.alpha = alpha
        self.unigram = facts.model_type == "unigram"
        self.names = [processor.id_to_piece(token) for token in range(len(model))]
        special = (processor.is_byte, processor.is_unknown, processor.is_control, processor.is_unused)
        whole = set(user_defined_symbols(model.model))
        self.ids = {
            name: token
            for token, name in enumerate(self.names)
            if name not in whole and not any(test(token) for test in special)
        }
        self.scores = {name: processor.get_score(token) for name, token in self.ids.items()}
        self.longest = max(map(len, self.ids), default=1)
        # merges of characters cannot make a piece if one of its characters is not a piece, so the piece stays whole
        self.is_whole = [not self.ids.keys() >= {name, *name} for name in self.names]
        self._cache: dict[tuple[str, bytes], list[int]] = {}

    def __call__(self, ids: npt.NDArray[np.integer], generator: np.random.Generator) -> list[int]:
        """Returns the ids of a random segmentation of the sentence. `ids` and the result have no eos."""
        result: list[int] = []
        word = ""
        for token in ids.tolist():
            whole, name = self.is_whole[token], self.names[token]
            if word and (whole or name.startswith(SPACE_SYMBOL)):
                result += self._word(word, generator)
                word = ""
            if whole:
                result.append(token)
            else:
                word += name
        return result + (self._word(word, generator) if word else [])

    def _word(self, text: str, generator: np.random.Generator) -> list[int]:
        if self.unigram:
            return self._sampled(text, generator.random(len(text)).tolist())
        # upper bound of the number of tried merges: one per pair of neighbours, and two new pairs after each merge
        left_out = generator.random(3 * len(text)) < self.alpha
        key = (text, left_out.tobytes())
        if key not in self._cache:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[key] = self._merged(text, left_out.tolist())
        return self._cache[key]

    def _merged(self, text: str, left_out: Sequence[bool]) -> list[int]:
        """Merges characters in the order of the scores. Skips the n-th tried merge if `left_out[n]` is true."""
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
                continue  # `left` or `right` was already merged with a different neighbour
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
        """Draws a segmentation with a probability proportional to (product of the probabilities of its pieces)^alpha.

        First computes the total weight of all segmentations of each prefix of the text, then draws pieces from last to
        first. `numbers[n]` in [0, 1) decides the n-th draw.
        """
        sums = [0.0] + [-math.inf] * len(text)
        # for each end position: (start, log weight) of each piece with this end
        pieces: list[list[tuple[int, float]]] = [[] for _ in sums]
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
