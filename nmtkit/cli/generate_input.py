"""Opens the input of `nmtkit generate`: a document, the lines of files, or a dataset. Warns of unsuitable lines."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nmtkit.cli import imports
from nmtkit.cli.command import standard_input, stderr
from nmtkit.cli.generate_config import GenerateConfig
from nmtkit.data.corpora.corpus import format_of as corpus_format
from nmtkit.text.documents import Document, ReadOptions, check_text, notice, read_document
from nmtkit.text.documents.recognition import COMPRESSIONS, HEAD
from nmtkit.text.sentences import has_several
from nmtkit.translation.search.options import SearchOptions

if TYPE_CHECKING:
    from nmtkit.data.dataset.binarized import Dataset
    from nmtkit.translation.search.types import Request
    from nmtkit.translation.translator import Translator

logger = logging.getLogger("nmtkit")

# A larger share of lines with several sentences causes a warning. Test sets of WMT have a smaller share.
MANY_LINES = 0.2


def open_document(
    format: str, files: Sequence[Path], config: GenerateConfig, checkpoint: Path, language: str | None
) -> Document:
    """Reads the document. Prints its format unless --input-format gives the format. Raises OSError or ValueError."""
    name = str(files[0]) if files else "standard input"
    if config.input_format is None and not click.get_current_context().meta.get("quiet"):
        message = f"{name} is read as {format}; to translate its lines, add --input-format text"
        stderr.print(message, style="dim", markup=False, soft_wrap=True)
    data = files[0].read_bytes() if files else standard_input().read()
    if language is None:
        with imports():
            from nmtkit.models.building import languages_of
        languages = languages_of(checkpoint)
        language = None if languages is None else languages[1]
    return read_document(data, format, name, ReadOptions(language, config.overwrite_translations))


def languages_of_input(search: SearchOptions, checkpoint: Path) -> tuple[str | None, str | None]:
    """Returns the languages of a corpus to translate: from the flags, otherwise from the checkpoint."""
    from nmtkit.models.building import languages_of

    source, target = languages_of(checkpoint) or (None, None)
    return search.source_lang or source, search.target_lang or target


def check_lines(files: Sequence[Path], config: GenerateConfig) -> None:
    """Raises ValueError for a file that is not text, and if --columns does nothing.

    Without --input-format, warns of files that look like documents.
    """
    format = config.input_format
    for path in files:
        if config.both_columns is not None and corpus_format(path) is None:
            raise ValueError(f"--columns does nothing for {path}, which is not .tsv, .jsonl or .parquet")
        if not path.is_file():  # a pipe cannot be read twice
            continue
        if format is None and corpus_format(path) is not None:  # a corpus is not plain text
            continue
        with path.open("rb") as file:
            head = file.read(HEAD)
        if path.suffix.lower() not in COMPRESSIONS:
            check_text(head, str(path))
        if format is None and (message := notice(head, str(path))) is not None:
            logger.warning("%s", message)


def warn_of_several_sentences(count: int, total: int, unit: str) -> None:
    """Warns if `count` of the lines or segments look like several sentences."""
    if count:
        logger.warning(
            "%s of %s %s look like several sentences. A model that was trained on single sentences may omit sentences; "
            "add --split-sentences with the language of the source, such as en", f"{count:,}", f"{total:,}", unit,
        )  # fmt: skip


def noticing_sentences(windows: Iterable[list["Request"]]) -> Iterator[list["Request"]]:
    """Yields the windows of requests. At the end, warns if many lines look like several sentences."""
    count = total = 0
    for window in windows:
        total += len(window)
        count += sum(has_several(request.source) for request in window)
        yield window
    if count >= MANY_LINES * total:
        warn_of_several_sentences(count, total, "lines")


def open_dataset(folder: Path, translator: "Translator", checkpoint: Path) -> "Dataset":
    """Opens a dataset. Raises ValueError if its tokenizer is not the tokenizer of the checkpoint."""
    from nmtkit.data.dataset.binarized import Dataset

    dataset = Dataset.open(folder)
    if dataset.tokenizer.fingerprint != translator.tokenizer.fingerprint:
        raise ValueError(
            f"{folder} and {checkpoint} have different tokenizers; give the dataset of the training, or raw text with "
            "--input"
        )
    return dataset
