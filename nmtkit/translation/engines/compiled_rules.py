"""Rules of the compiled search: forbidden continuations of a hypothesis, and tokens drawn from the distribution.

`rules.ConstraintProcessor` and `beam_search.draw` have the same rules. A token is a column of the shortlist of
its sentence, or a target piece if there are no shortlists.
"""

from typing import NamedTuple

import numpy as np

from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.translation.engines.compiled_code import Array, inner
from nmtkit.translation.engines.compiled_kernels import OUTPUTS, block_maxima, exponentials

INFINITY = np.inf
SPACE, LINE_FEED = 32, 10


class Ragged(NamedTuple):
    """Lists of different lengths: list i is values[starts[i]:starts[i + 1]]."""

    values: Array
    starts: Array


class AvoidedTexts(NamedTuple):
    """The avoided texts of all sentences, in bytes.

    In `pieces`, the lists of text i begin at list 2 x texts.starts[i]. There are two lists for each number k: they are
    for hypotheses that end with the first k bytes of the text. For k = 0, the first list has the pieces that contain
    the text, and the second list is empty. For k > 0, the first list has the pieces that begin with the rest of the
    text (from byte k on), and the second list has the pieces that begin with a space and the rest. Lists are sorted.
    """

    texts: Ragged
    pieces: Ragged
    spelled: Ragged  # the bytes of each target piece, for one or more vocabularies
    vocabularies: Array  # for each text, the index in `spelled` of piece 0 of its vocabulary


class Settings(NamedTuple):
    beam: int  # open hypotheses of a sentence; with sampling, samples
    nbest: int
    lenpen: float
    min_length: int
    unknown_penalty: float  # subtracted from the log probability of <unk>; infinite: <unk> is forbidden
    no_repeat: int  # n-grams of this size occur once at most; 0: any number of times
    sampling: bool
    temperature: float
    top_k: int  # 0: all tokens
    top_p: float


@inner
def forbid_others(logits: Array, vocabulary: int, allowed: Array) -> None:
    """Forbids all tokens that are not in `allowed`."""
    kept = np.empty(len(allowed), np.float32)
    for i in range(len(allowed)):
        kept[i] = logits[allowed[i]]
    for token in range(vocabulary):
        logits[token] = -INFINITY
    for i in range(len(allowed)):
        logits[allowed[i]] = kept[i]


@inner
def forbid_repeats(logits: Array, places: Array, tokens: Array, length: int, size: int) -> None:
    """Forbids the tokens that would complete a second occurrence of `size` successive tokens of a hypothesis."""
    for start in range(1, length - size + 2):  # the token at position 0 is bos
        same = True
        for index in range(size - 1):
            same = same and tokens[places[start + index]] == tokens[places[length - size + 2 + index]]
        if same:
            logits[tokens[places[start + size - 1]]] = -INFINITY


@inner
def forbid_text(
    logits: Array, text: int, avoided: AvoidedTexts, places: Array, tokens: Array, length: int, columns: Array
) -> None:
    """Forbids each token that would complete an avoided text in a hypothesis, like `AvoidedText.forbidden`."""
    first = avoided.texts.starts[text]
    size = avoided.texts.starts[text + 1] - first
    end, known = np.empty(size, np.uint8), 0  # the last bytes of the hypothesis, the last byte first
    position = length
    while known < size and position >= 0:
        start, stop = 0, 2
        if position:
            piece = tokens[places[position]]
            piece = avoided.vocabularies[text] + (columns[piece] if len(columns) else piece)
            start, stop = avoided.spelled.starts[piece], avoided.spelled.starts[piece + 1]
        for index in range(stop - 1, start - 1, -1):
            byte = SPACE if index else LINE_FEED  # an output begins with a line feed and a space
            if position:
                byte = avoided.spelled.values[index]
            if known < size and not (byte == SPACE and known and end[known - 1] == SPACE):
                end[known] = byte
                known += 1
        position -= 1
    for begun in range(size):
        same = begun <= known
        for index in range(begun if same else 0):
            same = same and end[begun - 1 - index] == avoided.texts.values[first + index]
        if same:
            number = 2 if begun and end[0] == SPACE else 1
            for index in range(2 * (first + begun), 2 * (first + begun) + number):
                forbid_pieces(logits, list_of(avoided.pieces, index), columns)


@inner
def list_of(ragged: Ragged, index: int) -> Array:
    return ragged.values[ragged.starts[index] : ragged.starts[index + 1]]


@inner
def forbid_pieces(logits: Array, pieces: Array, columns: Array) -> None:
    """Forbids target pieces. Column i of the logits is piece columns[i], or piece i if `columns` is empty.

    `pieces` and `columns` are sorted.
    """
    if not len(columns):
        for piece in pieces:
            logits[piece] = -INFINITY
    place = 0
    for column in range(len(columns)):
        while place < len(pieces) and pieces[place] < columns[column]:
            place += 1
        if place < len(pieces) and pieces[place] == columns[column]:
            logits[column] = -INFINITY


@inner
def sift(order: Array, weights: Array, root: int, size: int) -> None:
    """Moves the token at `root` of a heap down until no token below is better.

    A token is better than another token if its weight is larger, or if the weights are equal and its id is smaller.
    """
    token = order[root]
    while 2 * root + 1 < size:
        child = 2 * root + 1
        if child + 1 < size:
            a, b = order[child], order[child + 1]
            if weights[b] > weights[a] or (weights[b] == weights[a] and b < a):
                child += 1
        best = order[child]
        if not (weights[best] > weights[token] or (weights[best] == weights[token] and best < token)):
            break
        order[root] = best
        root = child
    order[root] = token


@inner
def draw(logits: Array, size: int, maxima: Array, settings: Settings, uniform: float, weights: Array) -> int:
    """Returns the token that the random number `uniform` in [0, 1) selects. `weights` is memory for `size` numbers."""
    padded = (size + OUTPUTS - 1) // OUTPUTS * OUTPUTS
    largest = block_maxima(logits.ctypes.data, padded, maxima.ctypes.data)
    factor = np.float32(1 / settings.temperature)
    total = float(exponentials(logits.ctypes.data, size, largest, factor, weights.ctypes.data))
    result = 0
    if not settings.top_k and settings.top_p >= 1:
        cumulative = 0.0
        for token in range(size):
            if logits[token] > -INFINITY:
                result = token
                cumulative += weights[token]
                if cumulative > uniform * total:
                    break
        return result
    order = np.arange(size)
    for root in range(size // 2 - 1, -1, -1):
        sift(order, weights, root, size)
    most, count, mass = min(settings.top_k, size) if settings.top_k else size, 0, 0.0
    while count < most and (settings.top_k or mass < settings.top_p * total):
        best = order[0]  # the best tokens are collected from the end of the array backwards
        mass += weights[best]
        count += 1
        order[0], order[size - count] = order[size - count], best
        sift(order, weights, 0, size - count)
    if settings.top_k:
        total, mass, kept = mass, 0.0, 0
        while kept < count and mass < settings.top_p * total:
            kept += 1
            mass += weights[order[size - kept]]
        count = kept
    cumulative = 0.0
    for rank in range(1, count + 1):
        result = order[size - rank]
        cumulative += weights[result]
        if cumulative > uniform * mass:
            break
    return result


@inner
def forbid(logits: Array, length: int, language_tokens: int, settings: Settings) -> None:
    """Forbids bos and an early end. Subtracts `unknown_penalty`, which may be infinite, from the logit of <unk>."""
    logits[BOS] = -INFINITY
    logits[UNK] -= settings.unknown_penalty
    if length - language_tokens < settings.min_length:
        logits[EOS] = -INFINITY
