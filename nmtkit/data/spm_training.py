"""The tokenizer of a new dataset: a seeded sample of its text, of bounded size, and SentencePiece trained on it."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from nmtkit.data import corpus
from nmtkit.data.tokenizer import BOS, EOS, SPACE_SIGN, UNK, normalize

# Threads change the sums of unigram training in the last digits: a fixed number gives the same model everywhere.
TRAINING_THREADS = 8
# A line with one of these is passed over by SentencePiece's trainer, which uses them itself.
TRAINER_RESERVED = str.maketrans({"\t": " ", "▅": " ", "\0": " "})


def train_model(lines: Iterable[str], vocab_size: int, model_type: str = "bpe", tags: Sequence[str] = ()) -> bytes:
    """A SentencePiece model of raw `lines`; `tags` become symbols that stand before a line.

    Raises ValueError when the text is too small or too varied for `vocab_size`, naming a size that would do.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=(normalize(line.translate(TRAINER_RESERVED)) for line in lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=model_type != "word",  # a word vocabulary has unknown words; that is what it is for
            normalization_rule_name="identity",
            user_defined_symbols=[SPACE_SIGN + tag for tag in tags],
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            num_threads=TRAINING_THREADS,
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_training_error(str(error), vocab_size, model_type)) from error
    return model.getvalue()


def _training_error(message: str, vocab_size: int, model_type: str) -> str:
    largest = re.search(r"value <= (\d+)", message)
    if largest:
        return f"the text is too small for --vocab-size {vocab_size}; the largest that would do is {largest[1]}"
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", message)
    if smallest:
        return f"--vocab-size {vocab_size} is less than its characters and bytes need; the smallest is {smallest[1]}"
    if "char_model_trainer" in message:
        return f"--vocab-size {vocab_size} has no room for characters beside the bytes and marks that it always holds"
    if "sentences_.empty()" in message:
        return "there is no text to train a tokenizer on: every line is empty"
    return f"SentencePiece could not train a {model_type} model of {vocab_size} entries: {message}"


# --- the sample -----------------------------------------------------------------------------------------------------


class LineSample:
    """A uniform sample of `limit` of the lines it is shown, the same for the same lines and seed.

    Every line has a random number, a function of (seed, its index); the lines with the smallest numbers are kept.
    """

    def __init__(self, limit: int, seed: int) -> None:
        self._limit = limit
        self._seed = seed
        self._seen = 0
        self._threshold = np.uint64(2**64 - 1)
        self._numbers: list[npt.NDArray[np.uint64]] = []
        self._lines: list[str] = []

    def show(self, lines: list[str], max_bytes: int) -> None:
        """Lines that are empty, or longer than `max_bytes`, are not taken."""
        numbers = random_numbers(self._seed, self._seen, len(lines))
        self._seen += len(lines)
        rows = np.flatnonzero(numbers <= self._threshold)
        taken = [row for row in rows.tolist() if lines[row].strip() and len(lines[row].encode()) <= max_bytes]
        self._lines += [lines[row] for row in taken]
        self._numbers.append(numbers[taken])
        if len(self._lines) > 2 * self._limit:
            self._prune()

    def _prune(self) -> None:
        numbers = np.concatenate(self._numbers)
        if len(numbers) > self._limit:
            self._threshold = np.partition(numbers, self._limit - 1)[self._limit - 1]
        keep = numbers <= self._threshold
        self._lines = [line for line, kept in zip(self._lines, keep.tolist(), strict=True) if kept]
        self._numbers = [numbers[keep]]

    def lines(self) -> list[str]:
        """The sample, in the order of the text."""
        if self._numbers:
            self._prune()
        return self._lines


def random_numbers(seed: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """A random 64-bit number for each of the indices first … first + count - 1 (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed % (1 << 64))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def sample_pairs(
    files: Sequence[tuple[Path, Path]], limit: int, seed: int, max_bytes: int
) -> tuple[list[str], list[str]]:
    """Up to `limit` lines of each side of several corpora, streamed.

    Raises ValueError naming file and line for bytes that are no UTF-8, and both files and counts for files of
    different line counts.
    """
    samples = LineSample(limit, seed), LineSample(limit, seed + 1)
    for pair in files:
        counts = [0, 0]
        for side, path in enumerate(pair):
            for lines in _line_lists(path):
                counts[side] += len(lines)
                samples[side].show(lines, max_bytes)
        corpus.check_line_counts(pair, counts)
    return samples[0].lines(), samples[1].lines()


def _line_lists(path: Path) -> Iterator[list[str]]:
    number = 1
    rest = b""
    with corpus.open_bytes(path) as file:
        while chunk := corpus.read(file, corpus.CHUNK, path):
            end = chunk.rfind(b"\n") + 1
            if not end:
                rest += chunk
                continue
            lines = corpus.decode(rest + chunk[: end - 1], path, number).split("\n")
            yield lines
            number += len(lines)
            rest = chunk[end:]
    if rest:
        yield corpus.decode(rest, path, number).split("\n")
