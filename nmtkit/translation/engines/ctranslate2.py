"""CTranslate2 as the engine of a search. It is faster than PyTorch for few sentences at a time.

Without a length penalty, CTranslate2 searches like `BeamSearch`. Options that CTranslate2 does not support, or that
have a different meaning there, raise an error. The distributions of CTranslate2 leave out <unk>, so log probabilities
of a trained model differ in the third decimal place. The package ctranslate2 is required.
"""

import math
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from nmtkit.config import changed_flags, check_flags
from nmtkit.config.files import cache_folder
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer
from nmtkit.models import checkpoint
from nmtkit.models.architectures import Architecture
from nmtkit.models.formats import ctranslate2 as ctranslate2_format
from nmtkit.translation.search.candidates import length_penalty
from nmtkit.translation.search.constraints import NO_CONSTRAINTS
from nmtkit.translation.search.decoding import annotated, decode
from nmtkit.translation.search.options import CTRANSLATE2_RULE, SearchOptions
from nmtkit.translation.search.segments import BatchDecoder, BatchHypotheses, Hypothesis, Segment, SegmentBatch

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}

Precision = Literal["fp32", "int8"]


def check_options(options: SearchOptions) -> None:
    """Raises ValueError for an option that CTranslate2 does not support, or that has a different meaning there."""
    check_flags((CTRANSLATE2_RULE,), {CTRANSLATE2_RULE.flag}, changed_flags(options) | {CTRANSLATE2_RULE.flag})
    if options.beam > 1 and options.lenpen != 0:
        raise ValueError(
            f"--engine ctranslate2 has a different length penalty than --lenpen {options.lenpen:g}: give --lenpen 0 "
            "or --beam 1"
        )


def exported(path: Path, precision: Precision) -> Path:
    """Returns the folder with the CTranslate2 model of the checkpoint `path`. Exports the checkpoint if necessary.

    The folder is next to the checkpoint, or in `cache_folder` if that folder is not writable. The name contains the
    checksum of the checkpoint, so a new checkpoint with the same name is exported again and replaces the old export.

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
    for old in path.parent.glob(f"{stem}*"):
        shutil.rmtree(old, ignore_errors=True)
    try:
        ctranslate2_format.save(path, folder, "int8" if precision == "int8" else "float32")
    except OSError:
        if not folder.is_dir():  # if the folder exists, another process has exported the model at the same time
            raise
    return folder


class CTranslate2Engine:
    """A model in CTranslate2, on the CPU. It searches `workers` batches at a time, each with `threads` threads."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, precision: Precision, workers: int = 1, threads: int = 1
    ) -> None:
        folder = exported(path, precision)
        import ctranslate2

        self.workers = workers
        self.pieces = tokenizer.source_pieces(range(tokenizer.source_size))
        self.ids = {piece: id for id, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
        self.bos = tokenizer.target_pieces([BOS])[0]
        self.translator = ctranslate2.Translator(
            str(folder), compute_type=COMPUTE_TYPES[precision], inter_threads=workers, intra_threads=threads
        )

    def decoder(self, models: Sequence[Architecture], options: SearchOptions) -> BatchDecoder:
        """Returns a decoder of batches.

        `models`, on the CPU, compute alignments. If the translation of a sentence reaches the maximum length or has no
        finite score, `models` translate the sentence again, because the engines differ in these cases. Raises the same
        errors as `check_options`.
        """
        check_options(options)
        return partial(self._decode, models=models, options=options)

    def _decode(
        self, batches: Iterable[SegmentBatch], models: Sequence[Architecture], options: SearchOptions
    ) -> Iterator[tuple[int, BatchHypotheses]]:
        running: deque[tuple[int, SegmentBatch, list[Any]]] = deque()

        def finished(all_of_them: bool) -> Iterator[tuple[int, BatchHypotheses]]:
            while running and (all_of_them or running[0][2] == [] or running[0][2][-1].done()):
                number, batch, results = running.popleft()
                yield number, self._hypotheses(batch, [result.result() for result in results], models, options)

        for number, batch in enumerate(batches):
            running.append((number, batch, self._start(batch, options)))
            # an empty batch means that no further input has arrived yet, so results are not held back
            yield from finished(not batch or len(running) > 2 * self.workers)
        yield from finished(True)

    def _start(self, batch: SegmentBatch, options: SearchOptions) -> list[Any]:
        """Starts the search for a batch. Returns a future result for each sentence.

        A call of CTranslate2 has a single maximum length, so each call gets sentences with the same maximum length.
        """
        results: list[Any] = []
        for _, group in groupby(batch, key=lambda sentence: self._max_length(sentence, options)):
            results += self._start_group(list(group), options)
        return results

    def _max_length(self, sentence: Segment, options: SearchOptions) -> int:
        return options.max_length(len(sentence.ids) - 1)

    def _start_group(self, group: Sequence[Segment], options: SearchOptions) -> list[Any]:
        if any(sentence.constraints != NO_CONSTRAINTS for sentence in group):
            raise ValueError(
                "--engine ctranslate2 supports no prefixes and no required or avoided phrases; leave out --engine"
            )
        return self.translator.translate_batch(
            [[self.pieces[id] for id in sentence.ids if id != EOS] for sentence in group],
            beam_size=options.beam,
            length_penalty=0,
            max_decoding_length=self._max_length(group[0], options) + 1,
            min_decoding_length=0,
            max_input_length=0,
            disable_unk=not options.replace_unknown,
            suppress_sequences=[[self.bos]],
            return_scores=True,
            asynchronous=True,
        )

    def _hypotheses(
        self, batch: SegmentBatch, results: Sequence[Any], models: Sequence[Architecture], options: SearchOptions
    ) -> BatchHypotheses:
        device = torch.device("cpu")
        translations, cut = [], []
        for index, (sentence, result) in enumerate(zip(batch, results, strict=True)):
            tokens = [self.ids[piece] for piece in result.hypotheses[0]]
            log_probability = result.scores[0]
            if len(tokens) >= self._max_length(sentence, options) or not math.isfinite(log_probability):
                cut.append(index)
            score = log_probability / float(length_penalty(len(tokens) + 1, options.lenpen))
            translations.append([Hypothesis(tokens, score, log_probability)])
        translations = annotated(models, batch, options, device, translations)
        searched = decode(models, [batch[index] for index in cut], options, device)
        for index, hypotheses in zip(cut, searched, strict=True):
            translations[index] = hypotheses
        return translations
