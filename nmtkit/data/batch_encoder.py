"""Text to ids, many lines at a time: the fast path of preprocessing, with the same ids as `Tokenizer.encode_source`.

Where a word's pieces do not depend on its neighbours (a BPE or character model that splits at spaces, whatever its
normaliser), words are looked up in a dictionary from word to the bytes of its ids. New words go to SentencePiece in one
call per block. A unigram model encodes whole lines: the rounding of its sums along a line decides ties, and at 4 µs a
line, where BPE takes 11, there is little to gain. Measured on 29,000 English and as many German lines of 12 words, one
core: 0.7 M lines/s when all words are known, against 0.11 M lines/s of SentencePiece's batch call;
benchmarks/preprocess_speed.py measures the whole.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import sentencepiece

from nmtkit.data.spm_model import model_facts
from nmtkit.data.tokenizer import EOS, SPACE_SYMBOL, Encoded, normalize

CACHED_WORDS = 1 << 17  # words of a cache, about 30 MB
CACHED_WORD_LENGTH = 64  # longer ones (whole lines, in scripts without spaces) would not repeat
WORDS_PER_LINE = 64  # in a call; SentencePiece's heap grows with the line


@dataclass(frozen=True, eq=False)
class Words:
    """The words of lines, which spaces separate: their number in each line, and the first piece and pieces of each."""

    per_line: npt.NDArray[np.int64]
    first_piece: npt.NDArray[np.int64]
    pieces: npt.NDArray[np.int64]


class BatchEncoder:
    """Encodes with one SentencePiece model to ids of `dtype`."""

    def __init__(self, model: bytes, dtype: str, cached_words: int = CACHED_WORDS) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._dtype = np.dtype(dtype)
        self._capacity = cached_words
        self._words = self._empty_cache()
        pieces = [self._processor.id_to_piece(token) for token in range(len(self._processor))]
        special = [self._processor.is_unknown(token) or self._processor.is_byte(token) for token in range(len(pieces))]
        self._is_unknown = np.array(special)
        self._starts_word = np.array([piece.startswith(SPACE_SYMBOL) for piece in pieces])
        facts = model_facts(model)
        self._rewrites = facts.rewrites
        space = self._processor.piece_to_id(SPACE_SYMBOL)
        # Every word begins with a known piece that begins with the symbol, and no piece spans words, as it does where a
        # model of words merges unknown ones.
        self.splits_at_spaces = (
            facts.splits_at_spaces
            and facts.model_type != "word"
            and not (self._processor.is_unknown(space) or self._processor.is_unused(space))
            and not any(SPACE_SYMBOL in piece[1:] or " " in piece for piece in pieces)
        )
        # a unigram model adds up scores along the line, and their rounding decides ties such as x|xx and xx|x
        self.encodes_by_word = self.splits_at_spaces and facts.model_type in ("bpe", "char")

    def _empty_cache(self) -> dict[str, bytes]:
        # a line feed between spaces is the word that ends a sentence; runs of spaces make empty words
        return {"\n": np.array([EOS], self._dtype).tobytes(), "": b""}

    def encode(self, text: str) -> Encoded:
        """Encodes the lines of `text`, each of which ends in \\n."""
        text = normalize(text)
        if self.encodes_by_word:
            return self._by_word(text)
        rows = self._processor.encode(text.split("\n")[:-1], return_type="numpy", add_eos=True, num_threads=1)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return Encoded((np.concatenate(rows) if rows else np.empty(0, np.int32)).astype(self._dtype), lengths)

    def _by_word(self, text: str) -> Encoded:
        words = text.replace("\n", " \n ").split(" ")
        if len(self._words) > self._capacity:
            self._words = self._empty_cache()
        known = self._words
        new = list(set(words).difference(known))
        known.update(zip(new, self._encode_words(new), strict=True))
        ids = np.frombuffer(b"".join(map(known.__getitem__, words)), self._dtype)
        for word in new:
            if len(word) > CACHED_WORD_LENGTH:
                del known[word]
        ends = np.flatnonzero(ids == EOS) + 1  # no text is encoded as eos
        return Encoded(ids, np.diff(ends, prepend=0))

    def _encode_words(self, words: list[str]) -> list[bytes]:
        """Returns the ids of each word, encoded as lines of many words and cut where a word begins."""
        if not words:
            return []
        groups = _groups(words)
        lines = list(map(" ".join, groups))
        ids = np.concatenate(self._processor.encode(lines, return_type="numpy", num_threads=1)).astype(self._dtype)
        begins = np.append(np.flatnonzero(self._starts_word[ids]), len(ids)) * self._dtype.itemsize
        last = np.cumsum(self._normalized_words(groups))  # of each word, in words as normalised
        flat = ids.tobytes()
        return [flat[start:end] for start, end in pairwise([0, *begins[last].tolist()])]

    def _normalized_words(self, groups: list[list[str]]) -> npt.NDArray[np.int64]:
        """Returns the number of words that the model's normaliser makes of each word: one but for exotic ones."""
        counts = np.ones(sum(map(len, groups)), np.int64)
        if self._rewrites:
            lines = list(map(" ".join, groups))
            for index, (line, normalized) in enumerate(zip(lines, self._processor.normalize(lines), strict=True)):
                if normalized != SPACE_SYMBOL + line.replace(" ", SPACE_SYMBOL):
                    start = index * WORDS_PER_LINE
                    for row, word in enumerate(self._processor.normalize(groups[index]), start):
                        counts[row] = word.count(SPACE_SYMBOL)
        return counts

    def unknown_pieces(self, encoded: Encoded) -> int:
        """Returns the number of pieces that are unknown, or single bytes of characters outside the vocabulary."""
        return int(np.count_nonzero(self._is_unknown[encoded.ids]))

    def words(self, text: str, encoded: Encoded) -> Words:
        """Returns the words of lines that each end in \\n, and the pieces of each word in the encoded lines."""
        assert self.splits_at_spaces
        lines = [[word for word in line.split(" ") if word] for line in normalize(text).split("\n")[:-1]]
        normalized = self._normalized_words(_groups([word for words in lines for word in words]))
        starts = np.flatnonzero(self._starts_word[encoded.ids])  # of words as normalised
        assert len(starts) == normalized.sum()
        line_ends = np.cumsum(encoded.lengths) - 1  # the position of eos
        line = np.searchsorted(line_ends, starts)
        ends = np.minimum(np.append(starts[1:], len(encoded.ids)), line_ends[line])
        first_piece, pieces = np.zeros_like(normalized), np.zeros_like(normalized)
        present = normalized > 0  # the normaliser removes some words
        last = (np.cumsum(normalized) - 1)[present]
        first = last + 1 - normalized[present]
        first_piece[present] = starts[first] - (line_ends + 1 - encoded.lengths)[line[first]]
        pieces[present] = ends[last] - starts[first]
        return Words(np.array(list(map(len, lines)), np.int64), first_piece, pieces)


def _groups(words: list[str]) -> list[list[str]]:
    """Returns the words in groups of WORDS_PER_LINE."""
    return [words[start : start + WORDS_PER_LINE] for start in range(0, len(words), WORDS_PER_LINE)]
