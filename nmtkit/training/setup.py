"""Builds the parts of a run from its plan: loader, transforms, model, criterion, schedule, trainer and validator."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from nmtkit.config import changed_flags
from nmtkit.config.plugins import is_own
from nmtkit.data.checkpoint_file import Checkpoint
from nmtkit.data.dataset.batching import check_all_sizes
from nmtkit.data.dataset.binarized import Dataset, Split
from nmtkit.data.dataset.transform_pipeline import TransformPipeline
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs import distributed
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES, Architecture
from nmtkit.models.architectures.contract import check_forward
from nmtkit.models.layers.quantization import quantize_aware
from nmtkit.training.config import CALLING_PARTS, JobConfig
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.interface import check_sum
from nmtkit.training.due import StopSignal
from nmtkit.training.initial_weights import SideName, embedding_of, load_embeddings, show_hidden_pieces, start_from
from nmtkit.training.loader import BatchLoader
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, RunInfo
from nmtkit.training.parameters import adapters_of, choose_trained
from nmtkit.training.plan import RunPlan, trained_directions
from nmtkit.training.run_config import VALIDATION_FLAGS
from nmtkit.training.trainer import Trainer
from nmtkit.training.validation import Validator

log = logging.getLogger("nmtkit")

CHECKED_PAIRS = 1 << 20  # number of pairs whose lengths `check_positions` reads at a time


def validating_where_possible(job: JobConfig, dataset: Dataset) -> JobConfig:
    """Returns the job, without validation if the dataset has no valid set and no setting asks for a validation."""
    config = job.run
    asked = bool(changed_flags(config) & set(VALIDATION_FLAGS))
    asked = asked or job.has_own_metrics or job.schedule_follows_validations
    if asked or not config.validates or config.valid_subset[0] in dataset.splits:
        return job
    if distributed.is_rank_zero():
        log.warning(
            f"the dataset has no subset {config.valid_subset[0]!r}, so this run makes no validation and has no "
            "best.pt; preprocess with --validpref to validate"
        )
    return replace(job, run=replace(config, validate_interval=None))


def build_loader(plan: RunPlan, dataset: Dataset, rank: int, ranks: int) -> BatchLoader:
    """Returns the loader of the training set. Raises ValueError for a pair that exceeds --max-tokens.

    An automatic --max-tokens is at least the length of the longest sentence.
    """
    split, job = dataset["train"], plan.job
    if job.run.max_tokens:  # checked before the sampler checks the update size, which may depend on --max-tokens
        check_all_sizes(split.source.lengths, split.target.lengths, job.run.max_tokens, "--max-tokens")
    sampler = plan.sampler(split)
    max_tokens = plan.max_tokens if job.run.max_tokens else max(plan.max_tokens, *sampler.max_lengths)
    transforms = build_transforms(job, split)
    return BatchLoader(split, sampler, max_tokens, rank, ranks, plan.device, job.run.max_sentences, transforms)


def build_validator(
    plan: RunPlan, dataset: Dataset, max_tokens: int, stop: StopSignal, callbacks: bool
) -> Validator | None:
    """Returns the validator of all validation subsets, or None if the run does not validate.

    If the run has callbacks, which may ask for validations, returns a validator whenever the dataset has the subsets.
    `callbacks` says whether there are callbacks that the job does not name. Raises ValueError for an empty subset.
    """
    config, metrics = plan.job.run, plan.job.metrics()
    names = config.valid_subset
    on_request = callbacks or bool(plan.job.chosen("callbacks"))
    if not config.validates and not (on_request and all(len(dataset.splits.get(name, ())) for name in names)):
        return None
    for name in names:
        if not len(dataset[name]):
            raise ValueError(f"{dataset.folder}: the subset {name!r} is empty")
    first, *others = (
        Validator(
            split=dataset[name] if config.valid_sentences is None else dataset[name].first_rows(config.valid_sentences),
            max_tokens=max_tokens,
            device=plan.device,
            precision=plan.precision,
            metrics=metrics,
            languages=(dataset.source_language, dataset.target_language),
            target_lang=dataset.target_language or dataset.target_lang,
            beam=config.valid_beam,
            sharded=config.parallel == "fsdp" and plan.world_size > 1,
            interruptible=stop.interrupting,
            averaged=trained_directions(config, dataset["train"]),
        )
        for name in names
    )
    first.others = dict(zip(names[1:], others, strict=True))
    return first


def check_positions(model: Architecture, train: Split, validator: Validator | None) -> None:
    """Raises ValueError, with the pair, if a training or valid pair has more tokens than the model has positions."""
    validators = [validator, *validator.others.values()] if validator else []
    splits = [train, *(each.split for each in validators)]
    sides: tuple[Literal["source"], Literal["target"]] = ("source", "target")
    for side in sides:
        limit = model.max_source_positions if side == "source" else model.max_target_positions
        for split in splits if limit is not None else ():
            lengths = getattr(split, side).lengths
            for start in range(0, len(lengths), CHECKED_PAIRS):
                part = np.asarray(lengths[start : start + CHECKED_PAIRS])
                row = start + int(part.argmax())
                number = row if split.rows is None else int(split.rows[row])
                title = f"the {side} of pair {number + 1:,} of {split.name} in {split.folder}"
                model.check_length(title, int(part.max()), side)


# --- the model and its trainer ----------------------------------------------------------------------------------------


def build_model(job: JobConfig, tokenizer: Tokenizer) -> Architecture:
    """Returns the model on the CPU. Its parameters are drawn from the seed, so they are equal on all ranks.

    For an architecture of a plug-in, checks the forward pass and raises ContractError if, for example, the pass reads
    later target words. The check takes 0.02 s with transformer_tiny and 0.2 s with transformer_base.
    """
    architecture, vocabulary = job.components["architecture"], building.vocabulary_of(tokenizer)
    torch.manual_seed(job.run.seed)
    model = building.build(architecture.name, architecture.config, vocabulary)
    if not is_own(ARCHITECTURES[architecture.name].factory):
        check_forward(model, vocabulary)
    return model


def build_transforms(job: JobConfig, split: Split) -> TransformPipeline | None:
    """Returns the transforms of the pairs of `split`, or None if the job has no transforms.

    Raises ValueError for a transform of monolingual pairs if the split has no such pairs, and for a transform of source
    sentences if the model reads no source.
    """
    chosen = list(job.built("transforms", split.tokenizer).items())
    for name, transform in chosen:
        if transform.source_only and not job.reads_source:
            raise ValueError(
                f"--transforms {name} has no effect: it changes source sentences, which a language model does not read"
            )
        if transform.monolingual and not split.has_monolingual_rows:
            raise ValueError(
                f"--transforms {name} has no effect: it changes pairs from a language to itself, and the training set "
                "has no such pairs; preprocess makes such pairs if a corpus of --corpora has only one language, or if "
                "--source-lang and --target-lang are equal"
            )
    return TransformPipeline(chosen, split.tokenizer, job.run.seed) if chosen else None


def build_trainer(
    job: JobConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    resumed: Checkpoint | None = None,
    updates: int | None = None,
    dataset: Dataset | None = None,
) -> Trainer:
    """Returns the trainer of a fresh or fine-tuned model. A run that is `resumed` loads its own weights afterwards.

    `updates` is the number of updates of the whole run, by default --max-update. If the criterion comes from a plug-in,
    a few pairs of `dataset` are used to check that the criterion returns a sum. If a fine-tuned model cannot produce
    pieces of `dataset`, the output bias of these pieces is raised.
    """
    model = build_model(job, tokenizer)
    architecture, criterion, scheduler = (
        job.components[table] for table in ("architecture", "criterion", "lr-scheduler")
    )
    adapters = None
    if job.run.finetune_from and (resumed is None or job.run.adapter_rank):
        base = job.run.finetune_from, job.run.new_language_from, job.run.finetune_partial
        known = start_from(model, architecture.name, architecture.config, tokenizer, *base)
        log.info(
            f"weights from {job.run.finetune_from}, which has {known['source']} of {tokenizer.source_size} source "
            f"pieces and {known['target']} of {tokenizer.target_size} target pieces"
        )
        if resumed is None and dataset is not None:
            names = ("train", *(name for name in job.run.valid_subset if name in dataset.splits))
            fixed = job.run.adapter_rank is not None
            show_hidden_pieces(model, [dataset[name] for name in names], job.run.finetune_from, fixed)
    if resumed is None:
        _load_embeddings(job, model, tokenizer)
    if job.run.adapter_rank and job.run.finetune_from:
        adapters = adapters_of(model, tokenizer, job.run, job.run.finetune_from)
        model.shortlist = None  # checkpoints of adapters store no shortlist; the base may have a shortlist
    if frozen := choose_trained(model, job.run):
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        log.info("%.3f M parameters are trained, %.1f M are frozen", trained / 1e6, frozen / 1e6)
    if job.run.quantize_aware:
        log.info(
            "%d layers and embeddings round their weights to 8 bits, and %d layers round their inputs",
            *quantize_aware(model),
        )
    if job.run.compile and criterion.name in (*CALLING_PARTS, "simcut"):  # the hook of simcut is not compiled
        raise ValueError(f"--criterion {criterion.name} cannot use a compiled forward pass; leave out --compile")
    if criterion.name == "expected_reward" and not model.reads_source:
        raise ValueError("--criterion expected_reward rewards translations; give a language model another --criterion")
    loss = CRITERIONS[criterion.name].factory(criterion.config, tokenizer)
    if dataset is not None and not is_own(CRITERIONS[criterion.name].factory):
        train_split = dataset["train"]
        pairs = np.arange(min(3, len(train_split)))
        check_sum(loss, model, train_split.batch(pairs), train_split.batch(np.tile(pairs, 2)))
    schedule_start = 0  # the update after which the learning-rate schedule begins
    if resumed is not None:
        reset = job.run.reset_lr_scheduler
        schedule_start = int(resumed["update"] if reset else resumed["training"]["schedule_start"])
    total = updates or job.run.max_update
    # If no updates are left, the run ends at once, but a schedule is still created.
    remaining = total - schedule_start if total is not None and total > schedule_start else total
    # with --base-width, the schedule computes the learning rate of a model of the base width
    width = getattr(architecture.config, "base_width", None) or getattr(architecture.config, "d_model", None)
    run = RunInfo(d_model=width, max_update=remaining)
    return Trainer(
        job,
        model,
        loss.to(device),
        LR_SCHEDULERS[scheduler.name].factory(scheduler.config, run),
        device,
        adapters,
        schedule_start,
    )


def _load_embeddings(job: JobConfig, model: Architecture, tokenizer: Tokenizer) -> None:
    paths: Mapping[SideName, Path | None] = {"source": job.run.encoder_embed_path, "target": job.run.decoder_embed_path}
    sizes: dict[SideName, int] = {"source": tokenizer.source_size, "target": tokenizer.target_size}
    if all(paths.values()) and len({embedding_of(model, side, sizes[side]).weight for side in paths}) == 1:
        raise ValueError("--encoder-embed-path and --decoder-embed-path both set the shared embeddings; give only one")
    for side, path in paths.items():
        if path is not None:
            count = load_embeddings(model, tokenizer, side, path)
            log.info("loaded vectors from %s for %d of %d %s pieces", path, count, sizes[side], side)
