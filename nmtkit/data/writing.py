"""Writes the splits of a dataset: valid and test sets as they are, the training set filtered, mixed and counted."""

import functools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data import corpus, duplicates, mixing
from nmtkit.data.binarized import FORMAT, MANIFEST, SIDES, TOKENIZER_FOLDER, array_file, id_dtype, map_array, text_file
from nmtkit.data.cleaning import DUPLICATE, Findings, Rules
from nmtkit.data.encoding import (
    Encode,
    EncodedBlock,
    Files,
    FindCopies,
    PairEncoder,
    Place,
    SplitFiles,
    Statistics,
    Sum,
    Worker,
    WorkerSettings,
    Write,
    checksum,
)
from nmtkit.data.report import CorpusReport, Report, SplitReport, length_histogram
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.data.workers import Workers

TRAIN = "train"
SCRATCH = "scratch"
TOP_PIECES = 40


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """Those of `preparation.Options` that matter here."""

    source_lang: str
    target_lang: str
    rules: Rules
    strict: bool
    weights: tuple[float, ...]
    temperature: float | None
    seed: int
    part: tuple[int, int] | None
    count_pieces: bool
    workers: int
    recorded: dict[str, Any]  # all options, for the manifest


class DatasetWriter:
    """Fills `folder` with the splits that are added, then the manifest. Valid and test sets come before the train."""

    def __init__(
        self, options: WritingOptions, tokenizer: Tokenizer, folder: Path, on_progress: Callable[[int], None]
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.folder = folder
        self.on_progress = on_progress
        self.dtypes = id_dtype(tokenizer.source_size), id_dtype(tokenizer.target_size)
        self.report = Report(
            options.source_lang,
            options.target_lang,
            {"source": tokenizer.source_size, "target": tokenizer.target_size},
        )
        self._encoder = PairEncoder(tokenizer, self.dtypes)
        self._held_out_keys: list[npt.NDArray[np.uint64]] = []
        self._sums: dict[str, dict[str, Any]] = {}
        self._scratch = folder / SCRATCH
        self._scratch.mkdir()

    # --- valid and test ---------------------------------------------------------------------------------------------

    def add_held_out(self, split: str, files: Files) -> None:
        """Writes a valid or test set, every line of it, and keeps its raw text; a source line with its tag before it.

        A part other than the first only remembers the pairs, to find them in its training set.
        """
        write = self.options.part is None or self.options.part[0] == 1
        texts = [(self.folder / text_file(split, side)).open("wb") for side in SIDES] if write else []
        output = self._split_files(split)
        place = Place()
        spool = self._scratch / split
        spool.mkdir()
        for block in corpus.blocks(files.source, files.target, spool):
            raw = block.source.read(), block.target.read()
            source, target = self._encoder.encode_texts(raw, files, block.first_line)
            hashes = self._encoder.hashes(source, target)
            self._held_out_keys.append(duplicates.pair_keys(hashes))
            if not write:
                continue
            encoded = EncodedBlock(self._encoder.tagged(source, files.tag), target, hashes, Findings())
            output.write(encoded, place)
            place = place.after(encoded.sizes)
            texts[0].write(_with_tag(raw[0], files.tag))
            texts[1].write(raw[1])
        output.close()
        for text in texts:
            text.close()
        if write:
            for side in SIDES:
                mixing.write_starts(self._path(split, side, "lengths"), self._path(split, side, "offsets"))
            self._report_split(split)

    # --- train ------------------------------------------------------------------------------------------------------

    def add_train(self, corpora: list[Files]) -> None:
        """Encodes the training corpora with all workers, then drops duplicates and mixes.

        Raises ValueError when no pair is left, and as `corpus.blocks` and `PairEncoder.encode`.
        """
        files = SplitFiles(
            self._path(TRAIN, "source", "ids"),
            self._path(TRAIN, "target", "ids"),
            self._scratch / "source.lengths",
            self._scratch / "target.lengths",
            self._scratch / "keys",
        )
        held_out = np.unique(np.concatenate(self._held_out_keys)) if self._held_out_keys else np.empty(0, np.uint64)
        settings = WorkerSettings(
            self.tokenizer,
            self.dtypes,
            self.options.rules,
            self.options.strict,
            held_out,
            files,
            self.options.count_pieces,
        )
        self.report.corpora = [CorpusReport(corpus_files.source, corpus_files.target) for corpus_files in corpora]
        with Workers(self.options.workers, functools.partial(Worker, settings)) as workers:
            bounds = self._encode(workers, corpora)
            pieces = workers.finish(Statistics())  # by then all blocks are written
            if bounds[-1] == 0 and self.options.part is not None:  # a small corpus has nothing for some parts
                for path in self._train_arrays():
                    path.touch()
            elif bounds[-1] == 0:
                raise ValueError(f"no training pair is left: {_listed(self.report.findings().dropped)}")
            else:
                self._write_rows(bounds, self._find_duplicates(workers, self._scratch / "keys", bounds))
            if self.options.count_pieces:
                self._report_pieces(pieces)
            self._report_split(TRAIN)
            self._sum_files(workers)

    def _encode(self, workers: Workers, corpora: list[Files]) -> list[int]:
        """Encodes and writes all corpora; gives the rows where they begin, and the last one's end."""
        place = Place()
        bounds = [0]
        at = 0
        pairs_read = 0

        def messages() -> Iterator[Encode]:
            for index, files in enumerate(corpora):
                spool = self._scratch / f"corpus{index}"
                spool.mkdir()
                for block in corpus.blocks(files.source, files.target, spool, self.options.part or (1, 1)):
                    given.append((index, block.lines))
                    yield Encode(block, files)

        given: deque[tuple[int, int]] = deque()  # of each block not written yet, the corpus and its lines
        for worker, (sizes, findings) in workers.each(messages()):
            index, lines = given.popleft()
            while at < index:
                bounds.append(place.pair)
                at += 1
            workers.tell(worker, Write(place))
            place = place.after(sizes)
            report = self.report.corpora[index]
            report.findings.add(findings)
            report.read += lines
            report.written += sizes[0]
            pairs_read += lines
            self.on_progress(pairs_read)
        return bounds + [place.pair] * (len(corpora) - at)

    def _find_duplicates(self, workers: Workers, keys: Path, bounds: list[int]) -> npt.NDArray[np.uint8] | None:
        """Counts the pairs that stand in an earlier row; if these are to be dropped, gives a byte per row to say so."""
        partitions = duplicates.partition(keys, self._scratch)
        keys.unlink()
        drop = self.options.rules.drop_duplicates
        dropped = None
        if drop:
            dropped = np.memmap(self._scratch / "dropped", np.uint8, "w+", shape=(bounds[-1],))
        for _, rows in workers.each(FindCopies(path) for path in partitions):
            if dropped is not None:
                dropped[rows] = 1
            counts = np.diff(np.searchsorted(rows, bounds))
            for report, count in zip(self.report.corpora, counts.tolist(), strict=True):
                if count:
                    findings = report.findings.dropped if drop else report.findings.counted
                    findings[DUPLICATE] = findings.get(DUPLICATE, 0) + count
                    report.written -= count if drop else 0
        return dropped

    def _write_rows(self, bounds: list[int], dropped: npt.NDArray[np.uint8] | None) -> None:
        """Offsets and lengths, from the lengths as encoded, in the order of training."""
        weights = self._weights()
        lengths = [self._scratch / f"{side}.lengths" for side in SIDES]
        starts = [self._scratch / f"{side}.offsets" for side in SIDES]
        for length, start in zip(lengths, starts, strict=True):
            mixing.write_starts(length, start)
        inputs = [path for pair in zip(starts, lengths, strict=True) for path in pair]
        outputs = [self._path(TRAIN, side, array) for side in SIDES for array in ("offsets", "lengths")]
        if dropped is None and len(bounds) == 2 and weights == [1.0]:
            for source, final in zip(inputs, outputs, strict=True):
                os.rename(source, final)
            return
        corpora = [
            mixing.CorpusRows(start, end, weight)
            for start, end, weight in zip(bounds[:-1], bounds[1:], weights, strict=True)
        ]
        mixing.write_rows(mixing.mixed_rows(corpora, self.options.seed), dropped, inputs, outputs)

    def _weights(self) -> list[float]:
        weights = list(self.options.weights) or [1.0] * len(self.report.corpora)
        if self.options.temperature is not None:
            counts = [report.written for report in self.report.corpora]
            weights = mixing.weights_of_temperature(counts, self.options.temperature)
        for report, weight in zip(self.report.corpora, weights, strict=True):
            report.weight = weight
        return weights

    # --- report and manifest ----------------------------------------------------------------------------------------

    def _report_split(self, split: str) -> None:
        lengths = {side: map_array(self._path(split, side, "lengths"), "int32") for side in SIDES}
        self.report.splits[split] = SplitReport(
            len(lengths["source"]),
            {side: int(values.sum(dtype=np.int64)) for side, values in lengths.items()},
            {side: length_histogram(values) for side, values in lengths.items()},
        )

    def _report_pieces(self, counts_of_workers: list[list[npt.NDArray[np.int64]]]) -> None:
        pieces_of = {"source": self.tokenizer.source_pieces, "target": self.tokenizer.target_pieces}
        for number, side in enumerate(SIDES):
            counts = np.sum([counts[number] for counts in counts_of_workers], axis=0)
            top = np.argsort(-counts, kind="stable")[:TOP_PIECES].tolist()
            self.report.pieces[side] = list(zip(pieces_of[side](top), counts[top].tolist(), strict=True))
            self.report.unused[side] = int(np.count_nonzero(counts == 0))

    def _sum_files(self, workers: Workers) -> None:
        paths = self._files()
        for path, (_, facts) in zip(paths, workers.each(Sum(path) for path in paths), strict=True):
            self._sums[str(path.relative_to(self.folder))] = facts

    def _files(self) -> list[Path]:
        own = [path for path in self.folder.iterdir() if path.suffix in (".bin", ".txt")]
        return sorted(own) + sorted((self.folder / TOKENIZER_FOLDER).iterdir())

    def finish(self) -> None:
        """Writes the manifest; the folder is whole then."""
        shutil.rmtree(self._scratch)
        for path in self._files():
            name = str(path.relative_to(self.folder))
            if name not in self._sums:  # the training set's are summed by the workers
                self._sums[name] = checksum(path)
        manifest = {
            "nmtkit_dataset": FORMAT,
            "source_lang": self.options.source_lang,
            "target_lang": self.options.target_lang,
            "tokenizer": self.tokenizer.fingerprint,
            "part": list(self.options.part) if self.options.part else None,
            "splits": {
                split: {
                    "pairs": report.pairs,
                    **{
                        side: {"tokens": report.tokens[side], "dtype": dtype}
                        for side, dtype in zip(SIDES, self.dtypes, strict=True)
                    },
                }
                for split, report in self.report.splits.items()
            },
            "report": self.report.counts(),
            "options": self.options.recorded,
            "files": self._sums,
        }
        with (self.folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())

    def _path(self, split: str, side: str, array: str) -> Path:
        return self.folder / array_file(split, side, array)

    def _train_arrays(self) -> list[Path]:
        return [self._path(TRAIN, side, array) for side in SIDES for array in ("ids", "offsets", "lengths")]

    def _split_files(self, split: str) -> SplitFiles:
        return SplitFiles(
            self._path(split, "source", "ids"),
            self._path(split, "target", "ids"),
            self._path(split, "source", "lengths"),
            self._path(split, "target", "lengths"),
        )


def _with_tag(text: bytes, tag: str | None) -> bytes:
    if tag is None:
        return text
    start = tag.encode() + b" "
    return start + text[:-1].replace(b"\n", b"\n" + start) + b"\n"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in counts.items())
