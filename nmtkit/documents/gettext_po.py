"""Catalogues of gettext: PO files, and the templates they are made from (POT).

Read here and not by polib (MIT): that wraps every entry anew, and loses blank lines, the order of comments and what it
does not know. Here an entry that is not translated gets its msgstr and the flag fuzzy, and no other line changes.

- Entries translated already, in part or fuzzily, stay, unless `overwrite` is on; obsolete ones and the header always.
- Plural forms are as many as the header says by Plural-Forms. A form that is for the number 1 alone is the
  translation of msgid, all others that of msgid_plural; where a form is for 1 and others too (21 in Russian), the
  former only if it has the placeholders of the latter.
- Where a translation has the conversions of a c-format in another order, they get their numbers, as in %2$d %1$s.
- Of a text of several lines, those in which a sentence goes on are translated together and wrapped again.
"""

import gettext
import html
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nmtkit.documents.encoding import Encoding, decode
from nmtkit.documents.inline import MAX_CODES, Inline, Piece, has_words, trimmed
from nmtkit.documents.interface import Document, Edit, ReadOptions, line_of, lines_of, newline_of
from nmtkit.documents.lines import goes_on, words_of, wrapped

WIDTH = 80  # columns of the file's lines, as gettext's programs wrap them
MOST_FORMS = 10  # of a plural; Arabic has 6

_CHARSET = re.compile(rb"charset=([\w:.-]+)")
_KEYWORD = re.compile(r"[ \t]*(msgctxt|msgid_plural|msgid|msgstr)(?:\[(\d+)\])?[ \t]*(?=\")")
_STRING = re.compile(r"[ \t]*\"((?>[^\"\\\r\n]++|\\[^\r\n])*+)\"[ \t]*")
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_CODE = re.compile(r"</?[A-Za-z](?>[^<>=]++|=\s*+(?>\"[^\"]*+\"|'[^']*+'|))*+>")
_CONVERSION = re.compile(r"%%|%[-+ #0']*\d*(?:\.\d+)?(?:hh?|ll?|[jztL])?[diouxXeEfFgGaAcsp]")
_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|\w+);")
_PLACEHOLDER = re.compile(r"%(?:\(\w+\)|\d+\$)?[-+ #0]*(?:\d+|\*)?(?:\.\d+)?[a-zA-Z]|%\d|\{[^{}]*\}")


@dataclass
class Message:
    """A string of an entry: its place, from the keyword to the end of its last line, and what it says."""

    start: int
    end: int
    text: str
    lines: int  # of the file


@dataclass
class Entry:
    """An entry; `start` is where its first keyword stands, and `flags` the place of its line of flags."""

    start: int
    messages: dict[str, Message] = field(default_factory=dict)  # by keyword, as msgstr[0]
    flags: tuple[int, int] | None = None

    @property
    def forms(self) -> dict[str, Message]:
        return {name: message for name, message in self.messages.items() if name.startswith("msgstr")}


def unescaped(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        octal, hexadecimal, char = match.groups()
        if char is not None:
            return _ESCAPES.get(char, char)
        return chr(int(octal, 8) if octal is not None else int(hexadecimal, 16))

    return _ESCAPE.sub(replace, text)


def escaped(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    for char, sign in _ESCAPES.items():
        text = text.replace(sign, "\\" + char)
    return text


def entries_of(text: str) -> Iterator[Entry]:
    """Yields the entries of a catalogue, but not those that are obsolete. Raises ValueError, naming the line."""
    entry: Entry | None = None
    flags: tuple[int, int] | None = None
    message: Message | None = None
    for start, end in lines_of(text):
        line = text[start:end].strip(" \t\f\v")
        keyword = _KEYWORD.match(text, start, end)
        if not line or line.startswith("#"):
            message = None
            if line.startswith("#,"):
                flags = start, end
            if not line:
                flags = None
            continue
        string = _STRING.fullmatch(text, keyword.end() if keyword else start, end)
        if string is None:
            raise ValueError(
                f"line {line_of(text, start)}: {line[:60]!r} is neither a comment nor a keyword with a string, as "
                'msgid "File"'
            )
        if keyword is None:
            if message is None:
                raise ValueError(f"line {line_of(text, start)}: a string without msgid or msgstr before it")
            message.text += unescaped(string[1])
            message.end, message.lines = end, message.lines + 1
            continue
        name = keyword[1] if keyword[2] is None else f"{keyword[1]}[{int(keyword[2][:9])}]"
        if entry is None or name == "msgctxt" or (name == "msgid" and "msgid" in entry.messages):
            if entry is not None:
                yield checked(entry, text)
            entry, flags = Entry(start, flags=flags), None
        if name in entry.messages or (not name.startswith("msgstr") and entry.forms):
            raise ValueError(f"line {line_of(text, start)}: a second {name} in an entry, or one after msgstr")
        indent = len(text[start:end]) - len(text[start:end].lstrip(" \t"))
        message = entry.messages[name] = Message(start + indent, end, unescaped(string[1]), 1)
    if entry is not None:
        yield checked(entry, text)


def checked(entry: Entry, text: str) -> Entry:
    missing = [name for name in ("msgid", "msgstr") if not any(key.startswith(name) for key in entry.messages)]
    if missing or "msgid" not in entry.messages:
        raise ValueError(f"line {line_of(text, entry.start)}: an entry without {(*missing, 'msgid')[0]}")
    if ("msgid_plural" in entry.messages) == ("msgstr" in entry.messages):
        line = line_of(text, entry.start)
        raise ValueError(f"line {line}: an entry has either msgstr, or msgid_plural and msgstr[0]")
    return entry


@dataclass(frozen=True)
class Part:
    """Lines of a text that are translated together: `source`, from the one numbered `line`."""

    line: int
    source: list[str]
    before: str  # what stands before and after what is translated
    after: str
    width: int
    inline: Inline
    write: Callable[[str], str]

    def written(self, translation: str) -> list[str]:
        """Returns the lines of the translation."""
        pieces = self.inline.restored(translation)
        if pieces is None:
            return self.source
        count = len(self.source) - self.before.count("\n") - self.after.count("\n")
        lines = wrapped(words_of(pieces, self.write), count, self.width) if count > 1 else [
            "".join(piece.raw if piece.role != "text" else self.write(piece.text) for piece in pieces)
        ]  # fmt: skip
        return (self.before + "\n".join(lines) + self.after).split("\n")


def parts_of(text: str) -> Iterator[Part]:
    """Yields the parts of a text to translate."""
    markup = bool(_CODE.search(text) and _ENTITY.search(text))
    read, write = (html.unescape, lambda text: html.escape(text, quote=False)) if markup else (str, str)
    lines = text.split("\n")
    first = 0
    while first < len(lines):
        last = first + 1
        while last < len(lines) and goes_on(lines[last - 1], lines[last]) and lines[last][0].isalpha():
            last += 1
        pieces: list[Piece] = []
        for line in lines[first:last]:
            if pieces:
                pieces.append(Piece("text", " ", "\n"))
            cursor = 0
            for match in [*_CODE.finditer(line), None]:
                stop = match.start() if match else len(line)
                if cursor < stop:
                    pieces.append(Piece("text", read(line[cursor:stop]), line[cursor:stop]))
                if match is not None:
                    pieces.append(_code(match[0]))
                    cursor = match.end()
        start, end = trimmed(pieces)
        if has_words(pieces[start:end]) and end - start <= MAX_CODES:
            opening, closing = pieces[start], pieces[end - 1]
            lead = opening.raw[: len(opening.raw) - len(opening.raw.lstrip())]
            trail = closing.raw[len(closing.raw.rstrip()) :] if opening.role == "text" or end - start > 1 else ""
            yield Part(
                first, lines[first:last], "".join(piece.raw for piece in pieces[:start]) + lead,
                trail + "".join(piece.raw for piece in pieces[end:]), max(map(len, lines[first:last])),
                Inline(pieces[start:end]), write,
            )  # fmt: skip
        first = last


def _code(raw: str) -> Piece:
    name = re.match(r"</?([^\s/>]+)", raw)
    role = "closing" if raw.startswith("</") else "alone" if raw.endswith("/>") else "opening"
    return Piece(role, "", raw, name[1].lower() if name else "")  # type: ignore[arg-type]


def numbered(source: str, target: str) -> str:
    """Returns a translation in which conversions of C, as %s, say which argument they take, if their order changed."""
    wanted, found = ([part for part in _CONVERSION.findall(text) if part != "%%"] for text in (source, target))
    if found == wanted or sorted(found) != sorted(wanted):
        return target
    free = list(enumerate(wanted, 1))

    def number(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%%"
        place = next(entry for entry in free if entry[1] == match[0])
        free.remove(place)
        return f"%{place[0]}${match[0][1:]}"

    return _CONVERSION.sub(number, target)


class Plurals:
    """The plural forms of a language, by the header's Plural-Forms: how many, and which is for what number."""

    def __init__(self, header: str) -> None:
        match = re.search(r"Plural-Forms:\s*nplurals\s*=\s*(\d{1,2})\s*;\s*plural\s*=([^;\n]{1,500});?", header)
        self.count = int(match[1]) if match and int(match[1]) <= MOST_FORMS else None
        self.numbers: dict[int, set[int]] = {}  # of each form
        try:
            rule: Callable[[int], int] = gettext.c2py(match[2]) if match else int
            for number in range(201):
                self.numbers.setdefault(rule(number), set()).add(number)
        except (ValueError, RecursionError, ArithmeticError):
            self.count = None

    def is_singular(self, form: int, singular: str, plural: str) -> bool:
        """Returns whether a form is the translation of msgid, not of msgid_plural."""
        if self.count is None:
            return form == 0
        numbers = self.numbers.get(form, set())
        if 1 not in numbers or self.count == 1:
            return False
        return numbers == {1} or _placeholders(singular) == _placeholders(plural)


def _placeholders(text: str) -> Counter[str]:
    return Counter(_PLACEHOLDER.findall(text))


class Catalogue(Document):
    """A PO file."""

    protects = True

    @classmethod
    def read(cls, data: bytes, options: ReadOptions) -> "Catalogue":
        declared = _CHARSET.search(data)
        name = declared[1].decode() if declared else None
        text, encoding = decode(data, None if name == "CHARSET" else name)
        return cls(text, encoding, options)

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        super().__init__(text, encoding, options)
        self.newline = newline_of(text)
        entries = list(entries_of(text))
        header = next((entry for entry in entries if entry.messages["msgid"].text == "" and "msgctxt" not in
                       entry.messages), None)  # fmt: skip
        self.plurals = Plurals("".join(m.text for m in header.forms.values()) if header else "")
        self.entries = []
        self.parts: list[dict[str, list[Part]]] = []  # of each entry, by msgid and msgid_plural
        for entry in entries:
            if entry is header or (not options.overwrite and any(form.text for form in entry.forms.values())):
                continue
            sources = {name: message for name, message in entry.messages.items() if name in ("msgid", "msgid_plural")}
            parts = {name: list(parts_of(message.text)) for name, message in sources.items()}
            if any(parts.values()):
                self.entries.append(entry)
                self.parts.append(parts)
        self.segments = [
            part.inline.markup for parts in self.parts for found in parts.values() for part in found
        ]  # fmt: skip

    def edits(self, translations: Sequence[str]) -> list[Edit]:
        edits: list[Edit] = []
        following = iter(translations)
        for entry, parts in zip(self.entries, self.parts, strict=True):
            texts = {}
            for name, found in parts.items():
                lines = entry.messages[name].text.split("\n")
                shift = 0
                for part in found:
                    new = part.written(next(following))
                    lines[part.line + shift : part.line + shift + len(part.source)] = new
                    shift += len(new) - len(part.source)
                texts[name] = "\n".join(lines)
                if entry.flags and re.search(r"[ ,]c-format", self.text[slice(*entry.flags)]):
                    texts[name] = numbered(entry.messages[name].text, texts[name])
            edits += self.form_edits(entry, texts)
            edits += self.fuzzy_edit(entry)
        return edits

    def form_edits(self, entry: Entry, texts: dict[str, str]) -> Iterator[Edit]:
        source = entry.messages["msgid"]
        forms = entry.forms
        if "msgstr" in forms:
            message = forms["msgstr"]
            yield message.start, message.end, self.message("msgstr", texts["msgid"], source)
            return
        singular, plural = (entry.messages[name].text for name in ("msgid", "msgid_plural"))
        count = self.plurals.count or len(forms)
        lines = []
        for form in range(count):
            name = "msgid" if self.plurals.is_singular(form, singular, plural) else "msgid_plural"
            lines.append(self.message(f"msgstr[{form}]", texts[name], entry.messages[name]))
        places = [(message.start, message.end) for message in forms.values()]
        yield min(places)[0], max(places)[1], self.newline.join(lines)

    def message(self, keyword: str, text: str, source: Message) -> str:
        """Returns keyword and string, broken into lines as gettext does it; not if the source's is one long line."""
        lines = [escaped(line) for line in re.findall(r"[^\n]*\n|[^\n]+", text)] or [""]
        wraps = not (source.lines == 1 and len(escaped(source.text)) > WIDTH)
        if len(lines) == 1 and (not wraps or len(f'{keyword} "{lines[0]}"') <= WIDTH):
            return f'{keyword} "{lines[0]}"'
        if wraps:
            lines = [part for line in lines for part in _folded(line)]
        return self.newline.join([f'{keyword} ""', *(f'"{line}"' for line in lines)])

    def fuzzy_edit(self, entry: Entry) -> list[Edit]:
        """Returns what marks an entry as one that a person has to look at."""
        if entry.flags is None:
            line_start = self.text.rfind("\n", 0, entry.start) + 1
            before = _previous_comments(self.text, line_start)
            return [(before, before, f"#, fuzzy{self.newline}")]
        start, end = entry.flags
        if "fuzzy" in re.split(r"[,\s]+", self.text[start:end]):
            return []
        return [(start + 2, start + 2, " fuzzy,")]

    def encoded(self, text: str) -> bytes:
        """Returns the file in its encoding, or, with another charset in its header, in UTF-8."""
        if "charset=CHARSET" in self.text:
            text = text.replace("charset=CHARSET", "charset=UTF-8", 1)
        try:
            return self.encoding.encode(text)
        except UnicodeEncodeError:
            return re.sub(r"charset=[\w:.-]+", "charset=UTF-8", text, count=1).encode()


def _folded(line: str) -> Iterator[str]:
    """Yields an escaped line in parts that fit into the width, broken after spaces."""
    part = ""
    for word in re.findall(r"\S*\s*", line):
        if part and len(part) + len(word.rstrip()) > WIDTH - 3:
            yield part
            part = ""
        part += word
    yield part


def _previous_comments(text: str, place: int) -> int:
    """Returns the start of the comments `#| msgid …` before a line, or else its own."""
    while place:
        start = text.rfind("\n", 0, place - 1) + 1
        if not text.startswith("#|", start):
            break
        place = start
    return place
