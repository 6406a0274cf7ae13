"""`--dry-run`: what a run will take, by formula, and on demand by making a few of its updates."""

import time
from dataclasses import replace
from pathlib import Path

import torch

from nmtkit import models
from nmtkit.architectures import Vocabulary
from nmtkit.data.batching import BatchSampler
from nmtkit.data.binarized import Dataset
from nmtkit.training import precision as precisions
from nmtkit.training.config import JobConfig
from nmtkit.training.estimate import Estimate, estimate, product_ceiling, report
from nmtkit.training.loader import BatchLoader, Position
from nmtkit.training.progress import duration
from nmtkit.training.setup import batch_tokens_of, build_trainer, device_of, set_threads

WARM_UP = 2  # updates before the clock starts


def dry_run(job: JobConfig, data: Path | None, vocabulary_size: int | None, updates: int) -> list[str]:
    """Lines for people. Without `data`, a joint vocabulary of `vocabulary_size` is taken, and no update can be timed.

    Raises ValueError when neither, or not enough, is given.
    """
    device = device_of(job.run)
    precision = precisions.resolve(job.run.precision, device)
    processes = job.run.nproc_per_node or 1
    tokens = batch_tokens_of(job.run, processes)
    job = replace(job, run=replace(job.run, batch_tokens=tokens, update_freq=None))
    dataset = Dataset.open(data) if data else None
    if dataset:
        vocabulary = models.vocabulary_of(dataset.tokenizer)
    elif vocabulary_size:
        vocabulary = Vocabulary(source=vocabulary_size, target=vocabulary_size, joint=True)
    else:
        raise ValueError("--dry-run needs a dataset, or --vocab-size")
    plan = _plan(job, dataset, tokens) if dataset else None
    per_epoch = plan.updates_per_epoch if plan else None
    expected = estimate(job, vocabulary, tokens, 4 if precision == "fp32" else 2, per_epoch, processes)
    lines = report(expected)
    if updates:
        if dataset is None or plan is None:
            raise ValueError("--dry-run-updates makes real updates, and needs a dataset for them")
        set_threads(job.run, device)
        lines += _timed(job, dataset, plan, device, precision, updates, expected)
    return lines


def _plan(job: JobConfig, dataset: Dataset, tokens: int) -> BatchSampler:
    split = dataset["train"]
    return BatchSampler(split.source.lengths, split.target.lengths, tokens, job.run.seed)


def _timed(
    job: JobConfig,
    dataset: Dataset,
    plan: BatchSampler,
    device: torch.device,
    precision: str,
    updates: int,
    expected: Estimate,
) -> list[str]:
    """Makes updates in one process, and says how long they take and what share of the device's ceiling that is."""
    trainer = build_trainer(job, dataset.tokenizer, device, resumed=False)
    loader = BatchLoader(dataset["train"], plan, job.run.max_tokens, 0, 1, device, job.run.subword_alpha)
    source = target = 0
    started = time.monotonic()
    for number, update in enumerate(loader.updates(Position(0, 0))):
        if number == WARM_UP:
            _wait(device)
            started, source, target = time.monotonic(), 0, 0
        if number == WARM_UP + updates:
            break
        trainer.step(update)
        source, target = source + update.source_tokens, target + update.target_tokens
    _wait(device)
    seconds = time.monotonic() - started
    loader.close()
    flops = expected.flops / expected.tokens * (source + target) / 2
    ceiling = product_ceiling(device, precision)
    rate = flops / seconds
    lines = [
        f"{f'timed over {updates} updates':<26}{target / seconds:>10,.0f} target tokens/s",
        f"{'FLOP/s':<26}{rate / 1e12:>10,.3f} TFLOP/s, {rate / ceiling:.0%} of the {ceiling / 1e12:,.2f} that large "
        f"{precision} products reach here",
    ]
    if device.type == "cuda":
        lines.append(f"{'peak memory':<26}{torch.cuda.max_memory_allocated(device) / 1e9:>10,.2f} GB")
    if expected.updates is not None:
        whole = expected.updates * seconds / updates
        accounting = whole * ceiling
        lines += [
            f"{'time to finish':<26}{duration(whole):>10} on one device: {whole / 3600:,.1f} device hours",
            f"{'by the paper’s accounting':<26}{accounting:>10.2e} FLOP (time x devices x the ceiling above)",
        ]
    return lines


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
