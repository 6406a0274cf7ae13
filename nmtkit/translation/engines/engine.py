"""The interface of engines, the engine of PyTorch, and the choice of an engine for each call and each segment.

An engine decodes batches of segments. Required phrases, alignments, quality and the segments that an engine does not
support are handled here, once for all engines.
"""

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch

from nmtkit.config import Config
from nmtkit.config.registry import Registry
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS, Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers import ModuleWatch, sharing_copy
from nmtkit.models.layers.prepack import Precision
from nmtkit.translation.search import decoding
from nmtkit.translation.search.beam_search import free_search
from nmtkit.translation.search.constrained_search import lacking_sentences
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import LONGEST_RUN, is_loop, searches_again
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import BatchDecoder, BatchHypotheses, Segment, SegmentBatch

# Options that `Decoder` and the text pipeline implement, not the engine. Languages are tokens of each segment.
OUTSIDE = {"--alignment", "--quality", "--mbr", "--source-lang", "--target-lang", "--keep-loops"}

logger = logging.getLogger("nmtkit")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """The config of an engine without settings."""


@dataclass(frozen=True, eq=False)
class LoadedModels:
    """The models that an engine gets, and how the user wants to use them.

    When an engine is created, the models have the weights and layers of their checkpoints, in fp32 on the CPU.
    `torch_models` are the models on `device` in `precision`, with fast layers for PyTorch. Unless the engine
    `keeps_weights`, `torch_models` are the modules of `models`, changed in place after the engine has been created.
    """

    models: Sequence[Architecture]
    tokenizer: Tokenizer
    device: str
    max_tokens: int  # maximum source tokens of a batch
    paths: Sequence[Path] = ()  # checkpoints of the models, if the models come from files
    precision: Precision = "fp32"
    workers: int = 1  # number of batches to decode at the same time
    prepare: Callable[[Architecture], Architecture] | None = None  # moves and converts a model; None: already done
    preparing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def torch_models(self) -> list[Architecture]:
        """The models with which PyTorch computes. Without `prepare_in_place`, the first use converts copies."""
        with self.preparing:
            return self.prepared

    @cached_property
    def prepared(self) -> list[Architecture]:
        return self.recorded(
            [model if self.prepare is None else self.prepare(sharing_copy(model)) for model in self.models]
        )

    def recorded(self, models: list[Architecture]) -> list[Architecture]:
        """Returns `models`, and records their modules and weights for `are_changed`."""
        self.__dict__["watch"] = ModuleWatch(models)
        return models

    @cached_property
    def watch_of_originals(self) -> ModuleWatch:
        return ModuleWatch(self.models)

    @property
    def are_changed(self) -> bool:
        """Whether `torch_models` have hooks, new code, new modules or new weights since they were loaded."""
        watch: ModuleWatch | None = self.__dict__.get("watch")
        return self.watch_of_originals.have_hooks() or (watch is not None and watch.are_changed())

    def prepare_in_place(self) -> None:
        """Converts the models themselves, which saves memory. They then lack the weights of their checkpoints."""
        if self.prepare is not None:
            self.__dict__["prepared"] = self.recorded([self.prepare(model) for model in self.models])

    @cached_property
    def shortlist(self) -> Shortlist | None:
        """The union of the shortlists of all models; None if no model has a shortlist."""
        sizes = self.tokenizer.source_size, self.tokenizer.target_size
        states = [model.shortlist for model in self.models if model.shortlist is not None]
        lists = [Shortlist.from_state(state, *sizes) for state in states]
        return reduce(Shortlist.union, lists) if lists else None

    def precision_of(self, engine: str, ensembles: bool = False) -> Precision:
        """Returns the precision for an engine that decodes on a CPU: fp32 or int8.

        Raises ValueError for a GPU, bf16 and, unless the engine supports `ensembles`, for several models.
        """
        if len(self.models) > 1 and not ensembles:
            raise ValueError(f"--engine {engine} decodes with one model; for an ensemble, give --engine torch")
        if not self.device.startswith("cpu"):
            raise ValueError(f"--engine {engine} runs only on a CPU; leave out --device {self.device} or --engine")
        if self.precision == "bf16":
            raise ValueError(f"--engine {engine} supports --precision fp32 and int8; for bf16, give --engine torch")
        return self.precision


class Engine(ABC):
    """Decodes batches with the models of `loaded`. Factories are called as `factory(config, loaded)`.

    A factory raises ValueError for models that the engine does not support, and ImportError for a missing package. An
    engine keeps no state of a call, so several threads can use the engine at the same time.
    """

    falls_back = True  # whether PyTorch decodes options that the engine refuses; otherwise, a refusal is an error
    shares_memory = False  # whether all calls share memory that one call can fill, such as the slots of a GPU
    keeps_weights = False  # whether the engine reads the weights of `loaded.models` after its creation
    same_hypotheses = True  # whether PyTorch finds the same hypotheses, except for rounding

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        self.config, self.loaded = config, loaded

    @abstractmethod
    def refusal(self, options: SearchOptions) -> str | None:
        """Returns the reason why the engine does not support `options`, such as "--sampling", or None."""

    def refuses(self, segment: Segment) -> bool:
        """Returns whether the engine does not support the prefix or the avoided phrases of a segment.

        PyTorch searches such a segment, even if `falls_back` is false. An engine does not get the required phrases of a
        segment.
        """
        return False

    @abstractmethod
    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        """Yields the number of each batch with the hypotheses of its segments, best first, in any order of batches.

        An empty batch means that no further input has arrived yet: the engine then finishes all batches. With
        `polled`, `batches` never waits while a batch is under way, so the engine may ask for input at any time. An
        empty list of hypotheses means that PyTorch must search this segment.
        """

    def is_ready(self) -> bool:
        """Returns whether `prepare` takes little time. With --engine auto, PyTorch decodes while this is false."""
        return True

    def is_awaited(self) -> None:  # noqa: B027  # most engines are always ready
        """Called after each batch that PyTorch decodes because the engine is not ready."""

    def prepare(self) -> None:  # noqa: B027  # most engines are ready when they are created
        """Does the work whose results forked processes can share. Called before each call of `decode`."""

    def start(self) -> None:  # noqa: B027
        """Starts threads that a forked process would not have. Called in each process before its first batch."""


ENGINES: Registry[Engine] = Registry("engine", "--engine")


@ENGINES.register("torch", EngineConfig())
class TorchEngine(Engine):
    """The search in PyTorch, for all models and options. The engine decodes one batch after another."""

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        self.made_processors: dict[str, tuple[Any, LogitsProcessor]] = {}  # name -> newest config, newest processor

    def refusal(self, options: SearchOptions) -> None:
        return None

    def prepare(self) -> None:
        _ = self.loaded.torch_models

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        processors = self.processors(options)
        for number, batch in enumerate(batches):
            yield number, self.search(batch, options, processors)

    def search(
        self, batch: SegmentBatch, options: SearchOptions, processors: Sequence[LogitsProcessor]
    ) -> BatchHypotheses:
        """Returns the hypotheses of a batch, or the scores of its references. Required phrases are ignored."""
        if not batch:
            return []
        source = self.packed(batch)
        if options.score_reference:
            return decoding.score_references(self.loaded.torch_models, source, batch, options.lenpen)
        constraints, seeds = [segment.constraints for segment in batch], [segment.seed for segment in batch]
        return free_search(
            self.loaded.torch_models, source, options, constraints, seeds, processors, self.loaded.shortlist
        )

    def with_required_phrases(
        self, batch: SegmentBatch, results: BatchHypotheses, options: SearchOptions
    ) -> BatchHypotheses:
        """Returns `results`, with new hypotheses for each segment whose hypotheses lack a required phrase."""
        constraints, processors = [segment.constraints for segment in batch], self.processors(options)
        return decoding.with_required_phrases(
            self.loaded.torch_models, self.packed(batch), results, options, constraints, processors,
            self.loaded.shortlist,
        )  # fmt: skip

    def annotated(self, batch: SegmentBatch, results: BatchHypotheses, options: SearchOptions) -> BatchHypotheses:
        """Returns `results` with attention weights and log probabilities of tokens, if `options` request them."""
        return decoding.annotated(self.loaded.torch_models, self.packed(batch), options, results)

    def packed(self, batch: SegmentBatch) -> Packed:
        return Packed.from_lists([segment.ids for segment in batch], torch.device(self.loaded.device))

    def processors(self, options: SearchOptions) -> list[LogitsProcessor]:
        """Returns the logits processors that `options` name. The newest processor of each name is kept."""
        processors = []
        for name, config in options.processors.items():
            entry = LOGITS_PROCESSORS[name]
            config = entry.preset if config is None else config
            made = self.made_processors.get(name)
            if made is None or made[0] != config:
                made = self.made_processors[name] = config, entry.factory(config, self.loaded.tokenizer)
                made[1].check_models(self.loaded.paths)
            processors.append(made[1])
        return processors


def without_required(segment: Segment) -> Segment:
    """Returns a segment without required phrases. `completed` searches again if the hypotheses lack a phrase."""
    if not segment.constraints.required:
        return segment
    return replace(segment, constraints=replace(segment.constraints, required=()))


AUTO, COMPILED = "auto", "numba"
NO_PREFIX = "{} does not support --prefix, --avoid or the tokens of target languages"
NOT_COMPILED = "the search is not compiled for this processor yet"


class Decoder:
    """Decodes with `engine`, or with PyTorch if this engine does not support the options or the segment.

    The name "auto" means the fastest engine of the device: the slots on a GPU, the compiled search on a CPU. PyTorch
    decodes if the compiled search does not support the models, and while the machine code of the search is missing.
    A call keeps its engine to the end. If the hypotheses of the two engines can differ by more than rounding, as in
    int8, the first call waits for the machine code, so that equal commands give equal translations.
    """

    def __init__(self, loaded: LoadedModels, name: str = AUTO, told: set[str] | None = None) -> None:
        """Creates the engine with this name. `told` has the messages about engines that are already in the log."""
        self.torch = TorchEngine(EngineConfig(), loaded)
        self.told = set() if told is None else told
        self.automatic = name == AUTO and loaded.device.startswith("cpu")
        self.decided: Engine | None = None  # with `automatic`, the engine of the newest call
        self.obstacle: str | None = None  # with `automatic`, the reason why PyTorch decodes all calls
        on_cuda = loaded.device.startswith("cuda")
        self.name = name if name != AUTO else COMPILED if self.automatic else "slots" if on_cuda else "torch"
        entry = ENGINES[self.name]
        try:
            self.engine = self.torch if self.name == "torch" else entry.factory(entry.preset, loaded)
        except (ValueError, ImportError) as error:
            if not self.automatic:
                raise
            self.give_up(str(error))
        self.automatic = self.automatic and self.engine is not self.torch
        if loaded.prepare is None:
            _ = loaded.torch_models  # records the modules and weights that the engine has read

    @staticmethod
    def prepared(loaded: LoadedModels, name: str = AUTO, told: set[str] | None = None) -> "Decoder":
        """Returns a decoder of models that `loaded.prepare` has not converted yet."""
        decoder = Decoder(loaded, name, told)
        if not decoder.engine.keeps_weights:
            loaded.prepare_in_place()
        return decoder

    def give_up(self, reason: str) -> None:
        """Makes PyTorch decode all further calls."""
        self.engine, self.name, self.automatic, self.obstacle = self.torch, "torch", False, reason

    def keep_choice(self) -> None:
        """Ends the automatic choice of an engine.

        The engine of the newest call decodes all further calls, except calls with options that it does not support.
        """
        if self.automatic:
            if self.decided is None:
                self.decide()
            if self.decided is not self.engine:
                self.give_up(NOT_COMPILED)
        self.automatic = False

    @property
    def waits(self) -> bool:
        """Whether PyTorch decodes because the search is not compiled yet."""
        return self.obstacle == NOT_COMPILED or (self.automatic and self.decided is self.torch)

    def choice(self, options: SearchOptions) -> str:
        """Returns the name of the engine for these options. If PyTorch replaces the engine, adds the reason.

        Raises ValueError like `engine_for`.
        """
        _, reason = self.chosen(options)
        if reason is None and options.target_lang is not None:
            # the token of the target language is a prefix of every translation
            _, prefix = self.torch.loaded.tokenizer.language_ids(options.source_lang, options.target_lang)
            if self.engine.refuses(Segment([EOS], Constraints(tuple(prefix)))):
                reason = NO_PREFIX.format(self.name)
        return self.name if reason is None else f"torch ({reason})"

    def engine_for(self, options: SearchOptions, alone: bool = True) -> tuple[Engine, str | None]:
        """Returns the engine of a call, and the reason if PyTorch replaces `self.engine`.

        Without `alone`, other calls may run at the same time. This call then uses the engine that was chosen for the
        other calls, or PyTorch if the engine has memory that the calls would share. With `alone`, raises ValueError if
        the engine refuses the options and does not fall back to PyTorch. PyTorch always scores references, so this case
        has no reason.
        """
        if options.score_reference:
            return self.torch, None
        if self.automatic and (alone or self.decided is None) and self.engine.refusal(options) is None:
            self.decide()
        engine, reason = self.chosen(options, alone)
        if reason is None and engine.shares_memory and not alone:
            engine, reason = self.torch, f"other calls may use the memory of {self.name}"
        engine.prepare()
        return engine, reason

    def tell(self, options: SearchOptions, reason: str | None, searched: bool) -> None:
        """Logs once which engine searches with these options. If PyTorch replaces an engine, also logs the reason.

        `reason` comes from `engine_for`. `searched` is whether the engine has searched a segment of the batch. The
        method is called for each batch, and not once before the first batch, so that an error in the input is reported
        without a message about the engine.
        """
        if reason is None and not searched:
            reason = NO_PREFIX.format(self.name)
        name = self.name if reason is None else f"torch, because {reason}"
        if name not in ("torch", *self.told) and not options.score_reference:
            self.told.add(name)
            logger.info("engine: %s", name)

    def decide(self) -> None:
        """Chooses between the compiled search and PyTorch, if the machine code was missing until now."""
        if self.decided is self.engine:
            return
        self.decided = self.torch
        if self.engine.is_ready() or not self.engine.same_hypotheses:
            try:
                self.engine.prepare()
                self.decided = self.engine
            except Exception as error:  # such as an error of LLVM
                self.give_up(f"the search could not be compiled ({error})")
                logger.warning("PyTorch translates, because %s", self.obstacle)

    def chosen(self, options: SearchOptions, alone: bool = True) -> tuple[Engine, str | None]:
        """Returns the engine for these options, and the reason if the engine is not `self.engine`.

        Raises ValueError like `engine_for`.
        """
        if self.obstacle is not None:
            return self.torch, self.obstacle
        reason = self.engine.refusal(options)
        if reason is not None and not self.engine.falls_back and alone:
            raise ValueError(reason)
        if reason is None and self.engine is not self.torch and self.torch.loaded.are_changed:
            # other engines have copies of the weights or recorded graphs, without hooks and new code
            reason = "modules that were changed after loading"
        if reason is not None:
            return self.torch, f"{self.name} does not support {reason}"
        if self.automatic and self.decided is self.torch:
            return self.torch, NOT_COMPILED
        return self.engine, None

    def decoder(
        self, options: SearchOptions, *, alone: bool = True, polled: bool = False, tell: bool = True
    ) -> BatchDecoder:
        """Returns a decoder of batches with these options. With `tell`, the log names the engine.

        Raises the same errors as `engine_for`.
        """
        engine, reason = self.engine_for(options, alone)
        return partial(self.decode, engine, reason, options, polled=polled, tell=tell)

    def decode(
        self, engine: Engine, reason: str | None, options: SearchOptions, batches: Iterable[SegmentBatch],
        *, polled: bool, tell: bool,
    ) -> Iterator[tuple[int, BatchHypotheses]]:  # fmt: skip
        """Yields the number and the hypotheses of each batch. `engine` and `reason` come from `engine_for`."""
        under_way: dict[int, tuple[SegmentBatch, list[int]]] = {}  # number -> batch, indices of supported segments

        def supported() -> Iterator[SegmentBatch]:
            for number, batch in enumerate(batches):
                indices = [index for index, segment in enumerate(batch) if not engine.refuses(segment)]
                under_way[number] = batch, indices
                yield [without_required(batch[index]) for index in indices]

        for number, searched in engine.decode(supported(), options, polled):
            batch, indices = under_way.pop(number)
            if tell and batch:
                self.tell(options, reason, searched=bool(indices))
            yield number, self.completed(batch, dict(zip(indices, searched, strict=True)), options)
            if self.automatic and engine is self.torch is self.decided:
                self.engine.is_awaited()

    def completed(self, batch: SegmentBatch, searched: dict[int, list[Any]], options: SearchOptions) -> BatchHypotheses:
        """Returns the hypotheses of a batch with all results that `options` request.

        `searched` maps the index of a segment to the hypotheses of an engine. PyTorch searches the other segments.
        """
        missing = [index for index in range(len(batch)) if not searched.get(index)]
        if missing:
            found = self.torch.search([batch[index] for index in missing], options, self.torch.processors(options))
            searched |= dict(zip(missing, found, strict=True))
        results = [searched[index] for index in range(len(batch))]
        if any(segment.constraints.required for segment in batch) and not options.score_reference:
            results = self.torch.with_required_phrases(batch, results, options)
        results = self.without_loops(batch, results, options)
        if batch and (options.alignment is not None or options.replace_unknown or options.quality):
            results = self.torch.annotated(batch, results, options)
        return results

    def without_loops(self, batch: SegmentBatch, results: BatchHypotheses, options: SearchOptions) -> BatchHypotheses:
        """Returns `results`, with the hypotheses of a second search for each segment whose best hypothesis is a loop.

        The old hypotheses stay if the second search finds a loop again, finds nothing, or misses a required phrase.
        """
        tokenizer, loops = self.torch.loaded.tokenizer, []
        if searches_again(options):
            loops = [row for row, own in enumerate(results) if is_loop(own[0].tokens, batch[row], tokenizer)]
        if not loops:
            return results
        results, segments = list(results), [batch[row] for row in loops]
        again = replace(options, no_repeat_ngram=LONGEST_RUN)
        ((_, found),) = self.decoder(again, alone=False, tell=False)([segments])
        lacking = lacking_sentences([segment.constraints for segment in segments], found, again)
        for number, (row, own) in enumerate(zip(loops, found, strict=True)):
            if number not in lacking and own[0].score > -math.inf and not is_loop(own[0].tokens, batch[row], tokenizer):
                results[row] = [replace(each, no_repeat_ngram=LONGEST_RUN) for each in own]
        return results
