"""Lines in, translations out, in order: what stands between text and search.

from nmtkit import Translator
for translation in Translator.load("averaged.pt").translate(["A dog runs.", "Hello!"], beam=4):
    print(translation.text)
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from nmtkit import models
from nmtkit.architectures import Architecture
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.generation.beam_search import Hypothesis
from nmtkit.generation.continuous_batching import Continuous
from nmtkit.generation.decoding import beam_search
from nmtkit.generation.graph_search import suits
from nmtkit.generation.lines import Desk, Line, Output, Request, Sentence, Translation
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.teacher_forced import align, score_references
from nmtkit.layers.prepack import prepack
from nmtkit.packed import Packed

__all__ = ["Output", "Request", "Translation", "Translator"]

WINDOW = 8192  # lines sorted by length together; what a stream holds in memory
MAX_TOKENS = {"cpu": 2048, "cuda": 16384}  # source tokens of a batch
SLOT_TOKENS = 64  # of them for each slot of a GPU's search

Precision = Literal["auto", "fp32", "bf16", "int8"]
Job = list[Sentence]
Found = list[list[Hypothesis]]
# Searches batches, in any order, perhaps at the same time; says which batch (its number) each result is of.
Runner = Callable[[Iterable[Job]], Iterator[tuple[int, Found]]]


@dataclass(frozen=True)
class Part:
    """Part number `index` of a line."""

    line: Line
    index: int

    @property
    def sentence(self) -> Sentence:
        return self.line.parts[self.index]

    @property
    def tokens(self) -> int:
        reference = self.sentence.reference
        return max(len(self.sentence.ids), 0 if reference is None else len(reference) + 1)


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
        self.continuous: Continuous | None = None

    @staticmethod
    def load(
        path: str | Path | Sequence[str | Path], device: str = "cpu", precision: Precision = "auto", **settings: Any
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

    def translate(self, lines: Iterable[str | Request], **options: Any) -> list[Translation]:
        """Translations of `lines`, in their order; `options` are fields of SearchOptions."""
        return list(self.stream(lines, SearchOptions(**options)))

    def stream(self, lines: Iterable[str | Request], options: SearchOptions) -> Iterator[Translation]:
        """The same, a window of lines at a time, in bounded memory."""
        requests = (Request(line) if isinstance(line, str) else line for line in lines)
        windows = iter(lambda: list(islice(requests, WINDOW)), [])
        return self.run(windows, options, self.runner(options))

    def runner(self, options: SearchOptions) -> Runner:
        """Searches batches in this process: on a GPU through slots where that is known how, else one after the other.

        What a GPU has set up for some options serves the next call with the same.
        """
        if self.device.type == "cuda" and suits(self.models, options):
            if self.continuous is None or self.continuous.options != options:
                self.continuous = None  # its memory is free from here on
                slots = max(1, self.max_tokens // SLOT_TOKENS)
                search = partial(self.search, options=options)
                self.continuous = Continuous(self.models, options, slots, search, self.device)
            return self.continuous.run

        def run(jobs: Iterable[Job]) -> Iterator[tuple[int, Found]]:
            for number, job in enumerate(jobs):
                yield number, self.search(job, options)

        return run

    def search(self, job: Job, options: SearchOptions) -> Found:
        """The hypotheses of each sentence of a batch, best first."""
        if not job:
            return []
        source = Packed.from_lists([sentence.ids for sentence in job], self.device)
        if options.score_reference:
            references = [sentence.reference or [] for sentence in job]
            found = [[one] for one in score_references(self.models, source, references, options.lenpen)]
        else:
            constraints, seeds = [sentence.constraints for sentence in job], [sentence.seed for sentence in job]
            found = beam_search(self.models, source, options, constraints, seeds)
        return align(self.models, source, found) if options.alignment or options.replace_unknown else found

    def run(
        self, windows: Iterable[Sequence[Request]], options: SearchOptions, runner: Runner
    ) -> Iterator[Translation]:
        """Translates windows of requests; a window's lines are sorted by length and batched together.

        A window may be empty: that says no more than that nothing has come in yet, so what is ready goes out.
        """
        desk = Desk(self.tokenizer, options, self.max_source_len, self.long_lines)
        waiting: deque[Line] = deque()
        batches: dict[int, list[Part]] = {}

        def jobs() -> Iterator[Job]:
            lines = number = 0
            for window in windows:
                new = desk.lines(window, lines)
                lines += len(new)
                waiting.extend(new)
                for batch in self.batches(new) or [[]]:
                    batches[number] = batch
                    number += 1
                    yield [part.sentence for part in batch]

        for number, found in runner(jobs()):
            for part, hypotheses in zip(batches.pop(number), found, strict=True):
                part.line.found[part.index] = hypotheses
            while waiting and waiting[0].complete():
                yield desk.translation(waiting.popleft())
        assert not waiting

    def batches(self, lines: Sequence[Line]) -> list[list[Part]]:
        """Longest first, so that what takes long does not come last, and memory is claimed once."""
        parts = [Part(line, index) for line in lines for index in range(len(line.parts))]
        parts.sort(key=lambda part: -part.tokens)
        batches: list[list[Part]] = []
        for part in parts:
            if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > self.max_tokens:
                batches.append([])
            batches[-1].append(part)
        return batches


def prepared(model: Architecture, device: str, precision: Precision) -> Architecture:
    """The model on its device, with weights laid out for inference. Raises ValueError for int8 off the CPU."""
    on_cpu = torch.device(device).type == "cpu"
    if precision == "auto":
        precision = "fp32" if on_cpu else "bf16"
    if on_cpu:
        with torch.inference_mode():
            prepack(model, precision)
        return model
    if precision == "int8":
        raise ValueError(f"--precision int8 is for CPUs; on {device} use bf16 or fp32")
    return model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
