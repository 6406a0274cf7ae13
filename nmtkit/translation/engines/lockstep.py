"""Runs the compiled search on batches of segments, with any number of threads."""

import contextlib
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from nmtkit.data.tokenizers.tokenizer import UNK
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.layers.prepack import Precision
from nmtkit.text.encoded import Encoded
from nmtkit.translation.engines import compiled_search as compiled
from nmtkit.translation.engines.compiled_code import Array
from nmtkit.translation.engines.compiled_rules import Settings
from nmtkit.translation.engines.compiled_weights import model_of, position_tables
from nmtkit.translation.engines.search_memory import (
    MemorySizes,
    SearchMemory,
    avoided_texts,
    encoding_groups,
    memories,
    ragged,
    results_for,
    rounded,
)
from nmtkit.translation.search.beam_search import random_numbers
from nmtkit.translation.search.decoding import needs_attention
from nmtkit.translation.search.limited_search import needed_pieces
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import forbidden_tokens, max_lengths, open_hypotheses
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, SegmentBatch

MOST_ROWS, MOST_SENTENCES = 64, 32  # limits of open hypotheses and of sentences that one thread searches together
RECORDED = 1 << 22  # largest number of attention weights of all slots, for outputs as long as the sources
KEPT_BYTES = 1 << 27  # largest size of keys and values that a thread keeps for its next search


class LockstepSearch:
    """The compiled search of one or more models, with copies of their weights."""

    def __init__(self, transformers: Sequence[Transformer], precision: Precision, shortlist: Shortlist | None) -> None:
        self.transformers, self.shortlist = transformers, shortlist
        with torch.inference_mode():
            packed = [model_of(each, precision) for each in transformers]
        self.models = np.stack([record for record, _ in packed])
        self.tables = [tables for _, tables in packed]
        self.linears = [np.array(tables.linears, np.int64) for tables in self.tables]
        self.reserved = [0] * len(transformers)  # number of positions in the tables of each model
        self.extending = threading.Lock()
        self.free: list[SearchMemory] = []  # memory of earlier searches, for the next searches

    def search(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        """Returns the hypotheses of each segment, best first. Required phrases have no effect.

        The number of threads does not change the hypotheses.
        """
        threads = min(torch.get_num_threads(), len(batch))
        # A batch begins with its longest segments, and each thread takes a run of successive segments. With n threads,
        # the new order begins with the segments 0, n, 2n, …, so that each thread gets some of the long segments.
        order = [index for first in range(threads) for index in range(first, len(batch), threads)]
        found = dict(zip(order, self.searched([batch[index] for index in order], options, threads), strict=True))
        return [found[index] for index in range(len(batch))]

    def searched(self, batch: SegmentBatch, options: SearchOptions, threads: int) -> BatchHypotheses:
        sources = [len(segment.ids) for segment in batch]
        constraints = [segment.constraints for segment in batch]
        lengths = max_lengths(options, sources, constraints, self.transformers)
        self.reserve_positions(max(*sources, max(lengths) + 1))
        sentences, settings = self.sentences(batch, lengths, options), settings_of(options)
        results = results_for(sentences, options)
        groups = encoding_groups(sentences.sources.starts, threads)
        sizes = self.sizes(sentences, settings, groups, -(-len(batch) // threads), needs_attention(options))
        workers = [self.memory(sizes) for _ in range(threads)]
        memory = memories(self.models, len(sentences.sources.values))

        def encode(worker: SearchMemory) -> None:
            compiled.encode_sentences(worker.state, sentences.sources, groups)

        def decode(worker: SearchMemory) -> None:
            while not compiled.search(worker.state, sentences, results, settings):
                worker.lengthen()

        for work in (encode, decode):
            counter = np.zeros(1, np.int64)
            for worker in workers:
                worker.connect(memory, counter, sizes.slots)
            if threads == 1:
                work(workers[0])
            else:
                list(thread_pool(os.getpid(), torch.get_num_threads()).map(work, workers))
        self.free = [worker for worker in workers if worker.cache_bytes <= KEPT_BYTES]
        return hypotheses_of(sentences, results, float(options.unkpen or 0))

    def sentences(
        self, batch: SegmentBatch, lengths: Sequence[int], options: SearchOptions
    ) -> compiled.SourceSentences:
        constraints = [segment.constraints for segment in batch]
        prefixes: list[Any] = [each.prefix for each in constraints]
        allowed: list[Any] = [each.after_prefix for each in constraints]
        sources = ragged([segment.ids for segment in batch])
        columns: list[Any] = [()] * len(batch)
        if options.shortlist and self.shortlist is not None:
            encoded = Encoded(sources.values, np.diff(sources.starts))
            columns = [
                np.flatnonzero(row) for row in self.shortlist.allowed(encoded, list(map(needed_pieces, constraints)))
            ]
            # sentences without a prefix skip `isin`, which takes longer than the rest of this method
            prefixes = [ids and np.searchsorted(own, ids) for own, ids in zip(columns, prefixes, strict=True)]
            allowed = [ids and np.flatnonzero(np.isin(own, ids)) for own, ids in zip(columns, allowed, strict=True)]
        texts = list(dict.fromkeys(text for each in constraints for text in each.avoided))
        numbers = {text: number for number, text in enumerate(texts)}
        uniform: list[Any] = [()] * len(batch)
        if options.sampling:
            rows = open_hypotheses(options)
            uniform = [
                random_numbers(options.seed, segment.seed).random(rows * (length + 1))
                for segment, length in zip(batch, lengths, strict=True)
            ]
        return compiled.SourceSentences(
            sources=sources,
            max_lengths=np.array(lengths),
            language_tokens=np.array([each.language_tokens for each in constraints]),
            prefixes=ragged(prefixes),
            allowed=ragged(allowed),
            columns=ragged(columns),
            avoided=ragged([[numbers[text] for text in each.avoided] for each in constraints]),
            texts=avoided_texts(texts),
            uniform=ragged(uniform, np.float64),
        )

    def sizes(
        self, sentences: compiled.SourceSentences, settings: Settings, groups: Array, number: int, records: bool
    ) -> MemorySizes:
        """Returns the sizes of memory for a thread that searches about `number` of the sentences."""
        starts = sentences.sources.starts
        first = starts[groups]
        longest, tokens = int((starts[1:] - starts[:-1]).max()), int((first[1:] - first[:-1]).max())
        slots = max(1, min(MOST_SENTENCES, MOST_ROWS // settings.beam, number))
        recorded = rounded(longest) if records else 0
        if records:
            slots = max(1, min(slots, RECORDED // (longest * longest * settings.beam)))
        shortlists, vocabulary = len(sentences.columns.values) > 0, len(self.transformers[0].output_projection.weight)
        if shortlists:
            vocabulary = rounded(int(np.diff(sentences.columns.starts).max()))
        return MemorySizes(
            slots=slots,
            beam=settings.beam,
            rows=rounded(max(tokens, slots * settings.beam)),
            positions=rounded(max(longest, int(sentences.max_lengths.max()) + 1)),
            vocabulary=vocabulary,
            shortlists=shortlists,
            recorded=recorded,
        )

    def memory(self, sizes: MemorySizes) -> SearchMemory:
        """Returns memory for a search. No other thread uses this memory."""
        with contextlib.suppress(IndexError):  # raised if no memory is free
            memory = self.free.pop()
            if memory.sizes.suffice(sizes):
                return memory
        outputs = self.output_rows if sizes.shortlists else np.stack([table[-1] for table in self.linears])
        return SearchMemory(sizes, self.models, self.linears, outputs)

    @cached_property
    def output_rows(self) -> Array:
        """The output projections of the models for searches with a shortlist."""
        return np.stack([tables.output_rows() for tables in self.tables])

    def reserve_positions(self, length: int) -> None:
        """Extends the tables of positions to `length`, the longest source or output of a batch."""
        with self.extending:
            for index, transformer in enumerate(self.transformers):
                if self.reserved[index] < length:
                    tables = position_tables(transformer, length)
                    for name, table in tables.items():  # old tables are kept, because other threads may use them
                        self.models[index][name] = self.tables[index].kept(table)
                    self.reserved[index] = min(map(len, tables.values()))


@cache
def thread_pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Returns threads that search at the same time. Compiled functions release the GIL.

    `process` is the id of this process. The cache has an entry for each id, because a forked process does not have the
    threads of its parent and must make new threads.
    """
    return ThreadPoolExecutor(threads, "numba")


def settings_of(options: SearchOptions) -> Settings:
    return Settings(
        beam=open_hypotheses(options),
        nbest=options.nbest,
        lenpen=float(options.lenpen),
        min_length=options.min_len,
        unknown_penalty=math.inf if UNK in forbidden_tokens(options) else float(options.unkpen or 0),
        no_repeat=options.no_repeat_ngram,
        sampling=options.sampling,
        temperature=float(options.temperature),
        top_k=options.top_k,
        top_p=float(options.top_p),
    )


def hypotheses_of(
    sentences: compiled.SourceSentences, results: compiled.Results, unknown_penalty: float
) -> BatchHypotheses:
    """Returns the hypotheses of each sentence, best first.

    Log probabilities of hypotheses contain the penalty of <unk>, but log probabilities of tokens do not.
    """
    scores, log_probabilities = results.scores.tolist(), results.log_probabilities.tolist()
    order, sizes = results.order.tolist(), results.lengths.tolist()
    starts, columns = sentences.sources.starts.tolist(), sentences.columns

    def hypothesis(sentence: int, rank: int) -> Hypothesis:
        index = order[sentence][rank]
        size = sizes[sentence][index]
        ids = results.tokens[sentence, index, :size]
        if len(columns.values):
            ids = columns.values[columns.starts[sentence] :][ids]
        gains = None
        if len(results.gains):
            own = results.gains[sentence, index, : size + 1]
            own[:-1][ids == UNK] += unknown_penalty
            gains = own.tolist()
        return Hypothesis(
            ids.tolist(), scores[sentence][rank], log_probabilities[sentence][rank], attention(sentence, index, size),
            gains,
        )  # fmt: skip

    def attention(sentence: int, index: int, size: int) -> list[list[float]] | None:
        weights = results.attention
        if not len(weights.values):
            return None
        width = starts[sentence + 1] - starts[sentence]
        first = weights.starts[sentence] + index * (sentences.max_lengths[sentence] + 1) * width
        rows: list[list[float]] = weights.values[first : first + size * width].reshape(size, width).tolist()
        return rows

    return [
        [hypothesis(sentence, rank) for rank, score in enumerate(own) if score > -math.inf]
        for sentence, own in enumerate(scores)
    ]
