"""Encodes many lines of text at once: the fast path of preprocessing, with the same ids as `Tokenizer.encode_source`.

With a BPE or character model that splits at spaces, the pieces of a word do not depend on the neighbouring words. This
is true for every normaliser. Therefore, all words of a block are looked up in a table at once, and one call of
SentencePiece per block encodes the words that are not in the table. On English lines of 12 words, one core encodes
0.34 M lines/s if one word in twelve is new, and 0.9 M lines/s if all words are known. SentencePiece alone encodes
0.08 M lines/s. benchmarks/data.py measures the speed of the whole command `preprocess`.

With a unigram model, whole lines are encoded without a table. A unigram model adds up 32-bit scores along the line, and
rounding decides between two segmentations of a word with equal scores, such as x|xx and xx|x. A table of words would
need a test that no other segmentation of a word has almost the same score. NumPy needs 7 µs per word for this test, but
SentencePiece needs 4 µs for a whole line. The table had 0.83 times the speed of SentencePiece if one word in twelve was
new, and 4.6 times the speed if all words were known.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.tokenizers.tokenizer import EOS, SPACE_SYMBOL, UNK, SubwordModel, normalize
from nmtkit.text.encoded import Encoded, ranges, starts_of

COLUMNS = 8  # largest count of 8-byte numbers in the key of a word
# maximum bytes of a word; longer words, such as lines in scripts without spaces, seldom repeat
LONGEST = 8 * COLUMNS - 1
ABSENT = 0
FIRST_CAPACITY = 1 << 10
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, rounded to an odd number
PADDING = ~np.uint64(0) << np.arange(0, 64, 8, dtype=np.uint64)  # PADDING[n] fills all bytes from byte n on

WordIndices = npt.NDArray[np.int64]
WordNumbers = npt.NDArray[np.uint64]

CACHED_WORDS = 1 << 18  # maximum number of words in the table (about 30 MB); a larger table is cleared
WORDS_PER_LINE = 24  # number of words in a line for SentencePiece; longer lines need more memory


@dataclass(frozen=True, eq=False)
class WordPieces:
    """The pieces of each word of a text. Words are separated by spaces."""

    per_line: npt.NDArray[np.int64]  # number of words in each line
    first_piece: npt.NDArray[np.int64]  # position of the first piece of each word in its line
    pieces: npt.NDArray[np.int64]  # number of pieces of each word


class BatchEncoder:
    """Encodes text with one SentencePiece model. The ids have the type `dtype`."""

    def __init__(self, model: SubwordModel, dtype: str, cached_words: int = CACHED_WORDS) -> None:
        self._model, self._processor = model, model.processor
        self._dtype = np.dtype(dtype)
        self._capacity = cached_words
        pieces = [self._processor.id_to_piece(token) for token in range(len(self._processor))]
        special = [self._processor.is_unknown(token) or self._processor.is_byte(token) for token in range(len(pieces))]
        self._is_unknown = np.array(special)
        self._starts_word = np.array([piece.startswith(SPACE_SYMBOL) for piece in pieces])
        facts = model.facts
        self._rewrites = facts.rewrites
        space = self._processor.piece_to_id(SPACE_SYMBOL)
        self._has_words = facts.splits_at_spaces and facts.model_type == "word"
        if self._has_words:
            self._starts_word[UNK] = True
        # True if every word begins with a known piece that begins with SPACE_SYMBOL, and no piece spans two words.
        # Models of type "word" are excluded because they merge adjacent unknown words into one piece.
        self.splits_at_spaces = (
            facts.splits_at_spaces
            and not self._has_words
            and not (self._processor.is_unknown(space) or self._processor.is_unused(space))
            and not any(SPACE_SYMBOL in piece[1:] or " " in piece for piece in pieces)
        )
        self.can_align = self.splits_at_spaces or self._has_words  # whether `words` can be called
        self.encodes_by_word = self.splits_at_spaces and facts.model_type in ("bpe", "char")
        self._clear()

    def _clear(self) -> None:
        """Removes all words from the table. Index 0 stands for the end of a line, and its only id is eos."""
        self._table = WordTable()
        self._first, self._counts = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._ids = np.array([EOS], self._dtype)  # ids of all words, concatenated

    def encode(self, text: str) -> Encoded:
        """Encodes the lines of `text`. Every line must end in \\n."""
        text = self._model.prepared(text)
        if self.encodes_by_word:
            return self._by_word(text.encode())
        return Encoded(*self._encode_lines(text.split("\n")[:-1], add_eos=True))

    def _encode_lines(self, lines: list[str], add_eos: bool = False) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Returns the concatenated ids of all lines, and the number of ids in each line."""
        if not lines:
            return np.empty(0, self._dtype), np.empty(0, np.int64)
        encoded = self._model.encode_prepared(lines, add_eos)
        return encoded.ids.astype(self._dtype), encoded.lengths

    def _by_word(self, text: bytes) -> Encoded:
        if len(self._table) > self._capacity:
            self._clear()
        starts, lengths = _tokens(text)
        index = np.zeros(len(starts), np.int64)
        is_word = lengths > 0
        short = np.flatnonzero(is_word & (lengths <= LONGEST))
        index[short] = self._table.find(WordKeys.of(text, starts[short], lengths[short]))
        unknown = np.flatnonzero(is_word & (index == ABSENT))
        ends = (starts + lengths)[unknown].tolist()
        words = [text[start:end] for start, end in zip(starts[unknown].tolist(), ends, strict=True)]
        new = sorted(dict.fromkeys(words), key=lambda word: len(word) > LONGEST)  # words above LONGEST come last
        numbers = dict(zip(new, range(len(self._first), len(self._first) + len(new)), strict=True))
        index[unknown] = list(map(numbers.__getitem__, words))
        kept = [word for word in new if len(word) <= LONGEST]
        ids, counts = self._encode_words(new)
        self._first = np.concatenate((self._first, len(self._ids) + starts_of(counts)))
        self._counts, self._ids = np.concatenate((self._counts, counts)), np.concatenate((self._ids, ids))
        encoded = self._ids_of(index, ~is_word)
        if dropped := len(new) - len(kept):
            self._ids = self._ids[: self._first[-dropped]]
            self._first, self._counts = self._first[:-dropped], self._counts[:-dropped]
        self._table.add(WordKeys.of_words(kept))
        return encoded

    def _ids_of(self, index: npt.NDArray[np.int64], is_end: npt.NDArray[np.bool_]) -> Encoded:
        """Returns the encoded lines. `index` has the table index of each word and line end; `is_end` marks the ends."""
        counts = self._counts[index]
        ids = self._ids[ranges(self._first[index], counts)]
        return Encoded(ids, np.diff(np.cumsum(counts)[is_end], prepend=0))

    def _encode_words(self, words: list[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Returns the concatenated ids of all words, and the number of ids of each word.

        Words are encoded in lines of WORDS_PER_LINE words. The ids of a line are then split where a word begins.
        """
        groups = _groups([word.decode() for word in words])
        ids, _ = self._encode_lines(list(map(" ".join, groups)))
        begins = np.append(np.flatnonzero(self._starts_word[ids]), len(ids))
        last = np.cumsum(self._normalized_words(groups))  # number of normalised words up to the end of each word
        return ids, np.diff(begins[last], prepend=0)

    def _normalized_words(self, groups: list[list[str]]) -> npt.NDArray[np.int64]:
        """Returns the number of words that the normaliser makes of each word, which is almost always 1."""
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
        """Returns the number of pieces that are <unk> or a byte of a character outside the vocabulary."""
        return int(np.count_nonzero(self._is_unknown[encoded.ids]))

    def words(self, text: str, encoded: Encoded) -> WordPieces:
        """Returns the pieces of each word of `text`. `encoded` is the encoded text. Every line must end in \\n.

        Raises ValueError if the model is of type "word" and has merged adjacent unknown words into one piece.
        """
        assert self.can_align
        lines = [[word for word in line.split(" ") if word] for line in normalize(text).split("\n")[:-1]]
        parts = [word.translate(self._model.replacements).split(" ") for words in lines for word in words]
        owners = [index for index, word in enumerate(parts) for part in word if part]
        counts = self._normalized_words(_groups([part for word in parts for part in word if part]))
        normalized = np.bincount(owners, counts, len(parts)).astype(np.int64)  # number of normalised words of each word
        starts = np.flatnonzero(self._starts_word[encoded.ids])  # positions where normalised words start
        if self._has_words and len(starts) != normalized.sum():
            raise ValueError(
                "--alignments: the word model merges adjacent unknown words into one piece; give a larger "
                "--vocab-size, or --model-type bpe"
            )
        assert len(starts) == normalized.sum()
        line_ends = np.cumsum(encoded.lengths) - 1  # positions of eos
        line = np.searchsorted(line_ends, starts)
        ends = np.minimum(np.append(starts[1:], len(encoded.ids)), line_ends[line])
        first_piece, pieces = np.zeros_like(normalized), np.zeros_like(normalized)
        present = normalized > 0  # false for words that the normaliser removes
        last = (np.cumsum(normalized) - 1)[present]
        first = last + 1 - normalized[present]
        first_piece[present] = starts[first] - (line_ends + 1 - encoded.lengths)[line[first]]
        pieces[present] = ends[last] - starts[first]
        return WordPieces(np.array(list(map(len, lines)), np.int64), first_piece, pieces)


def _tokens(text: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the positions of all words and line feeds, in order, and their lengths in bytes (0 for a line feed)."""
    characters = np.frombuffer(text, np.uint8)
    line_feed = characters == ord("\n")
    separator = (characters == ord(" ")) | line_feed
    begins = ~separator
    begins[1:] &= separator[:-1]
    ends = separator.copy()
    ends[:1] = False
    ends[1:] &= ~separator[:-1]
    starts = np.flatnonzero(begins | line_feed)
    lengths = np.zeros_like(starts)
    lengths[begins[starts]] = np.flatnonzero(ends) - np.flatnonzero(begins)
    return starts, lengths


def _groups(words: list[str]) -> list[list[str]]:
    """Returns the words in groups of WORDS_PER_LINE."""
    return [words[start : start + WORDS_PER_LINE] for start in range(0, len(words), WORDS_PER_LINE)]


# --- the table of words -----------------------------------------------------------------------------------------------
# The key of a word is its UTF-8 text, divided into numbers of 8 bytes. The last number is padded with 0xFF, which never
# occurs in UTF-8. Therefore, two words with equal keys are equal, even if hashes collide. The hash table is an array of
# word indices, with linear probing.


@dataclass(frozen=True, eq=False)
class WordKeys:
    """The keys of words. A key is a sequence of numbers.

    Column i has two arrays: the indices of the words whose key has a number i, and number i of each of these words.
    """

    count: int
    columns: list[tuple[WordIndices | slice, WordNumbers]]

    @staticmethod
    def of(text: bytes, starts: WordIndices, lengths: WordIndices) -> "WordKeys":
        """Returns the keys of the words in `text` with these starts and lengths in bytes (at most LONGEST)."""
        # Row r has the text from byte r on, as 8-byte numbers. So for each byte of the text, some row has a number that
        # begins at this byte.
        rows = np.zeros((8, len(text) // 8 + COLUMNS + 1), "<u8")
        for row in range(min(8, len(text))):
            rows[row].view(np.uint8)[: len(text) - row] = np.frombuffer(text, np.uint8)[row:]
        position = (starts & 7) * rows.shape[1] + (starts >> 3)
        numbers, rest = rows.ravel(), lengths
        words: WordIndices | slice = slice(None)
        columns: list[tuple[WordIndices | slice, WordNumbers]] = []
        while len(rest):
            column = numbers.take(position)
            ends = np.flatnonzero(rest < 8)
            column[ends] |= PADDING[rest[ends]]
            columns.append((words, column))
            longer = np.flatnonzero(rest >= 8)
            words = longer if isinstance(words, slice) else words[longer]
            position, rest = position[longer] + 1, rest[longer] - 8
        return WordKeys(len(lengths), columns)

    def hashes(self) -> WordNumbers:
        hashes = np.zeros(self.count, np.uint64)
        for words, column in self.columns:
            mixed = (hashes[words] + column) * MULTIPLIER
            hashes[words] = mixed ^ (mixed >> np.uint64(32))
        return hashes * MULTIPLIER

    def equal(self, table: WordNumbers, rows: WordIndices) -> npt.NDArray[np.bool_]:
        """Returns a mask [words], true where row `rows[word]` of `table` [rows, COLUMNS] equals the key of the word."""
        equal = np.ones(self.count, np.bool_)
        for number, (words, column) in enumerate(self.columns):
            equal[words] &= table[rows[words], number] == column
        return equal

    @staticmethod
    def of_words(words: list[bytes]) -> "WordKeys":
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        return WordKeys.of(b"".join(words), starts_of(lengths), lengths)

    def select(self, chosen: WordIndices) -> "WordKeys":
        """Returns the keys of the words with the ascending indices `chosen`."""
        position = np.full(self.count, -1)
        position[chosen] = np.arange(len(chosen))
        columns: list[tuple[WordIndices | slice, WordNumbers]] = []
        for words, column in self.columns:
            new = position[words]
            there = new >= 0
            columns.append((new[there], column[there]))
        return WordKeys(len(chosen), columns)

    def write(self, table: WordNumbers) -> None:
        """Writes the key of word i into row i of `table`."""
        for number, (words, column) in enumerate(self.columns):
            table[words, number] = column


class WordTable:
    """Words of at most LONGEST bytes, numbered from 1 in the order of `add`. Index 0 stands for an absent word."""

    def __init__(self) -> None:
        self._count = 1
        self._keys: WordNumbers = np.zeros((FIRST_CAPACITY, COLUMNS), np.uint64)
        self._hashes: WordNumbers = np.zeros(FIRST_CAPACITY, np.uint64)
        self._slots = np.zeros(4 * FIRST_CAPACITY, np.int32)

    def __len__(self) -> int:
        return self._count - 1

    def find(self, keys: WordKeys) -> WordIndices:
        """Returns the index of each word, or ABSENT."""
        slots = self._first_slots(keys.hashes())
        indices = self._slots[slots].astype(np.int64)
        open_rows = np.flatnonzero((indices != ABSENT) & ~keys.equal(self._keys, indices))
        while len(open_rows):  # these slots hold different words, so the next slots are tried
            slots[open_rows] = (slots[open_rows] + 1) % len(self._slots)
            indices[open_rows] = self._slots[slots[open_rows]]
            there = open_rows[indices[open_rows] != ABSENT]
            open_rows = there[~keys.select(there).equal(self._keys, indices[there])]
        return indices

    def add(self, keys: WordKeys) -> None:
        """Adds words. The words must be distinct and not in the table yet."""
        new = np.arange(self._count, self._count + keys.count)
        while self._count + keys.count > len(self._keys):
            self._keys = np.concatenate((self._keys, np.zeros_like(self._keys)))
            self._hashes = np.concatenate((self._hashes, np.zeros_like(self._hashes)))
        keys.write(self._keys[new[0] : new[-1] + 1] if len(new) else self._keys[:0])
        self._hashes[new] = keys.hashes()
        self._count += keys.count
        if len(self._slots) < 2 * len(self._keys):
            self._slots, new = np.zeros(4 * len(self._keys), np.int32), np.arange(1, self._count)
        slots = self._first_slots(self._hashes[new])
        while len(new):
            empty = self._slots[slots] == ABSENT
            self._slots[slots[empty]] = new[empty]  # if several words have the same slot, one of them gets the slot
            left = self._slots[slots] != new
            new, slots = new[left], (slots[left] + 1) % len(self._slots)

    def _first_slots(self, hashes: WordNumbers) -> WordIndices:
        return (hashes >> np.uint64(65 - len(self._slots).bit_length())).astype(np.int64)
