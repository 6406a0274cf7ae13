"""Translates lines: sorts windows of requests into batches of segments, and returns the translations in order."""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs.threads import OrderedCalls, Prefetched, short_switch_interval
from nmtkit.models import building
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.prepack import prepack
from nmtkit.translation.engines.continuous_batching import ContinuousBatching
from nmtkit.translation.engines.ctranslate2 import CTranslate2Engine
from nmtkit.translation.engines.graph_search import supports
from nmtkit.translation.engines.numba_engine import NumbaEngine
from nmtkit.translation.options import TextOptions, TranslatorOptions
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.requests import Request, Translation
from nmtkit.translation.search.constrained_search import lacking
from nmtkit.translation.search.constraints import PieceEdges
from nmtkit.translation.search.decoding import annotated, decode
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.segments import BatchDecoder, BatchHypotheses, Segment, SegmentBatch
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.steps import TextSegment
from nmtkit.translation.terms import piece_edges

WINDOW = 8192  # number of lines that are sorted by length together; limits the lines of a stream in memory
MAX_TOKENS = {"cpu": 2048, "cuda": 16384}  # maximum number of source tokens in a batch, by type of device
# The fixed cost of a decoding step, as a number of segments. The measured fixed cost is 0.11 to 0.16 of the time of a
# step with 64 segments (tiny and base models, fp32 and int8).
STEP_COST = 8
PREFETCHED = 1  # number of windows that are encoded in advance while a GPU decodes
TOKENS_PER_SLOT = 64  # a GPU search has `max_tokens` / TOKENS_PER_SLOT slots

logger = logging.getLogger("nmtkit")

Precision = Literal["auto", "fp32", "bf16", "int8"]
Engine = Literal["torch", "numba", "ctranslate2"]


class Translator:
    """Translates with one model, or with an ensemble of models that share a tokenizer. Models are in evaluation mode.

    `options.max_tokens` limits the source tokens of a batch, including padding. The limit does not change translations.
    Lines with more pieces than `options.max_source_len` or than the model can read are split or cut off, with a
    warning. Lines without text become empty lines without a search.
    """

    def __init__(
        self, models: Sequence[Architecture], tokenizer: Tokenizer, options: TranslatorOptions | None = None
    ) -> None:
        self.options = options or TranslatorOptions()
        self.models = list(models)
        self.tokenizer = tokenizer
        parameter = next(self.models[0].parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.max_tokens = self.options.max_tokens or MAX_TOKENS.get(self.device.type, MAX_TOKENS["cpu"])
        limits = [model.max_source_positions for model in models if model.max_source_positions is not None]
        # one position of a model is for eos
        self.max_source_len = min([self.options.max_source_len, *(limit - 1 for limit in limits)])
        self.continuous: ContinuousBatching | None = None
        # on a GPU, background threads encode lines and decode tokens while this thread launches kernels
        self.background = self.device.type == "cuda"
        self.engine: CTranslate2Engine | None = None
        self.compiled: NumbaEngine | None = None
        self.directions = self.models[0].directions  # trained language pairs of a multilingual model; empty: unknown
        self.noticed: set[tuple[str, str]] = set()  # untrained language pairs that a warning has already named
        self.name = "the checkpoint"  # name of the models in messages
        self.paths: list[Path] = []  # checkpoints of the models, if the models come from files
        self.processor_configs: dict[str, Any] = {}  # configs of logits processors, by name
        self.made_processors: dict[str, tuple[Any, LogitsProcessor]] = {}  # newest config and processor, by name

    @staticmethod
    def load(
        path: str | Path | Sequence[str | Path],
        device: str = "cpu",
        precision: Precision = "auto",
        engine: Engine = "torch",
        workers: int = 1,
        trainable: bool = False,
        **options: Any,
    ) -> "Translator":
        """Loads a checkpoint, or an ensemble with one tokenizer. `options` are fields of TranslatorOptions.

        `precision` "auto" is fp32 on a CPU, and bf16 on other devices; int8 is only for CPUs. `engine` "ctranslate2"
        uses CTranslate2 on the CPU for searches whose options CTranslate2 supports, with `workers` batches at a time.
        `engine` "numba" uses a compiled search on the CPU. Torch searches sentences with required or avoided phrases,
        and searches with options that the compiled search does not support.
        With `trainable`, the modules are the same as in training: in fp32, with all parameters and hooks.

        Raises FileNotFoundError or ValueError. The message names the file.
        """
        paths = [Path(file) for file in ([path] if isinstance(path, str | Path) else path)]
        loaded = [building.from_checkpoint(file) for file in paths]
        tokenizer = loaded[0][1]
        for file, (_, other) in zip(paths, loaded, strict=True):
            if other.fingerprint != tokenizer.fingerprint:
                raise ValueError(
                    f"{file} and {paths[0]} have different tokenizers; all models of an ensemble need the same "
                    "tokenizer"
                )
        if trainable and (engine != "torch" or precision not in ("auto", "fp32")):
            raise ValueError("a trainable model computes with torch in fp32: leave out engine and precision")
        prepared = [model for model, _ in loaded]
        numba = numba_engine(prepared, paths, device, precision) if engine == "numba" else None
        if engine != "ctranslate2":
            prepared = [prepare(model, device, precision, trainable) for model in prepared]
        translator = Translator(prepared, tokenizer, TranslatorOptions(**options))
        translator.name, translator.paths, translator.compiled = " + ".join(map(str, paths)), paths, numba
        if engine == "ctranslate2":
            translator.engine = ctranslate2_engine(paths, tokenizer, device, precision, workers)
        return translator

    def sibling(self) -> "Translator":
        """Returns a translator with the same models, engine and logits processors, but separate slots on a GPU."""
        sibling = Translator(self.models, self.tokenizer, self.options)
        sibling.name, sibling.engine, sibling.compiled = self.name, self.engine, self.compiled
        sibling.processor_configs = self.processor_configs
        sibling.made_processors, sibling.noticed, sibling.paths = self.made_processors, self.noticed, self.paths
        return sibling

    def pipeline(
        self,
        search: SearchOptions,
        text: TextOptions | None = None,
        source_tag: str | None = None,
        links: bool = False,
    ) -> Pipeline:
        """Returns the text pipeline of this model. Raises the same errors as `Pipeline`.

        Also raises ValueError if `search` uses a shortlist, but no model has one or the models are not on a CPU.
        """
        if search.shortlist and self.device.type != "cpu":
            raise ValueError(f"--shortlist is for CPUs; leave out --shortlist on {self.device.type}")
        if search.shortlist and self.shortlist is None:
            raise ValueError(f"{self.name} has no shortlist; add one with nmtkit shortlist DATA --path FILE")
        pipeline = Pipeline(
            self.tokenizer, search, text, source_tag, links, self.max_source_len, self.options.long_lines
        )
        if search.source_lang and search.target_lang:
            self.notice_untrained([(search.source_lang, search.target_lang)])
        return pipeline

    def notice_untrained(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Logs one warning that names the pairs (source language, target language) without training data (zero-shot).

        Pairs that an earlier warning named are left out. A model without known training directions gives no warning.
        """
        known = self.directions | self.noticed
        untrained = [pair for pair in pairs if pair not in known]
        if not self.directions or not untrained:
            return
        self.noticed.update(untrained)
        logger.warning(
            "the model was not trained on %s (zero-shot); check the translations, or use --pivot to translate "
            "through a language that the model knows well", ", ".join(f"{a} to {b}" for a, b in untrained),
        )  # fmt: skip

    def translate(self, lines: Iterable[str | Request], **options: Any) -> list[Translation]:
        """Returns the translations of `lines`, in the same order. `options` are fields of SearchOptions."""
        return list(self.stream(lines, self.pipeline(SearchOptions(**options))))

    def stream(self, lines: Iterable[str | Request], pipeline: Pipeline) -> Iterator[Translation]:
        """Yields the translations of `lines` in order. Reads one window of lines at a time to limit memory."""
        requests = (Request(line) if isinstance(line, str) else line for line in lines)
        return self.run(iter(lambda: list(islice(requests, WINDOW)), []), pipeline)

    def batch_decoder(self, options: SearchOptions) -> BatchDecoder:
        """Returns the decoder of this process: continuous batching on a GPU if possible, else one batch after another.

        On a GPU, the next call with the same options reuses the slots. Raises ValueError for options that the engine
        does not support.
        """
        if self.engine is not None:
            return self.engine.decoder(self.models, options)
        # Searches that differ only in these options share the slots: quality reports do not affect the search, and the
        # languages are tokens of each segment.
        search = replace(options, quality=False, source_lang=None, target_lang=None)
        if self.device.type == "cuda" and supports(self.models, search):
            if self.continuous is None or self.continuous.options != search:
                self.continuous = None  # frees the memory of the old slots before new slots are made
                slots = max(1, self.max_tokens // TOKENS_PER_SLOT)
                fallback = partial(self.decode, options=search)
                self.continuous = ContinuousBatching(self.models, search, slots, fallback, self.device)
            return partial(self.decode_in_slots, self.continuous, options)

        def decode_in_turn(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
            for number, batch in enumerate(batches):
                yield number, self.decode(batch, options)

        return decode_in_turn

    def decode(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        """Returns the hypotheses of each sentence of a batch, best first."""
        engine = self.compiled
        if engine is None or not engine.supports(options):
            return self.decode_with_torch(batch, options)
        free = [index for index, sentence in enumerate(batch) if engine.supports_constraints(sentence.constraints)]
        rest = sorted(set(range(len(batch))) - set(free))
        results = dict(zip(rest, self.decode_with_torch([batch[index] for index in rest], options), strict=True))
        if free:
            part = [batch[index] for index in free]
            searched = engine.search(part, options, self.shortlist)
            results |= zip(free, annotated(self.models, part, options, self.device, searched), strict=True)
        return [results[index] for index in range(len(batch))]

    def decode_with_torch(self, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
        required = any(sentence.constraints.required for sentence in batch)
        edges = self.edges if required else None
        return decode(self.models, batch, options, self.device, edges, self.processors(options), self.shortlist)

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """The union of the shortlists of all models; None if no model has a shortlist."""
        sizes = self.tokenizer.source_size, self.tokenizer.target_size
        states = [model.shortlist for model in self.models if model.shortlist is not None]
        lists = [Shortlist.from_state(state, *sizes) for state in states]
        return reduce(Shortlist.union, lists) if lists else None

    def processors(self, options: SearchOptions) -> list[LogitsProcessor]:
        """Returns the logits processors that `options` name. A processor is created once for each config."""
        processors = []
        for name in options.logits_processors:
            entry = LOGITS_PROCESSORS[name]
            config = self.processor_configs.get(name, entry.preset)
            made = self.made_processors.get(name)
            if made is None or made[0] != config:
                made = self.made_processors[name] = config, entry.factory(config, self.tokenizer)
                made[1].check_models(self.paths)
            processors.append(made[1])
        return processors

    def decode_in_slots(
        self, continuous: ContinuousBatching, options: SearchOptions, batches: Iterable[SegmentBatch]
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        """Searches in slots, which ignore required phrases.

        If a result lacks a required phrase, searches again for this segment with `decode`.
        """
        under_way: dict[int, SegmentBatch] = {}

        def free() -> Iterator[SegmentBatch]:
            for number, batch in enumerate(batches):
                under_way[number] = batch
                yield [without_required(sentence) for sentence in batch]

        for number, results in continuous.decode(free()):
            batch = under_way.pop(number)
            constraints = [sentence.constraints for sentence in batch]
            required = any(sentence.required for sentence in constraints)
            results = annotated(self.models, batch, options, self.device, results)
            missing = lacking(constraints, results, options, self.edges) if required else []
            for index, hypotheses in zip(missing, self.decode([batch[i] for i in missing], options), strict=True):
                results[index] = hypotheses
            yield number, results

    @cached_property
    def edges(self) -> PieceEdges:
        return piece_edges(self.tokenizer)

    def run(
        self,
        windows: Iterable[Sequence[Request]],
        pipeline: Pipeline,
        decoder: BatchDecoder | None = None,
        processes: int = 1,
        first: int = 0,
    ) -> Iterator[Translation]:
        """Yields the translations of windows of requests. The segments of a window are sorted by length and batched.

        An empty window means that no further request has arrived yet. The method then yields the translations that are
        ready. `decoder` has `processes` processes, which get equal work. The default decoder is the decoder of this
        process. `first` is the id of the first request, counted from 0.
        """
        waiting: deque[TextSegment] = deque()  # lines that are not yet translated, in order
        under_way: dict[int, list[TextSegment]] = {}  # number of an unfinished batch -> segments of the batch

        def prepared() -> Iterator[tuple[list[TextSegment], list[list[TextSegment]]]]:
            id = first
            for window in windows:
                lines = pipeline.segments(window, id)
                id += len(window)
                yield lines, self.batches(lines, processes) or [[]]

        def batches(prepared: Iterable[tuple[list[TextSegment], list[list[TextSegment]]]]) -> Iterator[SegmentBatch]:
            number = 0
            for lines, leaves_of_batches in prepared:
                waiting.extend(lines)
                for leaves in leaves_of_batches:
                    under_way[number] = leaves
                    number += 1
                    yield [leaf.input for leaf in leaves]

        def complete_lines(number: int, decoded: BatchHypotheses) -> list[TextSegment]:
            for leaf, hypotheses in zip(under_way.pop(number), decoded, strict=True):
                leaf.hypotheses = hypotheses
            return [waiting.popleft() for _ in list(takewhile(lambda line: line.complete, waiting))]

        def translations(lines: list[TextSegment]) -> list[Translation]:
            return list(map(pipeline.translation, lines))

        decoder = decoder or self.batch_decoder(pipeline.search)
        if not self.background:
            for number, decoded in decoder(batches(prepared())):
                yield from map(pipeline.translation, complete_lines(number, decoded))
        else:
            ahead = Prefetched(prepared(), PREFETCHED)
            with short_switch_interval(), OrderedCalls[list[Translation]]() as calls, contextlib.closing(ahead):
                for number, decoded in decoder(batches(ahead)):
                    calls.submit(translations, complete_lines(number, decoded))
                    for ready in calls.results(wait=not under_way):
                        yield from ready
                for ready in calls.results(wait=True):
                    yield from ready
        assert not waiting

    def batches(self, segments: Sequence[TextSegment], processes: int) -> list[list[TextSegment]]:
        """Returns batches of leaves, in descending order of length.

        A leaf is a segment or a part of a segment that the model reads as a whole. Because of this order, the slowest
        batch is not the last batch, and memory is allocated only once.
        """
        leaves = [leaf for segment in segments for leaf in segment.leaves()]
        leaves.sort(key=lambda leaf: -padded_tokens(leaf.input))
        ends = batch_ends([padded_tokens(leaf.input) for leaf in leaves], self.max_tokens, processes)
        return [leaves[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def batch_ends(lengths: Sequence[int], max_tokens: int, processes: int) -> list[int]:
    """Returns the end of each batch of segments. `lengths` are the tokens of the segments, in descending order.

    A batch has at most `max_tokens` tokens, padding included. For several processes, the number of batches is a
    multiple of the number of processes if there are enough segments, and the costs of the batches are as even as
    possible. The cost of a batch is the length of its longest segment times (segments + STEP_COST).
    """

    def ends_within(cost: float) -> list[int]:
        ends: list[int] = []
        start = 0
        for index in range(1, len(lengths)):
            size, longest = index - start + 1, lengths[start]
            if size * longest > max_tokens or (size + STEP_COST) * longest > cost:
                ends.append(index)
                start = index
        return [*ends, len(lengths)] if lengths else []

    ends = ends_within(math.inf)
    if processes == 1 or not ends:
        return ends
    number = -(-len(ends) // processes) * processes
    # bisection finds the lowest cost limit that needs no additional batch
    low, high = 0, lengths[0] * (len(lengths) + STEP_COST)
    while low < high:
        cost = (low + high) // 2
        low, high = (low, cost) if len(ends_within(cost)) <= number else (cost + 1, high)
    return ends_within(low)


def without_required(sentence: Segment) -> Segment:
    if not sentence.constraints.required:
        return sentence
    return replace(sentence, constraints=replace(sentence.constraints, required=()))


def padded_tokens(sentence: Segment) -> int:
    """Returns the number of tokens of the longer side (source or target) of a segment."""
    return max(len(sentence.ids), 0 if sentence.reference is None else len(sentence.reference) + 1)


def ctranslate2_engine(
    paths: Sequence[Path], tokenizer: Tokenizer, device: str, precision: Precision, workers: int
) -> CTranslate2Engine:
    """Returns CTranslate2 with a checkpoint. Raises ValueError for an ensemble, a GPU, or an unsupported precision."""
    check_engine("ctranslate2", paths, device, precision)
    return CTranslate2Engine(paths[0], tokenizer, "int8" if precision == "int8" else "fp32", workers)


def numba_engine(
    loaded: Sequence[Architecture], paths: Sequence[Path], device: str, precision: Precision
) -> NumbaEngine:
    """Returns the compiled search of a model, whose weights are still in fp32.

    Raises ValueError for an ensemble, a GPU, an unsupported precision or model, and ImportError without numba.
    """
    check_engine("numba", paths, device, precision)
    return NumbaEngine(loaded[0], paths[0], "int8" if precision == "int8" else "fp32")


def check_engine(engine: Engine, paths: Sequence[Path], device: str, precision: Precision) -> None:
    if len(paths) > 1:
        raise ValueError(f"--engine {engine} decodes with one model; leave out --engine for an ensemble")
    if not device.startswith("cpu"):
        raise ValueError(f"--engine {engine} runs only on a CPU; leave out --device {device} or --engine")
    if precision == "bf16":
        raise ValueError(f"--engine {engine} supports --precision fp32 and int8; for bf16, leave out --engine")


def prepare(model: Architecture, device: str, precision: Precision, trainable: bool = False) -> Architecture:
    """Moves the model to the device. Unless `trainable`, converts the weights for inference.

    Raises ValueError for int8 on a device other than the CPU, and for a device that cannot be used.
    """
    if precision == "int8" and not device.startswith("cpu"):
        raise ValueError(f"--precision int8 is for CPUs; on {device} use bf16 or fp32")
    on_cpu = usable_device(device).type == "cpu"
    if trainable:
        return model.to(device, torch.float32)
    if precision == "auto":
        precision = "fp32" if on_cpu else "bf16"
    if on_cpu:
        with torch.inference_mode():
            prepack(model, precision)
        return model
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def usable_device(name: str) -> torch.device:
    """Returns the device with this name. Raises ValueError with the reason if the device cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise RuntimeError("the tensors of this device have no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        gpus = torch.cuda.device_count()
        raise ValueError(f"--device {name} cannot be used: {reason}. GPUs here: {gpus}") from error
    return device
