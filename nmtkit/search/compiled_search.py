"""Beam search of a Transformer for one sentence, as one function compiled by Numba.

The search finds the same hypotheses as `beam_search.BeamSearch`, with the same rules. A hypothesis is a row. Keys and
values of self-attention are never moved: `seen` has the cache positions that each row attends to.
"""

from typing import Any, NamedTuple

import numpy as np

from nmtkit.data.tokenizer import BOS, EOS, UNK
from nmtkit.layers.compiled import (
    Array,
    Linear,
    Norm,
    Space,
    add,
    attend,
    compiled,
    exponentials,
    layer_norm,
    linear,
    maximum,
    relu,
    sigmoid,
)

# L layers, S source tokens, R rows, V target vocabulary, D model width, F inner width of the feed-forward networks. A
# size of 0 means that a model lacks a part.

BLOCK = 64  # logits whose maximum decides whether they are read one by one
STEPS = 64  # steps for which memory is reserved at first
INFINITY = np.inf


class NormOptions(NamedTuple):
    """The place of the norms, and the number that they add to the variance.

    Functions get these options instead of the whole model, because a call copies all fields of its arguments.
    """

    pre_norm: bool
    eps: Any


class FeedForward(NamedTuple):
    fc1: Linear
    fc2: Linear
    norm: Norm


class EncoderLayers(NamedTuple):
    qkv: Linear  # L 3D D: queries, keys and values
    out: Linear
    norm: Norm
    feed_forward: FeedForward


class DecoderLayers(NamedTuple):
    self_in: Linear  # L 3D D: queries, keys and values; for SSRUs L 2D D: values and forget gates
    value_norm: Norm  # of SSRUs
    forget_norm: Norm  # of SSRUs
    self_out: Linear  # not in SSRUs
    self_norm: Norm
    query: Linear
    memory: Linear  # L 2D D: keys and values of the memory
    cross_out: Linear
    cross_norm: Norm
    feed_forward: FeedForward


class Embedding(NamedTuple):
    tokens: Array  # V D
    positions: Array  # P D
    norm: Norm
    scale: Any
    zero_first: bool


class Model(NamedTuple):
    source: Embedding
    target: Embedding
    encoder: EncoderLayers
    encoder_norm: Norm
    decoder: DecoderLayers
    decoder_norm: Norm
    output: Linear  # 1 V D
    norms: NormOptions
    heads: int
    recurrent: bool  # SSRUs instead of self-attention in the decoder


class Settings(NamedTuple):
    """The settings of a search. Lengths are in tokens without eos."""

    beam: int
    nbest: int
    lenpen: float
    min_length: int
    max_length: int
    language_tokens: int  # tokens at the start of the prefix that do not count in scores


class Finished(NamedTuple):
    """The best finished hypotheses, best first. Free places have the score -inf."""

    scores: Array  # float64
    log_probabilities: Array  # float64
    lengths: Array
    tokens: Array  # hypotheses x longest length


# --- layers -----------------------------------------------------------------------------------------------------------


@compiled
def embed(tokens: Array, rows: int, first: int, stride: int, embedding: Embedding, eps: Any, x: Array) -> None:
    """Writes the embeddings of tokens [rows] to x. The token of row r is at position first + stride x r."""
    for row in range(rows):
        position = first + stride * row
        scale = np.float32(0) if embedding.zero_first and position == 0 else embedding.scale
        token = embedding.tokens[tokens[row]]
        for i in range(x.shape[1]):
            x[row, i] = token[i] * scale + embedding.positions[position, i]
    if embedding.norm.gain.shape[1]:
        layer_norm(x, rows, embedding.norm, 0, eps, x)


@compiled
def sublayer_input(x: Array, rows: int, norm: Norm, layer: int, options: NormOptions, normalized: Array) -> Array:
    """Returns the input of a sub-layer: x, or with pre-norm the normalised x, written to `normalized`."""
    if not options.pre_norm:
        return x
    layer_norm(x, rows, norm, layer, options.eps, normalized)
    return normalized


@compiled
def add_and_norm(x: Array, change: Array, rows: int, norm: Norm, layer: int, options: NormOptions) -> None:
    """Adds the output of a sub-layer to x, and normalises the sum unless the model has pre-norm."""
    add(x, change, rows)
    if not options.pre_norm:
        layer_norm(x, rows, norm, layer, options.eps, x)


@compiled
def apply_feed_forward(
    x: Array,
    rows: int,
    part: FeedForward,
    layer: int,
    norms: NormOptions,
    normalized: Array,
    inner: Array,
    change: Array,
) -> None:
    h = sublayer_input(x, rows, part.norm, layer, norms, normalized)
    linear(h, rows, part.fc1, layer, inner)
    relu(inner, rows)
    linear(inner, rows, part.fc2, layer, change)
    add_and_norm(x, change, rows, part.norm, layer, norms)


@compiled
def encode(model: Model, ids: Array, space: Space) -> Array:
    """Returns the memory S D of the source sentence `ids` [S]."""
    size, width = len(ids), model.source.tokens.shape[1]
    layers = model.encoder
    x, normalized = np.empty((size, width), np.float32), np.empty((size, width), np.float32)
    attended, change = np.empty_like(x), np.empty_like(x)
    qkv = np.empty((size, 3 * width), np.float32)
    inner = np.empty((size, layers.feed_forward.fc1.weight.shape[1]), np.float32)
    everything = np.arange(size)
    embed(ids, size, 0, 1, model.source, model.norms.eps, x)
    for layer in range(layers.qkv.weight.shape[0]):
        h = sublayer_input(x, size, layers.norm, layer, model.norms, normalized)
        linear(h, size, layers.qkv, layer, qkv)
        for i in range(size):
            attend(qkv[i, :width], qkv, (width, 2 * width), everything, size, model.heads, space, attended[i])
        linear(attended, size, layers.out, layer, change)
        add_and_norm(x, change, size, layers.norm, layer, model.norms)
        apply_feed_forward(x, size, layers.feed_forward, layer, model.norms, normalized, inner, change)
    if model.encoder_norm.gain.shape[1]:
        layer_norm(x, size, model.encoder_norm, 0, model.norms.eps, x)
    return x


@compiled
def recur(gates: Array, norms: tuple[Norm, Norm], layer: int, state: Array, eps: Any, space: Space, y: Array) -> None:
    """Computes an SSRU for one row: c = f c + (1 - f) v, with v and f from `gates` [2, D]. Writes relu(c) to y.

    Replaces c in `state` [D]. First normalises v and f with `norms`, if the model has these norms.
    """
    if norms[0].gain.shape[1]:
        layer_norm(gates[:1], 1, norms[0], layer, eps, gates[:1])
        layer_norm(gates[1:], 1, norms[1], layer, eps, gates[1:])
    value, forget = gates[0], gates[1]
    sigmoid(forget, space)
    for i in range(state.shape[0]):
        state[i] = forget[i] * state[i] + (np.float32(1) - forget[i]) * value[i]
        y[i] = max(state[i], np.float32(0))


@compiled
def step(
    model: Model,
    x: Array,
    rows: int,
    steps: int,
    first: int,
    seen: Array,
    cache: Array,
    states: Array,
    memory: Array,
    source: Array,
    space: Space,
) -> None:
    """Replaces the embeddings x [rows, D] of the newest tokens by the features from which logits are computed.

    These tokens are at the cache positions from `first` on. Row r attends to the positions seen[r, :steps]. `cache`
    [L, positions, 3D] has the projections of self-attention, `states` [L, R, D] the states of SSRUs, and `memory`
    [L, S, 2D] keys and values of the memory. `source` has the numbers from 0 to S - 1.
    """
    width, layers = x.shape[1], model.decoder
    normalized, attended, change = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    gates = np.empty((rows, 2 * width), np.float32)
    inner = np.empty((rows, layers.feed_forward.fc1.weight.shape[1]), np.float32)
    for layer in range(layers.query.weight.shape[0]):
        h = sublayer_input(x, rows, layers.self_norm, layer, model.norms, normalized)
        if model.recurrent:
            linear(h, rows, layers.self_in, layer, gates)
            for row in range(rows):
                both = gates[row].reshape(2, width)
                recur(
                    both,
                    (layers.value_norm, layers.forget_norm),
                    layer,
                    states[layer, row],
                    model.norms.eps,
                    space,
                    change[row],
                )
        else:
            new = cache[layer, first : first + rows]
            linear(h, rows, layers.self_in, layer, new)
            for row in range(rows):
                query, columns = new[row, :width], (width, 2 * width)
                attend(query, cache[layer], columns, seen[row], steps, model.heads, space, attended[row])
            linear(attended, rows, layers.self_out, layer, change)
        add_and_norm(x, change, rows, layers.self_norm, layer, model.norms)
        h = sublayer_input(x, rows, layers.cross_norm, layer, model.norms, normalized)
        linear(h, rows, layers.query, layer, change)
        for row in range(rows):
            attend(change[row], memory[layer], (0, width), source, len(source), model.heads, space, attended[row])
        linear(attended, rows, layers.cross_out, layer, change)
        add_and_norm(x, change, rows, layers.cross_norm, layer, model.norms)
        if inner.shape[1]:
            apply_feed_forward(x, rows, layers.feed_forward, layer, model.norms, normalized, inner, change)
    if model.decoder_norm.gain.shape[1]:
        layer_norm(x, rows, model.decoder_norm, 0, model.norms.eps, x)


# --- search -----------------------------------------------------------------------------------------------------------


@compiled
def penalty(length: int, lenpen: float) -> Any:
    """Returns the same as `candidates.length_penalty`."""
    return ((5.0 + length) / 6.0) ** lenpen


@compiled
def best_continuations(logits: Array, rows: int, before: Array, only: int, found: Any) -> int:
    """Finds the continuations of `rows` hypotheses with the highest log probabilities. Returns their number.

    `before` [R] has the log probabilities of the hypotheses. If `only` is not negative, all hypotheses continue with
    this token. `found` has three arrays, which this function fills, best first: the log probabilities of the continued
    hypotheses, their rows, and the new tokens. Tokens with the logit -inf are left out.
    """
    scores, parents, tokens = found
    size, count = len(scores), 0
    for row in range(rows):
        offset, x = before[row], logits[row]
        if not np.isfinite(offset):  # a hypothesis that does not exist, or whose logits overflowed
            continue
        limit = -INFINITY  # lower bound of the logits that may still be among the best
        start, end = (only, only + 1) if only >= 0 else (0, len(x))
        for block in range(start, end, BLOCK):
            size_of_block = min(BLOCK, end - block)
            if not maximum(x[block : block + size_of_block], size_of_block) > limit:
                continue
            for i in range(block, block + size_of_block):
                if not x[i] > limit:  # smaller, or NaN
                    continue
                score = x[i] + offset
                if count == size and score <= scores[size - 1]:
                    continue
                place = min(count, size - 1)
                while place and scores[place - 1] < score:
                    scores[place], parents[place] = scores[place - 1], parents[place - 1]
                    tokens[place] = tokens[place - 1]
                    place -= 1
                scores[place], parents[place], tokens[place] = score, row, i
                count = min(count + 1, size)
                if count == size:
                    limit = scores[size - 1] - offset - 1e-3  # a logit below this limit is not among the best
    return count


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
def selected(output: Linear, columns: Array) -> Linear:
    """Returns the output projection of the pieces `columns`."""
    weight, bias, scale = output.weight[0][columns], output.bias[0][columns], output.scale[0]
    if len(scale):
        scale = scale[columns]
    return Linear(weight.reshape(1, weight.shape[0], weight.shape[1]), scale.reshape(1, -1), bias.reshape(1, -1))


@compiled
def keep(finished: Finished, score: float, log_probability: float, parents: Array, tokens: Array, row: int) -> None:
    """Adds a hypothesis to `finished`. `parents` and `tokens` [steps, R] have the earlier tokens, up to `row`."""
    place = len(finished.scores) - 1
    while place and finished.scores[place - 1] < score:
        finished.scores[place] = finished.scores[place - 1]
        finished.log_probabilities[place] = finished.log_probabilities[place - 1]
        finished.lengths[place] = finished.lengths[place - 1]
        finished.tokens[place] = finished.tokens[place - 1]
        place -= 1
    finished.scores[place], finished.log_probabilities[place] = score, log_probability
    finished.lengths[place] = len(tokens)
    for index in range(len(tokens) - 1, -1, -1):
        finished.tokens[place, index] = tokens[index, row]
        row = parents[index, row]


@compiled
def grown(x: Array, size: int) -> Array:
    """Returns a copy of x with at least `size` elements along the second dimension."""
    y = np.empty((x.shape[0], size, x.shape[2]), x.dtype)
    y[:, : x.shape[1]] = x
    return y


@compiled
def grown_rows(x: Array, size: int) -> Array:
    y = np.empty((size, x.shape[1]), x.dtype)
    y[: len(x)] = x
    return y


@compiled
def grown_columns(x: Array, size: int) -> Array:
    y = np.empty((x.shape[0], size), x.dtype)
    y[:, : x.shape[1]] = x
    return y


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

    encoded = encode(model, ids, space)
    source = np.arange(len(ids))
    memory = np.empty((layers, len(ids), 2 * width), np.float32)
    for layer in range(layers):
        linear(encoded, len(ids), model.decoder.memory, layer, memory[layer])

    steps = min(STEPS, settings.max_length + 1)
    cache = np.empty((layers, 0 if model.recurrent else steps * beam, 3 * width), np.float32)
    states = np.zeros((layers, beam if model.recurrent else 0, width), np.float32)
    seen = np.empty((beam, steps), np.int64)
    parents, tokens = np.zeros((steps, beam), np.int64), np.zeros((steps, beam), np.int64)
    x, logits = np.empty((beam, width), np.float32), np.empty((beam, vocabulary), np.float32)
    before = np.full(beam, -INFINITY)
    before[0] = 0.0
    newest, parent = np.full(beam, BOS), np.zeros(beam, np.int64)
    found = np.empty(2 * beam), np.empty(2 * beam, np.int64), np.empty(2 * beam, np.int64)
    finished = Finished(
        np.full(settings.nbest, -INFINITY),
        np.full(settings.nbest, -INFINITY),
        np.zeros(settings.nbest, np.int64),
        np.zeros((settings.nbest, steps), np.int64),
    )
    longest_penalty = penalty(settings.max_length + 1, settings.lenpen)
    for length in range(settings.max_length + 1):
        if length == len(parents):
            steps = min(2 * length, settings.max_length + 1)
            parents, tokens = grown_rows(parents, steps), grown_rows(tokens, steps)
            seen, cache = grown_columns(seen, steps), cache if model.recurrent else grown(cache, steps * beam)
            kept = grown_columns(finished.tokens, steps)
            finished = Finished(finished.scores, finished.log_probabilities, finished.lengths, kept)
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
        count = best_continuations(logits, rows, before, only, found)
        scores, found_parents, found_tokens = found
        row = 0
        before[:] = -INFINITY
        for i in range(count):
            if found_tokens[i] != EOS:
                if row < beam:
                    before[row], parent[row], newest[row] = scores[i], found_parents[i], found_tokens[i]
                    row += 1
            elif i < beam:
                score = scores[i] / penalty(length + 1, settings.lenpen)
                if score > finished.scores[-1]:
                    keep(finished, score, scores[i], parents[:length], tokens[:length], found_parents[i])
        parent[row:], newest[row:] = 0, EOS
        # no open hypothesis can become better than the finished hypotheses
        within_reach = before.max() / max(longest_penalty, penalty(length + 2, settings.lenpen))
        if within_reach <= finished.scores[-1] or (beam == 1 and finished.scores[-1] > -INFINITY):
            break
        parents[length], tokens[length] = parent, newest
        seen[:, : length + 1] = seen[parent, : length + 1]
        if model.recurrent:
            states = states[:, parent]
    return finished
