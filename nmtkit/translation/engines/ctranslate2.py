"""CTranslate2 as the engine of a search. CTranslate2 is faster than PyTorch for small batches.

Without a length penalty, CTranslate2 searches like `beam_search.Search`. Options that CTranslate2 does not support, or
that have a different meaning there, raise an error. Without --replace-unknown, the distributions of CTranslate2 leave
out <unk>, so log probabilities of a trained model differ in the third decimal place. The package ctranslate2 is
required.
"""

import glob
import math
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from nmtkit.config import changed_flags
from nmtkit.config.files import cache_folder
from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.models import checkpoint
from nmtkit.models.formats import ctranslate2 as ctranslate2_format
from nmtkit.models.layers.prepack import Precision
from nmtkit.translation.engines.engine import ENGINES, Engine, EngineConfig, LoadedModels
from nmtkit.translation.search.options import CTRANSLATE2_RULE, SearchOptions
from nmtkit.translation.search.rules import length_penalty, max_lengths
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Segment, SegmentBatch

COMPUTE_TYPES: dict[Precision, Literal["float32", "int8"]] = {"fp32": "float32", "int8": "int8"}


def exported(path: Path, precision: Precision) -> Path:
    """Returns the folder with the CTranslate2 model of the checkpoint `path`. Exports the checkpoint if necessary.

    The folder is next to the checkpoint, or in `cache_folder` if the folder of the checkpoint is not writable. The name
    of the folder contains the checksum of the checkpoint, so a new checkpoint with the same name is exported again and
    replaces the old export.

    Raises ImportError without the package ctranslate2, and ValueError for a model that CTranslate2 does not support.
    """
    ctranslate2_format.require()
    stem = f"{path.stem}.ctranslate2-{precision}-"
    folder = path.with_name(f"{stem}{checkpoint.load(path, mmap=True)['checksum']:016x}")
    if folder.is_dir():
        return folder
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError:
        folder = cache_folder() / folder.name
        if folder.is_dir():
            return folder
    for old in folder.parent.glob(f"{glob.escape(stem)}*"):
        shutil.rmtree(old, ignore_errors=True)
    try:
        ctranslate2_format.save(path, folder, COMPUTE_TYPES[precision])
    except OSError:
        if not folder.is_dir():  # if the folder exists, another process has exported the model at the same time
            raise
    return folder


@ENGINES.register("ctranslate2", EngineConfig())
class CTranslate2Engine(Engine):
    """A model in CTranslate2, on the CPU. `LoadedModels.workers` batches are searched at a time, each by one thread."""

    falls_back = False

    def __init__(self, config: Any, loaded: LoadedModels) -> None:
        super().__init__(config, loaded)
        self.precision = loaded.precision_of("ctranslate2")
        self.folder = exported(loaded.paths[0], self.precision)
        tokenizer = loaded.tokenizer
        self.pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        self.ids = {piece: id for id, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
        self.bos = tokenizer.target_pieces([BOS])[0]

    @cached_property
    def translator(self) -> Any:
        """The model of CTranslate2, with its threads.

        A forked process does not have the threads of its parent, so `start` creates the model in each process.
        """
        import ctranslate2

        return ctranslate2.Translator(
            str(self.folder), compute_type=COMPUTE_TYPES[self.precision], inter_threads=self.loaded.workers,
            intra_threads=1,
        )  # fmt: skip

    def start(self) -> None:
        _ = self.translator

    def refusal(self, options: SearchOptions) -> str | None:
        excluded = sorted(changed_flags(options) & set(CTRANSLATE2_RULE.excludes))
        if excluded:
            return f"{CTRANSLATE2_RULE.flag} and {excluded[0]} cannot be combined: {CTRANSLATE2_RULE.reason}"
        if options.beam > 1 and options.lenpen != 0:
            return (
                f"--engine ctranslate2 has a different length penalty than --lenpen {options.lenpen:g}: give "
                "--lenpen 0 or --beam 1"
            )
        return None

    def refuses(self, segment: Segment) -> bool:
        return segment.constraints.forbid_tokens

    def decode(
        self, batches: Iterable[SegmentBatch], options: SearchOptions, polled: bool = False
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        running: deque[tuple[int, SegmentBatch, list[Any]]] = deque()

        def finished(all_of_them: bool) -> Iterator[tuple[int, BatchHypotheses]]:
            while running and (all_of_them or running[0][2] == [] or running[0][2][-1].done()):
                number, batch, results = running.popleft()
                hypotheses = [self._hypotheses(*pair, options) for pair in zip(batch, results, strict=True)]
                yield number, hypotheses

        for number, batch in enumerate(batches):
            running.append((number, batch, self._start(batch, options)))
            # an empty batch means that no further input has arrived yet, so results are not held back
            yield from finished(not batch or len(running) > 2 * self.loaded.workers)
        yield from finished(True)

    def _start(self, batch: SegmentBatch, options: SearchOptions) -> list[Any]:
        """Starts the search for a batch. Returns a future result for each segment.

        A call of CTranslate2 has a single maximum length, so each call gets segments with the same maximum length.
        """
        results: list[Any] = []
        for max_length, group in groupby(batch, key=lambda segment: self._max_length(segment, options)):
            results += self.translator.translate_batch(
                [[self.pieces[id] for id in segment.ids if id != EOS] for segment in group],
                beam_size=options.beam,
                length_penalty=0,
                max_decoding_length=max_length + 1,
                min_decoding_length=0,
                max_input_length=0,
                disable_unk=not options.replace_unknown,
                suppress_sequences=[[self.bos]],
                return_scores=True,
                asynchronous=True,
            )
        return results

    def _hypotheses(self, segment: Segment, result: Any, options: SearchOptions) -> list[Hypothesis]:
        """Returns the best hypothesis of a segment.

        If the translation reaches the maximum length or has no finite score, returns an empty list, and PyTorch then
        searches the segment: the searches of CTranslate2 and of PyTorch differ in these cases.
        """
        search = result.result()
        tokens, log_probability = [self.ids[piece] for piece in search.hypotheses[0]], search.scores[0]
        if len(tokens) >= self._max_length(segment, options) or not math.isfinite(log_probability):
            return []
        penalty = length_penalty(len(tokens) + 1, options.lenpen, language_tokens=0)  # `refuses` excludes prefixes
        return [Hypothesis(tokens, log_probability / penalty, log_probability)]

    def _max_length(self, segment: Segment, options: SearchOptions) -> int:
        (length,) = max_lengths(options, [len(segment.ids)], [segment.constraints], self.loaded.models)
        return length
