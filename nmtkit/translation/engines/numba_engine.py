"""Numba as an engine: a search that is compiled for the processor, for Transformers on a CPU.

The operations of a narrow model are so small that PyTorch takes longer to start them than to compute them. A compiled
search has no such costs, and multiplies integers of 8 bits at the speed of the processor. It finds the same hypotheses
as `beam_search.Search`. Needs the package numba. The first search on a machine compiles for some ten seconds; the
machine code is kept in files.
"""

import importlib.util
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from nmtkit.config import changed_flags
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS
from nmtkit.models.architectures.transformer_layers import ROW_WISE, Embedding
from nmtkit.models.formats.writing import check_expressible
from nmtkit.models.layers import is_unmodified
from nmtkit.translation.engines.engine import ENGINES, OUTSIDE, Engine, EngineConfig, LoadedModels
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchHypotheses, Segment, SegmentBatch

# Settings of which the compiled search supports every value. ALLOWED maps other settings to the supported values.
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "position_offset", "max_positions"}
SAME |= {"pre_norm", "attention_bias", "output_bias", "embedding_norm", "scale_embeddings", "zero_bos", "norm_eps"}
SAME |= {"share_embeddings", "tie_output", "ssru_norm", "decoder_ffn", "decoder_tied_layers", "activation"}
SAME |= {"average_ffn", "average_gate", "average_separate_gates"}
ALLOWED = {"decoder_self_attention": ("attention", "average", "ssru"), "positions": ADDED_POSITIONS}
FLAGS = OUTSIDE | {"--beam", "--nbest", "--lenpen", "--max-len-a", "--max-len-b", "--min-len", "--shortlist"}
FLAGS |= {"--unkpen", "--replace-unknown", "--no-repeat-ngram", "--ordered-constraints"}
FLAGS |= {"--sampling", "--temperature", "--top-k", "--top-p", "--seed"}
MODULES = (*ROW_WISE, Transformer, Embedding, nn.Embedding)

NOTICE_SECONDS = 3  # loading machine code from files takes less time

log = logging.getLogger("nmtkit")


@ENGINES.register("numba", EngineConfig())
class NumbaEngine(Engine):
    """The compiled search. The engine has copies of the weights.

    Precision int8 stores the weights of products in 8 bits. The inputs of products are rounded to 8 bits, too, with one
    scale for each row.
    """

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        precision = loaded.precision_of("numba", ensembles=True)
        require()
        from nmtkit.translation.engines.lockstep import LockstepSearch

        paths = [*loaded.paths, *[Path("the model")] * len(loaded.models)]
        transformers = [supported(model, path) for model, path in zip(loaded.models, paths, strict=False)]
        self.lockstep = LockstepSearch(transformers, precision, loaded.shortlist)
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

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            yield number, self.search(batch, options) if batch else []

    def search(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        return self.lockstep.search(batch, options)


def supported(model: Architecture, source: Path) -> Transformer:
    """Returns the model of the checkpoint `source`. Raises ValueError if the compiled search does not support it."""
    transformer = check_expressible(model, source, "--engine numba", SAME, ALLOWED, "leave out --engine")
    if not all(type(module) in MODULES and is_unmodified(module, type(module)) for module in model.modules()):
        raise ValueError(f"{source} has modules that --engine numba does not support: leave out --engine")
    return transformer


def require() -> None:
    """Raises ImportError with the install command if the package numba is missing."""
    if importlib.util.find_spec("numba") is None:
        raise ImportError("--engine numba needs the package numba: pip install 'nmtkit[numba]'")
