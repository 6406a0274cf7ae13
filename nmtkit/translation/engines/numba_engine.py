"""Numba as the engine of a search: a compiled search for Transformers on a CPU, one sentence at a time.

The operations of a narrow model are so small that torch takes longer to start them than to compute them. A compiled
search has no such costs. It finds the same hypotheses as `beam_search.Search`. Needs the package numba. The first
search on a machine compiles for up to a minute; the machine code is kept in files.
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
from torch import Tensor, nn

from nmtkit.config import changed_flags
from nmtkit.data.tokenizers.tokenizer import EOS, Encoded
from nmtkit.models.architectures.transformer import ROW_WISE, Embedding, SelfAttention, Transformer
from nmtkit.models.formats.writing import check_expressible
from nmtkit.models.layers import int8, is_unmodified
from nmtkit.models.layers.feed_forward import FeedForward
from nmtkit.models.layers.fixed_state import SSRU
from nmtkit.models.layers.prepack import Precision
from nmtkit.translation.engines.engine import ENGINES, OUTSIDE, Engine, EngineConfig, LoadedModels
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import max_lengths
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Segment, SegmentBatch

if TYPE_CHECKING:  # these files import numba
    from nmtkit.translation.engines import compiled_layers as compiled
    from nmtkit.translation.engines import compiled_model, compiled_search

# Settings of which the compiled search supports every value. ALLOWED maps other settings to the supported values.
SAME = {"encoder_layers", "decoder_layers", "d_model", "d_ff", "heads", "positions", "position_offset", "max_positions"}
SAME |= {"pre_norm", "attention_bias", "output_bias", "embedding_norm", "scale_embeddings", "zero_bos", "norm_eps"}
SAME |= {"share_embeddings", "tie_output", "ssru_norm", "decoder_ffn", "decoder_tied_layers"}
ALLOWED = {"decoder_self_attention": ("attention", "ssru")}
FLAGS = OUTSIDE | {"--beam", "--nbest", "--lenpen", "--max-len-a", "--max-len-b", "--min-len", "--shortlist"}
MODULES = (*ROW_WISE, Transformer, Embedding, nn.Embedding)

NOTICE_SECONDS = 3  # loading machine code from files takes less time

log = logging.getLogger("nmtkit")


@ENGINES.register("numba", EngineConfig())
class NumbaEngine(Engine):
    """The compiled search of one model.

    The engine copies the weights. Precision int8 stores the weights of products in 8 bits; their inputs have 14 bits.
    """

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        precision = loaded.precision_of("numba")
        require()
        (model,), (source, *_) = loaded.models, (*loaded.paths, Path("the model"))
        self.transformer = check_expressible(model, source, "--engine numba", SAME, ALLOWED, "leave out --engine")
        if not all(type(module) in MODULES and is_unmodified(module, type(module)) for module in model.modules()):
            raise ValueError(f"{source} has modules that --engine numba does not support: leave out --engine")
        with torch.inference_mode():
            self.model = weights_of(self.transformer, precision)
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
        return bool(segment.constraints.avoided)

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        for number, batch in enumerate(batches):
            yield number, self.search(batch, options) if batch else []

    def search(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        """Returns the hypotheses of each segment, best first. Of the constraints, only prefixes have an effect."""
        sources = [np.array(segment.ids) for segment in batch]
        constraints = [segment.constraints for segment in batch]
        lengths = max_lengths(options, map(len, sources), constraints, [self.transformer])
        prefixes = [np.array(each.prefix, np.int64) for each in constraints]
        settings = [
            compiled_settings(options, length, each.language_tokens)
            for length, each in zip(lengths, constraints, strict=True)
        ]
        lists: list[Any] = [np.empty(0, np.int64)] * len(batch)
        if options.shortlist and self.loaded.shortlist is not None:
            encoded = Encoded(np.concatenate(sources), np.array([len(ids) for ids in sources]))
            allowed = self.loaded.shortlist.allowed(encoded, [list(ids) for ids in prefixes])
            lists = [np.flatnonzero(row) for row in allowed]
            prefixes = [np.searchsorted(ids, prefix) for ids, prefix in zip(lists, prefixes, strict=True)]
        self.reserve_positions(max(map(len, sources)), max(lengths) + 1)
        if len(batch) > 1 and self.threads > 1:
            return list(self.pool.map(self.search_sentence, sources, settings, lists, prefixes))
        return list(map(self.search_sentence, sources, settings, lists, prefixes))

    def search_sentence(
        self, ids: Any, settings: "compiled_search.Settings", columns: Any, prefix: Any
    ) -> list[Hypothesis]:
        from nmtkit.translation.engines import compiled_search

        found = compiled_search.search(self.model, ids, settings, columns, prefix)
        fields = found.tokens, found.lengths.tolist(), found.scores.tolist(), found.log_probabilities.tolist()
        return [
            Hypothesis((columns[tokens[:size]] if len(columns) else tokens[:size]).tolist(), score, log_probability)
            for tokens, size, score, log_probability in zip(*fields, strict=True)
            if score > -math.inf
        ]

    def reserve_positions(self, source: int, target: int) -> None:
        """Extends the tables of positions to the longest source and the longest output of a batch."""
        parts = {}
        for side, size in (("source", source), ("target", target)):
            embedding: Embedding = getattr(self.transformer, f"{side}_embedding")
            part = getattr(self.model, side)
            if len(part.positions) < size:
                parts[side] = part._replace(positions=array(embedding.table(size)))
        if parts:
            self.model = self.model._replace(**parts)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that search sentences at the same time. The compiled function releases the lock of Python."""
        return ThreadPoolExecutor(self.threads, "numba")


def compiled_settings(options: SearchOptions, max_length: int, language_tokens: int) -> "compiled_search.Settings":
    from nmtkit.translation.engines import compiled_search

    fixed = options.beam, options.nbest, float(options.lenpen), options.min_len
    return compiled_search.Settings(*fixed, max_length, language_tokens)


def require() -> None:
    """Raises ImportError with the install command if the package numba is missing."""
    if importlib.util.find_spec("numba") is None:
        raise ImportError("--engine numba needs the package numba: pip install 'nmtkit[numba]'")


# --- weights ----------------------------------------------------------------------------------------------------------


def weights_of(model: Transformer, precision: Precision) -> "compiled_model.Model":
    """Returns the weights of a model as NumPy arrays, stacked over the layers of the encoder and of the decoder."""
    from nmtkit.translation.engines import compiled_model

    stack = Stack(precision)
    encoder, decoder = list(model.encoder), list(model.decoder)
    recurrent = model.config.decoder_self_attention == "ssru"
    ssrus = [layer.self_attention for layer in decoder if isinstance(layer.self_attention, SSRU)]
    self_attentions = [layer.self_attention for layer in decoder if isinstance(layer.self_attention, SelfAttention)]
    cross = [layer.cross_attention for layer in decoder if layer.cross_attention is not None]

    def feed_forward(layers: Sequence[Any]) -> "compiled_model.FeedForward":
        parts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, FeedForward)]
        norms = [layer.feed_forward_norm for layer in layers if layer.feed_forward is not None]
        return compiled_model.FeedForward(
            stack.linear([part.fc1 for part in parts]), stack.linear([part.fc2 for part in parts]), stack.norm(norms)
        )

    return compiled_model.Model(
        source=embedding(model.source_embedding, stack),
        target=embedding(model.target_embedding, stack),
        encoder=compiled_model.EncoderLayers(
            qkv=stack.linear([layer.self_attention.qkv_proj for layer in encoder]),
            out=stack.linear([layer.self_attention.out_proj for layer in encoder]),
            norm=stack.norm([layer.self_attention_norm for layer in encoder]),
            feed_forward=feed_forward(encoder),
        ),
        encoder_norm=stack.norm([model.encoder_norm]),
        decoder=compiled_model.DecoderLayers(
            self_in=stack.gates(ssrus) if recurrent else stack.linear([part.qkv_proj for part in self_attentions]),
            value_norm=stack.norm([part.norm for part in ssrus]),
            forget_norm=stack.norm([part.forget_norm for part in ssrus]),
            self_out=stack.linear([part.out_proj for part in self_attentions]),
            self_norm=stack.norm([layer.self_attention_norm for layer in decoder]),
            query=stack.linear([part.q_proj for part in cross]),
            memory=stack.linear([part.kv_proj for part in cross]),
            cross_out=stack.linear([part.out_proj for part in cross]),
            cross_norm=stack.norm([layer.cross_attention_norm for layer in decoder]),
            feed_forward=feed_forward(decoder),
        ),
        decoder_norm=stack.norm([model.decoder_norm]),
        output=stack.linear([model.output_projection]),
        norms=compiled_model.NormOptions(model.config.pre_norm, np.float32(model.config.norm_eps)),
        heads=model.config.heads,
        recurrent=recurrent,
    )


def embedding(part: Embedding, stack: "Stack") -> "compiled_model.Embedding":
    from nmtkit.translation.engines import compiled_model

    return compiled_model.Embedding(
        tokens=array(part.tokens.weight),
        positions=array(part.table(1)),
        norm=stack.norm([part.norm]),
        scale=np.float32(part.scale),
        zero_first=part.zero_first,
    )


class Stack:
    """Stacks weights of modules with the same shapes. If there is no module, the arrays have size 0."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def linear(self, modules: Sequence[nn.Linear]) -> "compiled.Linear":
        return self.products([(module.weight, module.bias) for module in modules])

    def gates(self, modules: Sequence[SSRU]) -> "compiled.Linear":
        """Stacks both projections of SSRUs: the values, then the forget gates."""
        weights = [torch.cat([module.proj.weight, module.forget_proj.weight]) for module in modules]
        biases = [with_bias(module.forget_proj.bias, len(module.proj.weight)) for module in modules]
        return self.products(
            [(weight, torch.cat([bias * 0, bias])) for weight, bias in zip(weights, biases, strict=True)]
        )

    def products(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> "compiled.Linear":
        from nmtkit.translation.engines import compiled_layers as compiled

        if not pairs:
            dtype = np.int8 if self.precision == "int8" else np.float32
            return compiled.Linear(
                np.empty((0, 0, 0), dtype), np.empty((0, 0), np.float32), np.empty((0, 0), np.float32)
            )
        weight = torch.stack([weight.detach().float() for weight, _ in pairs])
        bias = torch.stack([with_bias(bias, len(weight)) for weight, bias in pairs])
        scale = torch.empty(len(pairs), 0)
        if self.precision == "int8":
            weight, scale = int8.quantize(weight)
        return compiled.Linear(array(weight), array(scale), array(bias))

    def norm(self, modules: Sequence[nn.Module | None]) -> "compiled.Norm":
        from nmtkit.translation.engines import compiled_layers as compiled

        norms = [module for module in modules if isinstance(module, nn.LayerNorm)]
        if not norms:
            return compiled.Norm(np.empty((1, 0), np.float32), np.empty((1, 0), np.float32))
        width = norms[0].normalized_shape[0]
        gain: list[Tensor] = [part.weight for part in norms]
        bias = [with_bias(part.bias, width) for part in norms]
        return compiled.Norm(array(torch.stack(gain)), array(torch.stack(bias)))


def with_bias(bias: Tensor | None, size: int) -> Tensor:
    """Returns a bias in fp32, or zeros."""
    return torch.zeros(size) if bias is None else bias.detach().float()


def array(tensor: Tensor) -> Any:
    """Returns a tensor as a contiguous NumPy array, which shares the memory of the tensor if possible."""
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
