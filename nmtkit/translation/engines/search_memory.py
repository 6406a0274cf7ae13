"""Arrays of the compiled search: the sentences of a call, the memory of a search, and its results.

Compiled functions get these arrays, and records with the addresses of arrays.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nmtkit.translation.engines import compiled_model as model
from nmtkit.translation.engines import compiled_search as compiled
from nmtkit.translation.engines.compiled_code import Array
from nmtkit.translation.engines.compiled_kernels import OUTPUTS
from nmtkit.translation.engines.compiled_products import (
    BIASES,
    BYTES_OF_INPUT,
    COLUMNS,
    CORRECTIONS,
    IN_8_BITS,
    PADDED_INPUTS,
    PADDED_OUTPUTS,
    SCALES,
    WEIGHT,
    aligned,
    packed_size,
)
from nmtkit.translation.engines.compiled_rules import AvoidedTexts, Ragged
from nmtkit.translation.engines.compiled_vectors import LANES
from nmtkit.translation.search.constraints import AvoidedText, PieceTexts
from nmtkit.translation.search.decoding import needs_attention
from nmtkit.translation.search.options import SearchOptions

GROWING = ("slots", "rows", "positions", "vocabulary", "recorded")  # sizes that may be larger than a search needs
STEPS = 32  # initial number of positions of the cache
ROUNDED = 128  # memory has a multiple of this number of rows, positions and columns, so that later calls can use it


def ragged(lists: Sequence[Any], dtype: Any = np.int64) -> Ragged:
    parts = [np.asarray(each, dtype) for each in lists if len(each)]
    if not parts:
        return empty_lists(len(lists), dtype)
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(each) for each in lists], out=starts[1:])
    return Ragged(np.concatenate(parts), starts)


@functools.lru_cache(maxsize=256)
def empty_lists(number: int, dtype: Any) -> Ragged:
    return Ragged(np.zeros(0, dtype), np.zeros(number + 1, np.int64))


# --- avoided texts ----------------------------------------------------------------------------------------------------


def avoided_texts(texts: Sequence[AvoidedText]) -> AvoidedTexts:
    if not texts:
        return NO_TEXTS
    vocabularies = tuple(dict.fromkeys(text.pieces for text in texts))
    starts = np.cumsum([0, *(len(pieces.texts) for pieces in vocabularies)])
    return AvoidedTexts(
        ragged([np.frombuffer(text.text, np.uint8) for text in texts], np.uint8),
        ragged([each for text in texts for each in pieces_of(text)]),
        spelled(vocabularies),
        np.array([starts[vocabularies.index(text.pieces)] for text in texts]),
    )


@functools.lru_cache(maxsize=1024)
def pieces_of(text: AvoidedText) -> list[Array]:
    """Returns the lists of pieces of a text. `compiled_rules.AvoidedTexts` describes these lists."""
    pieces = text.pieces
    lists: list[list[int]] = [pieces.contains(text.text), []]
    for size in range(1, len(text.text)):
        rest = text.text[size:]
        lists += [pieces.begins(rest), pieces.begins(b" " + rest)]
    return [np.sort(np.array(each, np.int64)) for each in lists]


@functools.lru_cache(maxsize=8)
def spelled(vocabularies: tuple[PieceTexts, ...]) -> Ragged:
    """Returns the bytes of the pieces of all vocabularies, in order."""
    return ragged([np.frombuffer(text, np.uint8) for pieces in vocabularies for text in pieces.texts], np.uint8)


NO_BYTES = ragged([], np.uint8)
NO_TEXTS = AvoidedTexts(NO_BYTES, ragged([]), NO_BYTES, np.zeros(0, np.int64))


# --- memory of a search -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemorySizes:
    slots: int  # sentences that are searched at the same time
    beam: int
    rows: int
    positions: int  # longest source or output
    vocabulary: int
    shortlists: bool
    recorded: int  # source tokens whose attention weights are recorded for each target token; 0: no recording

    @property
    def hypotheses(self) -> int:
        return self.slots * self.beam

    def suffice(self, needed: "MemorySizes") -> bool:
        """Returns whether memory of these sizes is enough for a search that needs the sizes `needed`.

        A size in GROWING may be larger than the needed size, unless the needed size is 0. Other sizes must be equal.
        """
        sizes = replace(self, **{name: getattr(needed, name) for name in GROWING})
        return sizes == needed and all(
            getattr(self, name) >= getattr(needed, name) and bool(getattr(self, name)) == bool(getattr(needed, name))
            for name in GROWING
        )


def rounded(size: int) -> int:
    return -(-size // ROUNDED) * ROUNDED


class SearchMemory:
    """Memory of the searches of one thread.

    `models` are records MODEL. `linears` are the tables of linear layers of these models. `outputs` are the output
    projections: rows of these tables, or for shortlists the results of `WeightTables.output_rows`.
    """

    def __init__(self, sizes: MemorySizes, models: Array, linears: Sequence[Array], outputs: Array) -> None:
        self.sizes, self.models = sizes, models
        self.arrays: list[Array] = []  # arrays whose addresses are in records
        slots, beam, number = sizes.slots, sizes.beam, len(models)
        spaces, caches = np.zeros(number, model.SPACE), np.zeros(number, model.CACHE)
        self.slots = np.zeros(slots, compiled.SLOT)
        self.slots["sentence"] = compiled.NO_SENTENCE
        self.everything = np.arange(sizes.positions)
        for index, table in enumerate(linears):
            self.make_space(spaces[index], models[index], table)
        tables = integers(number, slots if sizes.shortlists else 0, COLUMNS)
        for table, output in zip(tables, outputs, strict=True):
            for row in table:
                self.make_shortlist(row, output)
        self.state = compiled.SearchState(
            models=models, spaces=spaces, caches=caches, outputs=outputs, tables=tables,
            slots=self.slots, rows=np.zeros(sizes.hypotheses, model.ROW),
            before=np.zeros((slots, beam)), newest=integers(slots, beam), parents=integers(slots, beam),
            best_scores=np.zeros((slots, 2 * beam)), best_hypotheses=integers(slots, 2 * beam),
            best_tokens=integers(slots, 2 * beam),
            logits=aligned((number, compiled.LOGITS, packed_size(sizes.vocabulary)), np.float32),
            maxima=np.zeros(-(-packed_size(sizes.vocabulary) // OUTPUTS // LANES) * LANES, np.float32),
            weights=np.zeros(sizes.vocabulary, np.float32),
            places=integers(sizes.hypotheses, STEPS), tokens=integers(sizes.hypotheses * STEPS),
            totals=np.zeros(sizes.hypotheses * STEPS), old_places=integers(beam, STEPS),
            recorded=np.empty((sizes.hypotheses * STEPS if sizes.recorded else 0, sizes.recorded), np.float32),
            counter=integers(1),
        )  # fmt: skip
        self.caches: list[Array] = []  # keys and values of each model
        for index, record in enumerate(models):
            recurrent = record["self_attention"] != model.ATTENTION
            layers, width = int(record["decoder_layers"]), int(record["width"])
            caches[index]["hypotheses"] = sizes.hypotheses
            caches[index]["states"] = self.kept((layers, 2, sizes.hypotheses if recurrent else 0, width), np.float32)
            caches[index]["zeros"] = self.kept((width,), np.float32)
            size = 0 if recurrent else sizes.hypotheses * STEPS
            self.caches.append(np.empty((layers, size, 2 * width), np.float32))
        self.write_addresses()

    def kept(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the address of a new array of zeros, which lives as long as this memory."""
        array = aligned(shape, dtype)
        array[...] = 0
        self.arrays.append(array)
        return array.ctypes.data

    def make_space(self, space: Array, record: Array, linears: Array) -> None:
        width, rows = int(record["width"]), self.sizes.rows
        layers = linears[:-1]
        space["width"] = packed_size(width)
        space["projected_width"] = max(packed_size(3 * width), packed_size(width + packed_size(width)))
        space["inner_width"] = max(int(layers[:, PADDED_OUTPUTS].max()), packed_size(2 * width))
        space["rounded_width"] = int(linears[:, PADDED_INPUTS].max()) * BYTES_OF_INPUT
        for name in ("x", "normal", "attended"):
            space[name] = self.kept((rows, int(space["width"])), np.float32)
        space["projected"] = self.kept((rows, int(space["projected_width"])), np.float32)
        space["inner"] = self.kept((rows, int(space["inner_width"])), np.float32)
        space["rounded"] = self.kept((rows, int(space["rounded_width"])), np.uint8)
        space["scales"] = self.kept((rows,), np.float32)
        space["weights"] = self.kept((int(record["heads"]), self.sizes.positions + LANES), np.float32)
        space["everything"] = self.everything.ctypes.data

    def make_shortlist(self, row: Array, output: Array) -> None:
        """Allocates memory for the output projection of a shortlist, and writes its description to `row`.

        `row` belongs to a slot of the search. `output` is the projection to all pieces.
        """
        size = packed_size(self.sizes.vocabulary)
        row[:] = output
        row[WEIGHT] = self.kept((size, int(row[PADDED_INPUTS])), np.int8 if row[IN_8_BITS] else np.float32)
        for column, kind in ((SCALES, np.float32), (CORRECTIONS, np.int32), (BIASES, np.float32)):
            row[column] = self.kept((size,), kind)

    @property
    def cache_bytes(self) -> int:
        """The bytes of the keys and values of all hypotheses, which grow with the longest translation so far."""
        return sum(array.nbytes for array in self.caches)

    def connect(self, memories: Sequence[Array], counter: Array, slots: int) -> None:
        """Connects a search with the keys and values of all source tokens, and with a counter of taken sentences.

        The search uses the first `slots` slots. With more slots, a thread would take more sentences than its share.
        """
        for cache, array in zip(self.state.caches, memories, strict=True):
            cache["memory"], cache["memory_layer_size"] = array.ctypes.data, array.strides[0]
            cache["memory_width"] = array.shape[2]
        self.state = self.state._replace(counter=counter, slots=self.slots[:slots])

    def write_addresses(self) -> None:
        for cache, array in zip(self.state.caches, self.caches, strict=True):
            cache["keys_and_values"], cache["layer_size"] = array.ctypes.data, array.strides[0]

    def lengthen(self) -> None:
        """Doubles the positions of the cache. The tokens of a hypothesis stay together."""
        hypotheses, capacity = self.state.places.shape

        def longer(array: Array, axis: int) -> Array:
            shape = [*array.shape[:axis], -1, capacity, *array.shape[axis + 1 :]]
            old = array.reshape(shape)
            new = np.empty([*old.shape[: axis + 1], 2 * capacity, *old.shape[axis + 2 :]], array.dtype)
            new[(slice(None),) * (axis + 1) + (slice(capacity),)] = old
            return new.reshape([*array.shape[:axis], 2 * array.shape[axis], *array.shape[axis + 1 :]])

        places = integers(hypotheses, 2 * capacity)
        places[:, :capacity] = self.state.places + self.state.places // capacity * capacity
        self.state = self.state._replace(
            places=places,
            tokens=longer(self.state.tokens, 0),
            totals=longer(self.state.totals, 0),
            old_places=integers(self.sizes.beam, 2 * capacity),
            recorded=longer(self.state.recorded, 0) if len(self.state.recorded) else self.state.recorded,
        )
        self.caches = [longer(array, 1) if array.shape[1] else array for array in self.caches]
        self.write_addresses()


def integers(*shape: int) -> Array:
    return np.zeros(shape, np.int64)


def memories(models: Array, tokens: int) -> list[Array]:
    """Returns memory for the keys and values of the source tokens of all sentences, for each model."""
    shapes = [(int(each["decoder_layers"]), tokens, packed_size(2 * int(each["width"]))) for each in models]
    return [np.empty(shape, np.float32) for shape in shapes]


def results_for(sentences: compiled.SourceSentences, options: SearchOptions) -> compiled.Results:
    number, nbest, longest = len(sentences.max_lengths), options.nbest, int(sentences.max_lengths.max()) + 1
    starts = integers(number + 1)
    # with a shortlist, the search does not normalise log probabilities over the whole vocabulary
    with_gains = options.quality and not options.shortlist
    if needs_attention(options):
        np.cumsum(nbest * (sentences.max_lengths + 1) * np.diff(sentences.sources.starts), out=starts[1:])
    return compiled.Results(
        scores=np.full((number, nbest), -np.inf),
        log_probabilities=np.full((number, nbest), -np.inf),
        lengths=integers(number, nbest),
        order=integers(number, nbest) + np.arange(nbest),
        tokens=np.zeros((number, nbest, longest), np.int32),
        gains=np.zeros((number if with_gains else 0, nbest, longest)),
        attention=Ragged(np.empty(int(starts[-1]), np.float32), starts),
    )


def encoding_groups(starts: Array, threads: int) -> Array:
    """Returns the index of the first sentence of each group that is encoded together, then the number of sentences.

    A group has about ENCODED source tokens, or fewer, so that each thread gets a group.
    """
    size = min(compiled.ENCODED, -(-int(starts[-1]) // threads))
    groups, number = [0], len(starts) - 1
    while groups[-1] < number:
        end = int(np.searchsorted(starts, starts[groups[-1]] + size))
        groups.append(min(max(end, groups[-1] + 1), number))
    return np.array(groups)
