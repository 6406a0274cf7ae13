"""Beam search of a compiled Transformer for one sentence, as one function compiled by Numba.

The search finds the same hypotheses as `beam_search.BeamSearch`, with the same rules. A hypothesis is a row.
"""

from typing import Any, NamedTuple

import numpy as np

from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.translation.engines.compiled_layers import Array, Space, compiled, exponentials, linear, maximum
from nmtkit.translation.engines.compiled_model import Model, embed, encode, keys_and_values, selected, step

# L layers, S source tokens, R rows, D model width

BLOCK = 64  # logits whose maximum decides whether they are read one by one
STEPS = 64  # steps for which memory is reserved at first
INFINITY = np.inf


class Settings(NamedTuple):
    """The settings of the search for one sentence. Lengths are in tokens without eos."""

    beam: int
    nbest: int
    lenpen: float
    min_length: int
    max_length: int
    language_tokens: int  # tokens at the start of the prefix that do not count in scores


class Continuations(NamedTuple):
    """Continuations of hypotheses by one token, best first."""

    scores: Array  # float64: log probabilities of the continued hypotheses
    parents: Array  # rows of the hypotheses that are continued
    tokens: Array


class Finished(NamedTuple):
    """The best finished hypotheses, best first. Free places have the score -inf."""

    scores: Array  # float64
    log_probabilities: Array  # float64
    lengths: Array
    tokens: Array  # hypotheses x longest length


@compiled
def penalty(length: int, lenpen: float) -> Any:
    """Returns the same as `candidates.length_penalty`."""
    return ((5.0 + length) / 6.0) ** lenpen


@compiled
def best_continuations(logits: Array, rows: int, before: Array, only: int, best: Continuations) -> int:
    """Finds the most probable continuations of `rows` hypotheses, and writes them to `best`. Returns their number.

    The log probability of a continuation is the logit of its new token plus `before` [R] of the hypothesis: the log
    probability of the hypothesis minus the normaliser of its logits. If `only` is not negative, every hypothesis
    continues with this token. Tokens with the logit -inf are left out.
    """
    size, count = len(best.scores), 0
    for row in range(rows):
        offset, x = before[row], logits[row]
        if not np.isfinite(offset):  # a hypothesis that does not exist, or whose logits overflowed
            continue
        limit = -INFINITY  # lower bound of the logits that may still be among the best
        start, end = (only, only + 1) if only >= 0 else (0, len(x))
        for block in range(start, end, BLOCK):
            width = min(BLOCK, end - block)
            if not maximum(x[block : block + width], width) > limit:
                continue
            for token in range(block, block + width):
                if not x[token] > limit:  # smaller, or NaN
                    continue
                if count < size or x[token] + offset > best.scores[size - 1]:
                    count = min(count + 1, size)
                    insert(best, count, x[token] + offset, row, token)
                if count == size:
                    limit = best.scores[size - 1] - offset - 1e-3  # a logit below this limit is not among the best
    return count


@compiled
def insert(best: Continuations, count: int, score: float, row: int, token: int) -> None:
    """Inserts a continuation, so that the first `count` continuations are sorted. The last one of them is lost."""
    rank = count - 1
    while rank and best.scores[rank - 1] < score:
        best.scores[rank], best.parents[rank] = best.scores[rank - 1], best.parents[rank - 1]
        best.tokens[rank] = best.tokens[rank - 1]
        rank -= 1
    best.scores[rank], best.parents[rank], best.tokens[rank] = score, row, token


@compiled
def normalizers(logits: Array, rows: int, space: Space) -> Array:
    """Returns the logarithms of the sums of exponentials of `rows` rows of logits.

    The result for a row is not finite if one of its logits is NaN or infinite.
    """
    result = np.empty(rows, np.float32)
    for row in range(rows):
        x = logits[row]
        largest = maximum(x, len(x))
        result[row] = largest + np.log(exponentials(x, len(x), largest, space, space.numbers))
    return result


@compiled
def keep(finished: Finished, score: float, log_probability: float, parents: Array, tokens: Array, row: int) -> None:
    """Adds a hypothesis to `finished`. `parents` and `tokens` [steps, R] have the earlier tokens, up to `row`."""
    rank = len(finished.scores) - 1
    while rank and finished.scores[rank - 1] < score:
        finished.scores[rank] = finished.scores[rank - 1]
        finished.log_probabilities[rank] = finished.log_probabilities[rank - 1]
        finished.lengths[rank] = finished.lengths[rank - 1]
        finished.tokens[rank] = finished.tokens[rank - 1]
        rank -= 1
    finished.scores[rank], finished.log_probabilities[rank] = score, log_probability
    finished.lengths[rank] = len(tokens)
    for index in range(len(tokens) - 1, -1, -1):
        finished.tokens[rank, index] = tokens[index, row]
        row = parents[index, row]


@compiled
def advance(
    best: Continuations,
    count: int,
    settings: Settings,
    before: Array,
    parent: Array,
    newest: Array,
    finished: Finished,
    parents: Array,
    tokens: Array,
) -> None:
    """Makes the best `count` continuations open or finished hypotheses.

    Open hypotheses are written to `before` (log probabilities), `parent` (rows) and `newest` (tokens), each [R]. A
    continuation by eos is finished if it is one of the best R. `parents` and `tokens` [steps, R] have earlier tokens.
    """
    beam, row = settings.beam, 0
    before[:] = -INFINITY
    for i in range(count):
        if best.tokens[i] != EOS:
            if row < beam:
                before[row], parent[row], newest[row] = best.scores[i], best.parents[i], best.tokens[i]
                row += 1
        elif i < beam:
            score = best.scores[i] / penalty(len(tokens) + 1, settings.lenpen)
            if score > finished.scores[-1]:
                keep(finished, score, best.scores[i], parents, tokens, best.parents[i])
    parent[row:], newest[row:] = 0, EOS


@compiled
def search(model: Model, ids: Array, settings: Settings, columns: Array, prefix: Array) -> Finished:
    """Returns the best hypotheses of the source sentence `ids` [S], which begin with `prefix`.

    `columns` are the sorted target pieces of a shortlist, or empty for all pieces. The tokens of `prefix` are indices
    into `columns`, if there are any; the same holds for the tokens of the hypotheses.
    """
    beam, width, layers = settings.beam, model.target.tokens.shape[1], model.decoder.query.weight.shape[0]
    output = selected(model.output, columns) if len(columns) else model.output
    vocabulary = output.weight.shape[1]
    numbers = max(len(ids), vocabulary, width, settings.max_length + 1)
    space = Space(np.empty(numbers, np.float32), np.empty(numbers, np.int32))

    memory, source = keys_and_values(model, encode(model, ids, space)), np.arange(len(ids))
    steps = min(STEPS, settings.max_length + 1)
    cache = np.empty((layers, 0 if model.recurrent else steps * beam, 3 * width), np.float32)
    states = np.zeros((layers, beam if model.recurrent else 0, width), np.float32)
    seen = np.empty((beam, steps), np.int64)
    parents, tokens = np.zeros((steps, beam), np.int64), np.zeros((steps, beam), np.int64)
    x, logits = np.empty((beam, width), np.float32), np.empty((beam, vocabulary), np.float32)
    before = np.full(beam, -INFINITY)
    before[0] = 0.0
    newest, parent = np.full(beam, BOS), np.zeros(beam, np.int64)
    best = Continuations(np.empty(2 * beam), np.empty(2 * beam, np.int64), np.empty(2 * beam, np.int64))
    finished = Finished(
        np.full(settings.nbest, -INFINITY),
        np.full(settings.nbest, -INFINITY),
        np.zeros(settings.nbest, np.int64),
        np.zeros((settings.nbest, steps), np.int64),
    )
    longest_penalty = penalty(settings.max_length + 1, settings.lenpen)
    for length in range(settings.max_length + 1):
        if length == len(parents):  # twice as much memory
            parents, tokens = np.concatenate((parents, parents)), np.concatenate((tokens, tokens))
            seen, cache = np.concatenate((seen, seen), 1), np.concatenate((cache, cache), 1)
            outputs = np.concatenate((finished.tokens, finished.tokens), 1)
            finished = Finished(finished.scores, finished.log_probabilities, finished.lengths, outputs)
        rows = beam if length else 1  # at first, all rows are equal
        pieces = columns[newest] if len(columns) else newest
        embed(pieces, rows, length, 0, model.target, model.norms.eps, x)
        seen[:rows, length] = np.arange(length * beam, length * beam + rows)
        step(model, x, rows, length + 1, length * beam, seen, cache, states, memory, source, space)
        linear(x, rows, output, 0, logits)
        only = prefix[length] if length < len(prefix) else EOS if length >= settings.max_length else -1
        if length < settings.language_tokens:
            logits[:, only] = 0
        else:
            before[:rows] -= normalizers(logits, rows, space)
            logits[:, BOS], logits[:, UNK] = -np.inf, -np.inf
            if length < settings.min_length:
                logits[:, EOS] = -np.inf
        count = best_continuations(logits, rows, before, only, best)
        advance(best, count, settings, before, parent, newest, finished, parents[:length], tokens[:length])
        # no open hypothesis can become better than the finished hypotheses
        within_reach = before.max() / max(longest_penalty, penalty(length + 2, settings.lenpen))
        if within_reach <= finished.scores[-1] or (beam == 1 and finished.scores[-1] > -INFINITY):
            break
        parents[length], tokens[length] = parent, newest
        seen[:, : length + 1] = seen[parent, : length + 1]
        if model.recurrent:
            states = states[:, parent]
    return finished
