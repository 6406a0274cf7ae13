"""Reads the texts to score: lists of lines, of equal counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nmtkit.data import corpus
from nmtkit.data.binarized import Dataset


def lines_of(text: bytes, name: Path) -> list[str]:
    """Returns the lines of a text, which end at \\n only, without byte-order mark and carriage returns at their ends.

    Warns with the count of what was removed. Raises ValueError if the text is empty, and for bytes that are not UTF-8,
    naming `name` and the line.
    """
    if not text:
        raise ValueError(f"{name} is empty")
    decoder = corpus.LineDecoder(name)
    lines = decoder.lines(text)
    decoder.warn()
    return lines


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a file, perhaps compressed; raises as `lines_of`, and OSError if it cannot be read."""
    with corpus.open_bytes(path) as file:
        return lines_of(file.read(), path)


def check_equal_counts(texts: Mapping[str, list[str]]) -> None:
    """Raises ValueError naming the first text and the first that has another number of lines, with both counts."""
    (first, lines), *rest = texts.items()
    for name, other in rest:
        if len(other) != len(lines):
            raise ValueError(
                f"line counts differ: {first} has {len(lines)}, {name} has {len(other)}; "
                "line i of one must translate what line i of the other does"
            )


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to score, of equal line counts; systems by file name."""

    references: list[list[str]]
    systems: dict[str, list[str]]
    sources: list[str] | None
    target_lang: str | None


def read_texts(
    reference_paths: Sequence[Path],
    data: Path | None,
    subset: str,
    system_paths: Sequence[Path],
    source: Path | None,
    stream: BinaryIO | None,
) -> Texts:
    """Reads references, from files or a dataset's subset, systems, or one from `stream`, and perhaps a source.

    Raises ValueError and OSError naming the file.
    """
    if bool(reference_paths) == (data is not None):
        raise ValueError("give references either as --ref FILE or as --data FOLDER")
    systems: dict[str, list[str]] = {}
    for path in system_paths:
        if str(path) in systems:
            raise ValueError(f"--sys {path} is given twice")
        systems[str(path)] = read_lines(path)
    references = {str(path): read_lines(path) for path in reference_paths}
    sources = {str(source): read_lines(source)} if source else {}
    target_lang = None
    if data is not None:
        dataset = Dataset.open(data)
        split = dataset[subset]
        references[f"{data} ({subset})"] = split.references()
        sources = sources or {f"{data} ({subset}, source)": split.source_lines()}
        target_lang = dataset.target_lang
    if stream is not None:
        systems["standard input"] = lines_of(stream.read(), Path("standard input"))
    check_equal_counts({**systems, **references, **sources})
    return Texts(
        references=list(references.values()),
        systems=systems,
        sources=next(iter(sources.values()), None),
        target_lang=target_lang,
    )
