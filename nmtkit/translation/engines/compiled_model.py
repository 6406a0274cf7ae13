"""A Transformer compiled by Numba, for one sentence at a time: its weights, its encoder and a step of its decoder.

Rows are the hypotheses of the sentence. Keys and values of self-attention are never moved: `seen` has the cache
positions that each row attends to.
"""

from typing import Any, NamedTuple

import numpy as np

from nmtkit.translation.engines.compiled_layers import (
    Array,
    Linear,
    Norm,
    Space,
    add,
    attend,
    compiled,
    layer_norm,
    linear,
    relu,
    sigmoid,
)

# L layers, S source tokens, R rows, V target vocabulary, D model width, F inner width of the feed-forward networks, P
# positions. A size of 0 means that a model lacks a part.


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


@compiled
def keys_and_values(model: Model, encoded: Array) -> Array:
    """Returns the keys and values of the memory `encoded` [S, D] for each decoder layer: L S 2D."""
    size, width = encoded.shape
    layers = model.decoder.query.weight.shape[0]
    memory = np.empty((layers, size, 2 * width), np.float32)
    for layer in range(layers):
        linear(encoded, size, model.decoder.memory, layer, memory[layer])
    return memory


@compiled
def selected(output: Linear, columns: Array) -> Linear:
    """Returns the output projection of the pieces `columns`."""
    weight, bias, scale = output.weight[0][columns], output.bias[0][columns], output.scale[0]
    if len(scale):
        scale = scale[columns]
    return Linear(weight.reshape(1, weight.shape[0], weight.shape[1]), scale.reshape(1, -1), bias.reshape(1, -1))
