"""Engines that decode batches. The import registers the engines of the package."""

from nmtkit.translation.engines import continuous_batching, ctranslate2, numba_engine
from nmtkit.translation.engines.engine import AUTO, ENGINES, Decoder, Engine, EngineConfig, LoadedModels, TorchEngine

__all__ = [
    "AUTO",
    "ENGINES",
    "Decoder",
    "Engine",
    "EngineConfig",
    "LoadedModels",
    "TorchEngine",
    "continuous_batching",
    "ctranslate2",
    "numba_engine",
]
