"""What a run stands on: its device and threads, the size of an update, and the model with what trains it."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from nmtkit import distributed, models
from nmtkit.architectures import Architecture
from nmtkit.criterions import CRITERIONS
from nmtkit.data.binarized import Dataset
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.lr_schedulers import LR_SCHEDULERS, RunInfo
from nmtkit.training.config import JobConfig, RunConfig
from nmtkit.training.finetune import start_from
from nmtkit.training.parameters import freeze
from nmtkit.training.trainer import Trainer

log = logging.getLogger("nmtkit")

ELEMENTWISE = ("adam", "adamw", "sgd")  # optimizers that treat a number of a parameter without looking at the others


def device_of(config: RunConfig) -> torch.device:
    """This process's device. Raises ValueError when there is no such device."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    if distributed.local_rank() >= torch.cuda.device_count():
        raise ValueError(
            f"process {distributed.local_rank()} of this machine has no GPU of its own: it has "
            f"{torch.cuda.device_count()}; lower --nproc-per-node"
        )
    device = torch.device("cuda", distributed.local_rank())
    torch.cuda.set_device(device)
    return device


def set_threads(config: RunConfig, device: torch.device) -> None:
    """On the CPU, the machine's cores shared out among its processes unless told otherwise."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif device.type == "cpu" and distributed.launched():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))


def batch_tokens_of(config: RunConfig, world_size: int) -> int:
    """Tokens of an update: as given, or from --update-freq (1 when neither is)."""
    return config.batch_tokens or (config.update_freq or 1) * config.max_tokens * world_size


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


def build_trainer(job: JobConfig, tokenizer: Tokenizer, device: torch.device, resumed: bool) -> Trainer:
    """The model and what trains it. A run that is resumed has its own weights, and needs no others to start from."""
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
    facts = RunInfo(
        d_model=getattr(job.components["architecture"].config, "d_model", None), max_update=job.run.max_update
    )
    chosen = job.components["lr-scheduler"]
    scheduler = LR_SCHEDULERS[chosen.name].factory(chosen.config, facts)
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
