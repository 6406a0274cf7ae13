"""A Transformer in compiled code: its weights, its encoder, and a step of its decoder for the rows of many sentences.

A row is a token of a source sentence, or the newest token of a hypothesis. Weights are addresses in tables, so that one
machine code serves all models: `compiled_products.linear` reads a row of the table of linear layers. Keys and values
are never moved. A hypothesis has the places of its tokens in the cache.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nmtkit.translation.engines.compiled_code import inner
from nmtkit.translation.engines.compiled_kernels import attend, layer_norm
from nmtkit.translation.engines.compiled_products import BYTES_OF_INPUT, PADDED_INPUTS, PADDED_OUTPUTS, linear

# T rows, D model width, F inner width of the feed-forward networks, V target vocabulary, P positions

Array = npt.NDArray[Any]
# linear layers of an encoder layer and of a decoder layer, in the order of the table
ENCODER_LINEARS = QKV, OUT, FC1, FC2 = range(4)
DECODER_LINEARS = SELF_IN, SELF_OUT, QUERY, MEMORY, CROSS_OUT, DECODER_FC1, DECODER_FC2 = range(7)
# norms of a layer; the last two are norms of SSRUs
NORMS = SELF_NORM, CROSS_NORM, FEED_FORWARD_NORM, VALUE_NORM, FORGET_NORM = range(5)
# norms of the whole model
OTHER_NORMS = SOURCE_NORM, TARGET_NORM, ENCODER_NORM, DECODER_NORM = range(4)
LINEARS_OF_ENCODER_LAYER, LINEARS_OF_DECODER_LAYER = len(ENCODER_LINEARS), len(DECODER_LINEARS)
NORMS_OF_LAYER = len(NORMS)
RELU, GELU, SWISH = range(3)
NO_FLOOR = np.float32(-np.inf)
ROOT_OF_HALF = np.float32(0.7071067811865476)


class CompiledEmbedding(NamedTuple):
    tokens: Array  # V D
    positions: Array  # P D
    scale: Any
    zero_first: bool


class ModelSizes(NamedTuple):
    width: int
    inner: int  # 0: a decoder layer without a feed-forward network
    encoder_inner: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    vocabulary: int


class Options(NamedTuple):
    pre_norm: bool
    eps: Any
    activation: int
    gated: bool
    recurrent: bool  # SSRUs instead of self-attention in the decoder


class CompiledTransformer(NamedTuple):
    linears: Array  # int64: the columns of `compiled_products.linear`
    norms: Array  # int64: address of the gains, address of the biases, width; a width of 0 means that there is no norm
    source: CompiledEmbedding
    target: CompiledEmbedding
    sizes: ModelSizes
    options: Options


class Space(NamedTuple):
    """Memory for the numbers of rows."""

    x: Array  # T D: the numbers that the residual connections carry
    normal: Array  # T D: normalised x, with pre-norm
    projected: Array  # T 3D: queries, keys and values
    attended: Array  # T D
    inner: Array  # T F
    rounded: Array  # T, bytes: inputs of a product in 8 bits
    scales: Array  # T: scales of these inputs
    weights: Array  # P: attention weights of a head


class StepRows(NamedTuple):
    """The rows of a step: the newest token of each open hypothesis."""

    tokens: Array  # T
    lengths: Array  # T: number of earlier tokens, which is the position of the token
    slots: Array  # T: index of the hypothesis among all hypotheses of the search
    parents: Array  # T: the hypothesis that the row continues
    memory_starts: Array  # T: first row of the sentence in the memory
    memory_sizes: Array  # T


class Caches(NamedTuple):
    """Keys and values of all hypotheses."""

    keys_and_values: Array  # layers, places, 2D
    places: Array  # hypotheses x positions, int64: the place of each token of a hypothesis in the cache
    states: Array  # layers, 2, hypotheses, D: states of SSRUs after an even and an odd number of tokens
    memory: Array  # layers, source tokens, 2D: keys and values of all memories


@inner
def space_for(model: CompiledTransformer, rows: int, positions: int) -> Space:
    """Returns memory for a number of rows that attend to at most `positions` positions."""
    sizes, linears = model.sizes, model.linears
    widest, projected = 0, 64
    for index in range(len(linears)):
        widest = max(widest, linears[index, PADDED_INPUTS])
        if index < len(linears) - 1:
            projected = max(projected, linears[index, PADDED_OUTPUTS])
    width = (sizes.width + 63) // 64 * 64
    return Space(
        np.zeros((rows, width), np.float32),
        np.zeros((rows, width), np.float32),
        np.zeros((rows, max((3 * sizes.width + 63) // 64 * 64, 64)), np.float32),
        np.zeros((rows, width), np.float32),
        np.zeros((rows, projected), np.float32),
        np.zeros((rows, widest * BYTES_OF_INPUT), np.uint8),
        np.empty(rows, np.float32),
        np.empty(positions + 64, np.float32),
    )


@inner
def product(linears: Array, space: Space, x: Array, rows: int, index: int, y: Array, floor: Any, adds: int) -> None:
    """Writes the outputs of row `index` of a table of linear layers for the rows of x to y, or adds them to y."""
    linear(
        linears.ctypes.data, index, rows, x.ctypes.data, x.strides[0], space.rounded.ctypes.data,
        space.rounded.strides[0], space.scales.ctypes.data, y.ctypes.data, y.strides[0] // 4, floor, adds,
    )  # fmt: skip


@inner
def normalize(model: CompiledTransformer, x: Array, rows: int, index: int, y: Array) -> None:
    """Writes norm `index` of the rows of x to y, unless the model lacks this norm. x and y may be the same array."""
    gains, biases, width = model.norms[index]
    if width:
        for row in range(rows):
            layer_norm(
                x.ctypes.data + row * x.strides[0], width, gains, biases, model.options.eps,
                y.ctypes.data + row * y.strides[0],
            )  # fmt: skip


@inner
def sublayer_input(model: CompiledTransformer, space: Space, rows: int, norm: int) -> Array:
    """Returns the input of a sub-layer: x, or with pre-norm the normalised x."""
    if not model.options.pre_norm:
        return space.x
    normalize(model, space.x, rows, norm, space.normal)
    return space.normal


@inner
def add_output(model: CompiledTransformer, space: Space, y: Array, rows: int, index: int, norm: int) -> None:
    """Adds the last product of a sub-layer, whose input is y, to x. Then normalises x unless the model has pre-norm."""
    product(model.linears, space, y, rows, index, space.x, NO_FLOOR, 1)
    if not model.options.pre_norm:
        normalize(model, space.x, rows, norm, space.x)


@inner
def feed_forward(model: CompiledTransformer, space: Space, rows: int, inner_width: int, fc1: int, norm: int) -> None:
    """Applies a feed-forward network, whose linear layers are `fc1` and the next one, to x."""
    options = model.options
    h = sublayer_input(model, space, rows, norm)
    plain = options.activation == RELU and not options.gated
    product(model.linears, space, h, rows, fc1, space.inner, np.float32(0) if plain else NO_FLOOR, 0)
    if not plain:
        for row in range(rows):
            activate(space.inner[row], inner_width, options.activation, options.gated)
    add_output(model, space, space.inner, rows, fc1 + 1, norm)


@inner
def activate(x: Array, size: int, activation: int, gated: bool) -> None:
    """Applies the activation to the first `size` numbers of x. A gated activation multiplies them by the next ones."""
    for i in range(size):
        if activation == RELU:
            value = max(x[i], np.float32(0))
        elif activation == GELU:
            value = (
                np.float32(0.5) * x[i] * (np.float32(1) + np.float32(math.erf(x[i] * np.float32(0.7071067811865476))))
            )
        else:
            value = x[i] / (np.float32(1) + np.exp(-x[i]))
        x[i] = value * x[size + i] if gated else value


@inner
def embed(embedding: CompiledEmbedding, token: int, position: int, x: Array) -> None:
    """Writes the embedding of a token at a position to x."""
    scale = np.float32(0) if embedding.zero_first and position == 0 else embedding.scale
    for i in range(embedding.tokens.shape[1]):
        x[i] = embedding.tokens[token, i] * scale + embedding.positions[position, i]


@inner
def encode(
    model: CompiledTransformer, space: Space, ids: Array, starts: Array, everything: Array, memory: Array, first: int
) -> None:
    """Writes keys and values of the memory of several sentences to `memory` [layers, T, 2D], from row `first` on.

    `ids` has the tokens of all sentences, and `starts` the index of the first token of each sentence, then the number
    of tokens. `everything` has the numbers from 0 to the length of the longest sentence.
    """
    sizes = model.sizes
    rows, width, layers = len(ids), sizes.width, sizes.encoder_layers
    head, stride = width // sizes.heads, space.projected.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(head))
    other = NORMS_OF_LAYER * (layers + sizes.decoder_layers)
    for sentence in range(len(starts) - 1):
        for row in range(starts[sentence], starts[sentence + 1]):
            embed(model.source, ids[row], row - starts[sentence], space.x[row])
    normalize(model, space.x, rows, other + SOURCE_NORM, space.x)
    for layer in range(layers):
        linears, norms = LINEARS_OF_ENCODER_LAYER * layer, NORMS_OF_LAYER * layer
        h = sublayer_input(model, space, rows, norms + SELF_NORM)
        product(model.linears, space, h, rows, linears + QKV, space.projected, NO_FLOOR, 0)
        for sentence in range(len(starts) - 1):
            start, size = starts[sentence], starts[sentence + 1] - starts[sentence]
            keys = space.projected[start, width:].ctypes.data
            for row in range(start, start + size):
                attend(
                    space.projected[row].ctypes.data, head, sizes.heads, keys, keys + 4 * width,
                    everything.ctypes.data, size, stride, scale, space.weights.ctypes.data,
                    space.attended[row].ctypes.data,
                )  # fmt: skip
        add_output(model, space, space.attended, rows, linears + OUT, norms + SELF_NORM)
        feed_forward(model, space, rows, sizes.encoder_inner, linears + FC1, norms + FEED_FORWARD_NORM)
    normalize(model, space.x, rows, other + ENCODER_NORM, space.x)
    for layer in range(sizes.decoder_layers):
        index = LINEARS_OF_ENCODER_LAYER * layers + LINEARS_OF_DECODER_LAYER * layer + MEMORY
        product(model.linears, space, space.x, rows, index, memory[layer, first : first + rows], NO_FLOOR, 0)


@inner
def recur(model: CompiledTransformer, gates: Array, norms: int, before: Array, after: Array, y: Array) -> None:
    """Computes an SSRU for a row: c = f c + (1 - f) v, with v and f from `gates` [2D]. Writes c to `after`.

    Writes relu(c) to y. First normalises v and f, if the model has norms for them.
    """
    width = model.sizes.width
    both = gates[: 2 * width].reshape(2, width)
    normalize(model, both[:1], 1, norms + VALUE_NORM, both[:1])
    normalize(model, both[1:], 1, norms + FORGET_NORM, both[1:])
    for i in range(width):
        forget = np.float32(1) / (np.float32(1) + np.exp(-gates[width + i]))
        state = forget * before[i] + (np.float32(1) - forget) * gates[i]
        after[i] = state
        y[i] = max(state, np.float32(0))


@inner
def step(
    model: CompiledTransformer, space: Space, rows: StepRows, count: int, caches: Caches, everything: Array
) -> None:
    """Computes the features of the newest tokens of `count` rows. Writes them to `space.x`."""
    sizes = model.sizes
    width, heads = sizes.width, sizes.heads
    head = width // heads
    scale = np.float32(1) / np.sqrt(np.float32(head))
    first_linear, first_norm = LINEARS_OF_ENCODER_LAYER * sizes.encoder_layers, NORMS_OF_LAYER * sizes.encoder_layers
    other = first_norm + NORMS_OF_LAYER * sizes.decoder_layers
    weights, places = space.weights.ctypes.data, caches.places
    for row in range(count):
        embed(model.target, rows.tokens[row], rows.lengths[row], space.x[row])
    normalize(model, space.x, count, other + TARGET_NORM, space.x)
    for layer in range(sizes.decoder_layers):
        linears = first_linear + LINEARS_OF_DECODER_LAYER * layer
        norms = first_norm + NORMS_OF_LAYER * layer
        h = sublayer_input(model, space, count, norms + SELF_NORM)
        product(model.linears, space, h, count, linears + SELF_IN, space.projected, NO_FLOOR, 0)
        if model.options.recurrent:
            for row in range(count):
                length, slot = rows.lengths[row], rows.slots[row]
                states, y = caches.states[layer], space.attended[row]
                recur(model, space.projected[row], norms, states[length % 2, rows.parents[row]],
                      states[(length + 1) % 2, slot], y)  # fmt: skip
                for i in range(width):
                    space.x[row, i] += y[i]
            if not model.options.pre_norm:
                normalize(model, space.x, count, norms + SELF_NORM, space.x)
        else:
            cache = caches.keys_and_values[layer]
            keys, stride = cache.ctypes.data, cache.shape[1]
            for row in range(count):
                slot, length = rows.slots[row], rows.lengths[row]
                place = places[slot, length]
                for i in range(2 * width):
                    cache[place, i] = space.projected[row, width + i]
                attend(
                    space.projected[row].ctypes.data, head, heads, keys, keys + 4 * width, places[slot].ctypes.data,
                    length + 1, stride, scale, weights, space.attended[row].ctypes.data,
                )  # fmt: skip
            add_output(model, space, space.attended, count, linears + SELF_OUT, norms + SELF_NORM)
        h = sublayer_input(model, space, count, norms + CROSS_NORM)
        product(model.linears, space, h, count, linears + QUERY, space.projected, NO_FLOOR, 0)
        memory = caches.memory[layer]
        for row in range(count):
            keys = memory[rows.memory_starts[row]].ctypes.data
            attend(
                space.projected[row].ctypes.data, head, heads, keys, keys + 4 * width, everything.ctypes.data,
                rows.memory_sizes[row], memory.shape[1], scale, weights, space.attended[row].ctypes.data,
            )  # fmt: skip
        add_output(model, space, space.attended, count, linears + CROSS_OUT, norms + CROSS_NORM)
        if sizes.inner:
            feed_forward(model, space, count, sizes.inner, linears + DECODER_FC1, norms + FEED_FORWARD_NORM)
    normalize(model, space.x, count, other + DECODER_NORM, space.x)
