"""Output projections of shortlists in the compiled engine: weights of a few hundred pieces, packed for a sentence."""

from typing import NamedTuple

import numpy as np

from nmtkit.translation.engines.compiled_code import inner
from nmtkit.translation.engines.compiled_kernels import OUTPUTS
from nmtkit.translation.engines.compiled_model import Array, CompiledTransformer
from nmtkit.translation.engines.compiled_products import (
    BIASES,
    COLUMNS,
    CORRECTIONS,
    IN_8_BITS,
    INPUTS,
    PADDED_INPUTS,
    PADDED_OUTPUTS,
    SCALES,
    WEIGHT,
)
from nmtkit.translation.engines.compiled_vectors import LANES


class Output(NamedTuple):
    """The weights of the output projection by piece, from which the weights of a shortlist are packed.

    Arrays have no rows in a search without shortlists.
    """

    weight: Array  # V x groups of inputs: the numbers of a group are one integer
    scales: Array
    corrections: Array
    biases: Array


class Shortlists(NamedTuple):
    """Memory for the output projection of each slot."""

    table: Array  # slots x columns of `compiled_products.linear`
    weight: Array  # slots x outputs / 16 x groups of inputs x 16
    scales: Array  # slots x outputs
    corrections: Array
    biases: Array


@inner
def memory_of_shortlists(model: CompiledTransformer, output: Output, slots: int, vocabulary: int) -> Shortlists:
    """Returns memory for shortlists of at most `vocabulary` pieces."""
    groups, size = output.weight.shape[1], (vocabulary + OUTPUTS - 1) // OUTPUTS * OUTPUTS
    lists = Shortlists(
        np.zeros((slots, COLUMNS), np.int64),
        np.zeros((slots, size // LANES, groups, LANES), output.weight.dtype),
        np.zeros((slots, size), np.float32),
        np.zeros((slots, size), np.int32),
        np.zeros((slots, size), np.float32),
    )
    whole = model.linears[len(model.linears) - 1]
    for slot in range(slots):
        row = lists.table[slot]
        row[WEIGHT], row[SCALES] = lists.weight[slot].ctypes.data, lists.scales[slot].ctypes.data
        row[CORRECTIONS], row[BIASES] = lists.corrections[slot].ctypes.data, lists.biases[slot].ctypes.data
        row[INPUTS], row[PADDED_INPUTS], row[IN_8_BITS] = whole[INPUTS], whole[PADDED_INPUTS], whole[IN_8_BITS]
    return lists


@inner
def pack_shortlist(output: Output, columns: Array, lists: Shortlists, slot: int) -> None:
    """Packs the output projection of the target pieces `columns` into the memory of a slot of the search.

    The outputs that fill the last block have the bias -inf, so that the search never chooses these outputs.
    """
    weight, scales, corrections, biases = (
        lists.weight[slot],
        lists.scales[slot],
        lists.corrections[slot],
        lists.biases[slot],
    )
    size, groups = (len(columns) + OUTPUTS - 1) // OUTPUTS * OUTPUTS, weight.shape[1]
    lists.table[slot, PADDED_OUTPUTS] = size
    for index in range(size):
        block, lane = index // LANES, index % LANES
        if index < len(columns):
            piece = columns[index]
            scales[index], corrections[index] = output.scales[piece], output.corrections[piece]
            biases[index] = output.biases[piece]
            for group in range(groups):
                weight[block, group, lane] = output.weight[piece, group]
        else:  # old weights are finite
            scales[index], corrections[index], biases[index] = 0, 0, -np.inf
