"""The model of a job and what trains it, and what a resumed run must share with the one it continues."""

import logging
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nmtkit
from nmtkit import models
from nmtkit.architectures import ARCHITECTURES, Architecture
from nmtkit.architectures.contract import check_forward
from nmtkit.criterions import CRITERIONS
from nmtkit.criterions.contract import check_sum
from nmtkit.data.binarized import Dataset, Split
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.data.transforms import TRANSFORMS, TransformPipeline
from nmtkit.plugins import is_own
from nmtkit.training.config import JobConfig
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, RunInfo
from nmtkit.training.parameters import Side, adapters_of, choose_trained, embedding_of, load_embeddings, start_from
from nmtkit.training.plan import RunPlan
from nmtkit.training.trainer import Trainer

log = logging.getLogger("nmtkit")


def fingerprint(dataset: Dataset) -> str:
    """Returns 12 hexadecimal digits that identify the contents of all files of a dataset."""
    return dataset.fingerprint[:12]


def resume_requirements(job: JobConfig, dataset: Dataset, adapters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns by name what a resumed run must have in common with the one it continues."""
    settings = job.tables()["architecture"]
    return {
        "architecture": settings.pop("name"),
        **settings,
        "tokenizer": dataset.tokenizer.fingerprint[:12],
        "dataset": fingerprint(dataset),
        "languages": [dataset.source_lang, dataset.target_lang],
        "optimizer": job.components["optimizer"].name,
        "seed": job.run.seed,
        "batch tokens": job.run.batch_tokens,
        **{f"adapters: {name}": (adapters or {}).get(name) for name in ("rank", "alpha", "layers", "fingerprint")},
        "overfit batches": job.run.overfit_batches,
    }


def run_facts(plan: RunPlan, data: Path, dataset: Dataset) -> dict[str, Any]:
    """Returns in plain types what a run is made of: its command, data, settings, versions and device."""
    gpu = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else None
    return {
        "command": _command(),
        "data": str(data.absolute()),
        "dataset": fingerprint(dataset),
        "nmtkit": nmtkit.__version__ + (f" at commit {commit}" if (commit := _commit()) else ""),
        "torch": str(torch.__version__),  # a subclass of str, which is no plain type
        "python": platform.python_version(),
        "device": gpu or f"{plan.device.type} of {platform.node()}",
        "precision": plan.precision,
        "processes": plan.world_size,
        "settings": plan.job.tables(),
    }


def _command() -> str:
    """Returns what started this process: the command as typed, or a script that calls `nmtkit.train`."""
    program = Path(sys.argv[0])
    ours = program.name == "nmtkit" or program.parent == Path(nmtkit.__file__).parent  # or `python -m nmtkit`
    return shlex.join(["nmtkit", *sys.argv[1:]] if ours else ["python", *sys.argv])


def _commit() -> str | None:
    """Returns the git commit of nmtkit's own source tree, None where it is installed without one."""
    root = Path(nmtkit.__file__).parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    result = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return result.stdout.strip() or None


def build_model(job: JobConfig, tokenizer: Tokenizer) -> Architecture:
    """Returns the model on the CPU, its parameters drawn from the seed, hence alike on all ranks.

    Raises ContractError for an architecture of a plug-in whose forward pass breaks the contract, as by reading later
    target words. It takes 0.02 s with transformer_tiny and 0.2 s with transformer_base.
    """
    architecture, vocabulary = job.components["architecture"], models.vocabulary_of(tokenizer)
    torch.manual_seed(job.run.seed)
    model = models.build(architecture.name, architecture.config, vocabulary)
    if not is_own(ARCHITECTURES[architecture.name].factory):
        check_forward(model, vocabulary)
    return model


def build_transforms(job: JobConfig, tokenizer: Tokenizer) -> TransformPipeline | None:
    """Returns the transforms of the training pairs, None without any."""
    chosen = [(it.name, TRANSFORMS[it.name].factory(it.config, tokenizer)) for it in job.chosen("transforms")]
    return TransformPipeline(chosen, tokenizer, job.run.seed) if chosen else None


def build_trainer(
    job: JobConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    resumed: bool,
    updates: int | None = None,
    train_split: Split | None = None,
) -> Trainer:
    """Returns the trainer of a fresh or fine-tuned model; a resumed run loads its own weights afterwards.

    `updates` are those of the whole run, where --max-epoch may bound it; None: --max-update.
    """
    model = build_model(job, tokenizer)
    architecture, criterion, scheduler = (
        job.components[table] for table in ("architecture", "criterion", "lr-scheduler")
    )
    adapters = None
    if job.run.finetune_from and (not resumed or job.run.adapter_rank):
        known = start_from(model, architecture.name, architecture.config, tokenizer, job.run.finetune_from)
        log.info(
            "weights from %s, which knows %d of %d source and %d of %d target pieces",
            *(job.run.finetune_from, known["source"], tokenizer.source_size, known["target"], tokenizer.target_size),
        )
    if not resumed:
        _load_embeddings(job, model, tokenizer)
    if job.run.adapter_rank and job.run.finetune_from:
        adapters = adapters_of(model, tokenizer, job.run, job.run.finetune_from)
    if frozen := choose_trained(model, job.run):
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        log.info("%.3f M parameters are trained, %.1f M are frozen", trained / 1e6, frozen / 1e6)
    if job.run.compile and criterion.name == "guided_alignment":
        raise ValueError("--compile compiles the model's forward, which --criterion guided_alignment does not call")
    loss = CRITERIONS[criterion.name].factory(criterion.config, tokenizer)
    if train_split is not None and not is_own(CRITERIONS[criterion.name].factory):
        pairs = np.arange(min(3, len(train_split)))
        check_sum(loss, model, train_split.batch(pairs), train_split.batch(np.tile(pairs, 2)))
    run = RunInfo(d_model=getattr(architecture.config, "d_model", None), max_update=updates or job.run.max_update)
    return Trainer(
        job,
        model,
        loss.to(device),
        LR_SCHEDULERS[scheduler.name].factory(scheduler.config, run),
        device,
        adapters,
    )


def _load_embeddings(job: JobConfig, model: Architecture, tokenizer: Tokenizer) -> None:
    paths: dict[Side, Path | None] = {"source": job.run.encoder_embed_path, "target": job.run.decoder_embed_path}
    sizes: dict[Side, int] = {"source": tokenizer.source_size, "target": tokenizer.target_size}
    if all(paths.values()) and len({embedding_of(model, side, sizes[side]).weight for side in paths}) == 1:
        raise ValueError(
            "--encoder-embed-path and --decoder-embed-path fill one matrix, which both sides share; give one of them"
        )
    for side, path in paths.items():
        if path is not None:
            count = load_embeddings(model, tokenizer, side, path)
            log.info("vectors of %s for %d of %d %s pieces", path, count, sizes[side], side)
