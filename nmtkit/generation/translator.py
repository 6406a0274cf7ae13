"""Lines in, translations out, in order: what stands between text and search.

from nmtkit import Translator
for translation in Translator.load("averaged.pt").translate(["A dog runs.", "Hello!"], beam=4):
    print(translation.text)
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from nmtkit import models
from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import EOS, Tokenizer
from nmtkit.generation.long_lines import pieces_of
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.search import Hypothesis, beam_search
from nmtkit.layers.quantized import pack
from nmtkit.packed import Packed

WINDOW = 8192  # lines sorted by length together; what a stream holds in memory
MAX_TOKENS = {"cpu": 640, "cuda": 16384}  # source tokens of a batch

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class Output:
    """One translation of a line.

    `score` is the length-penalised log probability, which `hypotheses` are sorted by; both are summed over the parts of
    a line that was split. `pieces` are the target vocabulary's, without eos.
    """

    text: str
    pieces: list[str]
    score: float
    log_probability: float  # natural logarithm, eos included


@dataclass(frozen=True)
class Translation:
    """A line and its translations, best first; `id` counts lines from 0."""

    id: int
    source: str
    hypotheses: list[Output]

    @property
    def text(self) -> str:
        return self.hypotheses[0].text


@dataclass(frozen=True)
class Request:
    """A line to translate; `ids` (eos last) where it is encoded already."""

    source: str
    ids: list[int] | None = None


@dataclass(eq=False)
class Line:
    """A request on its way: the parts it was cut into, and what was found for each."""

    id: int
    source: str
    parts: list[list[int]]  # source ids, eos last; none for an empty line
    found: list[list[Hypothesis] | None]

    def complete(self) -> bool:
        return None not in self.found


@dataclass(frozen=True)
class Part:
    """What a batch is made of: part number `index` of a line."""

    line: Line
    index: int

    @property
    def ids(self) -> list[int]:
        return self.line.parts[self.index]


Job = list[list[int]]  # source ids of each sentence of a batch
Found = list[list[Hypothesis]]
# Searches batches, in any order, perhaps at the same time; says which batch (its number) each result is of.
Runner = Callable[[Iterable[Job]], Iterator[tuple[int, Found]]]


class Translator:
    """Translates with one model, or with an ensemble of models that share a tokenizer. Models are in evaluation mode.

    `max_tokens` bounds the source tokens of a batch (its longest sentence times its sentences); a result does not
    depend on it. Lines of more than `max_source_len` pieces, or than a model can read, are split or cut as `long_lines`
    says, with a warning. Empty and white-space lines become empty lines, of which the models know nothing.
    """

    def __init__(
        self,
        models: Sequence[Architecture],
        tokenizer: Tokenizer,
        *,
        max_tokens: int | None = None,
        max_source_len: int = 1024,
        long_lines: Literal["split", "cut"] = "split",
    ) -> None:
        self.models = list(models)
        self.tokenizer = tokenizer
        parameter = next(self.models[0].parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.max_tokens = max_tokens or MAX_TOKENS.get(self.device.type, MAX_TOKENS["cpu"])
        limits = [model.max_source_positions for model in models if model.max_source_positions is not None]
        self.max_source_len = min([max_source_len, *(limit - 1 for limit in limits)])  # without eos
        self.long_lines = long_lines

    @staticmethod
    def load(
        path: str | Path | Sequence[str | Path],
        device: str = "cpu",
        precision: Literal["auto", "fp32", "bf16", "int8"] = "auto",
        **settings: Any,
    ) -> "Translator":
        """From a checkpoint, or from several of one tokenizer: an ensemble. `settings` are those of the constructor.

        `precision` auto is fp32 on a CPU, bf16 elsewhere; int8 is for CPUs.

        Raises FileNotFoundError or ValueError, naming the file.
        """
        paths = [Path(one) for one in ([path] if isinstance(path, str | Path) else path)]
        loaded = [models.from_checkpoint(one) for one in paths]
        tokenizer = loaded[0][1]
        for other, (_, its) in zip(paths, loaded, strict=True):
            if its.fingerprint != tokenizer.fingerprint:
                raise ValueError(f"{other} and {paths[0]} have different tokenizers; an ensemble needs one for all")
        return Translator([prepared(model, device, precision) for model, _ in loaded], tokenizer, **settings)

    def translate(self, lines: Iterable[str], **options: Any) -> list[Translation]:
        """Translations of `lines`, in their order; `options` are fields of SearchOptions."""
        return list(self.stream(lines, SearchOptions(**options)))

    def stream(self, lines: Iterable[str], options: SearchOptions) -> Iterator[Translation]:
        """The same, a window of lines at a time, in bounded memory."""
        iterator = iter(lines)
        windows = iter(lambda: [Request(line) for line in islice(iterator, WINDOW)], [])
        return self.run(windows, options, self.runner(options))

    def runner(self, options: SearchOptions) -> Runner:
        """Searches batches one after the other, in this process."""

        def run(jobs: Iterable[Job]) -> Iterator[tuple[int, Found]]:
            for number, job in enumerate(jobs):
                yield number, self.search(job, options)

        return run

    def search(self, job: Job, options: SearchOptions) -> Found:
        if not job:
            return []
        return beam_search(self.models, Packed.from_lists(job, self.device), options)

    def run(
        self, windows: Iterable[Sequence[Request]], options: SearchOptions, runner: Runner
    ) -> Iterator[Translation]:
        """Translates windows of requests; a window's lines are sorted by length and batched together.

        A window may be empty: that says no more than that nothing has come in yet, so what is ready goes out.
        """
        waiting: deque[Line] = deque()
        batches: dict[int, list[Part]] = {}

        def jobs() -> Iterator[Job]:
            lines = number = 0
            for window in windows:
                new = self.prepare(window, lines)
                lines += len(new)
                waiting.extend(new)
                for batch in self.batches(new) or [[]]:
                    batches[number] = batch
                    number += 1
                    yield [part.ids for part in batch]

        for number, found in runner(jobs()):
            for part, hypotheses in zip(batches.pop(number), found, strict=True):
                part.line.found[part.index] = hypotheses
            while waiting and waiting[0].complete():
                yield self.finish(waiting.popleft())
        assert not waiting

    # --- requests to batches ----------------------------------------------------------------------------------------

    def prepare(self, window: Sequence[Request], first: int) -> list[Line]:
        encoded = self.tokenizer.encode_source([request.source for request in window if request.ids is None])
        fresh = iter(encoded.split())
        lines = []
        for id, request in enumerate(window, first):
            ids = next(fresh).tolist() if request.ids is None else request.ids
            parts = self.cut(ids[:-1], id) if len(ids) > 1 else []
            lines.append(Line(id, request.source, parts, [None] * len(parts)))
        return lines

    def cut(self, ids: list[int], id: int) -> list[list[int]]:
        """`ids` (without eos) in parts that the model can read, each with its eos."""
        limit = self.max_source_len
        if len(ids) <= limit:
            return [[*ids, EOS]]
        ends = pieces_of(self.tokenizer.source_pieces(ids), limit)
        if self.long_lines == "cut":
            logger.warning("line %d has %d pieces; all after the first %d are cut off", id + 1, len(ids), ends[0])
            ends = ends[:1]
        else:
            logger.warning("line %d has %d pieces; it is translated in %d parts", id + 1, len(ids), len(ends))
        return [[*ids[start:end], EOS] for start, end in zip([0, *ends], ends, strict=False)]

    def batches(self, lines: Sequence[Line]) -> list[list[Part]]:
        """Longest first, so that what takes long does not come last, and memory is claimed once."""
        parts = [Part(line, index) for line in lines for index in range(len(line.parts))]
        parts.sort(key=lambda part: -len(part.ids))
        batches: list[list[Part]] = []
        for part in parts:
            if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].ids) > self.max_tokens:
                batches.append([])
            batches[-1].append(part)
        return batches

    # --- hypotheses to text -----------------------------------------------------------------------------------------

    def finish(self, line: Line) -> Translation:
        if not line.parts:
            return Translation(line.id, line.source, [Output("", [], 0.0, 0.0)])
        found = [hypotheses for hypotheses in line.found if hypotheses is not None]
        number = max(len(hypotheses) for hypotheses in found)
        ranked = [[part[min(rank, len(part) - 1)] for part in found] for rank in range(number)]
        return Translation(line.id, line.source, [self.output(parts) for parts in ranked])

    def output(self, parts: list[Hypothesis]) -> Output:
        return Output(
            text=" ".join(self.tokenizer.decode_target(part.tokens) for part in parts),
            pieces=[piece for part in parts for piece in self.tokenizer.target_pieces(part.tokens)],
            score=sum(part.score for part in parts),
            log_probability=sum(part.log_probability for part in parts),
        )


def prepared(model: Architecture, device: str, precision: Literal["auto", "fp32", "bf16", "int8"]) -> Architecture:
    """The model on its device, with weights laid out for inference. Raises ValueError for int8 off the CPU."""
    on_cpu = torch.device(device).type == "cpu"
    if precision == "auto":
        precision = "fp32" if on_cpu else "bf16"
    if on_cpu:
        with torch.inference_mode():
            pack(model, precision)
        return model
    if precision == "int8":
        raise ValueError(f"--precision int8 is for CPUs; on {device} use bf16 or fp32")
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
