"""If a plug-in or a script imports a module of nmtkit that was moved, the error names the new path."""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

# Old path -> new path, both without "nmtkit.". An entry also moves all modules below the old path, except modules that
# have a separate entry.
MOVED = {
    "api.dual_cross_entropy": "cleaning.dual_cross_entropy",
    "api.encoder_output": "api.model",
    "architectures": "models.architectures",
    "architectures.students": "models.architectures.transformer_config",
    "bulk": "jobs",
    "bulk.local": "jobs.shard_processes",
    "bulk.merging": "jobs.shard_plan",
    "bulk.options": "jobs.shard_options",
    "bulk.plan": "jobs.shard_plan",
    "bulk.ray_cluster": "jobs.shard_processes",
    "checkpoint": "models.checkpoint",
    **{f"config.{name}": "config" for name in ("fields", "paths", "rules", "toml", "values")},
    "corpora": "cleaning",
    **{f"corpora.{name}": f"data.corpora.{name}" for name in
       ("blocks", "compression", "corpus", "lines", "pairs", "tables", "tmx", "writer")},
    "corpora.cleaning": "cleaning.clean",
    "corpora.clean_config": "cleaning.config",
    "corpora.clean_report": "cleaning.report",
    "corpora.clean_shards": "cleaning.shards",
    "corpora.duplicates": "data.corpora.dropping",
    "corpora.filters": "cleaning.filters",
    "corpora.rules": "cleaning.filters.rules",
    **{f"corpora.{name}_filter": f"cleaning.filters.{name}" for name in ("alignment", "domain", "word_order")},
    **{f"corpora.{name}": "cleaning.filters.calibration" for name in ("logistic_regression", "noise")},
    **{f"corpora.{name}": "cleaning.filters.languages" for name in ("language_filters", "scripts")},
    **{f"corpora.{name}": "cleaning.filters.text_block" for name in ("texts", "words")},
    **{f"corpora.{name}": "cleaning.filters.word_statistics" for name in ("bigrams", "word_ids")},
    "corpora.languages": "text.languages",
    "corpora.late_scores": "cleaning.probability",
    "corpora.scored_blocks": "cleaning.blocks",
    "corpora.language_identification": "text.language_identification",
    "criterions": "training.criterions",
    "criterions.contract": "training.criterions.interface",
    **{f"data.{name}": f"data.dataset.{name}" for name in
       ("batching", "binarized", "config", "dataset_files",
        "preprocess", "teacher_file", "transforms")},
    **{name: "data.tokenizers.spm_training" for name in ("data.spm_training", "data.dataset.spm_training")},
    **{f"data.{name}": f"data.tokenizers.{name}" for name in ("batch_encoder", "spm_model", "tokenizer")},
    "data.alignments": "data.dataset.encoding",
    "data.dataset_writer": "data.dataset.preprocess",
    "data.corpora_file": "data.dataset.parallel_corpora",
    "documents": "text.documents",
    "documents.translated": "text.documents",
    "files": "config.files",
    "formats": "models.formats",
    **{f"formats.{name}": "models.formats.writing" for name in ("expressible", "model_card")},
    **{f"formats.huggingface_{name}": "models.formats.huggingface_export" for name in ("m2m_export", "tensors")},
    "formats.tokenizer_json": "models.formats.huggingface",
    "formats.transformer_names": "models.formats.names",
    "layers": "models.layers",
    "layers.attention_gpu": "models.layers.attention",
    "layers.packed": "data.packed",
    "layers.recurrent_cache": "models.layers.fixed_state",
    "models.layers.light_convolution": "models.layers.fixed_state",
    "models.layers.positions": "models.layers.relative_positions",
    "plugins": "config.plugins",
    "processes": "jobs",
    "registry": "config.registry",
    "scoring.off_target": "scoring.extra_metrics",
    "layers.compiled": "translation.engines.compiled_kernels",
    "search": "translation.search",
    **{f"search.{name}": f"translation.engines.{name}" for name in
       ("compiled_model", "compiled_search", "continuous_batching", "ctranslate2", "numba_engine")},
    "search.graph_search": "translation.search.gpu_beam_search",
    **{f"translation.engines.{name}": "translation.search.gpu_beam_search" for name in
       ("gpu_beam_search", "graph_search")},
    "search.candidates": "translation.search.scorer",
    **{f"search.{name}": "translation.search.beam_search" for name in ("greedy_search", "sampling")},
    **{f"search.{name}": "translation.search.logits_processors.second_model" for name in
       ("contrastive", "lm_fusion", "second_model")},
    "search.segments": "translation.search.types",
    **{f"translation.{name}": "translation.lines" for name in ("inputs", "line_reports", "output_lines")},
    **{f"translation.{name}": "translation.pipeline" for name in ("model_input", "terms")},
    "translation.requests": "translation.search.types",
    "testing": "contracts",
    "training.adafactor": "training.optimizers.adafactor",
    **{f"training.{name}": f"experiments.{name}" for name in ("comparison", "estimate", "inspection", "sweep")},
    **{f"training.comparison_{name}": "experiments.comparison_output" for name in ("curves", "page")},
    **{f"training.optimizers.{name}": "training.optimizers.elementwise" for name in ("lion", "schedule_free")},
    "training.new_pieces": "training.initial_weights",
    "training.differences": "training.resume",
    "training.progress": "training.run_log",
    "training.report_validation": "training.report",
    "training.saving": "training.run",
    "training.stopping": "training.due",
    "training.sweep_search": "experiments.optuna_study",
}  # fmt: skip


class MovedModules:
    """The last finder of Python's import system: raises an error with the new path if an old path is imported."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if moved_to(name) is None:
            return None
        if any(old.startswith(f"{name.removeprefix('nmtkit.')}.") for old in MOVED) or name.count(".") == 1:
            return importlib.machinery.ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]
        raise ModuleNotFoundError(explanation(name), name=name)

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> None:
        """Lets Python make an empty module for an old folder. `exec_module` then names the file in the folder."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        def missing(attribute: str) -> NoReturn:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            inner = f"{module.__name__}.{attribute}"
            raise ModuleNotFoundError(
                explanation(inner if inner.removeprefix("nmtkit.") in MOVED else module.__name__), name=module.__name__
            )

        module.__dict__["__getattr__"] = missing


def moved_to(name: str) -> str | None:
    """Returns the new path of a module or folder with an old path, or None if `name` is not an old path."""
    package, _, old = name.partition(".")
    parts = old.split(".") if package == "nmtkit" else []
    for end in range(len(parts), 0, -1):
        new = MOVED.get(".".join(parts[:end]))
        if new is not None:
            return ".".join(["nmtkit", new, *parts[end:]])
    return None


def explanation(name: str) -> str:
    return f"{name} was moved to {moved_to(name)}; plug-ins should import from nmtkit.extend, whose names do not move"


def install() -> None:
    """Adds the finder to Python's import system, which asks the finder only for modules that exist nowhere else."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.append(MovedModules)
