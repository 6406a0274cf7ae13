"""Catalogues of gettext: PO files, and their templates (POT).

polib wraps every entry again, and loses blank lines, the order of comments and unknown lines. This module only fills
the msgstr of untranslated entries and flags them as fuzzy; no other line changes.

- Translated, partly translated and fuzzy entries do not change unless `overwrite` is on. Obsolete entries never change.
- The line Plural-Forms of the header gives the number of plural forms. If the line is missing, the rule of the target
  language is added. `Plurals.is_singular` decides which form translates msgid; all other forms translate msgid_plural.
- If a translation changes the order of the placeholders of a printf format, the placeholders are numbered, as in
  %2$d %1$s. In formats without numbered placeholders, such as python-format, the entry stays untranslated.
- Consecutive lines of a text that hold one sentence are translated together and wrapped again.
"""

import html
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from nmtkit.text.documents.encoding import Encoding
from nmtkit.text.documents.inline import Inline, Piece, is_markup, split_markup, translatable
from nmtkit.text.documents.interface import Document, ReadOptions, line_of, line_spans, newline_of
from nmtkit.text.documents.lines import TextPart, continues, edits_of, sentence_ranges
from nmtkit.text.documents.placeholders import in_order, placeholders
from nmtkit.text.documents.plural_forms import Plurals, plural_rule
from nmtkit.text.edits import Replacement, spliced
from nmtkit.text.markup import unescape_entities
from nmtkit.text.patterns import is_message

WIDTH = 80  # maximum width of a line of the file, the same as in the programs of gettext

_CHARSET = re.compile(rb"charset=([\w:.-]+)")
_LANGUAGE = re.compile(r"^Language:[ \t]*(\w+)", re.MULTILINE)
_EMPTY_LANGUAGE = re.compile(r'(?<!-)Language:[ \t]*(?=\\n|")')
# A header field of Poedit. The pattern does not match the value "C", which is not a language code.
_SOURCE_LANGUAGE = re.compile(r"^X-Source-Language:[ \t]*(\w{2,})", re.MULTILINE)
_KEYWORD = re.compile(r"[ \t]*+(msgctxt|msgid_plural|msgid|msgstr)(?:[ \t]*+\[[ \t]*+(\d+)[ \t]*+\])?[ \t]*+(?=\")")
_STRING = re.compile(r"\"((?>[^\"\\\r\n]++|\\[^\r\n])*+)\"")
_STRINGS = re.compile(r"[ \t]*+((?:\"(?>[^\"\\\r\n]++|\\[^\r\n])*+\"[ \t]*+)++)(?:#[^\r\n]*+)?")
_BYTE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2}))")
_ESCAPE = re.compile(r"((?:\\(?:[0-7]{1,3}|x[0-9a-fA-F]{1,2}))+)|\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_FORMAT = re.compile(r"(?<![\w-])(?!(?:no|possible|impossible)-)([\w+]+(?:-\w+)?)-format\b")

logger = logging.getLogger("nmtkit")


@dataclass
class Message:
    """A string of an entry: its text, and its position from the keyword to the end of the last line."""

    start: int
    end: int
    text: str
    lines: int  # length in lines of the file


@dataclass
class CatalogueEntry:
    """An entry: the position of its first keyword, its strings, and the positions of its lines of flags."""

    start: int
    messages: dict[str, Message] = field(default_factory=dict)  # keyword, such as msgstr[0] -> string
    flags: list[tuple[int, int]] = field(default_factory=list)

    @property
    def forms(self) -> dict[str, Message]:
        """The translations in the order of their index, which may differ from their order in the file."""
        names = (name for name in self.messages if name.startswith("msgstr"))
        return {name: self.messages[name] for name in sorted(names, key=lambda name: (len(name), name))}

    @property
    def translated(self) -> bool:
        """Whether the entry has a translation. A fuzzy translation or one translated plural form is enough."""
        return any(form.text for form in self.forms.values())


def unescaped(text: str, codec: str = "utf-8") -> str:
    """Returns a string without escapes. Octal and hexadecimal escapes are bytes of the file's encoding."""

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return _ESCAPES.get(match[2], match[2])
        escapes = _BYTE.findall(match[1])
        values = [int(octal, 8) & 0xFF if octal else int(hexadecimal, 16) for octal, hexadecimal in escapes]
        return bytes(values).decode("utf-8" if codec.startswith("utf") else codec, errors="replace")

    return _ESCAPE.sub(replace, text)


def escaped(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    for char, sign in _ESCAPES.items():
        text = text.replace(sign, "\\" + char)
    return text


def entries_of(text: str, codec: str = "utf-8") -> Iterator[CatalogueEntry]:
    """Yields the entries of a catalogue that are not obsolete.

    Raises ValueError, with the number of the line, for an invalid line or entry.
    """
    entry: CatalogueEntry | None = None
    flags: list[tuple[int, int]] = []
    message: Message | None = None
    for start, end in line_spans(text):
        line = text[start:end].strip(" \t\f\v")
        keyword = _KEYWORD.match(text, start, end)
        if not line or line.startswith("#"):
            message = None
            if line.startswith("#,"):
                flags.append((start, end))
            if not line or line.startswith("#~"):  # the flags above an obsolete entry belong to that entry
                flags = []
            continue
        strings = _STRINGS.fullmatch(text, keyword.end() if keyword else start, end)
        if strings is None:
            raise ValueError(
                f"line {line_of(text, start)}: {line[:60]!r} is neither a comment nor a keyword with a string "
                'such as msgid "File"'
            )
        content = "".join(_STRING.findall(strings[1]))
        end = strings.start(1) + len(strings[1].rstrip(" \t"))  # without a comment after the string
        if keyword is None:
            if message is None:
                raise ValueError(f"line {line_of(text, start)}: a string must follow a keyword such as msgid or msgstr")
            message.text += unescaped(content, codec)
            message.end, message.lines = end, message.lines + 1
            continue
        name = keyword[1] if keyword[2] is None else f"{keyword[1]}[{int(keyword[2][:9])}]"
        if entry is None or name == "msgctxt" or (name == "msgid" and "msgid" in entry.messages):
            if entry is not None:
                yield checked(entry, text)
            entry, flags = CatalogueEntry(start, flags=flags), []
        if name in entry.messages or (not name.startswith("msgstr") and entry.forms):
            raise ValueError(f"line {line_of(text, start)}: an entry has a second {name}, or {name} after msgstr")
        indent = len(text[start:end]) - len(text[start:end].lstrip(" \t"))
        message = entry.messages[name] = Message(start + indent, end, unescaped(content, codec), 1)
    if entry is not None:
        yield checked(entry, text)


def checked(entry: CatalogueEntry, text: str) -> CatalogueEntry:
    missing = [name for name in ("msgid", "msgstr") if not any(key.startswith(name) for key in entry.messages)]
    if missing or "msgid" not in entry.messages:
        raise ValueError(f"line {line_of(text, entry.start)}: the entry has no {(*missing, 'msgid')[0]}")
    if ("msgid_plural" in entry.messages) == ("msgstr" in entry.messages):
        line = line_of(text, entry.start)
        raise ValueError(f"line {line}: an entry must have either msgstr, or msgid_plural and msgstr[0]")
    return entry


def parts_of(text: str) -> Iterator[TextPart]:
    """Yields the parts of a text that are translated.

    A message of ICU with branches, such as {n, plural, one {# file} other {# files}}, is one part, tags included.
    """
    lines = text.split("\n")
    if is_message(text):
        yield TextPart(0, len(text), Inline([Piece("text", text, text)]), str, len(lines), max(map(len, lines)))
        return
    read, write = (unescape_entities, lambda text: html.escape(text, quote=False)) if is_markup(text) else (str, str)
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    for first, last in sentence_ranges(lines, lambda line, after: continues(line, after) and after[0].isalpha()):
        pieces: list[Piece] = []
        for line, start in zip(lines[first:last], starts[first:last], strict=True):
            if pieces:
                pieces.append(Piece("text", " ", "\n", start=start - 1, end=start))
            for role, begin, stop, name in split_markup(line):
                raw = line[begin:stop]
                words = read(raw) if role == "text" else ""
                pieces.append(Piece(role, words, raw, name, role == "alone", start + begin, start + stop))
        if kept := translatable(pieces):
            begin = kept[0].end - len(kept[0].raw.lstrip())
            stop = kept[-1].start + len(kept[-1].raw.rstrip())
            width = max(map(len, lines[first:last]))
            yield TextPart(begin, stop, Inline(kept), write, text.count("\n", begin, stop) + 1, width)


class Catalogue(Document):
    """A PO file."""

    protects = True

    @classmethod
    def declared_encoding(cls, data: bytes) -> str | None:
        declared = _CHARSET.search(data)
        return declared[1].decode() if declared and declared[1] != b"CHARSET" else None

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        super().__init__(text, encoding, options)
        self.newline = newline_of(text)
        self.all_entries = entries = list(entries_of(text, encoding.codec))
        self.header = next(
            (entry for entry in entries if entry.messages["msgid"].text == "" and "msgctxt" not in entry.messages), None
        )
        self.entries = []
        self.parts: list[dict[str, list[TextPart]]] = []  # for each entry: the parts of its msgid and msgid_plural
        for entry in entries:
            if entry is self.header or (entry.translated and not options.overwrite):
                continue
            sources = {name: message for name, message in entry.messages.items() if name in ("msgid", "msgid_plural")}
            parts = {name: list(parts_of(message.text)) for name, message in sources.items()}
            if any(parts.values()):
                self.entries.append(entry)
                self.parts.append(parts)
        header = "".join(form.text for form in self.header.forms.values()) if self.header else ""
        if self.entries:
            named = (pattern.search(header) for pattern in (_SOURCE_LANGUAGE, _LANGUAGE))
            self.warn_of_languages(*(match[1] if match else None for match in named))
        self.plurals = Plurals(header)
        has_plurals = any("msgid_plural" in parts for parts in self.parts)
        # in a template, the header has the text nplurals=INTEGER instead of a number
        self.lacks_rule = self.plurals.count is None and (has_plurals or "Plural-Forms:" in header)
        if self.lacks_rule:
            self.plurals = Plurals(f"Plural-Forms: {plural_rule(options.target_language)}")
        self.segments = [part.inline.markup for parts in self.parts for each in parts.values() for part in each]

    def is_fuzzy(self, entry: CatalogueEntry) -> bool:
        return any("fuzzy" in re.split(r"[,\s]+", self.text[slice(*line)]) for line in entry.flags)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields source and translation of each entry that is not fuzzy. Plural entries yield up to two pairs."""
        for entry in self.all_entries:
            if entry is self.header or not entry.translated or self.is_fuzzy(entry):
                continue
            forms = [form.text for form in entry.forms.values()]
            if forms[0]:
                yield entry.messages["msgid"].text, forms[0]
            if "msgid_plural" in entry.messages and len(forms) > 1 and forms[-1]:
                yield entry.messages["msgid_plural"].text, forms[-1]

    def edits(self, translations: Sequence[str]) -> list[Replacement]:
        edits = self.header_edits()
        following = iter(translations)
        untranslated = 0
        for entry, parts in zip(self.entries, self.parts, strict=True):
            texts: dict[str, str | None] = {}
            formats = {format for line in entry.flags for format in _FORMAT.findall(self.text[slice(*line)])}
            for name, each in parts.items():
                source = entry.messages[name].text
                texts[name] = in_order(source, spliced(source, edits_of(each, following)), formats)
            complete = {name: text for name, text in texts.items() if text is not None}
            if len(complete) < len(texts):
                untranslated += 1
                continue
            edits += self.form_edits(entry, complete, formats)
            edits += self.fuzzy_edit(entry)
        if untranslated:
            self.options.warn(
                f"untranslated entries: {untranslated}; their translations lack or add placeholders, or change the "
                "order of unnamed placeholders in a format that cannot number them, such as python-format"
            )
        return edits

    def header_edits(self) -> list[Replacement]:
        """Returns the edit that adds a missing plural rule to the header and fills in an empty language, if needed.

        A file without a header gets a header with the rule.
        """
        rule = f"Plural-Forms: {plural_rule(self.options.target_language)}"
        if self.header is None:
            if not self.lacks_rule:
                return []
            lines = ['msgid ""', 'msgstr ""', '"Content-Type: text/plain; charset=UTF-8\\n"', f'"{rule}\\n"', "", ""]
            return [(0, 0, self.newline.join(lines))]
        message = next(iter(self.header.forms.values()))
        raw = new = self.text[message.start : message.end]
        if self.lacks_rule and "Plural-Forms:" in raw:
            new = re.sub(r"Plural-Forms:[^\"\\]*+", lambda match: rule, raw, count=1)
        elif self.lacks_rule:
            line_end = "" if message.text.endswith("\n") or not message.text else "\\n"
            new = f'{raw[:-1]}{line_end}"{self.newline}"{rule}\\n"'
        if self.entries and self.options.target_language:
            language = self.options.target_language.replace("-", "_")
            new = _EMPTY_LANGUAGE.sub(f"Language: {language}", new, count=1)
        return [(message.start, message.end, new)] if new != raw else []

    def form_edits(self, entry: CatalogueEntry, texts: dict[str, str], formats: set[str]) -> Iterator[Replacement]:
        source = entry.messages["msgid"]
        forms = entry.forms
        if "msgstr" in forms:
            message = forms["msgstr"]
            yield message.start, message.end, self.message("msgstr", texts["msgid"], source)
            return
        singular, plural = (sorted(placeholders(entry.messages[name].text, formats)) for name in texts)
        lines = []
        for form in range(self.plurals.count or len(forms)):
            name = "msgid" if self.plurals.is_singular(form, singular == plural) else "msgid_plural"
            lines.append(self.message(f"msgstr[{form}]", texts[name], entry.messages[name]))
        spans = [(message.start, message.end) for message in forms.values()]
        yield min(spans)[0], max(spans)[1], self.newline.join(lines)

    def message(self, keyword: str, text: str, source: Message) -> str:
        """Returns a keyword and its string. Wraps the string like gettext, unless the source is one long line."""
        lines = [escaped(line) for line in re.findall(r"[^\n]*\n|[^\n]+", text)] or [""]
        wraps = not (source.lines == 1 and len(escaped(source.text)) > WIDTH)
        if len(lines) == 1 and (not wraps or len(f'{keyword} "{lines[0]}"') <= WIDTH):
            return f'{keyword} "{lines[0]}"'
        if wraps:
            lines = [part for line in lines for part in _folded(line)]
        return self.newline.join([f'{keyword} ""', *(f'"{line}"' for line in lines)])

    def fuzzy_edit(self, entry: CatalogueEntry) -> list[Replacement]:
        """Returns the edit that marks an entry as fuzzy, so that a person checks the translation."""
        if not entry.flags:
            line_start = self.text.rfind("\n", 0, entry.start) + 1
            before = _previous_comments(self.text, line_start)
            return [(before, before, f"#, fuzzy{self.newline}")]
        start, end = entry.flags[0]
        after_sign = self.text.index("#,", start) + len("#,")
        comma = "," if self.text[after_sign:end].strip() else ""
        return [] if self.is_fuzzy(entry) else [(after_sign, after_sign, f" fuzzy{comma}")]

    def encoded(self, text: str) -> bytes:
        """Returns the file in its encoding, or in UTF-8 with a changed header if the encoding lacks a character."""
        if "charset=CHARSET" in self.text:
            text = text.replace("charset=CHARSET", "charset=UTF-8", 1)
        try:
            return self.encoding.encode(text)
        except UnicodeEncodeError:
            return re.sub(r"charset=[\w:.-]+", "charset=UTF-8", text, count=1).encode()


def _folded(line: str) -> Iterator[str]:
    """Yields parts of an escaped line that fit into the width. Each part ends after a space."""
    part = ""
    for word in re.findall(r"\S*\s*", line):
        if part and len(part) + len(word.rstrip()) > WIDTH - 3:
            yield part
            part = ""
        part += word
    yield part


def _previous_comments(text: str, position: int) -> int:
    """Returns the start of the comments `#| msgid …` that end at `position`, or `position` if there are none."""
    while position:
        start = text.rfind("\n", 0, position - 1) + 1
        if not text.startswith("#|", start):
            break
        position = start
    return position
