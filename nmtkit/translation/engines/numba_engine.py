"""Numba as an engine: a search that is compiled for the processor, for Transformers on a CPU.

The operations of a narrow model are so small that PyTorch takes longer to start them than to compute them. A compiled
search has no such costs, and multiplies integers of 8 bits at the speed of the processor. It finds the same hypotheses
as `beam_search.Search`. Needs the package numba. The first search on a machine compiles for some ten seconds; the
machine code is kept in files.
"""

import importlib.util
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nmtkit.config import changed_flags
from nmtkit.data.tokenizers.tokenizer import EOS, UNK, Encoded
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS
from nmtkit.models.architectures.transformer_layers import ROW_WISE, Embedding
from nmtkit.models.formats.writing import check_expressible
from nmtkit.models.layers import is_unmodified
from nmtkit.translation.engines.engine import ENGINES, OUTSIDE, Engine, EngineConfig, LoadedModels
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import forbidden_tokens, max_lengths
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Segment, SegmentBatch

if TYPE_CHECKING:  # these files import numba
    from nmtkit.translation.engines import compiled_shortlists

# Settings of which the compiled search supports every value. ALLOWED maps other settings to the supported values.
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "position_offset", "max_positions"}
SAME |= {"pre_norm", "attention_bias", "output_bias", "embedding_norm", "scale_embeddings", "zero_bos", "norm_eps"}
SAME |= {"share_embeddings", "tie_output", "ssru_norm", "decoder_ffn", "decoder_tied_layers", "activation"}
ALLOWED = {"decoder_self_attention": ("attention", "ssru"), "positions": ADDED_POSITIONS}
FLAGS = OUTSIDE | {"--beam", "--nbest", "--lenpen", "--max-len-a", "--max-len-b", "--min-len", "--shortlist"}
FLAGS |= {"--unkpen", "--replace-unknown", "--no-repeat-ngram"}
MODULES = (*ROW_WISE, Transformer, Embedding, nn.Embedding)

NOTICE_SECONDS = 3  # loading machine code from files takes less time
MOST_ROWS, MOST_SENTENCES = 64, 32  # open hypotheses, and sentences, that are searched together by one thread

log = logging.getLogger("nmtkit")


@ENGINES.register("numba", EngineConfig())
class NumbaEngine(Engine):
    """The compiled search of one model. The engine has copies of the weights.

    Precision int8 stores the weights of products in 8 bits. The inputs of products are rounded to 8 bits, too, with one
    scale for each row.
    """

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        self.precision = loaded.precision_of("numba")
        require()
        from nmtkit.translation.engines.compiled_weights import model_of

        (model,), (source, *_) = loaded.models, (*loaded.paths, Path("the model"))
        self.transformer = check_expressible(model, source, "--engine numba", SAME, ALLOWED, "leave out --engine")
        if not all(type(module) in MODULES and is_unmodified(module, type(module)) for module in model.modules()):
            raise ValueError(f"{source} has modules that --engine numba does not support: leave out --engine")
        with torch.inference_mode():
            self.model, self.tables = model_of(self.transformer, self.precision)
        notice = threading.Timer(
            NOTICE_SECONDS, log.info, ("compiling the search for this processor, once per machine",)
        )
        notice.start()
        try:
            self.search([Segment([EOS])], SearchOptions())
        finally:
            notice.cancel()

    def refusal(self, options: SearchOptions) -> str | None:
        return ", ".join(sorted(changed_flags(options) - FLAGS)) or None

    def refuses(self, segment: Segment) -> bool:
        return bool(segment.constraints.avoided or segment.constraints.after_prefix)

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            yield number, self.search(batch, options) if batch else []

    def search(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        """Returns the hypotheses of each segment, best first. Of the constraints, only prefixes have an effect.

        Each thread searches a part of the segments. This does not change the hypotheses.
        """
        constraints = [segment.constraints for segment in batch]
        lengths = max_lengths(options, [len(segment.ids) for segment in batch], constraints, [self.transformer])
        self.reserve_positions(max(len(segment.ids) for segment in batch), max(lengths) + 1)
        threads = min(self.threads, len(batch))
        if threads == 1:
            return self.search_part(batch, lengths, options)
        parts = self.pool.map(
            self.search_part,
            [batch[first::threads] for first in range(threads)],
            [lengths[first::threads] for first in range(threads)],
            [options] * threads,
        )
        results: BatchHypotheses = [[] for _ in batch]
        for first, part in enumerate(parts):
            results[first::threads] = part
        return results

    def search_part(self, batch: SegmentBatch, lengths: Sequence[int], options: SearchOptions) -> BatchHypotheses:
        from nmtkit.translation.engines import compiled_search

        sources = [np.array(segment.ids, np.int64) for segment in batch]
        prefixes = [np.array(segment.constraints.prefix, np.int64) for segment in batch]
        columns = self.columns(sources, prefixes) if options.shortlist else []
        if columns:
            prefixes = [np.searchsorted(ids, prefix) for ids, prefix in zip(columns, prefixes, strict=True)]
        sentences = compiled_search.SourceSentences(
            *joined(sources), np.array(lengths), *joined(prefixes),
            np.array([segment.constraints.language_tokens for segment in batch]), *joined(columns),
        )  # fmt: skip
        unknown_penalty = math.inf if UNK in forbidden_tokens(options) else float(options.unkpen or 0)
        settings = compiled_search.Settings(
            slots=max(1, min(MOST_SENTENCES, MOST_ROWS // options.beam)),
            beam=options.beam,
            nbest=options.nbest,
            lenpen=float(options.lenpen),
            min_length=options.min_len,
            unknown_penalty=unknown_penalty,
            no_repeat=options.no_repeat_ngram,
        )
        output = self.output if columns else self.no_output
        found = compiled_search.search(self.model, output, sentences, settings)
        tokens, sizes = found.tokens, found.lengths.tolist()
        scores, log_probabilities = found.scores.tolist(), found.log_probabilities.tolist()

        def hypothesis(sentence: int, rank: int) -> Hypothesis:
            ids = tokens[sentence, rank, : sizes[sentence][rank]]
            ids = columns[sentence][ids] if columns else ids
            return Hypothesis(ids.tolist(), scores[sentence][rank], log_probabilities[sentence][rank])

        return [
            [hypothesis(sentence, rank) for rank in range(options.nbest) if scores[sentence][rank] > -math.inf]
            for sentence in range(len(batch))
        ]

    def columns(self, sources: Sequence[Any], prefixes: Sequence[Any]) -> list[Any]:
        """Returns the target pieces that the shortlist allows for each sentence, sorted."""
        shortlist = self.loaded.shortlist
        if shortlist is None:
            return []
        encoded = Encoded(np.concatenate(sources), np.array([len(ids) for ids in sources]))
        return [np.flatnonzero(row) for row in shortlist.allowed(encoded, [list(ids) for ids in prefixes])]

    def reserve_positions(self, source: int, target: int) -> None:
        """Extends the tables of positions to the longest source and the longest output of a batch."""
        from nmtkit.translation.engines.compiled_weights import array

        parts = {}
        for side, size in (("source", source), ("target", target)):
            embedding: Embedding = getattr(self.transformer, f"{side}_embedding")
            part = getattr(self.model, side)
            if len(part.positions) < size:
                parts[side] = part._replace(positions=array(embedding.table(size)))
        if parts:
            self.model = self.model._replace(**parts)

    @cached_property
    def output(self) -> "compiled_shortlists.Output":
        """The output projection by piece, from which the projections of shortlists are packed."""
        from nmtkit.translation.engines.compiled_weights import output_of

        with torch.inference_mode():
            return output_of(self.transformer, self.precision)

    @cached_property
    def no_output(self) -> "compiled_shortlists.Output":
        """The output projection of a search without shortlists: no rows, in the same types."""
        from nmtkit.translation.engines.compiled_shortlists import Output
        from nmtkit.translation.engines.compiled_weights import group_type

        weight = np.zeros((0, 1), group_type(self.precision))
        reals = np.zeros(0, np.float32)
        return Output(weight, reals, np.zeros(0, np.int32), reals)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that search at the same time. The compiled function releases the lock of Python."""
        return ThreadPoolExecutor(self.threads, "numba")


def joined(arrays: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the numbers of all arrays, and the index of the first number of each array, then their number."""
    if not arrays:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)])


def require() -> None:
    """Raises ImportError with the install command if the package numba is missing."""
    if importlib.util.find_spec("numba") is None:
        raise ImportError("--engine numba needs the package numba: pip install 'nmtkit[numba]'")
