"""Documents: does another program read each translated file, with the same entries and the same structure?

    pip download --no-binary :all: --no-deps polib srt webvtt-py pysubs2 html5lib translate-toolkit==3.8.0
    pip install polib srt webvtt-py pysubs2 html5lib lxml translate-toolkit
    for archive in *.tar.gz; do tar xzf $archive && rm $archive; done
    python benchmarks/documents.py polib-* srt-* webvtt_py-* pysubs2-* html5lib-* translate-toolkit-*

The documents are the files in the folders, the pages of html5lib-tests (`*.dat`, `*.test`), and the documents in string
literals of Python files, which are the inputs of the tests of these programs. Each document goes through the pipeline
of `nmtkit generate`. Two deterministic translators stand in for a model: `letters` replaces each letter of the Latin
alphabet (ROT13); `reversed` also reverses the order of the words, and replaces existing translations in catalogues.
Both also return the alignment of words.

crashed   nmtkit raised an error other than a refusal.
refused   nmtkit refused the file with a message.
damaged   A peer, one of the programs below, cannot read the output, or reads different entries, times, identifiers,
          tags or attributes than in the original. A document is compared only if the peer can read the original.
altered   The output differs from the original although the translator returned its input (web pages and subtitles).

The peers are polib, translate-toolkit, srt, pysubs2, webvtt-py, html5lib and lxml, as far as they are installed, and
`msgfmt --check --use-fuzzy` of gettext. The exit status is 1 if a document crashed, was damaged or was altered.
"""

import argparse
import ast
import codecs
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmtkit.data.tokenizers.piece_spans import decoded_pieces, source_spans
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.text.alignment import words
from nmtkit.text.documents import Document, ReadOptions, format_of, read_document
from nmtkit.text.documents.recognition import notice
from nmtkit.text.documents.web import ATTRIBUTES
from nmtkit.translation.options import TextOptions
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request
from nmtkit.translation.steps import SegmentNode

LANGUAGE = "pl"  # the target language: several plural forms
FORMATS = ("html", "srt", "vtt", "po", "xliff")
SHORTEST = 20  # a string literal with fewer characters does not count as a document


@dataclass(frozen=True)
class Source:
    """A document of a folder. `name` is a path, followed by the line of a string literal or the number of a page."""

    name: str
    format: str
    data: bytes


# --- documents of folders ---------------------------------------------------------------------------------------------


def sources(folder: Path) -> Iterator[Source]:
    """Yields the documents of a folder, each text once."""
    seen: set[tuple[str, bytes]] = set()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        for source in sources_of_file(path, str(path.relative_to(folder.parent))):
            key = source.format, source.data
            if key not in seen:
                seen.add(key)
                yield source


def sources_of_file(path: Path, name: str) -> Iterator[Source]:
    format = format_of(path.name)
    if format is not None:
        yield Source(name, format, path.read_bytes())
    elif path.suffix == ".dat":  # tests of the construction of trees
        for number, part in enumerate(path.read_bytes().split(b"#data\n")[1:], 1):
            yield Source(f"{name}:{number}", "html", re.split(rb"\n#(?:errors|encoding)", part)[0])
    elif path.suffix == ".test":  # tests of the tokenizer
        for number, test in enumerate(json.loads(path.read_bytes()).get("tests", ()), 1):
            if isinstance(test["input"], str):
                yield Source(f"{name}:{number}", "html", test["input"].encode(errors="replace"))
    elif path.suffix == ".py":
        yield from literals(path, name)


def literals(path: Path, name: str) -> Iterator[Source]:
    """Yields the string literals of a Python file that are documents."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str | bytes):
            continue
        value = node.value
        if len(value) < SHORTEST:
            continue
        text = value.encode(errors="replace") if isinstance(value, str) else value
        format = recognized(text)
        if format is not None:
            yield Source(f"{name}:{node.lineno}", format, text)


def recognized(data: bytes) -> str | None:
    """Returns the format of a string literal, or None if nmtkit does not recognize the literal as a document."""
    message = notice(data, "literal") or ""
    return next((format for format in FORMATS if f"--input-format {format}" in message), None)


# --- translators ------------------------------------------------------------------------------------------------------


def tokenizer() -> Tokenizer:
    """Returns a tokenizer that knows the letters of the Latin alphabet, and spells all other characters in bytes."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [f"{letter}{other} {letter.upper()}{other}." for letter in letters for other in letters]
    return Tokenizer(train_model([*lines, "! ? , . : ; ( ) - 0 1 2 3 4 5 6 7 8 9"] * 2, 420))


def letters(text: str) -> tuple[str, list[int]]:
    """Returns the text after ROT13, and the position in the source of each of its characters."""
    return codecs.encode(text, "rot13"), list(range(len(text)))


def reversed_words(text: str) -> tuple[str, list[int]]:
    """Like `letters`, but the words are in the opposite order."""
    rotated, order = codecs.encode(text, "rot13"), [*reversed(words(text))]
    parts, positions = [], []
    for start, end in order:
        parts += [" "] if parts else []
        positions += [start] * (len(parts) > 1) + list(range(start, end))
        parts.append(rotated[start:end])
    return "".join(parts), positions


TRANSLATORS: dict[str, Callable[[str], tuple[str, list[int]]]] = {"letters": letters, "reversed": reversed_words}


class Substitution:
    """Translates documents with the pipeline of nmtkit and a translator that stands in for a model."""

    def __init__(self, vocabulary: Tokenizer, translate: Callable[[str], tuple[str, list[int]]]) -> None:
        self.tokenizer, self.translate = vocabulary, translate
        self.pipelines = {
            protects: Pipeline(vocabulary, SearchOptions(), TextOptions(markup="html", protect_spans=protects))
            for protects in (False, True)
        }

    def translations(self, document: Document) -> list[str]:
        pipeline = self.pipelines[document.protects]
        lines = pipeline.segments([Request(segment) for segment in document.segments])
        for line in lines:
            for leaf in line.leaves():
                leaf.hypotheses = [self.hypothesis(leaf)]
        return [pipeline.translation(line).text for line in lines]

    def hypothesis(self, leaf: SegmentNode) -> Hypothesis:
        """Returns the translation of a leaf. Each target piece attends only to the source piece that it replaces."""
        ids, text = leaf.input.ids, leaf.segment.text
        target, positions = self.translate(text)
        tokens = self.tokenizer.encode_target([target]).ids[:-1].tolist()
        spans = source_spans(self.tokenizer.source, leaf.segment.ids or (), text)
        pieces = {position: index for index, span in enumerate(spans) for position in range(*span)}
        attention = []
        for start, end in decoded_pieces(self.tokenizer.target, self.tokenizer.target_pieces(tokens))[1]:
            first = start + (target[start:end].startswith(" ") and start + 1 < end)  # skips a space at the start
            position = positions[min(first, len(positions) - 1)] if positions else 0
            row = [0.0] * len(ids)
            row[pieces.get(position, 0)] = 1.0
            attention.append(row)
        return Hypothesis(tokens, 0.0, 0.0, attention)


# --- peers ------------------------------------------------------------------------------------------------------------

Entries = list[Any]
Reader = Callable[[bytes], Entries]


def polib_entries(data: bytes) -> Entries:
    import polib

    catalogue = polib.pofile(text_of_catalogue(data))
    # if the file has no header, polib takes the comments of the first entry for the header
    headers = [catalogue.header, *[""] * len(catalogue)]
    return [
        (entry.msgctxt, entry.msgid, entry.msgid_plural, entry.obsolete, entry.occurrences, entry.comment,
         f"{header.strip()}\n{entry.tcomment}".strip(), sorted({*entry.flags} - {"fuzzy"}), entry.previous_msgid)
        for header, entry in zip(headers, catalogue, strict=False)
    ]  # fmt: skip


def text_of_catalogue(data: bytes) -> str:
    declared = data.partition(b"charset=")[2].split(b"\\")[0].decode("ascii", errors="replace")
    try:
        return data.decode(declared)
    except (LookupError, UnicodeDecodeError):
        return data.decode()


def toolkit_units(module: str, name: str) -> Reader:
    def read(data: bytes) -> Entries:
        store = getattr(importlib.import_module(f"translate.storage.{module}"), name).parsestring(data)
        return [(unit.getid(), str(unit.source)) for unit in store.units if str(unit.source)]

    return read


def msgfmt(data: bytes) -> Entries:
    command = ["msgfmt", "--check", "--use-fuzzy", "-o", os.devnull, "-"]
    result = subprocess.run(command, input=data, capture_output=True)
    if result.returncode:
        raise ValueError(result.stderr.decode(errors="replace"))
    return []


def srt_cues(data: bytes) -> Entries:
    import srt

    return [(cue.index, cue.start, cue.end, cue.proprietary) for cue in srt.parse(data.decode("utf-8-sig"))]


def pysubs2_events(format: str) -> Reader:
    def read(data: bytes) -> Entries:
        import pysubs2

        events = pysubs2.SSAFile.from_string(data.decode("utf-8-sig"), format_=format).events
        return [(event.start, event.end) for event in events]

    return read


def webvtt_captions(data: bytes) -> Entries:
    from webvtt import WebVTT

    return [(caption.start, caption.end, caption.identifier, caption.voice)
            for caption in WebVTT.from_string(data.decode("utf-8-sig")).captions]  # fmt: skip


# attributes whose values are translated, or are the language of the page
SHOWN = ATTRIBUTES | {"label", "value", "content", "lang", "xml:lang", "dir"}


def html5lib_tags(data: bytes) -> Entries:
    """Returns the tags in order, not as a tree: if tags are badly nested, the tree depends on the words around them."""
    import html5lib
    from html5lib.constants import tagTokenTypes

    entries = []

    class Parser(html5lib.HTMLParser):
        def normalizedTokens(self) -> Iterator[Any]:  # noqa: N802  # a name of html5lib
            for token in super().normalizedTokens():
                if token["type"] in tagTokenTypes:
                    entries.append((token["type"], skeleton(token["name"], token["data"])))
                yield token

    Parser(namespaceHTMLElements=False).parse(data)
    return entries


def lxml_elements(data: bytes) -> Entries:
    from lxml import html

    elements = [node for node in html.document_fromstring(data).iter() if isinstance(node.tag, str)]
    return sorted(skeleton(node.tag, node.attrib) for node in elements)


def skeleton(tag: str, attributes: Any) -> tuple[str, list[str]]:
    names = {name: value for name, value in attributes.items() if name.lower() not in SHOWN}
    return tag, sorted(map(str, names.items()))


def xliff_sources(data: bytes) -> Entries:
    from lxml import etree

    root = etree.fromstring(data)
    return [
        (node.tag, etree.tostring(node, with_tail=False), node.getparent().get("id"))
        for node in root.iter() if isinstance(node.tag, str) and etree.QName(node).localname == "source"
    ]  # fmt: skip


READERS: dict[str, list[tuple[str, str, Reader]]] = {  # format -> name, module, reader of each peer
    "po": [
        ("polib", "polib", polib_entries),
        ("translate-toolkit", "translate.storage.pypo", toolkit_units("pypo", "pofile")),
        ("msgfmt", "", msgfmt),
    ],
    "srt": [("srt", "srt", srt_cues), ("pysubs2", "pysubs2", pysubs2_events("srt"))],
    "vtt": [("webvtt-py", "webvtt", webvtt_captions), ("pysubs2", "pysubs2", pysubs2_events("vtt"))],
    "html": [("html5lib", "html5lib", html5lib_tags), ("lxml", "lxml", lxml_elements)],
    "xliff": [
        ("lxml", "lxml", xliff_sources),
        ("translate-toolkit", "translate.storage.xliff", toolkit_units("xliff", "xlifffile")),
    ],
}


def installed(name: str, module: str) -> bool:
    if not module:
        return shutil.which(name) is not None
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


# --- the judgement ----------------------------------------------------------------------------------------------------


def entries_of(reader: Reader, data: bytes) -> Entries | None:
    """Returns the entries that a peer reads, or None if the peer fails."""
    try:
        return reader(data)
    except Exception:  # every peer has its own errors
        return None


def judge(source: Source, output: bytes, moved: bool, counts: Counter[str]) -> Iterator[str]:
    """Yields the name of each peer that reads the output and the original differently, with the difference.

    `moved` means that the translator has changed the order of words.
    """
    for name, module, reader in READERS[source.format]:
        if not installed(name, module):
            continue
        before = entries_of(reader, source.data)
        if before is None:
            continue
        counts[f"read by {name}"] += 1
        after = entries_of(reader, output)
        if source.format == "html" and moved and after is not None:
            before, after = sorted(before), sorted(after)  # inline elements move with their words
        if before != after:
            different = next((pair for pair in zip(before, after or [], strict=False) if pair[0] != pair[1]), None)
            yield f"{name}: {different or 'a different number of entries, or no entries'}"[:300]


def run(folders: Sequence[Path], report: Callable[[str], None]) -> dict[str, Counter[str]]:
    """Translates all documents. Returns the counts of each format, and reports each failure."""
    vocabulary = tokenizer()
    translators = {name: Substitution(vocabulary, translate) for name, translate in TRANSLATORS.items()}
    totals = {format: Counter[str]() for format in FORMATS}
    for source in (source for folder in folders for source in sources(folder)):
        counts = totals[source.format]
        counts["documents"] += 1
        failures = set()
        try:
            document = read_document(source.data, source.format, source.name, ReadOptions(LANGUAGE))
        except ValueError:
            counts["refused"] += 1
            continue
        except Exception:
            counts["crashed"] += 1
            report(f"crashed   {source.name}\n{traceback.format_exc(limit=-3)}")
            continue
        counts["segments"] += len(document.segments)
        # one of the translators also replaces the translations of catalogues
        again = read_document(source.data, source.format, source.name, ReadOptions(LANGUAGE, overwrite=True))
        plain = read_document(source.data, source.format, source.name, ReadOptions())
        if source.format not in ("po", "xliff") and plain.encoded(plain.render(plain.segments)) != source.data:
            failures.add("altered")
            report(f"altered   {source.name}")
        for name, translator in translators.items():
            document = again if name == "reversed" else document
            try:
                output = document.encoded(document.render(translator.translations(document)))
            except Exception:
                failures.add("crashed")
                report(f"crashed   {source.name} ({name})\n{traceback.format_exc(limit=-3)}")
                continue
            for difference in judge(source, output, name == "reversed", counts):
                failures.add("damaged")
                report(f"damaged   {source.name} ({name}) {difference}")
        counts.update(failures)
    return totals


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    arguments = flags.parse_args()
    logging.disable(logging.WARNING)
    missing = [name for each in READERS.values() for name, module, _ in each if not installed(name, module)]
    if missing:
        print(f"not installed: {', '.join(sorted({*missing}))}", file=sys.stderr)
    totals = run(arguments.folders, lambda line: print(line, file=sys.stderr, flush=True))
    columns = ["documents", "refused", "segments", "crashed", "altered", "damaged"]
    print(f"| format | {' | '.join(columns)} | outputs read by |\n|---|{'---:|' * len(columns)}---|")
    for format, counts in totals.items():
        peers = ", ".join(
            f"{name[8:]} {count:,}" for name, count in sorted(counts.items()) if name.startswith("read by")
        )
        print(f"| {format} | {' | '.join(f'{counts[column]:,}' for column in columns)} | {peers} |")
    sys.exit(any(counts["crashed"] or counts["altered"] or counts["damaged"] for counts in totals.values()))


if __name__ == "__main__":
    main()
