"""Everything that a plug-in imports: registries, base classes, the types of their arguments, and contract checks.

The modules that define these names may change; the names do not. Each name is imported at its first use, so a plug-in
with a learning-rate scheduler does not load the models.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmtkit.cleaning.filters import FILTERS, Filter, FilterContext, Scores, TextBlock
    from nmtkit.config import Config, option
    from nmtkit.config.registry import Registry
    from nmtkit.contracts import (
        ContractError,
        check_architecture,
        check_callback,
        check_criterion,
        check_engine,
        check_logits_processor,
        check_metric,
        check_optimizer,
        check_scheduler,
        check_transform,
    )
    from nmtkit.data.dataset.transforms import TRANSFORMS, Side, Transform
    from nmtkit.data.packed import IGNORE_INDEX, Batch, Layout, Packed
    from nmtkit.data.tokenizers.tokenizer import BOS, EOS, SPACE_SYMBOL, UNK, Tokenizer
    from nmtkit.models.architectures import ARCHITECTURES, Architecture, DecoderState, Vocabulary
    from nmtkit.models.architectures.incremental import IncrementalArchitecture, IncrementalState
    from nmtkit.models.architectures.transformer import Transformer
    from nmtkit.models.architectures.transformer_config import TransformerConfig
    from nmtkit.models.architectures.transformer_layers import Embedding, SelfAttention
    from nmtkit.models.layers.attention import AttentionContext
    from nmtkit.text.documents import Document, ReadOptions, read_document
    from nmtkit.text.encoded import Ids
    from nmtkit.training.callbacks import CALLBACKS, Callback, RunState
    from nmtkit.training.criterions import CRITERIONS, Criterion, Loss
    from nmtkit.training.lr_schedulers import LR_SCHEDULERS, LRScheduler, RunInfo
    from nmtkit.training.metrics import METRICS, Metric, Outputs
    from nmtkit.training.optimizers import OPTIMIZERS, ParameterGroups
    from nmtkit.translation.engines import ENGINES, Engine, EngineConfig, LoadedModels, TorchEngine
    from nmtkit.translation.search.constraints import NO_CONSTRAINTS
    from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState
    from nmtkit.translation.search.options import SearchOptions
    from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Segment, SegmentBatch

MODULES = {  # module -> the names above that it defines
    "cleaning.filters": "FILTERS Filter FilterContext Scores TextBlock",
    "config": "Config option",
    "config.registry": "Registry",
    "contracts": "ContractError check_architecture check_callback check_criterion check_engine check_logits_processor "
    "check_metric check_optimizer check_scheduler check_transform",
    "data.dataset.transforms": "TRANSFORMS Side Transform",
    "data.packed": "IGNORE_INDEX Batch Layout Packed",
    "data.tokenizers.tokenizer": "BOS EOS SPACE_SYMBOL UNK Tokenizer",
    "models.architectures": "ARCHITECTURES Architecture DecoderState Vocabulary",
    "models.architectures.incremental": "IncrementalArchitecture IncrementalState",
    "models.architectures.transformer": "Transformer",
    "models.architectures.transformer_config": "TransformerConfig",
    "models.architectures.transformer_layers": "Embedding SelfAttention",
    "models.layers.attention": "AttentionContext",
    "text.documents": "Document ReadOptions read_document",
    "text.encoded": "Ids",
    "training.callbacks": "CALLBACKS Callback RunState",
    "training.criterions": "CRITERIONS Criterion Loss",
    "training.metrics": "METRICS Metric Outputs",
    "training.lr_schedulers": "LR_SCHEDULERS LRScheduler RunInfo",
    "training.optimizers": "OPTIMIZERS ParameterGroups",
    "translation.engines": "ENGINES Engine EngineConfig LoadedModels TorchEngine",
    "translation.search.constraints": "NO_CONSTRAINTS",
    "translation.search.logits_processors": "LOGITS_PROCESSORS LogitsProcessor LogitsProcessorState",
    "translation.search.options": "SearchOptions",
    "translation.search.types": "BatchHypotheses Hypothesis Segment SegmentBatch",
}
MODULE_OF = {name: f"nmtkit.{module}" for module, names in MODULES.items() for name in names.split()}

__all__ = sorted(MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"nmtkit.extend has no {name}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
