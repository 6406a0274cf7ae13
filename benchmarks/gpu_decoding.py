"""Parts of `gpu.py`: decoding in slots with CUDA graphs, and other toolkits on the same shapes.

Weights and sources are random. Such a model hardly ever ends by itself, so a translation may be, and is, as long as its
source: as in life, sentences of many lengths end at many times. CTranslate2 gets the same weights and lengths, a call
for each length, all of them in its queue; a Hugging Face model gets sentences of like lengths together, as its padding
asks for.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu import Row, Scale
from gpu_training import lengths_of, timed, update_of
from turns import in_turns

from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.data.tokenizer import EOS
from nmtkit.formats.ctranslate2 import specification
from nmtkit.layers.logsumexp_gpu import logsumexp
from nmtkit.layers.packed import Batch, Layout, Packed
from nmtkit.search.candidates import BLOCK, continuations
from nmtkit.search.continuous_batching import ContinuousBatching
from nmtkit.search.decoding import beam_search
from nmtkit.search.options import SearchOptions
from nmtkit.search.segments import Segment
from nmtkit.translation.translator import prepare

BATCH = 16_384  # source tokens, of the search batch by batch and of CTranslate2
System = Callable[[], int]  # decodes all sentences; returns the tokens of the translations, eos included


def options_of(beam: int) -> SearchOptions:
    return SearchOptions(beam=beam, max_len_a=1.0, max_len_b=0)


def random_sentences(number: int, vocabulary: int) -> list[Segment]:
    """Longest first, as a translator sorts them."""
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
        found = [
            beam_search([model], Packed.from_lists([one.ids for one in batch], device), options_of(beam))
            for batch in batches(sentences)
        ]
        return sum(len(hypotheses[0].tokens) + 1 for each in found for hypotheses in each)

    return run


def in_slots(model: Architecture, sentences: list[Segment], beam: int, slots: int, device: torch.device) -> System:
    def never(batch: list[Segment]) -> list[list[object]]:
        raise AssertionError("no sentence has constraints")

    search = ContinuousBatching([model], options_of(beam), slots, never, device)

    def run() -> int:
        found = (each for _, each in search.decode(batches(sentences)))
        return sum(len(hypotheses[0].tokens) + 1 for each in found for hypotheses in each)

    return run


def decoding(scale: Scale) -> Iterator[Row]:
    """Slots and beams; the first call of each records its graphs."""
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
    """What a step does with its logits: log-sum-exp and top-k beside a log-softmax and its top-k."""
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
    tokens, seconds = in_turns({"it": system}, scale.rounds)
    median = statistics.median(seconds["it"])
    row: Row = {"tokens": tokens["it"], "target_tok_per_s": tokens["it"] / median, "seconds": median}
    row["recording_s"] = max(0.0, first - median)
    if scale.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


# --- other toolkits --------------------------------------------------------------------------------------------------


def peers(scale: Scale) -> Iterator[Row]:
    """Those that are installed."""
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
    """Writes the random model for CTranslate2, whose own converter knows no nmtkit."""
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
            # without eos: as many steps as ours
            limits = {"min_decoding_length": length, "max_decoding_length": length}
            settings = {"max_batch_size": BATCH, "batch_type": "tokens", "asynchronous": True, "beam_size": beam}
            waiting += translator.translate_batch(group, **settings, **limits)
        return sum(len(result.result().hypotheses[0]) for result in waiting)

    return run


def hugging_face(scale: Scale) -> Iterator[Row]:
    """MarianMTModel, the same Transformer, under bf16 autocast with fused AdamW, on batches made for padding."""
    from train_speed import marian_contestant

    config: Any = ARCHITECTURES[f"transformer_{scale.models[0]}"].preset
    contestant = marian_contestant("Marian", config, scale.vocabulary, torch.bfloat16)
    model = contestant.model.to(scale.device)
    largest = [size for size in scale.max_tokens if size <= scale.batch_tokens][-1]
    batches = padded_batches(largest, scale)

    def update(batch: Batch) -> None:
        fresh = batch.to(scale.device)
        with torch.autocast(scale.device, torch.bfloat16):
            loss = contestant.loss(fresh) / batch.target_tokens
        loss.backward()
        contestant.optimizer.step()
        contestant.optimizer.zero_grad(set_to_none=True)

    for batch in batches[: scale.warmup]:
        update(batch)
    taken = [(batch.target_tokens, timed(lambda batch=batch: update(batch), scale.device)[0]) for batch in batches]
    yield {
        "peer": "Hugging Face MarianMTModel",
        "precision": "bf16",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "padding": 1 - sum(tokens for tokens, _ in taken) / sum(
            batch.target_input.layout.sentences * batch.target_input.layout.max_length for batch in batches
        ),
        "target_tok_per_s": sum(tokens for tokens, _ in taken) / sum(seconds for _, seconds in taken),
    }  # fmt: skip


def padded_batches(tokens: int, scale: Scale) -> list[Batch]:
    """Batches of at most `tokens` target tokens, padding included, each of sentences of like lengths."""
    pool = [update_of(number, tokens, scale).micro_batches[0][1].to("cpu") for number in range(8)]
    pairs = sorted(
        (target, source)
        for batch in pool
        for source, target in zip(
            batch.source.layout.lengths.tolist(), batch.target_input.layout.lengths.tolist(), strict=True
        )
    )
    found: list[Batch] = []
    generator = torch.Generator().manual_seed(1)
    start = 0
    while start < len(pairs):
        end = start + 1
        while end < len(pairs) and (end + 1 - start) * pairs[end][0] <= tokens:
            end += 1
        sides = []
        for side in (1, 0):
            lengths = torch.tensor([pair[side] for pair in pairs[start:end]])
            ids = torch.randint(3, scale.vocabulary, (int(lengths.sum()),), generator=generator)
            sides.append(Packed(ids, Layout.of(lengths)))
        output = torch.randint(3, scale.vocabulary, (sides[1].layout.tokens,), generator=generator)
        found.append(Batch(sides[0], sides[1], output, len(output), torch.arange(end - start)))
        start = end
    return found
