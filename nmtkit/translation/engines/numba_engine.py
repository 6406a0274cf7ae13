"""Numba as an engine: a search that is compiled for the processor, for Transformers on a CPU.

The operations of a narrow model are so small that PyTorch takes longer to start them than to compute them. A compiled
search has no such costs, and multiplies 8-bit integers with the fastest instructions of the processor. In fp32, the
search finds the same hypotheses as `beam_search.Search`. Needs the package numba. Compilation takes about ten seconds;
`jobs/machine_code.py` keeps the machine code in files.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nmtkit.config import changed_flags
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.jobs import machine_code
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.interface import Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS, TransformerConfig
from nmtkit.models.architectures.transformer_layers import ROW_WISE, Embedding
from nmtkit.models.formats.writing import check_expressible
from nmtkit.models.layers import is_unmodified
from nmtkit.models.layers.prepack import Precision
from nmtkit.translation.engines.engine import ENGINES, OUTSIDE, Engine, EngineConfig, LoadedModels
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchHypotheses, Segment, SegmentBatch

if TYPE_CHECKING:  # lockstep.py imports numba
    from nmtkit.translation.engines.lockstep import LockstepSearch

# Settings for which the compiled search supports every value. ALLOWED maps other settings to the supported values.
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "position_offset", "max_positions"}
SAME |= {"pre_norm", "attention_bias", "output_bias", "embedding_norm", "scale_embeddings", "zero_bos", "norm_eps"}
SAME |= {"share_embeddings", "tie_output", "ssru_norm", "decoder_ffn", "decoder_tied_layers", "activation"}
SAME |= {"average_ffn", "average_gate", "average_separate_gates", "rotary_base"}
ALLOWED = {
    "decoder_self_attention": ("attention", "average", "ssru"),
    "positions": (*ADDED_POSITIONS, "rotary", "none"),
}
FLAGS = OUTSIDE | {"--beam", "--nbest", "--lenpen", "--max-len-a", "--max-len-b", "--min-len", "--shortlist"}
FLAGS |= {"--unkpen", "--replace-unknown", "--no-repeat-ngram", "--ordered-constraints"}
FLAGS |= {"--sampling", "--temperature", "--top-k", "--top-p", "--seed"}
MODULES = (*ROW_WISE, Transformer, Embedding, nn.Embedding)

SHORTEST = SearchOptions(beam=1, lenpen=0, max_len_a=0, max_len_b=1)  # a search that only loads the machine code
AWAITED_SECONDS = 2.0  # processor time of a process before it starts a compilation, which short jobs do not need


@ENGINES.register("numba", EngineConfig())
class NumbaEngine(Engine):
    """The compiled search. The engine has copies of the weights.

    Precision int8 stores the weights of products in 8 bits. The inputs of products are rounded to 8 bits, too, with one
    scale for each row.
    """

    keeps_weights = True

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        self.precision = loaded.precision_of("numba", ensembles=True)
        self.same_hypotheses = self.precision == "fp32"
        if not machine_code.installed():
            raise ImportError("--engine numba needs the package numba: pip install 'nmtkit[numba]'")
        paths = [*loaded.paths, *[Path("the model")] * len(loaded.models)]
        self.transformers = [supported(model, path) for model, path in zip(loaded.models, paths, strict=False)]
        self.lockstep: LockstepSearch | None = None  # set by `prepare`
        self.preparing = threading.Lock()
        self.created_at = time.process_time()

    def is_ready(self) -> bool:
        return machine_code.background.is_ready()

    def is_awaited(self) -> None:
        """Starts the compilation in the background if the process has worked for AWAITED_SECONDS since `__init__`."""
        if time.process_time() - self.created_at > AWAITED_SECONDS:
            machine_code.background.start()

    def prepare(self) -> None:
        """Packs the weights, and loads the machine code. First compiles the search if necessary.

        Forked processes then share this memory, which is 50 MB for the smallest model.
        """
        self.prepared()

    def prepared(self) -> "LockstepSearch":
        with self.preparing:
            if self.lockstep is None:
                machine_code.ensure(compile_search)
                from nmtkit.translation.engines.lockstep import LockstepSearch

                self.lockstep = LockstepSearch(self.transformers, self.precision, self.loaded.shortlist)
                self.lockstep.search([Segment([EOS])], SHORTEST)
            return self.lockstep

    def refusal(self, options: SearchOptions) -> str | None:
        return ", ".join(sorted(changed_flags(options) - FLAGS)) or None

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            yield number, self.search(batch, options) if batch else []

    def search(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        return self.prepared().search(batch, options)


def supported(model: Architecture, source: Path) -> Transformer:
    """Returns the model of the checkpoint `source`. Raises ValueError for a model that the search does not support."""
    transformer = check_expressible(model, source, "--engine numba", SAME, ALLOWED, "give --engine torch")
    if not all(type(module) in MODULES and is_unmodified(module, type(module)) for module in model.modules()):
        raise ValueError(f"{source} has modules that --engine numba does not support: give --engine torch")
    return transformer


def compile_search() -> None:
    """Compiles the search for all types of its arguments, by searches with a small model in each precision."""
    from nmtkit.translation.engines.lockstep import LockstepSearch

    config = TransformerConfig(encoder_layers=1, decoder_layers=1, d_model=16, heads=1, d_ff=16)
    with torch.random.fork_rng(devices=()):
        model = Transformer(config, Vocabulary(source=8, target=8, joint=True)).eval()
    precisions: tuple[Precision, ...] = ("fp32", "int8")
    for precision in precisions:
        LockstepSearch([model], precision, None).search([Segment([EOS])], SearchOptions())
