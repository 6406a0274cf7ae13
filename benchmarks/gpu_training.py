"""Parts of `gpu.py`: updates of the Transformer as the trainer makes them, and where their time goes."""

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import Row, Scale

from nmtkit.architectures import ARCHITECTURES, Vocabulary
from nmtkit.criterions import CRITERIONS
from nmtkit.layers.packed import Batch, Layout, Packed
from nmtkit.training.config import JobTemplate
from nmtkit.training.loader import Position, Update
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, RunInfo
from nmtkit.training.trainer import Trainer

MEAN_LENGTH, SPREAD = 28, 0.55  # of the log-normal distribution of lengths, eos included
LONGEST = 200
# dense bf16 products by the makers' data sheets, TFLOP/s
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "4090": 165.0}


def lengths_of(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths of sentences that have `tokens` tokens together."""
    mean = math.log(MEAN_LENGTH) - SPREAD**2 / 2
    drawn = torch.empty(2 * tokens // MEAN_LENGTH + 8).log_normal_(mean, SPREAD, generator=generator)
    lengths = drawn.round().long().clamp(2, min(LONGEST, tokens))
    end = int((lengths.cumsum(0) < tokens).sum())
    kept = lengths[: end + 1].clone()
    kept[-1] -= kept.sum() - tokens
    return kept[kept > 0]


def micro_batch(tokens: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """Random ids, `tokens` of them on each side."""
    source, target = lengths_of(tokens, generator), lengths_of(tokens, generator)
    sentences = min(len(source), len(target))
    sides = []
    for lengths in (source, target):
        kept = lengths[:sentences].clone()
        kept[-1] += lengths[sentences:].sum()
        while kept.max() > LONGEST:  # what the cut sentences had goes to the shortest
            extra = kept[kept.argmax()] - LONGEST
            kept[kept.argmax()] = LONGEST
            kept[kept.argmin()] += extra
        sides.append(Packed(torch.randint(3, vocabulary, (tokens,), generator=generator), Layout.of(kept)))
    output = torch.randint(3, vocabulary, (tokens,), generator=generator)
    return Batch(sides[0], sides[1], output, tokens, torch.arange(sentences))


def update_of(number: int, max_tokens: int, scale: Scale, device: str | None = None) -> Update:
    """An update of about `scale.batch_tokens`, in micro-batches of `max_tokens`, on the device."""
    generator = torch.Generator().manual_seed(number)
    count = max(1, round(scale.batch_tokens / max_tokens))
    batches = [
        (index, micro_batch(max_tokens, scale.vocabulary, generator).to(device or scale.device))
        for index in range(count)
    ]
    tokens = count * max_tokens
    pairs = np.arange(sum(len(batch.pairs) for _, batch in batches))
    return Update(Position(0, number), pairs, tokens, tokens, batches, False)


def trainer_of(model: str, scale: Scale, **settings: Any) -> Trainer:
    vocabulary = Vocabulary(source=scale.vocabulary, target=scale.vocabulary, joint=True)
    flags = {"device": scale.device, "batch_tokens": scale.batch_tokens} | scale.depth | settings
    job = JobTemplate.read(names={"architecture": f"transformer_{model}"}).job(flags)
    architecture, criterion = job.components["architecture"], job.components["criterion"]
    torch.manual_seed(1)
    built = ARCHITECTURES[architecture.name].factory(architecture.config, vocabulary)
    scheduler = job.components["lr-scheduler"]
    info = RunInfo(d_model=architecture.config.d_model, max_update=job.run.max_update)
    return Trainer(
        job,
        built,
        CRITERIONS[criterion.name].factory(criterion.config, None).to(scale.device),
        LR_SCHEDULERS[scheduler.name].factory(scheduler.config, info),
        torch.device(scale.device, 0) if scale.device == "cuda" else torch.device("cpu"),
    )


def update_flop(config: Any, vocabulary: int, update: Update) -> float:
    """Products of an update, forward and backward: with weights, and of attention's scores and values."""
    width = config.heads * (2 * config.key_width + 2 * config.value_width) * config.d_model  # four projections
    inner = 2 * config.d_model * config.d_ff
    source = config.encoder_layers * (width + inner) + config.decoder_layers * width // 2
    target = config.decoder_layers * (width + width // 2 + inner) + config.d_model * vocabulary
    pairs = 0.0  # of a query and a key, summed over layers
    for _, batch in update.micro_batches:
        s, t = batch.source.layout.lengths.double(), batch.target_input.layout.lengths.double()
        pairs += config.encoder_layers * float((s * s).sum())
        pairs += config.decoder_layers * float((t * t / 2 + t * s).sum())
    scores = config.heads * (config.key_width + config.value_width) * pairs
    return 3 * 2 * (update.source_tokens * source + update.target_tokens * target + scores)


def peak_flops(device: str) -> float | None:
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((1e12 * peak for key, peak in PEAKS.items() if key in name), None)


def timed(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Returns the seconds that the device and the host spend on one call."""
    if device != "cuda":
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return seconds, seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000, host


def measure(trainer: Trainer, max_tokens: int, scale: Scale) -> Row:
    """The median update of several, each of other sentences."""
    updates = [update_of(number, max_tokens, scale) for number in range(4)]
    for number in range(scale.warmup):
        trainer.step(updates[number % 4])
    if scale.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    taken = [
        timed(lambda number=number: trainer.step(updates[number % 4]), scale.device) for number in range(scale.updates)
    ]
    seconds, host = (statistics.median(times) for times in zip(*taken, strict=True))
    flop = update_flop(trainer.model.config, scale.vocabulary, updates[0])
    peak = peak_flops(scale.device)
    row: Row = {
        "max_tokens": max_tokens,
        "target_tokens": updates[0].target_tokens,
        "ms": 1000 * seconds,
        "target_tok_per_s": updates[0].target_tokens / seconds,
        "tflop_per_s": flop / seconds / 1e12,
        "utilisation": None if peak is None else flop / seconds / peak,
        "host_ms": 1000 * host,
    }
    if scale.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def sizes(model: str, scale: Scale, compiled: bool) -> Iterator[Row]:
    trainer = trainer_of(model, scale, precision="bf16", compile=compiled)
    title = {"model": model, "mode": "compiled" if compiled else "eager", "precision": "bf16"}
    if compiled:
        if scale.device == "cpu":  # whose compiler takes minutes for what it is not asked about here
            trainer.model.compile = functools.partial(trainer.model.compile, backend="aot_eager")
        start = time.perf_counter()
        trainer.compile(update_of(0, scale.max_tokens[-1], scale).micro_batches[0][1])
        seconds = time.perf_counter() - start
        yield title | {"compile_s": seconds, "compiled": trainer.model._compiled_call_impl is not None}
    for max_tokens in scale.max_tokens:
        try:
            yield title | measure(trainer, max_tokens, scale)
        except (torch.OutOfMemoryError, ValueError) as error:  # the trainer turns the first into the second
            yield title | {"max_tokens": max_tokens, "error": str(error)}
            gc.collect()


def base(scale: Scale) -> Iterator[Row]:
    yield from sizes(scale.models[0], scale, compiled=False)


def big(scale: Scale) -> Iterator[Row]:
    yield from sizes(scale.models[1], scale, compiled=False)


def compiled_base(scale: Scale) -> Iterator[Row]:
    yield from sizes(scale.models[0], scale, compiled=True)


def compiled_big(scale: Scale) -> Iterator[Row]:
    yield from sizes(scale.models[1], scale, compiled=True)


def precisions(scale: Scale) -> Iterator[Row]:
    """The other precisions, and what torch's own setting for fp32 products is worth."""
    names = ("fp16", "fp32") if scale.device == "cuda" else ("fp32",)
    for precision in names:
        trainer = trainer_of(scale.models[0], scale, precision=precision)
        largest = [size for size in scale.max_tokens if size <= scale.batch_tokens][-1]
        setting = {"model": scale.models[0], "precision": precision}
        yield setting | {"tf32": torch.backends.cuda.matmul.allow_tf32} | measure(trainer, largest, scale)
        del trainer
        gc.collect()


def profile(scale: Scale) -> Iterator[Row]:
    """Three updates of base: kernels, their time, and the largest of them."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    trainer = trainer_of(scale.models[0], scale, precision="bf16")
    largest = [size for size in scale.max_tokens if size <= scale.batch_tokens][-1]
    updates = [update_of(number, largest, scale) for number in range(3)]
    for update in updates:
        trainer.step(update)
    on_gpu = scale.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    start = time.perf_counter()
    with record(activities=activities) as recorded:
        for update in updates:
            trainer.step(update)
        if on_gpu:
            torch.cuda.synchronize()
    wall = time.perf_counter() - start
    averages = recorded.key_averages()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    row: Row = {"wall_ms_per_update": 1000 * wall / 3, "kernels_per_update": len(kernels) / 3}
    busy = sum(event.self_device_time_total for event in averages) / 1000 if on_gpu else 0.0
    row["kernel_ms_per_update"] = busy / 3
    yield row | {"text": averages.table(sort_by=key, row_limit=40, max_name_column_width=70)}
    if on_gpu:
        with contextlib.suppress(OSError):
            recorded.export_chrome_trace(str(Path("gpu_profile.json")))
