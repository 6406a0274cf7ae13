"""Identifies the languages of all lines of a block at once, with the model of py3langid.

py3langid runs a finite automaton over the bytes of a line, counts the features that its states report, and adds up a
weight for each feature and language (Lui and Baldwin 2012). Here NumPy runs the automaton over all lines of a block in
parallel. On 50,000 real lines, py3langid takes 9 times as long with all languages, and 13 times as long with 14
languages. `tests/cleaning/test_language.py` compares the probabilities with py3langid.
"""

import contextlib
import copy
import importlib.metadata
import shutil
import unicodedata
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nmtkit.config.extras import imported
from nmtkit.config.files import new_folder, user_cache
from nmtkit.text.languages import same_language

Probabilities = npt.NDArray[np.float32]  # [lines, languages]
MAX_BYTES = 200  # only this many bytes at the beginning of a line are read
MIN_LINES, MIN_LETTERS = 20, 12  # a text is judged only if MIN_LINES of its lines have at least MIN_LETTERS letters
EXCHANGED = 0.85  # two texts are exchanged if more than this share of lines is in the language of the other side
CLEAR = 0.6  # mean probability above which a text clearly has a language
ARRAYS = "next", "rows", "features", "weights", "prior", "classes"  # names of the files of the model in the cache
BUFFER = 1 << 13  # number of features whose weights are read at once


class Identifier(Protocol):
    """Gives the probability of each language for each line."""

    @property
    def languages(self) -> list[str]:
        """The language code of each column of the probabilities."""

    def probabilities(self, lines: Sequence[str]) -> Probabilities: ...


class BatchIdentifier:
    """The model of py3langid. Raises ImportError if the package is missing."""

    def __init__(self) -> None:
        try:
            model = _model()
        except ImportError as error:
            raise ImportError("the filters named language and swapped need pip install 'nmtkit[data]'") from error
        self._next, self._rows, self._features = model["next"], model["rows"], model["features"]
        self._weights, self._prior = model["weights"], model["prior"]
        self._set_classes(model["classes"].tolist())

    def restricted(self, languages: Collection[str]) -> "BatchIdentifier":
        """Returns an identifier of only these languages. The new identifier is faster: it reads fewer weights."""
        result = copy.copy(self)
        rows = [index for index, column in enumerate(self._column) if self.languages[column] in languages]
        classes = [self.languages[self._column[index]] for index in rows]
        result._set_classes(classes)
        result._weights, result._prior = np.ascontiguousarray(self._weights[:, rows]), self._prior[rows]
        return result

    def _set_classes(self, classes: list[str]) -> None:
        self.languages = list(dict.fromkeys(classes))
        self._column = [self.languages.index(name) for name in classes]  # several classes can have the same language
        self._first = [classes.index(name) for name in self.languages]

    def probabilities(self, lines: Sequence[str]) -> Probabilities:
        """Returns the probability of each language for each line, as py3langid computes them."""
        texts = [_bytes_of(line) for line in lines]
        lengths = np.array([len(text) for text in texts], np.int64)
        rows, features, counts = self._counts(texts, lengths)
        scores = np.tile(self._prior, (len(lines), 1))
        weights = np.log1p(np.arange(int(counts.max(initial=0)) + 1, dtype=np.float32))[counts]
        buffer = np.empty((BUFFER, len(self._column)), np.float32)  # fits into the CPU cache
        begins = np.diff(rows, prepend=-1) > 0  # marks the first feature of each line
        begins[::BUFFER] = True
        for start in range(0, len(rows), BUFFER):
            part = slice(start, start + BUFFER)
            weighted = np.take(self._weights, features[part], 0, out=buffer[: len(features[part])], mode="clip")
            weighted *= weights[part, None]
            first = np.flatnonzero(begins[part])
            scores[rows[part][first]] += np.add.reduceat(weighted, first, 0)
        without = np.ones(len(lines), np.bool_)
        without[rows] = False
        scores[without] = 0  # a line without features has equal scores for all languages
        scores /= np.sqrt(np.maximum(lengths, 1))[:, None].astype(np.float32)
        np.exp(scores - scores.max(1, keepdims=True), out=scores)
        scores /= scores.sum(1, keepdims=True)
        result = scores[:, self._first]
        for index in np.setdiff1d(np.arange(len(self._column)), self._first).tolist():
            result[:, self._column[index]] += scores[:, index]
        return result

    def _counts(self, texts: list[bytes], lengths: npt.NDArray[np.int64]) -> tuple[Any, Any, Any]:
        """Returns three arrays: the line, the id and the count of each feature in each line, sorted by line and id."""
        order = np.argsort(-lengths, kind="stable")
        width = int(lengths.max(initial=0))
        if not width:
            return (np.empty(0, np.int64),) * 3
        padded = b"".join([texts[row].ljust(width, b"\0") for row in order.tolist()])
        table = np.ascontiguousarray(np.frombuffer(padded, np.uint8).reshape(-1, width).T)  # [positions, lines]
        # number of lines that are longer than each position
        active = np.searchsorted(-lengths[order], -np.arange(width), side="left").tolist()
        states = np.zeros(len(texts), np.uint32)
        visited = []  # for each position, the states of the lines that are longer than the position
        for column, count in zip(table, active, strict=True):
            moves = self._rows.take(states[:count], mode="clip")
            moves += column[:count]
            states = self._next.take(moves, mode="clip")
            visited.append(states)
        features = self._features.take(np.concatenate(visited), mode="clip")
        # A key has the line in its high bits and the feature in its low bits. Keys of 32 bits are sorted faster.
        bits = len(self._weights).bit_length()
        size = 4 if len(texts) << bits <= 1 << 32 else 8
        lines = order.astype(f"u{size}") << bits
        keys = np.concatenate([lines[:count] for count in active])
        keys |= features.astype(f"i{size}").view(f"u{size}")  # all bits are 1 for a state without a feature
        keys.sort()
        keys = keys[: np.searchsorted(keys, np.iinfo(keys.dtype).max)]
        first = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
        distinct, counts = keys[first].astype(np.int64), np.diff(first, append=len(keys))
        return distinct >> bits, distinct & (1 << bits) - 1, counts


def _bytes_of(line: str) -> bytes:
    if line.isupper():
        line = line.lower()
    if line.isascii():
        return line[:MAX_BYTES].encode()
    return unicodedata.normalize("NFC", line).encode()[:MAX_BYTES]


class FastTextIdentifier:
    """A model file of fastText, such as lid.176.ftz, read by the package fasttext-predict.

    Raises ImportError if the package is missing, and FileNotFoundError if the file is missing.
    """

    def __init__(self, path: Path) -> None:
        fasttext = imported("fasttext", need="--lid-model needs pip install fasttext-predict")
        if not path.is_file():
            raise FileNotFoundError(f"--lid-model {path}: no such file")
        self._path = path.absolute()
        self._model: Any = fasttext.load_model(str(path))
        self._columns: dict[str, int] = {}  # language -> column of the probabilities

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the state without the model, which cannot be pickled."""
        return FastTextIdentifier, (self._path,), {"_columns": self._columns}

    @property
    def languages(self) -> list[str]:
        return list(self._columns)

    def probabilities(self, lines: Sequence[str]) -> Probabilities:
        predictions = []  # index of the line, column of the language, probability
        for row, line in enumerate(lines):
            labels, values = self._model.predict(line.replace("\n", " "), 5)
            for label, value in zip(labels, values, strict=True):
                column = self._columns.setdefault(label.removeprefix("__label__"), len(self._columns))
                predictions.append((row, column, value))
        result = np.zeros((len(lines), len(self._columns)), np.float32)
        for row, column, value in predictions:
            result[row, column] = min(value, 1)
        return result


@cache
def _model() -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of py3langid's model. Reads an unpacked copy in nmtkit's cache, or writes a new copy.

    py3langid takes 0.5 s to unpack its model. The files of the copy are mapped into memory, so processes share them.
    Raises ImportError if the package is missing.
    """
    folder = user_cache() / f"py3langid-{importlib.metadata.version('py3langid')}"
    with contextlib.suppress(OSError, ValueError, EOFError):  # no copy yet, or a damaged copy
        return {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS}
    arrays = _unpacked()
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError, ValueError), new_folder(folder) as fresh:  # the cache may be read-only
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array)
    return arrays


def _unpacked() -> dict[str, npt.NDArray[Any]]:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return {
        "next": np.asarray(model.tk_nextmove),
        "rows": np.asarray(model.tk_row, np.int64) << 8,
        "features": np.asarray(model.tk_output, np.int32),  # -1 without a feature
        "weights": np.asarray(model.nb_ptc, np.float32),
        "prior": np.asarray(model.nb_pc, np.float32),
        "classes": np.asarray(model.nb_classes),
    }


@cache
def identifier(path: Path | None) -> Identifier:
    """Returns the identifier of py3langid, or of the model file `path`."""
    return BatchIdentifier() if path is None else FastTextIdentifier(path)


def _judged(*texts: Sequence[str]) -> tuple[BatchIdentifier, list[list[str]]] | None:
    """Returns the model of py3langid, and the lines of each text that have at least MIN_LETTERS letters.

    The result is None if py3langid is missing, or if a text has fewer than MIN_LINES such lines.
    """
    judged = [[line for line in text if sum(map(str.isalpha, line)) >= MIN_LETTERS] for text in texts]
    if min(map(len, judged)) < MIN_LINES:  # checked first, because reading the model takes half a second
        return None
    with contextlib.suppress(ImportError):
        return BatchIdentifier(), judged
    return None


def exchanged(first: Sequence[str], second: Sequence[str], codes: tuple[str, str]) -> float | None:
    """Returns the share of lines in the language of the other text, if two texts are exchanged. Otherwise returns None.

    `codes` are the languages that `first` and `second` should have. Only these two languages are compared. The result
    is the smaller share of the two texts. The result is also None for a language that py3langid does not know, and if
    `_judged` returns None.
    """
    if (judged := _judged(first, second)) is None:
        return None
    model, texts = judged
    a, b = (columns_of(model.languages, code) for code in codes)
    if not a or not b or a == b:
        return None
    shares = []
    for lines, own, other in ((texts[0], a, b), (texts[1], b, a)):
        probabilities = model.probabilities(lines)
        shares.append(float((probabilities[:, other].sum(1) > probabilities[:, own].sum(1)).mean()))
    return min(shares) if min(shares) > EXCHANGED else None


def different_languages(lines: Sequence[str], references: Sequence[str]) -> tuple[str, str] | None:
    """Returns the language codes of two texts, if both languages are clear and different. Otherwise returns None.

    The result is also None if `_judged` returns None.
    """
    if (judged := _judged(lines, references)) is None:
        return None
    model, texts = judged
    means = [model.probabilities(text).mean(0) for text in texts]
    best = [int(mean.argmax()) for mean in means]
    is_clear = all(
        mean[own] > CLEAR and mean[other] < 1 - CLEAR for mean, own, other in zip(means, best, best[::-1], strict=True)
    )
    first, second = (model.languages[own] for own in best)
    return (first, second) if is_clear and not same_language(first, second) else None


def columns_of(languages: Sequence[str], code: str) -> list[int]:
    """Returns the indices of the codes in `languages` that are the language of `code` (`same_language`)."""
    return [index for index, name in enumerate(languages) if same_language(name, code)]
