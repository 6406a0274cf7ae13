"""A NumPy hash table from words to indices that looks up all words of a text at once.

The key of a word is its UTF-8 text, divided into numbers of 8 bytes. The last number is padded with 0xFF, which never
occurs in UTF-8. Therefore, two words with equal keys are equal, even if hashes collide. The hash table is an array of
word indices, with linear probing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]

COLUMNS = 8  # numbers in a key
# maximum bytes of a word; longer words, such as lines in scripts without spaces, seldom repeat
LONGEST = 8 * COLUMNS - 1
ABSENT = 0
FIRST_CAPACITY = 1 << 10
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, rounded to an odd number
PADDING = ~np.uint64(0) << np.arange(0, 64, 8, dtype=np.uint64)  # PADDING[n] fills a number that holds n bytes


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of words. Column i has the indices of the words that have an i-th number, and these numbers."""

    count: int
    columns: list[tuple[Indices | slice, Numbers]]

    @staticmethod
    def of(text: bytes, starts: Indices, lengths: Indices) -> "Keys":
        """Returns the keys of the words in `text` with these starts and lengths in bytes (at most LONGEST)."""
        # Row r has the text from byte r on. Therefore, one row has an aligned number that begins at any given byte.
        rows = np.zeros((8, len(text) // 8 + COLUMNS + 1), "<u8")
        for row in range(min(8, len(text))):
            rows[row].view(np.uint8)[: len(text) - row] = np.frombuffer(text, np.uint8)[row:]
        position = (starts & 7) * rows.shape[1] + (starts >> 3)
        numbers, rest = rows.ravel(), lengths
        words: Indices | slice = slice(None)
        columns: list[tuple[Indices | slice, Numbers]] = []
        while len(rest):
            column = numbers.take(position)
            ends = np.flatnonzero(rest < 8)
            column[ends] |= PADDING[rest[ends]]
            columns.append((words, column))
            longer = np.flatnonzero(rest >= 8)
            words = longer if isinstance(words, slice) else words[longer]
            position, rest = position[longer] + 1, rest[longer] - 8
        return Keys(len(lengths), columns)

    def hashes(self) -> Numbers:
        hashes = np.zeros(self.count, np.uint64)
        for words, column in self.columns:
            mixed = (hashes[words] + column) * MULTIPLIER
            hashes[words] = mixed ^ (mixed >> np.uint64(32))
        return hashes * MULTIPLIER

    def equal(self, table: Numbers, rows: Indices) -> npt.NDArray[np.bool_]:
        """Returns a mask [words], true where row `rows[word]` of `table` [rows, COLUMNS] equals the key of the word."""
        equal = np.ones(self.count, np.bool_)
        for number, (words, column) in enumerate(self.columns):
            equal[words] &= table[rows[words], number] == column
        return equal

    @staticmethod
    def of_words(words: list[bytes]) -> "Keys":
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        return Keys.of(b"".join(words), np.cumsum(lengths) - lengths, lengths)

    def select(self, chosen: Indices) -> "Keys":
        """Returns the keys of the words with the ascending indices `chosen`."""
        position = np.full(self.count, -1)
        position[chosen] = np.arange(len(chosen))
        columns: list[tuple[Indices | slice, Numbers]] = []
        for words, column in self.columns:
            new = position[words]
            there = new >= 0
            columns.append((new[there], column[there]))
        return Keys(len(chosen), columns)

    def write(self, table: Numbers) -> None:
        """Writes the key of word i into row i of `table`."""
        for number, (words, column) in enumerate(self.columns):
            table[words, number] = column


class WordTable:
    """Words of at most LONGEST bytes, numbered from 1 in the order of `add`. Index 0 stands for an absent word."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return self._count - 1

    def clear(self) -> None:
        self._count = 1
        self._keys: Numbers = np.zeros((FIRST_CAPACITY, COLUMNS), np.uint64)
        self._hashes: Numbers = np.zeros(FIRST_CAPACITY, np.uint64)
        self._slots = np.zeros(4 * FIRST_CAPACITY, np.int32)

    def find(self, keys: Keys) -> Indices:
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

    def add(self, keys: Keys) -> None:
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

    def _first_slots(self, hashes: Numbers) -> Indices:
        return (hashes >> np.uint64(65 - len(self._slots).bit_length())).astype(np.int64)
