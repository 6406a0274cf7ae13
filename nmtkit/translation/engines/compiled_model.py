"""Transformers in compiled code: the encoder, and a step of the decoder for the rows of many sentences.

A row is a token of a source sentence, or the newest token of a hypothesis. Weights and memory are addresses in records,
so the same machine code serves all models, and Numba compiles only functions of numbers. Keys and values are never
moved: a hypothesis stores the places of its tokens in the cache.
"""

from typing import Any

import numpy as np

from nmtkit.translation.engines.compiled_attention import attended
from nmtkit.translation.engines.compiled_code import Array, inner
from nmtkit.translation.engines.compiled_kernels import (
    RELU,
    activated,
    added,
    averaged,
    copied,
    embedded,
    gated_sum,
    normalized,
    recurrent,
    turned,
)
from nmtkit.translation.engines.compiled_products import linear

# T rows, D model width, F inner width of the feed-forward networks, V target vocabulary

# indices of the linear layers of one encoder layer, and of one decoder layer, in the table `MODEL.linears` (see below);
# the indices of each layer count from the first linear layer of this layer
ENCODER_LINEARS = QKV, OUT, FC1, FC2 = range(4)
# With average attention, SELF_IN and SELF_OUT are the layers of its feed-forward network. Only average attention has
# GATE and AVERAGE_GATE.
DECODER_LINEARS = SELF_IN, SELF_OUT, GATE, AVERAGE_GATE, QUERY, MEMORY, CROSS_OUT, DECODER_FC1, DECODER_FC2 = range(9)
# norms of a layer; the last two are norms of SSRUs
NORMS = SELF_NORM, CROSS_NORM, FEED_FORWARD_NORM, VALUE_NORM, FORGET_NORM = range(5)
# norms of the whole model
OTHER_NORMS = SOURCE_NORM, TARGET_NORM, ENCODER_NORM, DECODER_NORM = range(4)
LINEARS_OF_ENCODER_LAYER, LINEARS_OF_DECODER_LAYER = len(ENCODER_LINEARS), len(DECODER_LINEARS)
NORMS_OF_LAYER = len(NORMS)
ATTENTION, SSRU, AVERAGE = range(3)  # kinds of self-attention of a decoder
NO_GATE, JOINT_GATE, SEPARATE_GATES = range(3)  # gates of average attention
NO_FLOOR = np.float32(-np.inf)


def record(numbers: str, reals: str = "") -> Any:
    return np.dtype([(name, np.int64) for name in numbers.split()] + [(name, np.float32) for name in reals.split()])


# `linears` is the address of the table of linear layers (`compiled_products.linear`). `norms` is the address of the
# table of norms (`compiled_kernels.normalized`).
# `inner` is 0 for decoder layers without a feed-forward network. `turns` is the address of the cosines and sines of
# each position (`compiled_kernels.turned`), or 0. `source_tokens` to `target_positions` are addresses of embeddings.
MODEL = record(
    "linears norms width heads inner encoder_inner encoder_layers decoder_layers vocabulary pre_norm activation gated "
    "self_attention average_inner gates zero_first source_tokens source_positions target_tokens target_positions "
    "turns alignment_layer",
    "eps source_scale target_scale",
)
# Addresses of buffers for rows. The widths count fp32 numbers for each row, but `rounded_width` counts bytes.
# `x`: the residual stream; `normal`: normalised numbers; `projected`: queries, keys and values; `attended`: results of
# attention; `inner`: activations of feed-forward networks; `rounded` and `scales`: the 8-bit inputs of a product and
# their scales; `weights`: the attention weights of all heads; `everything`: the integers from 0.
SPACE = record("x normal projected attended inner rounded scales weights everything width projected_width inner_width "
               "rounded_width")  # fmt: skip
# Addresses of arrays, and their sizes.
# `keys_and_values`: keys and values of all hypotheses (layers, places, 2D); `states`: the SSRU states or averages of
# all hypotheses (layers, 2, hypotheses, D); the axis of length 2 has the states after an even and after an odd number
# of tokens; `zeros`: the state before the first token (D); `hypotheses`: the number of all hypotheses; `memory`: keys
# and values of all memories (layers, source tokens, `memory_width`). `layer_size` and `memory_layer_size` are the bytes
# of a layer.
CACHE = record("keys_and_values layer_size states zeros hypotheses memory memory_layer_size memory_width")
# The newest token of an open hypothesis.
# `length`: the number of earlier tokens, which is the position of the token; `hypothesis` and `parent`: indices among
# all hypotheses of the search; `memory` and `memory_size`: the first row, and the number of rows, of the sentence in
# the memory; `place`: the place of the token in the cache; `places`: the address of the places of all tokens of the
# hypothesis; `recorded`: the address of the attention weights of the token, or 0.
ROW = record("token length hypothesis parent memory memory_size place places recorded")


@inner
def product(model: Any, space: Any, x: int, stride: int, rows: int, index: int, y: int, y_stride: int,
            floor: Any, adds: int) -> None:  # fmt: skip
    """Writes the outputs of linear layer `index` for the rows at x to y, or adds them to y."""
    linear(
        model.linears, index, rows, x, 4 * stride, space.rounded, space.rounded_width, space.scales, y, y_stride, floor,
        adds,
    )  # fmt: skip


@inner
def normalize(model: Any, x: int, stride: int, rows: int, index: int, y: int) -> None:
    """Writes norm `index` of the rows at x to y, unless the model lacks this norm. x and y may be equal."""
    normalized(model.norms, index, rows, x, stride, model.eps, y)


@inner
def sublayer_input(model: Any, space: Any, rows: int, norm: int) -> int:
    """Returns the address of the input of a sub-layer: x, or the normalised x if the model has pre-norm."""
    if not model.pre_norm:
        return space.x
    normalize(model, space.x, space.width, rows, norm, space.normal)
    return space.normal


@inner
def add_output(model: Any, space: Any, y: int, stride: int, rows: int, index: int, norm: int) -> None:
    """Adds the output of linear layer `index` for the input y to x. Then normalises x unless the model has pre-norm."""
    product(model, space, y, stride, rows, index, space.x, space.width, NO_FLOOR, 1)
    normalize_output(model, space, rows, norm)


@inner
def normalize_output(model: Any, space: Any, rows: int, norm: int) -> None:
    if not model.pre_norm:
        normalize(model, space.x, space.width, rows, norm, space.x)


@inner
def hidden(model: Any, space: Any, x: int, rows: int, size: int, index: int) -> None:
    """Writes the activations of a feed-forward network, whose first linear layer is `index`, to `space.inner`."""
    plain = model.activation == RELU and not model.gated
    floor = np.float32(0) if plain else NO_FLOOR
    product(model, space, x, space.width, rows, index, space.inner, space.inner_width, floor, 0)
    if not plain:
        activated(space.inner, space.inner_width, rows, size, model.activation, model.gated)


@inner
def feed_forward(model: Any, space: Any, rows: int, size: int, index: int, norm: int) -> None:
    """Applies a feed-forward network, whose linear layers are `index` and `index` + 1, to x."""
    hidden(model, space, sublayer_input(model, space, rows, norm), rows, size, index)
    add_output(model, space, space.inner, space.inner_width, rows, index + 1, norm)


@inner
def embed(space: Any, tokens: int, positions: int, scale: Any, token: int, position: int, row: int, width: int) -> None:
    """Writes the embedding of a token at a position to a row of x."""
    size = 4 * width
    embedded(tokens + size * token, positions + size * position, width, scale, space.x + 4 * space.width * row)


@inner
def turn(model: Any, projected: int, position: int) -> None:
    """Rotates the queries and keys of a projected row, if the model has rotary position encodings."""
    if model.turns:
        head = model.width // model.heads
        turned(projected, 2 * model.heads, head // 2, model.turns + 4 * head * position)


@inner
def encode(model: Any, space: Any, cache: Any, ids: Array, starts: Array) -> None:
    """Encodes several sentences. Writes their keys and values for cross-attention to `cache.memory`.

    `ids` has the tokens of all sentences of the search. `starts` has the index of the first token of each sentence to
    encode, then the index after the last token of these sentences.
    """
    begin, width, layers = starts[0], model.width, model.encoder_layers
    rows = starts[len(starts) - 1] - begin
    head = width // model.heads
    scale = np.float32(1) / np.sqrt(np.float32(head))
    norms = NORMS_OF_LAYER * (layers + model.decoder_layers)
    for sentence in range(len(starts) - 1):
        for token in range(starts[sentence], starts[sentence + 1]):
            embed(space, model.source_tokens, model.source_positions, model.source_scale, ids[token],
                  token - starts[sentence], token - begin, width)  # fmt: skip
    normalize(model, space.x, space.width, rows, norms + SOURCE_NORM, space.x)
    row_size = 4 * space.projected_width
    for layer in range(layers):
        linears, layer_norms = LINEARS_OF_ENCODER_LAYER * layer, NORMS_OF_LAYER * layer
        h = sublayer_input(model, space, rows, layer_norms + SELF_NORM)
        product(model, space, h, space.width, rows, linears + QKV, space.projected, space.projected_width, NO_FLOOR, 0)
        for sentence in range(len(starts) - 1):
            first, size = starts[sentence] - begin, starts[sentence + 1] - starts[sentence]
            keys = space.projected + row_size * first + 4 * width
            for position in range(size):
                turn(model, space.projected + row_size * (first + position), position)
            for row in range(first, first + size):
                attended(
                    space.projected + row_size * row, head, model.heads, keys, keys + 4 * width, space.everything,
                    size, space.projected_width, scale, space.weights, space.attended + 4 * space.width * row, 0,
                    scale,
                )  # fmt: skip
        add_output(model, space, space.attended, space.width, rows, linears + OUT, layer_norms + SELF_NORM)
        feed_forward(model, space, rows, model.encoder_inner, linears + FC1, layer_norms + FEED_FORWARD_NORM)
    normalize(model, space.x, space.width, rows, norms + ENCODER_NORM, space.x)
    for layer in range(model.decoder_layers):
        index = LINEARS_OF_ENCODER_LAYER * layers + LINEARS_OF_DECODER_LAYER * layer + MEMORY
        target = cache.memory + cache.memory_layer_size * layer + 4 * cache.memory_width * begin
        product(model, space, space.x, space.width, rows, index, target, cache.memory_width, NO_FLOOR, 0)


@inner
def update_states(model: Any, space: Any, cache: Any, rows: Array, count: int, layer: int, h: int, norms: int) -> None:
    """Computes the states of SSRUs or averages of a layer, and adds relu(state) of SSRUs to x.

    Writes averages to `space.attended`. `h` is the address of the inputs of the layer.
    """
    width = model.width
    states, size = cache.states + 8 * width * cache.hypotheses * layer, 4 * width * cache.hypotheses
    for row in range(count):
        length, data = rows[row].length, 4 * space.width * row
        before = states + size * (length % 2) + 4 * width * rows[row].parent if length else cache.zeros
        after = states + size * ((length + 1) % 2) + 4 * width * rows[row].hypothesis
        if model.self_attention == SSRU:
            gates = space.projected + 4 * space.projected_width * row
            normalize(model, gates, 0, 1, norms + VALUE_NORM, gates)
            normalize(model, gates + 4 * width, 0, 1, norms + FORGET_NORM, gates + 4 * width)
            recurrent(gates, width, before, after, space.x + data)
        else:
            averaged(h + data, width, np.float32(length) / np.float32(length + 1), before, after)
            copied(after, width, space.attended + data)


@inner
def add_averages(model: Any, space: Any, count: int, linears: int, h: int) -> None:
    """Adds the output of average attention to the residual stream `space.x`.

    `space.attended` holds the averages over all tokens so far, the newest token included. `h` is the address of the
    inputs of the layer.
    """
    width, y = model.width, space.attended
    if model.average_inner:
        hidden(model, space, y, count, model.average_inner, linears + SELF_IN)
        product(model, space, space.inner, space.inner_width, count, linears + SELF_OUT, y, space.width, NO_FLOOR, 0)
    gates, stride = space.projected, space.projected_width
    if model.gates == JOINT_GATE:
        both, size = space.inner, 4 * space.inner_width
        for row in range(count):
            copied(h + 4 * space.width * row, width, both + size * row)
            copied(y + 4 * space.width * row, width, both + size * row + 4 * width)
        product(model, space, both, space.inner_width, count, linears + GATE, gates, stride, NO_FLOOR, 0)
    elif model.gates == SEPARATE_GATES:
        product(model, space, h, space.width, count, linears + GATE, gates, stride, NO_FLOOR, 0)
        second = gates + 4 * width
        product(model, space, y, space.width, count, linears + AVERAGE_GATE, second, stride, NO_FLOOR, 0)
    for row in range(count):
        data = 4 * space.width * row
        if model.gates == NO_GATE:
            added(y + data, width, space.x + data)
        else:
            gated_sum(h + data, y + data, gates + 4 * stride * row, width, space.x + data)


@inner
def step(model: Any, space: Any, cache: Any, rows: Array, count: int, share: Any) -> None:
    """Computes the features of the newest tokens of the first `count` rows. Writes them to `space.x`.

    For each row, adds `share` times the attention weights of the alignment layer, averaged over heads, to the numbers
    at the address `recorded`, unless this address is 0.
    """
    width, heads = model.width, model.heads
    head = width // heads
    scale = np.float32(1) / np.sqrt(np.float32(head))
    first_linear, first_norm = LINEARS_OF_ENCODER_LAYER * model.encoder_layers, NORMS_OF_LAYER * model.encoder_layers
    other = first_norm + NORMS_OF_LAYER * model.decoder_layers
    row_size = 4 * space.projected_width
    for row in range(count):
        newest = rows[row]
        factor = np.float32(0) if model.zero_first and newest.length == 0 else model.target_scale
        embed(space, model.target_tokens, model.target_positions, factor, newest.token, newest.length, row, width)
    normalize(model, space.x, space.width, count, other + TARGET_NORM, space.x)
    for layer in range(model.decoder_layers):
        linears = first_linear + LINEARS_OF_DECODER_LAYER * layer
        norms = first_norm + NORMS_OF_LAYER * layer
        h = sublayer_input(model, space, count, norms + SELF_NORM)
        if model.self_attention != AVERAGE:
            index = linears + SELF_IN
            product(model, space, h, space.width, count, index, space.projected, space.projected_width, NO_FLOOR, 0)
        if model.self_attention == ATTENTION:
            keys = cache.keys_and_values + cache.layer_size * layer
            for row in range(count):
                newest, query = rows[row], space.projected + row_size * row
                turn(model, query, newest.length)
                copied(query + 4 * width, 2 * width, keys + 8 * width * newest.place)
                attended(
                    query, head, heads, keys, keys + 4 * width, newest.places, newest.length + 1, 2 * width, scale,
                    space.weights, space.attended + 4 * space.width * row, 0, scale,
                )  # fmt: skip
            add_output(model, space, space.attended, space.width, count, linears + SELF_OUT, norms + SELF_NORM)
        else:
            update_states(model, space, cache, rows, count, layer, h, norms)
            if model.self_attention == AVERAGE:
                add_averages(model, space, count, linears, h)
            normalize_output(model, space, count, norms + SELF_NORM)
        h = sublayer_input(model, space, count, norms + CROSS_NORM)
        index = linears + QUERY
        product(model, space, h, space.width, count, index, space.projected, space.projected_width, NO_FLOOR, 0)
        memory = cache.memory + cache.memory_layer_size * layer
        for row in range(count):
            newest = rows[row]
            keys = memory + 4 * cache.memory_width * newest.memory
            attended(
                space.projected + row_size * row, head, heads, keys, keys + 4 * width, space.everything,
                newest.memory_size, cache.memory_width, scale, space.weights, space.attended + 4 * space.width * row,
                newest.recorded if layer == model.alignment_layer else 0, share / np.float32(heads),
            )  # fmt: skip
        add_output(model, space, space.attended, space.width, count, linears + CROSS_OUT, norms + CROSS_NORM)
        if model.inner:
            feed_forward(model, space, count, model.inner, linears + DECODER_FC1, norms + FEED_FORWARD_NORM)
    normalize(model, space.x, space.width, count, other + DECODER_NORM, space.x)
