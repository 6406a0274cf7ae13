"""Parts of `gpu.py`: the speed of training and decoding, and of other toolkits on the same shapes.

Weights and sources are random. A random model hardly ever ends a sentence, so each translation reaches the length
limit, which is the length of its source. As in practice, sentences of different lengths end at different times.
CTranslate2 gets the same weights and lengths, in one call for each length; the model of Hugging Face gets sentences of
one length, which need no padding.
"""

import contextlib
import functools
import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu import Row, Scale
from harness import in_turns

from nmtkit.data.packed import Batch, Layout, Packed
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.formats.ctranslate2 import specification
from nmtkit.models.layers.logsumexp_gpu import logsumexp
from nmtkit.training.config import JobConfig
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.loader import Position, Update
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, RunInfo
from nmtkit.training.trainer import Trainer
from nmtkit.translation.engines.continuous_batching import ContinuousBatching
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.scorer import BLOCK, continuations
from nmtkit.translation.search.types import Segment
from nmtkit.translation.translator import prepare

BATCH = 16_384  # source tokens of a batch, for CTranslate2 and for the search that decodes batch by batch
System = Callable[[], int]  # decodes all sentences and returns the number of target tokens, eos included
# mean of the log-normal sentence lengths (eos included), and standard deviation of their logarithms
MEAN_LENGTH, SPREAD = 28, 0.55
LONGEST = 200
# peak TFLOP/s of dense bf16 matrix products, from the data sheets of the makers
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "4090": 165.0}


def lengths_of(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Returns random sentence lengths whose sum is `tokens`."""
    mean = math.log(MEAN_LENGTH) - SPREAD**2 / 2
    drawn = torch.empty(2 * tokens // MEAN_LENGTH + 8).log_normal_(mean, SPREAD, generator=generator)
    lengths = drawn.round().long().clamp(2, min(LONGEST, tokens))
    end = int((lengths.cumsum(0) < tokens).sum())
    kept = lengths[: end + 1].clone()
    kept[-1] -= kept.sum() - tokens
    return kept[kept > 0]


def micro_batch(tokens: int, vocabulary: int, generator: torch.Generator) -> Batch:
    """Returns a batch of random ids with `tokens` tokens on each side."""
    source, target = lengths_of(tokens, generator), lengths_of(tokens, generator)
    sentences = min(len(source), len(target))
    sides = []
    for lengths in (source, target):
        kept = lengths[:sentences].clone()
        kept[-1] += lengths[sentences:].sum()
        while kept.max() > LONGEST:  # the shortest sentences get the tokens of the sentences that were cut
            extra = kept[kept.argmax()] - LONGEST
            kept[kept.argmax()] = LONGEST
            kept[kept.argmin()] += extra
        sides.append(Packed(torch.randint(3, vocabulary, (tokens,), generator=generator), Layout.of(kept)))
    output = torch.randint(3, vocabulary, (tokens,), generator=generator)
    return Batch(sides[0], sides[1], output, tokens, torch.arange(sentences))


def update_of(number: int, max_tokens: int, scale: Scale, device: str | None = None) -> Update:
    """Returns an update of about `scale.batch_tokens` tokens, in micro-batches of `max_tokens`, on the device."""
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
    job = JobConfig.read(names={"architecture": f"transformer_{model}"}, settings=flags)
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
    """Returns the FLOP of the matrix products of an update (with weights and in attention), forward and backward."""
    width = config.heads * (2 * config.key_width + 2 * config.value_width) * config.d_model  # four projections
    inner = 2 * config.d_model * config.d_ff
    source = config.encoder_layers * (width + inner) + config.decoder_layers * width // 2
    target = config.decoder_layers * (width + width // 2 + inner) + config.d_model * vocabulary
    pairs = 0.0  # pairs of a query and a key, summed over layers
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
    """Measures several updates with different sentences. Returns the medians."""
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
        if scale.device == "cpu":  # the compiler for CPUs would take minutes, and its kernels are not measured here
            trainer.model.compile = functools.partial(trainer.model.compile, backend="aot_eager")
        start = time.perf_counter()
        trainer.compile(update_of(0, scale.max_tokens[-1], scale).micro_batches[0][1])
        seconds = time.perf_counter() - start
        yield title | {"compile_s": seconds, "compiled": trainer.model._compiled_call_impl is not None}
    for max_tokens in scale.max_tokens:
        try:
            yield title | measure(trainer, max_tokens, scale)
        except (torch.OutOfMemoryError, ValueError) as error:  # the trainer raises ValueError if memory is full
            yield title | {"max_tokens": max_tokens, "error": str(error)}
            gc.collect()


def base(scale: Scale) -> Iterator[Row]:
    return sizes(scale.models[0], scale, compiled=False)


def big(scale: Scale) -> Iterator[Row]:
    return sizes(scale.models[1], scale, compiled=False)


def compiled_base(scale: Scale) -> Iterator[Row]:
    return sizes(scale.models[0], scale, compiled=True)


def compiled_big(scale: Scale) -> Iterator[Row]:
    return sizes(scale.models[1], scale, compiled=True)


def precisions(scale: Scale) -> Iterator[Row]:
    """Measures the other precisions. The rows say whether torch uses TF32 for products in fp32."""
    names = ("fp16", "fp32") if scale.device == "cuda" else ("fp32",)
    for precision in names:
        trainer = trainer_of(scale.models[0], scale, precision=precision)
        largest = [size for size in scale.max_tokens if size <= scale.batch_tokens][-1]
        setting = {"model": scale.models[0], "precision": precision}
        yield setting | {"tf32": torch.backends.cuda.matmul.allow_tf32} | measure(trainer, largest, scale)
        del trainer
        gc.collect()


def profile(scale: Scale) -> Iterator[Row]:
    """Profiles three updates of the first model: number of kernels, their time, and the slowest kernels."""
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


# --- decoding ---------------------------------------------------------------------------------------------------------


def options_of(beam: int) -> SearchOptions:
    return SearchOptions(beam=beam, max_len_a=1.0, max_len_b=0)


def random_sentences(number: int, vocabulary: int) -> list[Segment]:
    """Returns random sources, longest first, in the order in which `Translator` sorts sources."""
    generator = torch.Generator().manual_seed(1)
    lengths = lengths_of(64 * number, generator)[:number].sort(descending=True).values.tolist()
    return [Segment([*torch.randint(3, vocabulary, (n - 1,), generator=generator).tolist(), EOS]) for n in lengths]


def batches(sentences: list[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    for sentence in sentences:
        if batch and (len(batch) + 1) * len(batch[0].ids) > BATCH:
            yield batch
            batch = []
        batch.append(sentence)
    yield batch


def model_of(name: str, scale: Scale, precision: str) -> Architecture:
    torch.manual_seed(1)
    entry, size = ARCHITECTURES[f"transformer_{name}"], scale.vocabulary
    model = entry.factory(entry.preset, Vocabulary(source=size, target=size, joint=True)).eval()
    return prepare(model, "cuda", precision) if scale.device == "cuda" else model


def batch_by_batch(model: Architecture, sentences: list[Segment], beam: int, device: torch.device) -> System:
    def run() -> int:
        sources = (Packed.from_lists([segment.ids for segment in batch], device) for batch in batches(sentences))
        results = [beam_search([model], source, options_of(beam)) for source in sources]
        return sum(len(hypotheses[0].tokens) + 1 for batch in results for hypotheses in batch)

    return run


def in_slots(model: Architecture, sentences: list[Segment], beam: int, slots: int, device: torch.device) -> System:
    search = ContinuousBatching([model], options_of(beam), slots, device)

    def run() -> int:
        results = (batch for _, batch in search.decode(batches(sentences)))
        return sum(len(hypotheses[0].tokens) + 1 for batch in results for hypotheses in batch)

    return run


def decoding(scale: Scale) -> Iterator[Row]:
    """Measures decoding with several numbers of slots and beam sizes. The first call with each records CUDA graphs."""
    device = torch.device(scale.device, 0) if scale.device == "cuda" else torch.device("cpu")
    sentences = random_sentences(scale.sentences, scale.vocabulary)
    base, big = scale.models
    for name, precision, few in ((base, "bf16", False), (big, "bf16", True), (base, "fp32", True)):
        model = model_of(name, scale, precision)
        for beam in scale.beams[:1] if few else scale.beams:
            for slots in scale.slots[1:2] if few else scale.slots:
                title = {"model": name, "precision": precision, "beam": beam, "slots": slots}
                yield title | speed(in_slots(model, sentences, beam, slots, device), scale)
            if not few and beam > 1:
                some = sentences[:: max(1, len(sentences) // 512)]
                title = {"model": name, "precision": precision, "beam": beam, "slots": "batch by batch"}
                yield title | speed(batch_by_batch(model, some, beam, device), scale)
        del model
    yield from normalizers(scale, device)


def normalizers(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Compares log-sum-exp and top-k of the logits of a step with a log-softmax and its top-k."""
    beam = scale.beams[0]
    logits = torch.randn(scale.slots[-1] * beam, scale.vocabulary, device=device)

    before = torch.zeros(scale.slots[-1], beam, dtype=torch.float64, device=device)

    def by_logsumexp() -> None:
        normalizer, maxima = logsumexp(logits, BLOCK)
        blocks = None if maxima is None else maxima.unflatten(0, (-1, beam))
        continuations(logits.unflatten(0, (-1, beam)), before - normalizer.view_as(before), 2 * beam, blocks)

    def by_log_softmax() -> None:
        continuations(logits.log_softmax(1).unflatten(0, (-1, beam)), before, 2 * beam)

    ways = {"log-sum-exp": by_logsumexp, "log-softmax": by_log_softmax}
    with torch.inference_mode():
        for name, way in ways.items():
            way()
            seconds = statistics.median(timed(way, scale.device)[0] for _ in range(10))
            yield {"candidates by": name, "rows": len(logits), "columns": scale.vocabulary, "ms": 1000 * seconds}


def speed(system: System, scale: Scale) -> Row:
    if scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    system()
    first = time.perf_counter() - start
    timing = in_turns({"system": system}, scale.rounds)["system"]
    median = statistics.median(timing.seconds)
    row: Row = {"tokens": timing.output, "target_tok_per_s": timing.output / median, "seconds": median}
    row["recording_s"] = max(0.0, first - median)
    if scale.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


# --- other toolkits --------------------------------------------------------------------------------------------------


def peers(scale: Scale) -> Iterator[Row]:
    """Measures the other toolkits that are installed."""
    for name, run in (("CTranslate2 decoding", ctranslate2), ("Hugging Face training", hugging_face)):
        try:
            yield from run(scale)
        except ImportError as error:
            yield {"peer": name, "left_out": str(error)}


def ctranslate2(scale: Scale) -> Iterator[Row]:
    import ctranslate2 as ct2

    if scale.device == "cuda" and not ct2.get_cuda_device_count():
        raise ImportError("this build of CTranslate2 sees no GPU")
    sentences = random_sentences(scale.sentences, scale.vocabulary)
    with TemporaryDirectory() as folder:
        write_ctranslate2(scale, Path(folder) / "model")
        for compute_type in ("float16", "int8_float16") if scale.device == "cuda" else ("float32",):
            for beam in scale.beams:
                translator = ct2.Translator(str(Path(folder) / "model"), device=scale.device, compute_type=compute_type)
                title = {"peer": "CTranslate2", "precision": compute_type, "beam": beam}
                yield title | speed(ctranslate2_system(translator, sentences, beam), scale)


def write_ctranslate2(scale: Scale, folder: Path) -> None:
    """Writes the random model in the format of CTranslate2, which has no converter for models of nmtkit."""
    entry, size = ARCHITECTURES[f"transformer_{scale.models[0]}"], scale.vocabulary
    torch.manual_seed(1)
    model = entry.factory(entry.preset, Vocabulary(source=size, target=size, joint=True)).eval()
    pieces = ["<unk>", "<s>", "</s>", *(piece(id) for id in range(3, size))]
    spec = specification(model, pieces, pieces)
    spec.optimize()
    folder.mkdir()
    spec.save(str(folder))


def piece(id: int) -> str:
    return f"piece{id}"


def ctranslate2_system(translator: Any, sentences: list[Segment], beam: int) -> System:
    by_length: dict[int, list[list[str]]] = defaultdict(list)
    for sentence in sentences:
        by_length[len(sentence.ids)].append([piece(id) for id in sentence.ids[:-1]])

    def run() -> int:
        waiting = []
        for length, group in by_length.items():  # longest first
            # CTranslate2 makes no eos here, so that all systems make the same number of steps
            limits = {"min_decoding_length": length, "max_decoding_length": length}
            settings = {"max_batch_size": BATCH, "batch_type": "tokens", "asynchronous": True, "beam_size": beam}
            waiting += translator.translate_batch(group, **settings, **limits)
        return sum(len(result.result().hypotheses[0]) for result in waiting)

    return run


def hugging_face(scale: Scale) -> Iterator[Row]:
    """Measures MarianMTModel of the same shape under bf16 autocast with fused AdamW, on sentences of one length."""
    from train import adamw, make_updates, padded_loss, padded_model

    config: Any = ARCHITECTURES[f"transformer_{scale.models[0]}"].preset
    model = padded_model(config, scale.vocabulary).to(scale.device)
    optimizer = adamw(model)
    largest = [size for size in scale.max_tokens if size <= scale.batch_tokens][-1]
    layout = Layout.of(torch.full((max(1, largest // MEAN_LENGTH),), MEAN_LENGTH))
    tokens = torch.randint(3, scale.vocabulary, (layout.tokens,))
    side = Packed(tokens, layout)
    batch = Batch(side, side, tokens, len(tokens), torch.arange(layout.sentences)).to(scale.device)

    def update() -> None:
        make_updates(model, optimizer, padded_loss, torch.bfloat16, [batch])

    for _ in range(scale.warmup):
        update()
    seconds = statistics.median(timed(update, scale.device)[0] for _ in range(scale.updates))
    row = {"peer": "Hugging Face MarianMTModel", "precision": "bf16", "target_tok_per_s": len(tokens) / seconds}
    yield row | {"parameters": sum(parameter.numel() for parameter in model.parameters())}
