"""What a run stands on: its device and threads, the size of an update, and the model with what trains it."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from nmtkit import models
from nmtkit.architectures import Architecture
from nmtkit.criterions import CRITERIONS
from nmtkit.data.binarized import Dataset
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.lr_schedulers import LR_SCHEDULERS, RunInfo
from nmtkit.training.config import JobConfig
from nmtkit.training.finetune import start_from
from nmtkit.training.parameters import freeze
from nmtkit.training.trainer import Trainer

log = logging.getLogger("nmtkit")

ELEMENTWISE = ("adam", "adamw", "sgd")  # optimizers that treat a number of a parameter without looking at the others


def fingerprint(dataset: Dataset) -> str:
    """What tells one dataset from another: 12 hexadecimal digits over the checksums of its files."""
    facts = dataset.manifest.get("files", dataset.manifest)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def identity(job: JobConfig, dataset: Dataset) -> dict[str, Any]:
    """What a resumed run must have in common with the one it goes on from."""
    settings = job.tables()["architecture"]
    return {
        "architecture": settings.pop("name"),
        **settings,
        "tokenizer": dataset.tokenizer.fingerprint[:12],
        "dataset": fingerprint(dataset),
        "optimizer": job.components["optimizer"].name,
        "seed": job.run.seed,
        "batch tokens": job.run.batch_tokens,
    }


def build_model(job: JobConfig, tokenizer: Tokenizer) -> Architecture:
    """The model on the CPU, its parameters drawn from the seed, hence alike on all ranks."""
    chosen = job.components["architecture"]
    torch.manual_seed(job.run.seed)
    return models.build(chosen.name, chosen.config, models.vocabulary_of(tokenizer))


def build_trainer(
    job: JobConfig, tokenizer: Tokenizer, device: torch.device, resumed: bool, updates: int | None = None
) -> Trainer:
    """Returns the trainer of a fresh or fine-tuned model; a resumed run loads its own weights afterwards.

    `updates` are those of the whole run, where --max-epoch may bound it; None: --max-update.
    """
    if job.run.subword_alpha:
        tokenizer.check_sampling()
    model = build_model(job, tokenizer)
    if job.run.finetune_from and not resumed:
        _start_from(job, model, tokenizer, job.run.finetune_from)
    if job.run.freeze:
        frozen = freeze(model, job.run.freeze)
        log.info("%.1f M parameters are frozen", frozen / 1e6)
    if job.run.parallel == "fsdp":
        check_shardable(job)
    chosen = job.components["criterion"]
    criterion = CRITERIONS[chosen.name].factory(chosen.config, tokenizer).to(device)
    run = RunInfo(
        d_model=getattr(job.components["architecture"].config, "d_model", None),
        max_update=updates or job.run.max_update,
    )
    chosen = job.components["lr-scheduler"]
    scheduler = LR_SCHEDULERS[chosen.name].factory(chosen.config, run)
    return Trainer(job, model, criterion, scheduler, device)


def check_shardable(job: JobConfig) -> None:
    """Raises ValueError for what does not go with parameters that are shared out."""
    optimizer, criterion = (job.components[table].name for table in ("optimizer", "criterion"))
    if optimizer not in ELEMENTWISE:
        raise ValueError(
            f"--optimizer {optimizer} needs whole parameters, and with --parallel fsdp a process has but its share; "
            f"give one of {', '.join(ELEMENTWISE)}, or --parallel ddp"
        )
    if criterion == "expected_reward":
        raise ValueError("--criterion expected_reward translates while it trains; it needs --parallel ddp")
    if job.run.compile:
        raise ValueError("--compile does not go with --parallel fsdp; give one of them")


def _start_from(job: JobConfig, model: Architecture, tokenizer: Tokenizer, path: Path) -> None:
    chosen = job.components["architecture"]
    vocabulary = models.vocabulary_of(tokenizer)
    found = start_from(model, chosen.name, chosen.config, vocabulary, tokenizer, path)
    log.info(
        "weights from %s, which knows %d of %d source and %d of %d target pieces",
        path,
        found["source"],
        tokenizer.source_size,
        found["target"],
        tokenizer.target_size,
    )
