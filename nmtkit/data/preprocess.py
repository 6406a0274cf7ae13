"""`nmtkit preprocess`: trains a tokenizer, encodes valid and test sets, and cleans, encodes and mixes training sets."""

import dataclasses
import functools
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.corpora import duplicates
from nmtkit.corpora.blocks import blocks
from nmtkit.corpora.corpus import Corpus, locate
from nmtkit.data import diagnostics, mixing
from nmtkit.data.cleaning import DUPLICATE, EQUAL, CleaningStatistics
from nmtkit.data.config import PreprocessConfig
from nmtkit.data.dataset_files import (
    ALIGNMENTS,
    FORMAT,
    LINK_DTYPE,
    MANIFEST,
    SCRATCH_FOLDER,
    SIDES,
    TOKENIZER_FOLDER,
    AtomicFolder,
    array_file,
    checksum,
    id_dtype,
    map_array,
    shard_name,
    text_file,
    write_manifest,
)
from nmtkit.data.encoding import EncodedBlock, PairEncoder, Sizes, SplitFiles, Worker
from nmtkit.data.report import CorpusReport, PieceReport, Report, SplitReport, page
from nmtkit.data.spm_model import model_facts
from nmtkit.data.spm_training import expected_pieces_per_word, load_tokenizer, train_tokenizer
from nmtkit.data.tokenizer import Tokenizer
from nmtkit.data.tokenizer_extension import extended_by_pairs
from nmtkit.files import atomic_write, check_outputs
from nmtkit.processes.workers import Task, Workers

log = logging.getLogger("nmtkit")

TRAIN = "train"
MAX_PASSES = 10_000  # largest number of passes over a corpus in one epoch


def preprocess(config: PreprocessConfig, on_progress: Callable[[int], None] = lambda pairs: None) -> Report:
    """Writes the dataset to `config.destdir`, completely or not at all, and the report page to `config.report`.

    `on_progress` is called with the number of training pairs read so far. Raises ValueError or OSError for errors in
    the settings or in the text.
    """
    train = _locate(config, config.train, config.tags, config.alignments)
    held_out = {
        f"{name}{index or ''}": files
        for name, prefixes, tags in (
            ("valid", config.valid, config.valid_tags),
            ("test", config.test, config.test_tags),
        )
        for index, files in enumerate(_locate(config, prefixes, tags))
    }
    inputs = [path for files in (*train, *held_out.values()) for path in files.paths()]
    check_outputs({"--report": config.report}, [*inputs, *config.tokenizer_from])
    for flag in config.untagged():
        log.warning("training corpora have tags, but %s sets have none; %s adds tags", flag[2:-4], flag)
    tags = sorted({files.tag for files in (*train, *held_out.values()) if files.tag is not None})
    with AtomicFolder(_final_folder(config), config.overwrite) as destination:
        tokenizer = (
            load_tokenizer(config.tokenizer_from) if config.tokenizer_from else train_tokenizer(config, train, tags)
        )
        if config.extend_tokenizer is not None:
            tokenizer = extended_by_pairs(tokenizer, config, train)
        for tag in tags:
            tokenizer.check_tag(tag)
        tokenizer.save(destination.folder / TOKENIZER_FOLDER)
        writer = DatasetWriter(config, tokenizer, destination.folder, on_progress)
        for split, files in held_out.items():
            writer.add_held_out(split, files)
        if train:
            writer.add_train(train)
        writer.finish()
        destination.finish()
    for warning in writer.warnings():
        log.warning("%s", warning)
    if config.report is not None:
        with atomic_write(config.report) as file:
            file.write(page(writer.report).encode())
    return writer.report


def _locate(
    config: PreprocessConfig,
    prefixes: Sequence[str],
    tags: Sequence[str | None],
    alignments: Sequence[Path | None] = (),
) -> list[Corpus]:
    columns = None if not config.columns else (config.columns[0], config.columns[1])
    corpora = []
    for index, prefix in enumerate(prefixes):
        corpus = locate(prefix, config.source_lang, config.target_lang, columns)
        path = alignments[index] if alignments else None
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"--alignments {path}: no such file")
        if path is not None and corpus.format is not None:
            raise ValueError(f"--alignments {path} needs a corpus of two files of lines; {prefix} is one file")
        corpora.append(dataclasses.replace(corpus, tag=tags[index] if tags else None, alignments=path))
    return corpora


def _final_folder(config: PreprocessConfig) -> Path:
    shard = config.shard_of()
    if shard is None:
        return config.destdir
    if (config.destdir / MANIFEST).exists():
        raise ValueError(f"{config.destdir} holds a dataset that was made without --shard; give a different --destdir")
    return config.destdir / shard_name(*shard)


class DatasetWriter:
    """Writes splits and the manifest to `folder`. Valid and test sets must be added before the training set."""

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, on_progress: Callable[[int], None]
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.folder = folder
        self.on_progress = on_progress
        self.dtypes = id_dtype(tokenizer.source_size), id_dtype(tokenizer.target_size)
        self.report = Report(
            config.source_lang, config.target_lang, {"source": tokenizer.source_size, "target": tokenizer.target_size}
        )
        self._encoder = PairEncoder(tokenizer, self.dtypes, config.languages)
        self._train_sides: tuple[str, ...] = SIDES
        if any(config.alignments):
            self._encoder.check_alignable()
            self._train_sides = (*SIDES, ALIGNMENTS)
        self._held_out_profile = diagnostics.profile_of((b"", b""))
        self._held_out_keys: list[npt.NDArray[np.uint64]] = []
        self._checksums: dict[str, dict[str, Any]] = {}
        self._scratch = folder / SCRATCH_FOLDER
        self._scratch.mkdir()

    # --- valid and test ---------------------------------------------------------------------------------------------

    def add_held_out(self, split: str, files: Corpus) -> None:
        """Writes the ids and the raw text of every line of a valid or test set, with the tag before source lines.

        Only the first shard writes the set. Every shard keeps the keys of the pairs, in order to find the same pairs in
        the training set. Raises ValueError for a line that is too long to be read.
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
            self._held_out_keys.append(duplicates.pair_keys(hashes))
            if written:
                sides = self._encoder.with_prefixes(source, target, files.tag)
                encoded = EncodedBlock(sides, hashes, CleaningStatistics())
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

    def add_train(self, corpora: list[Corpus]) -> None:
        """Encodes the training corpora with all workers, then drops duplicates and mixes the corpora.

        Raises ValueError when no pair is left, and the same errors as `corpus.blocks` and `PairEncoder.encode`.
        """
        hashes = self._scratch / "hashes"
        files = self._split_files(TRAIN, self._scratch, hashes)
        held_out_keys = np.unique(np.concatenate(self._held_out_keys or [np.empty(0, np.uint64)]))
        self.report.corpora = [CorpusReport(files.source, files.target) for files in corpora]
        factory = functools.partial(Worker, self.tokenizer, self.dtypes, self.config, held_out_keys, files)
        with Workers(self.config.worker_count(), factory) as workers:
            bounds = self._encode(workers, corpora)
            piece_counts = workers.broadcast((Worker.piece_counts,))  # each worker first writes all of its blocks
            if bounds[-1]:
                self._write_rows(bounds, self._find_duplicates(workers, hashes, bounds))
            elif self.config.shard is None:
                dropped = ", ".join(f"{reason}: {count:,}" for reason, count in self.report.cleaning().dropped.items())
                raise ValueError(f"no training pair is left: {dropped}")
            else:  # a shard of a small corpus can be empty
                for side in self._train_sides:
                    for array in ("ids", "offsets", "lengths"):
                        self._path(TRAIN, side, array).touch()
            if self.config.report is not None:
                self._report_pieces(piece_counts)
            self._report_split(TRAIN)
            paths = self._files()
            checksums = workers.imap((Worker.checksum, path) for path in paths)
            for path, (_, facts) in zip(paths, checksums, strict=True):
                self._checksums[str(path.relative_to(self.folder))] = facts

    def _encode(self, workers: Workers, corpora: list[Corpus]) -> list[int]:
        """Encodes and writes all corpora. Returns the first row of each corpus, then the total number of rows."""
        offset: Sizes = (0, 0, 0, 0)
        bounds = [0]
        pairs_read = 0
        unwritten: deque[tuple[int, int]] = deque()  # (corpus index, number of lines) of each unwritten block

        def tasks() -> Iterator[Task]:
            for index, files in enumerate(corpora):
                scratch = self._scratch / f"corpus{index}"
                scratch.mkdir()
                shard = self.config.shard_of() or (1, 1)
                for block in blocks(files, scratch, self.config.max_line_bytes + 1, shard):
                    unwritten.append((index, block.lines))
                    yield Worker.encode, block, files

        for worker, (sizes, statistics, text) in workers.imap(tasks()):
            index, lines = unwritten.popleft()
            bounds += [offset[0]] * (index + 1 - len(bounds))
            workers.send(worker, (Worker.write, offset))
            offset = tuple(map(add, offset, sizes))
            report = self.report.corpora[index]
            report.cleaning.add(statistics)
            if text is not None:
                report.text.append(text)
            report.read += lines
            report.written += sizes[0]
            pairs_read += lines
            self.on_progress(pairs_read)
        return bounds + [offset[0]] * (len(corpora) + 1 - len(bounds))

    def _find_duplicates(self, workers: Workers, hashes: Path, bounds: list[int]) -> npt.NDArray[np.uint8] | None:
        """Counts rows that repeat an earlier row. To drop these rows, returns one byte per row, 1 for a duplicate."""
        partitions = duplicates.partition(hashes, self._scratch)
        hashes.unlink()
        dropped = None
        if self.config.drop_duplicates:
            dropped = np.memmap(self._scratch / "dropped", np.uint8, "w+", shape=(bounds[-1],))
        for _, rows in workers.imap((Worker.find_duplicates, path) for path in partitions):
            if dropped is not None:
                dropped[rows] = 1
            counts = np.diff(np.searchsorted(rows, bounds))
            for report, count in zip(self.report.corpora, counts.tolist(), strict=True):
                report.cleaning.count(DUPLICATE, count, [], self.config)
                report.written -= count if dropped is not None else 0
        return dropped

    def _write_rows(self, bounds: list[int], dropped: npt.NDArray[np.uint8] | None) -> None:
        """Reads the lengths in the order of the text, and writes offsets and lengths in the order of training."""
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
        corpora = [
            mixing.CorpusRows(start, end, weight)
            for start, end, weight in zip(bounds[:-1], bounds[1:], weights, strict=True)
        ]
        for rows, report in zip(corpora, self.report.corpora, strict=True):
            if report.written and not rows.size(dropped):
                raise ValueError(
                    f"--weights {rows.weight:g} leaves none of the {report.written:,} pairs of {report.source}; "
                    "give a larger weight, or leave the corpus out"
                )
        mixing.write_rows(mixing.mixed_rows(corpora, dropped, self.config.seed), inputs, outputs)

    def _weights(self) -> list[float]:
        weights = list(self.config.weights) or [1.0] * len(self.report.corpora)
        if self.config.temperature is not None:
            counts = [report.written for report in self.report.corpora]
            weights = mixing.weights_of_temperature(counts, self.config.temperature)
        if max(weights) > MAX_PASSES:
            raise ValueError(
                f"--temperature {self.config.temperature} makes an epoch see the pairs of a corpus "
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
        """Deletes the scratch folder and writes the manifest. The folder is then complete."""
        shutil.rmtree(self._scratch)
        for path in self._files():
            name = str(path.relative_to(self.folder))
            if name not in self._checksums:  # workers have computed the checksums of the training set
                self._checksums[name] = checksum(path)
        splits: dict[str, dict[str, Any]] = {
            split: {
                "pairs": report.pairs,
                **{
                    side: {"tokens": report.tokens[side], "dtype": dtype}
                    for side, dtype in zip(SIDES, self.dtypes, strict=True)
                },
            }
            for split, report in self.report.splits.items()
        }
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
        write_manifest(self.folder, manifest)

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
