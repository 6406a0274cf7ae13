"""Writes a dataset of many directions. Every sentence is stored once, for all directions of its corpus.

A row of a subset has the number of its direction and, for each side, the offset and length of a sentence in the shared
ids. Every stored sentence begins with the token of its language, or with <unk> if the tokenizer lacks this token.

With language tokens on both sides, a row refers to whole stored sentences. In the other layout, only source sentences
begin with a token: the token of the target language (Johnson et al. 2017). There, the target of a row begins after the
stored token, and the reader replaces the stored token of the source by the token of the target language.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.blocks import LineBlock, blocks_of_files
from nmtkit.data.dataset import diagnostics, mixing
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.dataset_files import (
    DIRECTION_DTYPE,
    MULTILINGUAL_FORMAT,
    SHARED,
    SIDES,
    direction_file,
    text_file,
)
from nmtkit.data.dataset.dataset_writer import TRAIN, DatasetWriter
from nmtkit.data.dataset.drop_reasons import EQUAL
from nmtkit.data.dataset.parallel_sentences import (
    NO_DIRECTION,
    Numbers,
    ParallelFiles,
    Rows,
    SentenceEncoder,
    SentenceFiles,
    SentenceWorker,
)
from nmtkit.data.dataset.report import CorpusReport, SplitReport
from nmtkit.data.directions import Direction
from nmtkit.data.tokenizers.spm_model import model_facts
from nmtkit.data.tokenizers.tokenizer import Encoded, Tokenizer


class MultilingualWriter(DatasetWriter):
    """Writes a dataset of many directions."""

    worker = SentenceWorker

    def __init__(
        self, config: PreprocessConfig, tokenizer: Tokenizer, folder: Path, on_progress: Callable[[int], None],
        directions: Sequence[Direction],
    ) -> None:  # fmt: skip
        if not tokenizer.one_model:
            raise ValueError(
                "--corpora needs one tokenizer for all languages; this tokenizer has one model for each side"
            )
        known = tokenizer.languages
        self._target_only = tokenizer.has_target_languages_only
        needed = {d.target for d in directions} | ({d.source for d in directions} if not self._target_only else set())
        if missing := sorted(needed - known.keys()):
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(
                f"the tokenizer has no token of the language {missing[0]}; it has {names}; "
                "change the codes in the file of --corpora, or train a tokenizer"
            )
        super().__init__(config, tokenizer, folder, on_progress)
        self.directions = list(directions)
        self._numbers = {direction: number for number, direction in enumerate(directions)}
        self._sentences = SentenceEncoder(tokenizer, self.dtypes[0], self._numbers)
        self._stored: dict[str, int] = {}  # number of shared ids, by split
        self._rows: dict[str, list[int]] = {}  # number of rows of each direction, by split
        self.report.source_lang, self.report.target_lang = self._codes()

    def _codes(self) -> tuple[str, str]:
        sources, targets = zip(*((direction.source, direction.target) for direction in self.directions), strict=True)
        return ",".join(dict.fromkeys(sources)), ",".join(dict.fromkeys(targets))

    # --- valid and test ---------------------------------------------------------------------------------------------

    def add_held_out_corpora(self, split: str, corpora: Sequence[ParallelFiles]) -> None:
        """Writes the rows and the raw text of all corpora of a valid or test set, direction by direction.

        In a corpus of more than two languages, an empty line means that the sentence is missing in this language. The
        pairs of a missing sentence are left out.
        """
        shard = self.config.shard_of()
        encoded: list[Encoded] = []
        parts: list[tuple[int, Rows, list[list[bytes]]]] = []  # direction, rows, and source and target lines
        sentences = 0
        for index, files in enumerate(corpora):
            texts = self._read(files, self._scratch / f"{split}{index}")
            sides = self._sentences.encode(texts, files, 1)
            lines = [text.split(b"\n")[:-1] for text in texts]
            pairs = self._sentences.language_pairs(files)
            kept = np.ones((len(pairs), len(lines[0])), np.bool_)
            if len(files.languages) > 2:
                for mask, pair in zip(kept, pairs, strict=True):
                    mask &= (sides[pair.first].lengths > 1) & (sides[pair.second].lengths > 1)
            hashes = [self._sentences.hashes(pair, files, sides) for pair in pairs]
            self._held_out_keys += [dropping.pair_keys(key[mask]) for key, mask in zip(hashes, kept, strict=True)]
            block = self._sentences.block(files, sides, np.ones_like(kept), hashes)
            encoded.append(block.sentences)
            for mask, pair in zip(kept, pairs, strict=True):
                rows = np.flatnonzero(mask)
                for number, ends in ((pair.forward, (0, 1)), (pair.backward, (1, 0))):
                    if number != NO_DIRECTION:
                        languages = [pair[end] for end in ends]
                        both = np.stack([sentences + index * len(mask) + rows for index in languages], axis=1)
                        parts.append((number, both, [[lines[index][row] for row in rows] for index in languages]))
            sentences += len(block.sentences.lengths)
        if shard is not None and shard[0] != 1:
            return
        parts.sort(key=lambda part: part[0])
        ids = np.concatenate([block.ids for block in encoded])
        lengths = np.concatenate([block.lengths for block in encoded])
        offsets = np.cumsum(lengths) - lengths
        self._path(split, SHARED, "ids").write_bytes(ids.tobytes())
        with _RowWriter(self, split) as writer:
            for number, rows, both_lines in parts:
                writer.add(rows, np.full(len(rows), number, np.uint16), offsets, lengths)
                for side, side_lines in zip(SIDES, both_lines, strict=True):
                    with (self.folder / text_file(split, side)).open("ab") as file:
                        file.write(b"".join(line + b"\n" for line in side_lines))
        self._rows[split] = writer.counts
        self._stored[split] = len(ids)
        self._report_split(split)

    def _read(self, files: ParallelFiles, scratch: Path) -> list[bytes]:
        """Returns the whole text of each language. Raises ValueError for a line of more than --max-line-bytes bytes."""
        scratch.mkdir()
        texts: list[list[bytes]] = [[] for _ in files.languages]
        for block in blocks_of_files(files.paths, scratch, self.config.max_line_bytes + 1):
            if block.over_long:
                raise ValueError(
                    f"{files.position(block.first_line)} has {max(span.size for span in block.spans):,} bytes; valid "
                    "and test sets are not filtered, so remove the line, or give a larger --max-line-bytes"
                )
            for text, span in zip(texts, block.spans, strict=True):
                text.append(span.read())
        return [b"".join(text) for text in texts]

    # --- train ------------------------------------------------------------------------------------------------------

    def _worker_factory(self, held_out_keys: npt.NDArray[np.uint64], hashes: Path) -> Callable[[], Any]:
        self._train_files = SentenceFiles(self._path(TRAIN, SHARED, "ids"), self._scratch, hashes)
        return functools.partial(
            SentenceWorker, self.tokenizer, self.dtypes[0], self.config, held_out_keys, self._train_files, self._numbers
        )

    def _corpus_report(self, files: ParallelFiles) -> CorpusReport:
        others = ", ".join(map(str, dict.fromkeys(files.names[1:]))) or files.names[0]
        return CorpusReport(files.names[0], Path(others), weight=files.weight)

    def _blocks(self, files: ParallelFiles, scratch: Path) -> Iterator[LineBlock]:
        return blocks_of_files(files.paths, scratch, self.config.max_line_bytes + 1, self.config.shard_of() or (1, 1))

    def _pairs_of(self, files: ParallelFiles, block: LineBlock) -> int:
        return block.lines * len(self._sentences.language_pairs(files))

    def _write_empty_train(self) -> None:
        self._path(TRAIN, SHARED, "ids").touch()
        with _RowWriter(self, TRAIN) as writer:
            pass
        self._rows[TRAIN], self._stored[TRAIN] = writer.counts, 0

    def _write_rows(self, bounds: list[int], dropped: npt.NDArray[np.uint8] | None) -> None:
        """Writes the rows in the order of training. The two directions of a pair are in neighbouring rows."""
        files = self._train_files
        offsets_file = self._scratch / "offsets"
        mixing.write_offsets(files.lengths, offsets_file)
        offsets, lengths = np.memmap(offsets_file, np.int64, "r"), np.memmap(files.lengths, np.int32, "r")
        sentences = np.memmap(files.rows, np.int64, "r").reshape(-1, 2)
        numbers = np.memmap(files.numbers, np.uint16, "r").reshape(-1, 2)
        with _RowWriter(self, TRAIN) as writer:
            weights = [report.weight for report in self.report.corpora]
            for chunk in self._mixed_rows(bounds, dropped, weights):
                directions = numbers[chunk]
                exists = directions != NO_DIRECTION
                both = np.stack((sentences[chunk], sentences[chunk][:, ::-1]), axis=1)  # [pairs, directions, sides]
                writer.add(both[exists], directions[exists], offsets, lengths)
        self._rows[TRAIN], self._stored[TRAIN] = writer.counts, int(lengths.sum(dtype=np.int64))

    # --- report and manifest ----------------------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Returns warnings about likely errors in the training corpora that have exactly two languages."""
        return [
            warning
            for corpus in self.report.corpora
            for warning in diagnostics.find_warnings(
                {str(corpus.source): corpus.text},
                {str(corpus.source): corpus.cleaning.pairs(EQUAL)},
                model_facts(self.tokenizer.source_model).model_type,
                expected=None,
                trained_here=not self.config.tokenizer_from,
            )
        ]

    def _split_facts(self, split: str, report: SplitReport) -> dict[str, Any]:
        shared = {"tokens": self._stored[split], "dtype": self.dtypes[0]}
        return super()._split_facts(split, report) | {SHARED: shared, "directions": self._rows[split]}

    def _more_facts(self) -> dict[str, Any]:
        source, target = self._codes()
        directions = [[direction.source, direction.target] for direction in self.directions]
        return {
            "nmtkit_dataset": MULTILINGUAL_FORMAT,
            "source_lang": source,
            "target_lang": target,
            "directions": directions,
            # left empty, because a mean over all languages would not be typical of any language
            "report": self.report.counts() | {"pieces_per_word": {}},
        }

    @property
    def target_only(self) -> bool:
        """Whether only source sentences begin with a language token. This token names the target language."""
        return self._target_only


class _RowWriter:
    """Writes the offsets, lengths and directions of the rows of a subset."""

    def __init__(self, writer: MultilingualWriter, split: str) -> None:
        self._skipped = int(writer.target_only)  # number of tokens to skip at the start of a stored target
        paths = [writer._path(split, side, array) for side in SIDES for array in ("offsets", "lengths")]
        self._files = [path.open("wb") for path in (*paths, writer.folder / direction_file(split))]
        self.counts = [0] * len(writer.directions)

    def __enter__(self) -> "_RowWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.close()

    def add(self, rows: Rows, numbers: Numbers, offsets: Any, lengths: Any) -> None:
        """Writes n rows.

        `rows` [n, 2] has the indexes of the source and target sentences. `numbers` [n] has the indexes of the
        directions. `offsets` and `lengths` have one entry for each stored sentence.
        """
        for side, skipped in enumerate((0, self._skipped)):
            self._files[2 * side].write((offsets[rows[:, side]] + skipped).astype(np.int64).tobytes())
            self._files[2 * side + 1].write((lengths[rows[:, side]] - skipped).astype(np.int32).tobytes())
        self._files[4].write(numbers.astype(DIRECTION_DTYPE).tobytes())
        for number, count in enumerate(np.bincount(numbers, minlength=len(self.counts)).tolist()):
            self.counts[number] += count
