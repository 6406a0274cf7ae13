"""Translates lines: sorts windows of requests into batches of segments, and returns the translations in order."""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from nmtkit.config.files import checkpoint_of
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs import progress
from nmtkit.jobs.distributed import usable_device
from nmtkit.jobs.threads import OrderedCalls, Prefetched, short_switch_interval
from nmtkit.models import building
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.prepack import Precision, prepack
from nmtkit.text.glossary import Glossary
from nmtkit.translation.engines import AUTO, Decoder, LoadedModels
from nmtkit.translation.options import TextOptions, TranslatorOptions
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchDecoder, BatchHypotheses, Request, Segment, SegmentBatch, Translation
from nmtkit.translation.steps import SegmentNode

WINDOW = 8192  # number of lines that are sorted by length together; limits the lines of a stream in memory
MAX_TOKENS = {"cpu": 2048, "cuda": 16384}  # type of device -> maximum number of source tokens in a batch
# The fixed cost of a decoding step, as a number of segments. The measured fixed cost is 0.11 to 0.16 of the time of a
# step with 64 segments (tiny and base models, fp32 and int8).
STEP_COST = 8
PREFETCHED = 1  # number of windows that are encoded in advance while a GPU decodes

logger = logging.getLogger("nmtkit")


class Translator:
    """Translates with one model, or with an ensemble of models that share a tokenizer. Models are in evaluation mode.

    `options.max_tokens` limits the source tokens of a batch, including padding. The limit does not change translations.
    Lines with more pieces than `options.max_source_len` or than the model can read are split or cut off, with a
    warning. Lines without text become empty lines without a search.
    """

    def __init__(
        self,
        models: Sequence[Architecture],
        tokenizer: Tokenizer,
        options: TranslatorOptions | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.options = options or TranslatorOptions()
        self.originals, self.tokenizer = list(models), tokenizer  # PyTorch computes with `models`
        parameter = next(self.originals[0].parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.max_tokens = self.options.max_tokens or MAX_TOKENS.get(self.device.type, MAX_TOKENS["cpu"])
        self.decoder = decoder or Decoder(LoadedModels(self.originals, tokenizer, str(self.device), self.max_tokens))
        self.background = self.device.type == "cuda"  # whether `run` uses background threads
        self.directions = self.originals[0].directions  # trained language pairs of a multilingual model; empty: unknown
        self.noticed: set[tuple[str, str]] = set()  # untrained language pairs that a warning has already named
        self.paths = list(self.decoder.torch.loaded.paths)  # checkpoints of the models, if the models come from files
        self.name = " + ".join(map(str, self.paths)) or "the checkpoint"  # name of the models in messages

    @property
    def models(self) -> list[Architecture]:
        """The models with the layers that PyTorch uses for inference."""
        return self.decoder.torch.loaded.torch_models

    @staticmethod
    @progress.pause_for("Loading the model")
    def load(
        path: str | Path | Sequence[str | Path],
        device: str = "cpu",
        precision: Precision | Literal["auto"] = "auto",
        engine: str = AUTO,
        workers: int = 1,
        trainable: bool = False,
        **options: Any,
    ) -> "Translator":
        """Loads a checkpoint, or an ensemble with one tokenizer. `options` are fields of TranslatorOptions.

        The folder of a run stands for its best checkpoint.

        `precision` "auto" is fp32 on a CPU and on an Apple GPU (mps), and bf16 on other devices; int8 is only for CPUs.
        `engine` is "auto" or a registered engine, which decodes `workers` batches at a time if it can. With
        `trainable`, the modules are the same as in training: in fp32, with all parameters and hooks.

        Raises FileNotFoundError, ValueError with the name of the file that cannot be used, or ImportError if the
        package of `engine` is missing.
        """
        paths = [checkpoint_of(Path(file)) for file in ([path] if isinstance(path, str | Path) else path)]
        contents = [building.from_checkpoint(file) for file in paths]
        tokenizer = contents[0][1]
        for file, (_, other) in zip(paths, contents, strict=True):
            if other.fingerprint != tokenizer.fingerprint:
                raise ValueError(
                    f"{file} and {paths[0]} have different tokenizers; all models of an ensemble need the same "
                    "tokenizer"
                )
        if trainable and (engine not in (AUTO, "torch") or precision not in ("auto", "fp32")):
            raise ValueError("a trainable model computes with torch in fp32: leave out engine and precision")
        engine = "torch" if trainable else engine
        if precision == "auto":
            precision = automatic_precision(device)
        settings, models = TranslatorOptions(**options), [model for model, _ in contents]
        max_tokens = settings.max_tokens or MAX_TOKENS.get(device.partition(":")[0], MAX_TOKENS["cpu"])
        prepared = partial(prepare, device=device, precision=precision, trainable=trainable)
        loaded = LoadedModels(models, tokenizer, device, max_tokens, paths, precision, workers, prepared)
        return Translator(models, tokenizer, settings, Decoder.prepared(loaded, engine))

    def pipeline(
        self,
        search: SearchOptions,
        text: TextOptions | None = None,
        source_tag: str | None = None,
        links: bool = False,
        terms: Glossary | None = None,
    ) -> Pipeline:
        """Returns the text pipeline of this model. Loads the logits processors that `search` names, with their files.

        `terms` is the glossary of `text`, if it has been read already.

        Raises the same errors as `Pipeline` and as the processors. Also raises ValueError if `search` uses a shortlist,
        but no model has one or the models are not on a CPU.
        """
        if search.shortlist and self.device.type != "cpu":
            raise ValueError(f"--shortlist is for CPUs; leave out --shortlist on {self.device.type}")
        if search.shortlist and self.decoder.torch.loaded.shortlist is None:
            raise ValueError(f"{self.name} has no shortlist; add one with nmtkit shortlist DATA --path FILE")
        processors = self.decoder.torch.processors(search)
        models = [*self.originals, *(model for processor in processors for model in processor.models)]
        # one position of a model is for eos
        limits = [model.max_source_positions - 1 for model in models if model.max_source_positions is not None]
        longest = min([self.options.max_source_len, *limits])
        pipeline = Pipeline(
            self.tokenizer,
            search,
            text,
            source_tag,
            links,
            longest,
            self.options.long_lines,
            models,
            str(self.device),
            terms,
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

    def batch_decoder(self, options: SearchOptions, polled: bool = False) -> BatchDecoder:
        """Returns the decoder of this process. `polled` is explained in `Engine.decode`.

        Raises ValueError for options that the engine does not support, if it does not fall back to PyTorch.
        """
        return self.decoder.decoder(options, polled=polled)

    def decode(self, batch: SegmentBatch, options: SearchOptions, tell: bool = True) -> BatchHypotheses:
        """Returns the hypotheses of each segment of a batch, best first. Other calls may run at the same time.

        With `tell`, the log names the engine.
        """
        ((_, hypotheses),) = self.decoder.decoder(options, alone=False, tell=tell)([batch])
        return hypotheses

    def run(
        self,
        windows: Iterable[Sequence[Request]],
        pipeline: Pipeline,
        decoder: BatchDecoder | None = None,
        processes: int = 1,
        first: int = 0,
        background: bool | None = None,
        max_tokens: int | None = None,
    ) -> Iterator[Translation]:
        """Yields the translations of windows of requests. The segments of a window are sorted by length and batched.

        An empty window means that no further request has arrived yet. The method then yields the translations that are
        ready. `decoder` has `processes` processes, which get equal work. The default decoder is the decoder of this
        process. `first` is the id of the first request, counted from 0. With `background`, the default on a GPU,
        background threads encode lines and decode tokens while this thread launches kernels. `max_tokens` is the
        maximum number of source tokens of a batch; the default is the limit of this translator.
        """
        waiting: deque[SegmentNode] = deque()  # lines that are not yet translated, in order
        # number of an unfinished batch -> segments of the batch, and the number of lines for the progress report
        under_way: dict[int, tuple[list[SegmentNode], float]] = {}

        def prepared() -> Iterator[tuple[list[SegmentNode], list[list[SegmentNode]]]]:
            id = first
            for window in windows:
                lines = pipeline.segments(window, id)
                id += len(window)
                yield lines, self.batches(lines, processes, max_tokens) or [[]]

        def batches(prepared: Iterable[tuple[list[SegmentNode], list[list[SegmentNode]]]]) -> Iterator[SegmentBatch]:
            number = 0
            for lines, leaves_of_batches in prepared:
                waiting.extend(lines)
                parts = sum(map(len, leaves_of_batches))
                for leaves in leaves_of_batches:
                    under_way[number] = leaves, len(lines) * (len(leaves) / parts if parts else 1)
                    number += 1
                    yield [leaf.input for leaf in leaves]

        def complete_lines(number: int, decoded: BatchHypotheses) -> list[SegmentNode]:
            leaves, share = under_way.pop(number)
            for leaf, hypotheses in zip(leaves, decoded, strict=True):
                leaf.hypotheses = hypotheses
            progress.advance(share)
            return [waiting.popleft() for _ in list(takewhile(lambda line: line.complete, waiting))]

        def translations(lines: list[SegmentNode]) -> list[Translation]:
            return list(map(pipeline.translation, lines))

        decoder = decoder or self.batch_decoder(pipeline.search)
        if not (self.background if background is None else background):
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

    def batches(
        self, segments: Sequence[SegmentNode], processes: int, max_tokens: int | None = None
    ) -> list[list[SegmentNode]]:
        """Returns batches of leaves, in descending order of length.

        A leaf is a segment or a part of a segment that the model reads as a whole. Because of this order, the slowest
        batch is not the last batch, and memory is allocated only once.
        """
        leaves = [leaf for segment in segments for leaf in segment.leaves()]
        leaves.sort(key=lambda leaf: -padded_tokens(leaf.input))
        ends = batch_ends([padded_tokens(leaf.input) for leaf in leaves], max_tokens or self.max_tokens, processes)
        return [leaves[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def batch_ends(lengths: Sequence[int], max_tokens: int, processes: int) -> list[int]:
    """Returns the index after the last segment of each batch. `lengths` are the token counts of segments, descending.

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


def padded_tokens(sentence: Segment) -> int:
    """Returns the number of tokens of the longer side (source or target) of a segment."""
    return max(len(sentence.ids), 0 if sentence.reference is None else len(sentence.reference) + 1)


def prepare(
    model: Architecture, device: str, precision: Precision | Literal["auto"], trainable: bool = False
) -> Architecture:
    """Moves the model to the device. Unless `trainable`, converts the weights for inference.

    Raises ValueError for int8 on a device other than the CPU, for bf16 on mps, and for a device that cannot be used.
    """
    if precision == "int8" and not device.startswith("cpu"):
        raise ValueError(f"--precision int8 is for CPUs; on {device} leave out --precision")
    if precision == "bf16" and device.startswith("mps"):
        raise ValueError("--device mps computes in fp32; leave out --precision bf16")
    on_cpu = usable_device(device).type == "cpu"
    if trainable:
        return model.to(device, torch.float32)
    if precision == "auto":
        precision = automatic_precision(device)
    if on_cpu:
        with torch.inference_mode():
            prepack(model, precision)
        return model
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def automatic_precision(device: str) -> Precision:
    """Returns the precision for --precision auto: fp32 on a CPU and on an Apple GPU, otherwise bf16."""
    return "fp32" if device.startswith(("cpu", "mps")) else "bf16"
