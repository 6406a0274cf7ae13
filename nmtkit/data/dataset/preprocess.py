"""`nmtkit preprocess`: trains a tokenizer, encodes valid and test sets, and cleans, encodes and mixes training sets."""

import functools
import logging
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.config.files import check_outputs, write_atomically
from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.lines import count_lines
from nmtkit.data.corpora.provenance import provenance_of_all
from nmtkit.data.dataset import mixing
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import (
    MANIFEST,
    SCRATCH_FOLDER,
    SIDES,
    TOKENIZER_FOLDER,
    AtomicFolder,
    array_file,
    checksum,
    map_array,
    shard_name,
    write_manifest,
)
from nmtkit.data.dataset.dataset_tokenizer import dataset_tokenizer, expected_pieces_per_word
from nmtkit.data.dataset.drop_reasons import DUPLICATE, drops
from nmtkit.data.dataset.encoding import BlockEncoder, EncodingWorker
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus, open_corpora
from nmtkit.data.dataset.report import (
    CorpusReport,
    DatasetReport,
    PieceReport,
    SplitReport,
    find_warnings,
    page,
    profile_of,
)
from nmtkit.data.dataset.storage import HASHES, TRAIN, EncodedBlock, SharedStorage, SideStorage, Sizes, Storage
from nmtkit.data.directions import Direction
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.jobs import progress
from nmtkit.jobs.scheduler import Task
from nmtkit.jobs.threads import usable_cores
from nmtkit.jobs.workers import Workers
from nmtkit.text.encoded import Encoded

MAX_PASSES = 10_000  # largest number of passes over a corpus in one epoch

log = logging.getLogger("nmtkit")


def preprocess(config: PreprocessConfig) -> DatasetReport:
    """Writes the dataset to `config.destdir`, completely or not at all, and the report page to `config.report`.

    Raises ValueError or OSError for errors in the settings or in the text.
    """
    with AtomicFolder(_final_folder(config), config.overwrite) as destination:
        scratch = destination.folder / SCRATCH_FOLDER
        scratch.mkdir()
        corpora = open_corpora(config, scratch)
        files = [path for corpus in corpora.all() for path in corpus.inputs]
        files += [path for path in (*config.tokenizer_from, config.corpora) if path is not None]
        check_outputs({"--report": config.report}, files)
        if config.drop_overlap and not corpora.held_out:
            raise ValueError("--drop-overlap does nothing without a valid or test set; give --validpref or --testpref")
        for flag in config.untagged():
            log.warning("training corpora have tags, but %s sets have none; %s adds tags", flag[2:-4], flag)
        exchanged = [each for corpus in corpora.all() for each in corpus.exchanged_languages(config.max_line_bytes + 1)]
        for warning in exchanged:
            log.warning("%s", warning)
        tokenizer = dataset_tokenizer(config, corpora)
        tokenizer.save(destination.folder / TOKENIZER_FOLDER)
        writer = DatasetWriter(config, tokenizer, destination.folder, corpora.directions)
        writer.provenance = provenance_of_all(corpus.names for corpus in corpora.all())
        for split, held_out in corpora.held_out.items():
            writer.add_held_out(split, held_out)
        if corpora.train:
            writer.add_train(corpora.train)
        writer.finish()
        destination.finish()
    for warning in writer.warnings(not exchanged):
        log.warning("%s", warning)
    if config.report is not None:
        write_atomically(config.report, page(writer.report))
    return writer.report


def _final_folder(config: PreprocessConfig) -> Path:
    shard = config.shard_of()
    if shard is None:
        return config.destdir
    if (config.destdir / MANIFEST).exists():
        raise ValueError(f"{config.destdir} holds a dataset that was made without --shard; give a different --destdir")
    return config.destdir / shard_name(*shard)


class DatasetWriter:
    """Writes subsets and the manifest to `folder`. Valid and test sets must be added before the training set."""

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, directions: Sequence[Direction]
    ) -> None:
        self.config, self.tokenizer, self.folder = config, tokenizer, folder
        self._scratch = folder / SCRATCH_FOLDER
        languages = config.source_lang, config.target_lang
        if config.corpora is None:
            self.storage: Storage = SideStorage(config, tokenizer, folder, self._scratch)
        else:
            self.storage = SharedStorage(config, tokenizer, folder, self._scratch, directions)
            sides = zip(*((direction.source, direction.target) for direction in directions), strict=True)
            source, target = (",".join(dict.fromkeys(codes)) for codes in sides)
            languages = source, target
        self.directions = directions
        self.report = DatasetReport(*languages, {"source": tokenizer.source_size, "target": tokenizer.target_size})
        self._encoder = BlockEncoder(tokenizer, self.storage.dtypes)
        if any(config.alignments) and not all(self._encoder.of(side).can_align for side in (0, 1)):
            raise ValueError("--alignments needs tokenizers that split text at spaces; yours do not")
        # read now, because the dataset of --tokenizer-from may be replaced
        self._expected_pieces = expected_pieces_per_word(config.tokenizer_from) if config.corpora is None else {}
        self._held_out_profile = profile_of((b"", b""))
        self._held_out_keys: list[dropping.Hashes] = []
        self._checksums: dict[str, dict[str, Any]] = {}
        self.provenance: dict[str, dict[str, Any]] = {}  # facts about the origin of corpora, by name

    # --- valid and test ---------------------------------------------------------------------------------------------

    def add_held_out(self, split: str, corpora: Sequence[ParallelCorpus]) -> None:
        """Writes the ids and the raw text of all lines of a valid or test set, with its tag before source lines.

        In a corpus of more than two languages, an empty line means that the sentence is missing in this language. The
        pairs of a missing sentence are left out.

        Only the first shard writes the set. Every shard keeps the keys (hashes) of the pairs in memory, to find the
        same pairs in the training set. Raises ValueError for a line that is too long to be read.
        """
        progress.begin(f"Encoding {split}")
        blocks, texts = [], []
        for index, corpus in enumerate(corpora):
            lines, sides = self._read(corpus, self._scratch / f"{split}.{index}")
            keep = np.ones((len(corpus.pairs), len(sides[0].lengths)), np.bool_)
            if len(corpus.languages) > 2:
                for mask, pair in zip(keep, corpus.pairs, strict=True):
                    mask &= (sides[pair.first].lengths > 1) & (sides[pair.second].lengths > 1)
            hashes = self._encoder.hashes(corpus, sides)
            self._held_out_keys += [dropping.pair_keys(key[mask]) for key, mask in zip(hashes, keep, strict=True)]
            blocks.append(EncodedBlock(sides, hashes, keep))
            texts.append(lines)
        if (self.config.shard_of() or (1, 1))[0] == 1:
            self.storage.write_held_out(split, corpora, blocks, texts)
            self._report_split(split)

    def _read(self, corpus: ParallelCorpus, scratch: Path) -> tuple[list[bytes], list[Encoded]]:
        """Returns the whole text and the sentences of each language. Raises ValueError for a line that is too long."""
        scratch.mkdir()
        texts: list[list[bytes]] = []
        sides: list[list[Encoded]] = []
        for block in corpus.blocks(scratch, self.config.max_line_bytes + 1):
            if block.over_long:
                largest = max(span.size for span in block.spans)
                raise ValueError(
                    f"{corpus.position(block.first_line)}: a line has {largest:,} bytes; "
                    "valid and test sets are not filtered, so remove the line, or give a larger --max-line-bytes"
                )
            texts.append([span.read() for span in block.spans])
            sides.append(self._encoder.encode(texts[-1], corpus, block.first_line))
            if len(corpus.languages) == 2:
                self._held_out_profile += profile_of(texts[-1])
        return list(map(b"".join, zip(*texts, strict=True))), list(map(Encoded.concatenated, zip(*sides, strict=True)))

    # --- train ------------------------------------------------------------------------------------------------------

    def add_train(self, corpora: Sequence[ParallelCorpus]) -> None:
        """Encodes the training corpora with all workers, then drops duplicates and mixes the corpora.

        Raises ValueError if no pair is left, and the same errors as `blocks` and `BlockEncoder.encode`.
        """
        held_out_keys = np.unique(np.concatenate(self._held_out_keys or [np.empty(0, np.uint64)]))
        self.report.corpora = [CorpusReport.of(corpus) for corpus in corpora]
        for array in (HASHES, *self.storage.arrays):
            self.storage.path(TRAIN, array).touch()
        factory = functools.partial(EncodingWorker, self.tokenizer, self.config, held_out_keys, self.storage)
        with Workers(self.config.workers or usable_cores(), factory) as workers:
            bounds = self._encode(workers, corpora)
            # a worker answers after it has written all of its blocks, so the files are complete after this line
            piece_counts = workers.broadcast((EncodingWorker.piece_counts,))
            if not bounds[-1] and self.config.shard is None:  # a shard of a small corpus can be empty
                dropped = ", ".join(f"{reason}: {count:,}" for reason, count in self.report.cleaning().dropped.items())
                raise ValueError(f"no training pair is left; dropped: {dropped}")
            dropped_rows = self._find_duplicates(workers, bounds)
            progress.begin("Writing")
            self.storage.write_rows(TRAIN, self._mixed_rows(bounds, dropped_rows))
            if self.config.report is not None:
                self._report_pieces(piece_counts)
            self._report_split(TRAIN)
            paths = self._files()
            checksums = workers.imap((EncodingWorker.checksum, path) for path in paths)
            for path, (_, facts) in zip(paths, checksums, strict=True):
                self._checksums[str(path.relative_to(self.folder))] = facts

    def _encode(self, workers: Workers, corpora: Sequence[ParallelCorpus]) -> list[int]:
        """Encodes and writes all corpora. Returns the index of the first row of each corpus, then the row count."""
        offset = Sizes()
        bounds = [0]
        unwritten: deque[tuple[int, int]] = deque()  # (corpus index, number of pairs) of each unwritten block
        longest, shard = self.config.max_line_bytes + 1, self.config.shard_of() or (1, 1)
        progress.begin("Encoding", "pairs", lambda: self._pairs_of_shard(corpora, shard[1]))

        def tasks() -> Iterator[Task]:
            for index, corpus in enumerate(corpora):
                scratch = self._scratch / f"corpus{index}"
                scratch.mkdir()
                for block in corpus.blocks(scratch, longest, shard):
                    unwritten.append((index, block.lines * len(corpus.pairs)))
                    yield EncodingWorker.encode, block, corpus

        for worker, (sizes, counts, text, samples) in workers.imap(tasks()):
            index, pairs = unwritten.popleft()
            bounds += [offset[HASHES]] * (index + 1 - len(bounds))
            workers.send(worker, (EncodingWorker.write, offset))
            offset.update(sizes)
            report = self.report.corpora[index]
            report.cleaning.add(counts)
            report.add_samples(samples)
            if text is not None:
                report.text.append(text)
            report.read += pairs
            report.written += sizes[HASHES]
            progress.advance(pairs)
        return bounds + [offset[HASHES]] * (len(corpora) + 1 - len(bounds))

    @staticmethod
    def _pairs_of_shard(corpora: Sequence[ParallelCorpus], shards: int) -> float | None:
        """Returns the number of pairs of one of `shards` equal shards, or None if counting is not cheap."""
        total = 0
        for corpus in corpora:
            lines = None if corpus.container else count_lines(corpus.paths[:1])
            if lines is None:
                return None
            total += lines * len(corpus.pairs)
        return total / shards

    def _find_duplicates(self, workers: Workers, bounds: list[int]) -> mixing.Dropped | None:
        """Counts the rows that repeat an earlier row.

        Returns an array [rows] that is 1 for a row to drop, or None if duplicates are kept.
        """
        progress.begin("Finding duplicates")
        hashes = self.storage.path(TRAIN, HASHES)
        partitions = dropping.partition(hashes, self._scratch)
        hashes.unlink()
        dropped = None
        if self.config.drop_duplicates and bounds[-1]:
            dropped = np.memmap(self._scratch / "dropped", np.uint8, "w+", shape=(bounds[-1],))
        for _, rows in workers.imap((EncodingWorker.find_duplicates, path) for path in partitions):
            if dropped is not None:
                dropped[rows] = 1
            counts = np.diff(np.searchsorted(rows, bounds))
            for report, count in zip(self.report.corpora, counts.tolist(), strict=True):
                report.cleaning.count(DUPLICATE, count, drops=drops(DUPLICATE, self.config))
                report.written -= count if dropped is not None else 0
        return dropped

    def _mixed_rows(self, bounds: list[int], dropped: mixing.Dropped | None) -> Iterator[dropping.RowNumbers]:
        """Returns the row numbers of an epoch, in chunks. Raises ValueError if a weight leaves no pair of a corpus."""
        reports = self.report.corpora
        if self.config.temperature is not None:
            weights = mixing.weights_of_temperature([each.written for each in reports], self.config.temperature)
            for report, weight in zip(reports, weights, strict=True):
                report.weight = weight
            if (largest := max(weights)) > MAX_PASSES:
                raise ValueError(
                    f"--temperature {self.config.temperature} makes an epoch contain each pair of a corpus "
                    f"{largest:,.0f} times; give a temperature nearer to 1"
                )
        corpora = [
            mixing.CorpusRows(start, end, report.weight)
            for start, end, report in zip(bounds[:-1], bounds[1:], reports, strict=True)
        ]
        for rows, report in zip(corpora, reports, strict=True):
            if report.written and not rows.size(dropped):
                setting = "--weights" if self.config.corpora is None else "weight"
                raise ValueError(
                    f"{setting} {rows.weight:g} leaves none of the {report.written:,} pairs of {report.source}; "
                    "give a larger weight, or leave the corpus out"
                )
        return mixing.mixed_rows(corpora, dropped, self.config.seed)

    # --- report and manifest ----------------------------------------------------------------------------------------

    def _report_split(self, split: str) -> None:
        paths = {side: self.folder / array_file(split, side, "lengths") for side in SIDES}
        self.report.splits[split] = SplitReport.of({side: map_array(path, "int32") for side, path in paths.items()})

    def _report_pieces(self, counts_of_workers: list[list[npt.NDArray[np.int64]]]) -> None:
        pieces_of = self.tokenizer.source_pieces, self.tokenizer.target_pieces
        for side, names, counts in zip(SIDES, pieces_of, zip(*counts_of_workers, strict=True), strict=True):
            self.report.pieces[side] = PieceReport.of(np.sum(counts, axis=0), names)

    def warnings(self, languages: bool) -> list[str]:
        """Returns warnings about likely errors in the training data. With --corpora, checks each corpus separately.

        With `languages`, also warns of corpora whose languages seem exchanged. For this, the blocks of a corpus are
        compared with the valid and test sets. If these sets have little text, the blocks are compared with the whole
        training text. With --corpora, the blocks are compared with the whole text of their corpus. A corpus with more
        than two languages has no statistics, and therefore no warnings.
        """
        one_direction = self.config.corpora is None
        corpora = self.report.corpora
        return [
            warning
            for group in ([corpora] if one_direction else [[corpus] for corpus in corpora])
            for warning in find_warnings(
                group,
                self.tokenizer.source.facts.model_type,
                self._expected_pieces,
                trained_here=not self.config.tokenizer_from,
                held_out=self._held_out_profile if one_direction else None,
                languages=languages,
            )
        ]

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
        manifest: dict[str, Any] = {
            "nmtkit_dataset": self.storage.format,
            "source_lang": self.report.source_lang,
            "target_lang": self.report.target_lang,
            "languages": dict(zip(SIDES, self.config.languages, strict=True)),
            "tokenizer": self.tokenizer.fingerprint,
            "splits": {split: self._split_facts(split, report) for split, report in self.report.splits.items()},
            "report": self.report.counts(),
            "settings": self.config.recorded(),
            "files": self._checksums,
        }
        if self.provenance:
            manifest["provenance"] = self.provenance
        if self.config.corpora is not None:
            manifest["directions"] = [[direction.source, direction.target] for direction in self.directions]
            # left empty, because a mean over all languages would not be typical of any language
            manifest["report"]["pieces_per_word"] = {}
        write_manifest(self.folder, manifest)

    def _split_facts(self, split: str, report: SplitReport) -> dict[str, Any]:
        """Returns the entry of a subset in the manifest."""
        sides = {
            side: {"tokens": report.tokens[side], "dtype": dtype}
            for side, dtype in zip(SIDES, self.storage.dtypes, strict=True)
        }
        return {"pairs": report.pairs, **sides, **self.storage.facts(split)}
