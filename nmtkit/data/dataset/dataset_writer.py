"""Writes the files of a dataset: encodes valid and test sets, and cleans, encodes and mixes training sets."""

import functools
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.blocks import blocks
from nmtkit.data.corpora.corpus import Corpus
from nmtkit.data.corpora.dropping import ReasonCounts
from nmtkit.data.dataset import diagnostics, mixing
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import (
    ALIGNMENTS,
    FORMAT,
    LINK_DTYPE,
    SCRATCH_FOLDER,
    SIDES,
    TOKENIZER_FOLDER,
    array_file,
    checksum,
    id_dtype,
    map_array,
    text_file,
    write_manifest,
)
from nmtkit.data.dataset.drop_reasons import DUPLICATE, EQUAL, drops
from nmtkit.data.dataset.encoding import EncodedBlock, PairEncoder, Sizes, SplitFiles, Worker
from nmtkit.data.dataset.report import CorpusReport, PieceReport, Report, SplitReport
from nmtkit.data.dataset.spm_training import expected_pieces_per_word
from nmtkit.data.tokenizers.spm_model import model_facts
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs.workers import Task, Workers

TRAIN = "train"
MAX_PASSES = 10_000  # largest number of passes over a corpus in one epoch


class DatasetWriter:
    """Writes splits and the manifest to `folder`. Valid and test sets must be added before the training set.

    The inherited methods of `MultilingualWriter` get corpora of a different class, so the corpora have the type Any.
    """

    worker: type[Worker] = Worker  # class of the objects in worker processes

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, on_progress: Callable[[int], None]
    ) -> None:
        if not config.language_token_loss and tokenizer.has_target_languages_only:
            raise ValueError(
                "--no-language-token-loss has no effect, because the language tokens of this tokenizer are on the "
                "source side only; leave the flag out"
            )
        self.config = config
        self.tokenizer = tokenizer
        self.folder = folder
        self.on_progress = on_progress
        self.dtypes = id_dtype(tokenizer.source_size), id_dtype(tokenizer.target_size)
        self.report = Report(
            config.source_lang, config.target_lang, {"source": tokenizer.source_size, "target": tokenizer.target_size}
        )
        self._train_sides: tuple[str, ...] = SIDES
        if any(config.alignments):
            self._encoder.check_alignable()
            self._train_sides = (*SIDES, ALIGNMENTS)
        self._held_out_profile = diagnostics.profile_of((b"", b""))
        self._held_out_keys: list[npt.NDArray[np.uint64]] = []
        self._checksums: dict[str, dict[str, Any]] = {}
        self._scratch = folder / SCRATCH_FOLDER
        self._scratch.mkdir(exist_ok=True)

    @functools.cached_property
    def _encoder(self) -> PairEncoder:
        """The encoder that converts text pairs to ids. The first access makes the encoder.

        Raises ValueError if the settings name a language for which the tokenizer has no language token.
        """
        return PairEncoder(self.tokenizer, self.dtypes, self.config.languages)

    # --- valid and test ---------------------------------------------------------------------------------------------

    def add_held_out(self, split: str, files: Corpus) -> None:
        """Writes the ids and the raw text of all lines of a valid or test set. A tag is written before source lines.

        Only the first shard writes the set. Every shard keeps the keys of the pairs in memory, to find the same pairs
        in the training set. Raises ValueError for a line of more than --max-line-bytes bytes.
        """
        shard = self.config.shard_of()
        written = shard is None or shard[0] == 1
        texts = [(self.folder / text_file(split, side)).open("wb") for side in SIDES] if written else []
        output = self._split_files(split, self.folder)
        offset: Sizes = (0, 0, 0)
        scratch = self._scratch / split
        scratch.mkdir()
        for block in blocks(files, scratch, self.config.max_line_bytes + 1):
            if block.over_long:
                raise ValueError(
                    f"line {block.first_line} of {files.source} or {files.target} has "
                    f"{max(block.source.size, block.target.size):,} bytes; valid and test sets are not filtered, so "
                    "remove the pair, or give a larger --max-line-bytes"
                )
            raw = block.source.read(), block.target.read()
            self._held_out_profile += diagnostics.profile_of(raw)
            source, target = self._encoder.encode_texts(raw, files, block.first_line)
            hashes = self._encoder.hashes(source, target)
            self._held_out_keys.append(dropping.pair_keys(hashes))
            if written:
                sides = self._encoder.with_prefixes(source, target, files.tag)
                encoded = EncodedBlock(sides, hashes, ReasonCounts())
                output.write(encoded, offset)
                offset = tuple(map(add, offset, encoded.sizes))
                texts[0].write(_with_tag(raw[0], files.tag))
                texts[1].write(raw[1])
        output.close()
        for text in texts:
            text.close()
        if written:
            for side in SIDES:
                mixing.write_offsets(self._path(split, side, "lengths"), self._path(split, side, "offsets"))
            self._report_split(split)

    # --- train ------------------------------------------------------------------------------------------------------

    def add_train(self, corpora: Sequence[Any]) -> None:
        """Encodes the training corpora with all workers, then drops duplicates and mixes the corpora.

        Raises ValueError if no pair is left, and the same errors as `blocks` and `PairEncoder.encode`.
        """
        hashes = self._scratch / "hashes"
        held_out_keys = np.unique(np.concatenate(self._held_out_keys or [np.empty(0, np.uint64)]))
        self.report.corpora = [self._corpus_report(files) for files in corpora]
        with Workers(self.config.worker_count(), self._worker_factory(held_out_keys, hashes)) as workers:
            bounds = self._encode(workers, corpora)
            # a worker answers after it has written all of its blocks, so the files are complete after this line
            piece_counts = workers.broadcast((self.worker.piece_counts,))
            if bounds[-1]:
                self._write_rows(bounds, self._find_duplicates(workers, hashes, bounds))
            elif self.config.shard is None:
                dropped = ", ".join(f"{reason}: {count:,}" for reason, count in self.report.cleaning().dropped.items())
                raise ValueError(f"no training pair is left; dropped: {dropped}")
            else:  # a shard of a small corpus can be empty
                self._write_empty_train()
            if self.config.report is not None:
                self._report_pieces(piece_counts)
            self._report_split(TRAIN)
            paths = self._files()
            checksums = workers.imap((self.worker.checksum, path) for path in paths)
            for path, (_, facts) in zip(paths, checksums, strict=True):
                self._checksums[str(path.relative_to(self.folder))] = facts

    def _worker_factory(self, held_out_keys: npt.NDArray[np.uint64], hashes: Path) -> Callable[[], Any]:
        """Returns a function that each worker process calls to make its `Worker`."""
        files = self._split_files(TRAIN, self._scratch, hashes)
        return functools.partial(Worker, self.tokenizer, self.dtypes, self.config, held_out_keys, files)

    def _corpus_report(self, files: Any) -> CorpusReport:
        return CorpusReport(files.source, files.target)

    def _blocks(self, files: Any, scratch: Path) -> Iterator[Any]:
        """Yields the blocks of a corpus in this shard."""
        return blocks(files, scratch, self.config.max_line_bytes + 1, self.config.shard_of() or (1, 1))

    def _pairs_of(self, files: Any, block: Any) -> int:
        """Returns the number of pairs in a block of a corpus."""
        return int(block.lines)

    def _write_empty_train(self) -> None:
        for side in self._train_sides:
            for array in ("ids", "offsets", "lengths"):
                self._path(TRAIN, side, array).touch()

    def _encode(self, workers: Workers, corpora: Sequence[Any]) -> list[int]:
        """Encodes and writes all corpora. Returns the first row of each corpus, then the total number of rows."""
        offset: Sizes = (0, 0, 0, 0)
        bounds = [0]
        pairs_read = 0
        unwritten: deque[tuple[int, int]] = deque()  # (corpus index, number of pairs) of each unwritten block

        def tasks() -> Iterator[Task]:
            for index, files in enumerate(corpora):
                scratch = self._scratch / f"corpus{index}"
                scratch.mkdir()
                for block in self._blocks(files, scratch):
                    unwritten.append((index, self._pairs_of(files, block)))
                    yield self.worker.encode, block, files

        for worker, (sizes, statistics, text) in workers.imap(tasks()):
            index, pairs = unwritten.popleft()
            bounds += [offset[0]] * (index + 1 - len(bounds))
            workers.send(worker, (self.worker.write, offset))
            offset = tuple(map(add, offset, sizes))
            report = self.report.corpora[index]
            report.cleaning.add(statistics)
            if text is not None:
                report.text.append(text)
            report.read += pairs
            report.written += sizes[0]
            pairs_read += pairs
            self.on_progress(pairs_read)
        return bounds + [offset[0]] * (len(corpora) + 1 - len(bounds))

    def _find_duplicates(self, workers: Workers, hashes: Path, bounds: list[int]) -> npt.NDArray[np.uint8] | None:
        """Counts the rows that repeat an earlier row.

        Returns an array [rows] that is 1 for a row to drop, or None if duplicates are kept.
        """
        partitions = dropping.partition(hashes, self._scratch)
        hashes.unlink()
        dropped = None
        if self.config.drop_duplicates:
            dropped = np.memmap(self._scratch / "dropped", np.uint8, "w+", shape=(bounds[-1],))
        for _, rows in workers.imap((self.worker.find_duplicates, path) for path in partitions):
            if dropped is not None:
                dropped[rows] = 1
            counts = np.diff(np.searchsorted(rows, bounds))
            for report, count in zip(self.report.corpora, counts.tolist(), strict=True):
                report.cleaning.count(DUPLICATE, count, drops=drops(DUPLICATE, self.config))
                report.written -= count if dropped is not None else 0
        return dropped

    def _write_rows(self, bounds: list[int], dropped: npt.NDArray[np.uint8] | None) -> None:
        """Writes the offsets and lengths of the training rows, in the order of training.

        The lengths in the scratch folder are in the order of the text. `dropped` marks the rows to leave out.
        """
        weights = self._weights()
        inputs, outputs = [], []
        for side in self._train_sides:
            lengths, offsets = self._scratch / f"train.{side}.lengths.bin", self._scratch / f"{side}.offsets"
            mixing.write_offsets(lengths, offsets)
            inputs += [offsets, lengths]
            outputs += [self._path(TRAIN, side, "offsets"), self._path(TRAIN, side, "lengths")]
        if dropped is None and len(bounds) == 2 and weights == [1.0]:
            for source, final in zip(inputs, outputs, strict=True):
                os.rename(source, final)
            return
        mixing.write_rows(self._mixed_rows(bounds, dropped, weights), inputs, outputs)

    def _mixed_rows(
        self, bounds: list[int], dropped: npt.NDArray[np.uint8] | None, weights: list[float]
    ) -> Iterator[mixing.Rows]:
        """Returns the row numbers of an epoch, in chunks. Raises ValueError if an epoch has no pair of a corpus."""
        corpora = [
            mixing.CorpusRows(start, end, weight)
            for start, end, weight in zip(bounds[:-1], bounds[1:], weights, strict=True)
        ]
        for rows, report in zip(corpora, self.report.corpora, strict=True):
            if report.written and not rows.size(dropped):
                setting = "--weights" if self.config.corpora is None else "weight"
                raise ValueError(
                    f"{setting} {rows.weight:g} leaves none of the {report.written:,} pairs of {report.source}; "
                    "give a larger weight, or leave the corpus out"
                )
        return mixing.mixed_rows(corpora, dropped, self.config.seed)

    def _weights(self) -> list[float]:
        weights = list(self.config.weights) or [1.0] * len(self.report.corpora)
        if self.config.temperature is not None:
            counts = [report.written for report in self.report.corpora]
            weights = mixing.weights_of_temperature(counts, self.config.temperature)
        if max(weights) > MAX_PASSES:
            raise ValueError(
                f"--temperature {self.config.temperature} makes an epoch contain each pair of a corpus "
                f"{max(weights):,.0f} times; give a temperature nearer to 1"
            )
        for report, weight in zip(self.report.corpora, weights, strict=True):
            report.weight = weight
        return weights

    # --- report and manifest ----------------------------------------------------------------------------------------

    def _report_split(self, split: str) -> None:
        lengths = {side: map_array(self._path(split, side, "lengths"), "int32") for side in SIDES}
        self.report.splits[split] = SplitReport.of(lengths)

    def _report_pieces(self, counts_of_workers: list[list[npt.NDArray[np.int64]]]) -> None:
        pieces_of = {"source": self.tokenizer.source_pieces, "target": self.tokenizer.target_pieces}
        for index, side in enumerate(SIDES):
            counts = np.sum([counts[index] for counts in counts_of_workers], axis=0)
            self.report.pieces[side] = PieceReport.of(counts, pieces_of[side])

    def warnings(self) -> list[str]:
        """Returns warnings about likely errors in the training data."""
        config = self.config
        return diagnostics.find_warnings(
            {str(corpus.source): corpus.text for corpus in self.report.corpora},
            {str(corpus.source): corpus.cleaning.pairs(EQUAL) for corpus in self.report.corpora},
            model_facts(self.tokenizer.source_model).model_type,
            expected_pieces_per_word(config.tokenizer_from),
            trained_here=not config.tokenizer_from,
            held_out=self._held_out_profile,
        )

    def _files(self) -> list[Path]:
        dataset_files = [path for path in self.folder.iterdir() if path.suffix in (".bin", ".txt")]
        return sorted(dataset_files) + sorted((self.folder / TOKENIZER_FOLDER).iterdir())

    def finish(self) -> None:
        """Deletes the scratch folder and writes the manifest. The dataset is then complete."""
        shutil.rmtree(self._scratch)
        for path in self._files():
            name = str(path.relative_to(self.folder))
            if name not in self._checksums:  # workers have computed the checksums of the training set
                self._checksums[name] = checksum(path)
        splits = {split: self._split_facts(split, report) for split, report in self.report.splits.items()}
        if ALIGNMENTS in self._train_sides:
            links = int(map_array(self._path(TRAIN, ALIGNMENTS, "lengths"), "int32").sum(dtype=np.int64))
            splits[TRAIN][ALIGNMENTS] = {"tokens": links, "dtype": LINK_DTYPE}
        manifest = {
            "nmtkit_dataset": FORMAT,
            "source_lang": self.config.source_lang,
            "target_lang": self.config.target_lang,
            "languages": dict(zip(SIDES, self.config.languages, strict=True)),
            "tokenizer": self.tokenizer.fingerprint,
            "splits": splits,
            "report": self.report.counts(),
            "settings": self.config.recorded(),
            "files": self._checksums,
        }
        write_manifest(self.folder, manifest | self._more_facts())

    def _split_facts(self, split: str, report: SplitReport) -> dict[str, Any]:
        """Returns the entry of a subset in the manifest."""
        sides = {
            side: {"tokens": report.tokens[side], "dtype": dtype}
            for side, dtype in zip(SIDES, self.dtypes, strict=True)
        }
        return {"pairs": report.pairs, **sides}

    def _more_facts(self) -> dict[str, Any]:
        """Returns the entries of the manifest that only some datasets have."""
        return {}

    def _path(self, split: str, side: str, array: str) -> Path:
        return self.folder / array_file(split, side, array)

    def _split_files(self, split: str, lengths_folder: Path, hashes: Path | None = None) -> SplitFiles:
        sides = self._train_sides if split == TRAIN else SIDES
        return SplitFiles(
            [(self._path(split, side, "ids"), lengths_folder / array_file(split, side, "lengths")) for side in sides],
            hashes,
        )


def _with_tag(text: bytes, tag: str | None) -> bytes:
    if tag is None:
        return text
    start = tag.encode() + b" "
    return start + text[:-1].replace(b"\n", b"\n" + start) + b"\n"
