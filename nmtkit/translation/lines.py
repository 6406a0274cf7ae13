"""Reads requests from files, datasets or a stream. Writes translations as text, JSON and reports."""

import dataclasses
import json
import logging
import math
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from nmtkit.config.files import atomic_write
from nmtkit.data.corpora.corpus import ColumnNames, format_of
from nmtkit.data.corpora.lines import LineDecoder, line_windows
from nmtkit.data.corpora.pairs import windows_of_side
from nmtkit.data.dataset.binarized import Split
from nmtkit.jobs.progress import quantity
from nmtkit.text.documents import check_text, notice
from nmtkit.text.documents.recognition import COMPRESSIONS, HEAD
from nmtkit.text.glossary import ALTERNATIVES
from nmtkit.translation.search.types import Request, Translation

CHUNK = 1 << 16  # bytes that are read from a stream at a time
TIMEOUT = 0.1  # seconds to wait for more lines of a window
HEAD_LINES = 10  # number of first lines that are checked for a document format

# Fields of a hypothesis in --format jsonl; a field without a value is left out.
JSONL_FIELDS = (
    *("text", "pieces", "score", "log_probability", "alignment", "utility", "token_log_probabilities"),
    *("quality", "no_repeat_ngram", "terms"),
)

logger = logging.getLogger("nmtkit")


# --- requests ---------------------------------------------------------------------------------------------------------


def lines_of_stream(stream: BinaryIO, name: str, size: int) -> Iterator[list[str]]:
    """Yields the lines of a pipe or terminal as they arrive, up to `size` lines at a time.

    If no line arrives for a while, yields the lines that have arrived, or an empty list, so that the caller can flush
    its results. At most a few chunks are read in advance. Raises ValueError in the same cases as `line_windows`, and
    OSError if `stream` cannot be read. `name` is the name of the stream in messages.
    """
    chunks: queue.Queue[bytes | OSError] = queue.Queue(maxsize=16)

    def read() -> None:
        try:
            while chunk := stream.read1(CHUNK):  # type: ignore[attr-defined]  # buffered streams have `read1`
                chunks.put(chunk)
            chunks.put(b"")
        except OSError as error:
            chunks.put(error)

    threading.Thread(target=read, daemon=True).start()
    lines: list[str] = []
    rest, decoder, checked = b"", LineDecoder(Path(name)), False
    while True:
        try:
            chunk = chunks.get(timeout=TIMEOUT)
        except queue.Empty:
            yield lines
            lines = []
            continue
        if isinstance(chunk, OSError):
            raise chunk
        if not checked:
            check_text(chunk[:HEAD], name)
            checked = True
        whole, newline, rest = (rest + chunk).rpartition(b"\n") if chunk else (rest, rest[:1] and b"\n", b"")
        if newline:
            lines += decoder.lines(whole + newline)
        while len(lines) >= size:
            yield lines[:size]
            lines = lines[size:]
        if not chunk:
            decoder.warn()
            yield lines
            return


def text_requests(
    paths: Sequence[Path], stream: BinaryIO | None, window: int,
    languages: tuple[str | None, str | None] | None = None, columns: ColumnNames | None = None,
) -> Iterator[list[Request]]:  # fmt: skip
    """Yields requests for the lines of `stream` (standard input). Without `stream`, reads the files in `paths`.

    With `languages`, the source side of a corpus file such as a .tmx is read. All other files are read as lines.
    `columns` are the columns of both sides in such corpus files. With `languages`, a warning is logged for a stream, a
    pipe or a compressed file that looks like a document.
    """

    def file_windows(path: Path) -> Iterator[list[str]]:
        if languages is not None and format_of(path) is not None:
            return windows_of_side(path, 0, languages, columns, window)
        windows = line_windows(path, window)
        # The command has checked plain files before it loaded the model. Pipes and compressed files are unchecked.
        unchecked = languages is not None and (not path.is_file() or path.suffix.lower() in COMPRESSIONS)
        return with_notice(windows, str(path)) if unchecked else windows

    if stream is None:
        windows: Iterable[list[str]] = chain.from_iterable(map(file_windows, paths))
    else:
        windows = lines_of_stream(stream, "standard input", window)
        windows = windows if languages is None else with_notice(windows, "standard input")
    for lines in windows:
        yield [Request(line) for line in lines]


def with_notice(windows: Iterable[list[str]], name: str) -> Iterator[list[str]]:
    """Yields windows of lines, and logs a warning if the first lines look like a document."""
    head: list[str] = []
    for lines in windows:
        if lines and len(head) < HEAD_LINES:
            head += lines[:HEAD_LINES]
            if (message := notice("\n".join(head)[:HEAD].encode(), name)) is not None:
                logger.warning("%s", message)
                head += [""] * HEAD_LINES
        yield lines


def segment_requests(segments: Sequence[str], window: int) -> Iterator[list[Request]]:
    """Yields requests for the segments of a document."""
    for start in range(0, len(segments), window):
        yield [Request(segment) for segment in segments[start : start + window]]


def dataset_requests(split: Split, window: int, with_references: bool) -> Iterator[list[Request]]:
    """Yields requests for the sentences of a subset of a dataset."""
    try:
        texts: Sequence[str] | None = split.source_lines()
    except ValueError:  # a dataset does not store the raw text of its training set
        texts = None
    references = split.references() if with_references else None
    for start in range(0, len(split), window):
        rows = range(start, min(start + window, len(split)))
        ids = [split.source.sentence(row) for row in rows]
        sources = [split.tokenizer.decode_source(row) for row in ids] if texts is None else texts[start : rows.stop]
        yield [
            Request(source, sentence, reference=None if references is None else references[row])
            for row, source, sentence in zip(rows, sources, ids, strict=True)
        ]


def with_fields(windows: Iterable[list[Request]], files: Mapping[str, Path]) -> Iterator[list[Request]]:
    """Adds fields to the requests. `files` maps a field to a file with one value per input line.

    Tabs separate the phrases of `required` and `avoided`. Raises ValueError, with the file and the number of lines, if
    a file is shorter or longer than the input.
    """
    streams = {name: chain.from_iterable(line_windows(path)) for name, path in files.items()}
    count = 0
    for window in windows:
        columns = {name: list(islice(stream, len(window))) for name, stream in streams.items()}
        for name, lines in columns.items():
            if len(lines) < len(window):
                raise ValueError(f"{files[name]} has {count + len(lines)} lines, fewer than the input")
        count += len(window)
        yield [
            dataclasses.replace(request, **{name: field_value(name, lines[row]) for name, lines in columns.items()})
            for row, request in enumerate(window)
        ]
    for name, stream in streams.items():
        if next(stream, None) is not None:
            raise ValueError(f"{files[name]} has more lines than the input, which has {count}")


def field_value(name: str, line: str) -> Any:
    """Returns the value of a field of a request from a line of a file: phrases, or the line itself."""
    return [phrase for phrase in line.split("\t") if phrase.strip()] if name in ("required", "avoided") else line


# --- translations -----------------------------------------------------------------------------------------------------


def output_line(translation: Translation, format: str, score_only: bool) -> bytes:
    """Returns the line that `generate` writes for a translation, in UTF-8, without the line end.

    `format` is "text" or "jsonl". A text line is the best translation, or with `score_only` the score of the best
    translation.
    """
    if format == "jsonl":
        line = json.dumps(as_object(translation), ensure_ascii=False, default=dataclasses.asdict)
    else:
        best = translation.hypotheses[0]
        line = f"{best.score:.6f}" if score_only else best.text
    return line.encode()


def as_object(translation: Translation) -> dict[str, Any]:
    """Returns a translation as an object for JSON: `id`, `source`, and `hypotheses` with the fields that have a value.

    With --pivot, `pivot` is the text in the pivot language. `direction` is set for a row of a dataset of several
    directions. For a line with tags, `untagged` is the text without the tags. Infinite scores become null, because JSON
    has no infinity.
    """
    hypotheses = [
        {name: finite(value) for name in JSONL_FIELDS if (value := getattr(hypothesis, name)) is not None}
        for hypothesis in translation.hypotheses
    ]
    facts = {"untagged": translation.untagged, "direction": translation.direction, "pivot": translation.pivot}
    known = {name: value for name, value in facts.items() if value is not None}
    return {"id": translation.id, "source": translation.source, **known, "hypotheses": hypotheses}


def finite(value: Any) -> Any:
    """Returns a value, or a list of values, with None for each number that is not finite."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Table(ExitStack):
    """A tab-separated file with a row of column names. The file appears when the `with` block has succeeded.

    Without `path`, nothing is written.
    """

    def __init__(self, path: Path | None, names: Sequence[str]) -> None:
        super().__init__()
        self.file: BinaryIO | None = None if path is None else self.enter_context(atomic_write(path))
        self.write(names)

    def write(self, row: Sequence[object]) -> None:
        if self.file is not None:
            self.file.write("\t".join(map(str, row)).encode() + b"\n")


class GlossaryReport(Table):
    """A report of glossary use. Each term of a source line has a row, with the target term in the translation."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, ("line", "result", "term", "targets", "found"))
        self.lines = self.lines_with_terms = self.hits = self.misses = 0

    def observe(self, translations: Iterable[Translation]) -> Iterator[Translation]:
        for translation in translations:
            terms = translation.hypotheses[0].terms or []
            for term in terms:
                result = "miss" if term.found is None else "hit"
                self.write((translation.id + 1, result, term.source, ALTERNATIVES.join(term.targets), term.found or ""))
            met = sum(term.found is not None for term in terms)
            self.hits, self.misses = self.hits + met, self.misses + len(terms) - met
            self.lines, self.lines_with_terms = self.lines + 1, self.lines_with_terms + bool(terms)
            yield translation

    @property
    def totals(self) -> str:
        return (
            f"glossary: {quantity(self.hits + self.misses, 'terms')} in {self.lines_with_terms:,} of "
            f"{quantity(self.lines, 'lines')}; "
            f"{self.hits:,} translated with a target term, {self.misses:,} without"
        )


class QualityReport(Table):
    """A table of quality estimates. Each line has a row about the best translation of the line."""

    def __init__(self, path: Path) -> None:
        names = ("line", "score", "flags", "mean_probability", "min_probability", "length_ratio", "copied")
        super().__init__(path, names)

    def observe(self, translations: Iterable[Translation]) -> Iterator[Translation]:
        for translation in translations:
            quality = translation.hypotheses[0].quality
            assert quality is not None
            numbers = (quality.mean_probability, quality.min_probability, quality.length_ratio, quality.copied)
            flags = ",".join(quality.flags)
            self.write((translation.id + 1, f"{quality.score:.4f}", flags, *(f"{number:.4f}" for number in numbers)))
            yield translation
