"""Subtitles: SubRip (.srt) and WebVTT (.vtt, W3C).

The libraries srt, webvtt-py and pysubs2 rewrite all cues. They change numbers, times, line ends and blank lines, or
drop notes, styles and tags. This module changes only the lines of text.

The end of a line or of a cue is seldom the end of a sentence. So the lines of a cue are translated together, and the
cues of one sentence are also translated together. The translation is divided among the cues in proportion to the
characters of each cue, and the text of each cue is divided into lines.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nmtkit.text.alignment import UNSPACED, Span
from nmtkit.text.documents.encoding import Encoding
from nmtkit.text.documents.inline import Inline, Piece, translatable
from nmtkit.text.documents.interface import Document, ReadOptions, line_of, line_spans, newline_of, without_white_space
from nmtkit.text.documents.lines import Word, continues, divided, ends_sentence, words_of, wrapped
from nmtkit.text.edits import Replacement
from nmtkit.text.markup import unescape_entities

WIDTH = 42  # maximum columns of a line, from common guides for subtitles; wider lines in the source raise this limit
MAX_CUES = 6  # maximum number of cues that are translated as one sentence
MAX_GAP = 2000  # maximum milliseconds between two cues of one sentence

_CLOCK = r"(?:(\d{1,9}):)?(\d{1,2}):(\d{1,2})[,.](\d{1,3})"
_TIMING = re.compile(rf"[ \t]*+{_CLOCK}[ \t]*+-->[ \t]*+{_CLOCK}(?:[ \t].*)?")
# a line that a player may read as times, such as -1:02:03.0 -> 1:02:04.0 or 00.00.03.000 --> 00.00.04.000
_LIKE_CLOCK = r"[ \t]*+[-−+]?\d++(?:[:.,;]\d++)"
_LIKE_TIMES = re.compile(
    rf"\A(?:(?=[^>]*[:,]){_LIKE_CLOCK}{{2,}}+[ \t]*+(?:[-–—=]++>|→)|{_LIKE_CLOCK}[^->]*?-->|"
    rf"[^>]*-->{_LIKE_CLOCK}{{2,}}+[ \t]*+$)"
)
_ARROW = re.compile(r"[-–—=]{1,5}[ \t]?(?:>|&gt;)|→|[->–—]")
_CLOCKS = re.compile(r"[ \t]*+[-−+]?(?:\d[\d \t:.,;'’：，．hms]*+)")  # clocks in any notation, such as 0h00m03s
_CLOCK_WITH_ARROW = re.compile(r"\d:\d{1,2}[,.:]\d{1,9}+[ \t]*+--(?:>|&gt;)|--(?:>|&gt;)[ \t]*+\d{1,9}+:\d{1,2}[,.:]\d")
_TAG = re.compile(r"<[^<>]*+>|\{[^{}]*+\}")
_GROUP = re.compile(r"\d+")
_NUMBER = re.compile(r"[ \t]*+\d++[ \t]*+")
_DASH = re.compile(r"\s*+[-–—‐][ \u00a0]?(?=\S)")
_SRT_CODE = re.compile(r"</?[A-Za-z][^<>\r\n]*+>|\{\\[^{}\r\n]*+\}|\{[A-Za-z]:[^{}\r\n]*+\}|[♪♫]++")
_VTT_CODE = re.compile(r"<[^<>\r\n]*+>|[♪♫]++")


@dataclass(frozen=True)
class Cue:
    """A subtitle: its times in milliseconds, and the positions of its lines of text."""

    start: int
    end: int
    lines: list[Span]


@dataclass(frozen=True)
class SubtitleBlock:
    """Lines of a cue that are translated together. `pieces` exclude the codes at the start and the end."""

    cue: int
    start: int  # start of the part of the file to replace
    end: int
    lines: int
    width: int  # columns of the longest line
    pieces: Sequence[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def plain(self) -> bool:
        return all(piece.role == "text" for piece in self.pieces)


def timing(text: str, start: int, end: int, *, expected: bool = False) -> tuple[int, int] | None:
    """Returns the times of a line in milliseconds, or None for a line of text. Raises ValueError for invalid times.

    If `expected`, the line follows the number of a cue, so it should have times.
    """
    match = _TIMING.fullmatch(text, start, end)
    if match is None:
        if not _LIKE_TIMES.match(text[start:end]) and not are_clocks(text[start:end], expected=expected):
            return None
        raise ValueError(
            f"line {line_of(text, start)}: {text[start:end].strip()[:60]!r} is not a time such as "
            "00:01:02,500 --> 00:01:04,000"
        )
    numbers = [int(group or 0) for group in match.groups()]
    clocks = numbers[:4], numbers[4:]
    first, last = (((hours * 60 + minutes) * 60 + seconds) * 1000 + rest for hours, minutes, seconds, rest in clocks)
    return first, last


def are_clocks(line: str, *, expected: bool) -> bool:
    """Returns whether a line looks like times in a wrong notation: a clock, an arrow or a dash, and a second clock.

    The result is also true for a line with --> next to a clock. If times are `expected`, --> alone is enough.
    """
    line = _TAG.sub("", line)
    if (expected and "-->" in line) or _CLOCK_WITH_ARROW.search(line):
        return True
    arrow = _ARROW.search(line, len(line) - len(line.lstrip(" \t-−")))
    if arrow is None or _CLOCKS.fullmatch(line, 0, arrow.start()) is None:
        return False
    second = _CLOCKS.match(line, arrow.end())
    if second is None or second.end() != len(line.rstrip()):
        return False
    groups = min(len(_GROUP.findall(line, 0, arrow.start())), len(_GROUP.findall(second[0])))
    long_arrow = arrow[0] in ("-->", "--&gt;")
    return expected or groups > 3 or (long_arrow and groups > 1)


class Subtitles(Document):
    """A file of cues."""

    code: re.Pattern[str]
    read_text: Callable[[str], str] = staticmethod(str)
    write_text: Callable[[str], str] = staticmethod(str)

    def __init__(self, text: str, encoding: Encoding, options: ReadOptions) -> None:
        super().__init__(text, encoding, options)
        self.cues = list(self.read_cues())
        if not self.cues and text.strip():
            raise ValueError("it has no subtitle: no line has times such as 00:01:02,500 --> 00:01:04,000")
        blocks = [block for number, cue in enumerate(self.cues) for block in self.blocks(number, cue)]
        self.chains = self.chains_of(blocks)
        self.inlines = [Inline(self.chained(chain)) for chain in self.chains]
        self.segments = [inline.markup for inline in self.inlines]

    def read_cues(self) -> Iterator[Cue]:
        """Yields the cues. A cue ends before the next line of times, or before the number above that line."""
        lines = line_spans(self.text)
        times = []
        for index, line in enumerate(lines):
            expected = self.has_identifier(lines, index) and (
                index == 1 or not self.text[slice(*lines[index - 2])].strip()
            )
            if (each := timing(self.text, *line, expected=expected)) is not None:
                times.append((index, each))
        for (index, (start, end)), following in zip(times, [*times[1:], None], strict=False):
            last = len(lines)
            if following is not None:
                last = following[0] - self.has_identifier(lines, following[0])
            yield Cue(start, end, self.text_lines(lines[index + 1 : last]))

    def has_identifier(self, lines: Sequence[Span], index: int) -> bool:
        """Returns whether the line before `index` is the number of the cue whose times are at `index`."""
        return index > 0 and _NUMBER.fullmatch(self.text, *lines[index - 1]) is not None

    def text_lines(self, lines: Sequence[Span]) -> list[Span]:
        """Returns the lines of text of a cue. `lines` are all lines between the times of the cue and the next cue."""
        return [line for line in lines if self.text[slice(*line)].strip()]

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Returns the texts and codes of a line."""
        pieces = []
        cursor = start
        for match in [*self.code.finditer(self.text, start, end), None]:
            stop = match.start() if match else end
            if cursor < stop:
                pieces.append(Piece("text", self.read_text(self.text[cursor:stop]), start=cursor, end=stop))
            if match is not None:
                pieces.append(_code(match))
                cursor = match.end()
        return pieces

    def blocks(self, number: int, cue: Cue) -> list[SubtitleBlock]:
        """Returns the blocks of a cue. A new block begins at the dash of a speaker, and after the end of a sentence."""
        groups: list[list[Span]] = []
        for start, end in cue.lines:
            before = self.text[slice(*groups[-1][-1])] if groups else "."
            if groups and len(line_spans(self.text[groups[-1][-1][1] : start])) > 2:
                before = ""  # no sentence continues after a blank line
            if ends_sentence(self.code.sub("", before)) or _DASH.match(self.code.sub("", self.text[start:end])):
                groups.append([])
            groups[-1].append((start, end))
        return [block for group in groups if (block := self.block(number, group)) is not None]

    def block(self, number: int, lines: Sequence[Span]) -> SubtitleBlock | None:
        pieces: list[Piece] = []
        for start, end in lines:
            if pieces:
                glued = UNSPACED.match(self.text[start : start + 1]) and UNSPACED.match(self.text[pieces[-1].end - 1])
                pieces.append(Piece("text", "" if glued else " ", start=pieces[-1].end, end=start))
            pieces += self.pieces(start, end)
        shown = translatable(_without_dash(pieces))
        if not shown:
            return None
        start, end = without_white_space(self.text, shown[0].start, shown[-1].end)
        within = [(max(first, start), min(last, end)) for first, last in lines if first < end and last > start]
        width = max(Word(text=_TAG.sub("", self.text[first:last])).width for first, last in within)
        return SubtitleBlock(number, start, end, len(within), width, shown)

    def chains_of(self, blocks: Sequence[SubtitleBlock]) -> list[list[SubtitleBlock]]:
        """Returns chains of blocks that together hold one sentence. A block with inner codes is a separate chain."""
        chains: list[list[SubtitleBlock]] = []
        for block in blocks:
            if chains and len(chains[-1]) < MAX_CUES and self.follows(chains[-1][-1], block):
                chains[-1].append(block)
            else:
                chains.append([block])
        return chains

    def follows(self, before: SubtitleBlock, block: SubtitleBlock) -> bool:
        """Returns whether a sentence of the block `before` continues in `block`, the next block of the file."""
        if block.cue != before.cue + 1 or not (before.plain and block.plain):
            return False
        gap = self.cues[block.cue].start - self.cues[before.cue].end
        line_start = self.cues[block.cue].lines[0][0]
        dashed = _DASH.match(self.code.sub("", self.text[line_start : block.end]))
        return -MAX_GAP < gap < MAX_GAP and not dashed and continues(before.text, block.text)

    def chained(self, chain: Sequence[SubtitleBlock]) -> list[Piece]:
        pieces = list(chain[0].pieces)
        for block in chain[1:]:
            glued = UNSPACED.match(pieces[-1].text[-1:]) and UNSPACED.match(block.pieces[0].text[:1])
            pieces += [Piece("text", "" if glued else " "), *block.pieces]
        return pieces

    def edits(self, translations: Sequence[str]) -> list[Replacement]:
        newline = newline_of(self.text)
        edits: list[Replacement] = []
        for chain, inline, translation in zip(self.chains, self.inlines, translations, strict=True):
            parts = inline.restored(translation)
            if parts is None:
                continue
            words = words_of(parts, self.write_text)
            shares = divided(words, [float(len(block.text)) for block in chain])
            for block, share in zip(chain, shares, strict=True):
                text = newline.join(wrapped(share, block.lines, max(WIDTH, block.width)))
                if "-->" not in inline.text:
                    text = text.replace("-->", "→")  # players read a line with --> as times
                edits.append((block.start, block.end, text))
        return edits


class SubRip(Subtitles):
    """Cues of SubRip: a number, times, and lines of text. Blank lines may follow the text or be part of it."""

    code = _SRT_CODE


class WebVTT(Subtitles):
    """Cues of WebVTT: an identifier, times, and lines of text up to an empty line (section 6.1 of the specification).

    Notes, styles and regions have no times, so they are not cues.
    """

    code = _VTT_CODE
    read_text = staticmethod(unescape_entities)

    def read_cues(self) -> Iterator[Cue]:
        if not re.match(r"WEBVTT(?![^ \t\r\n])", self.text):
            raise ValueError("line 1: it does not begin with WEBVTT")
        return super().read_cues()

    def has_identifier(self, lines: Sequence[Span], index: int) -> bool:
        """Returns whether the line before `index` is the identifier of the cue whose times are at `index`.

        The text of the previous cue may come directly before the times. So a line counts as an identifier only if it is
        a number after a blank line.
        """
        blank = index > 1 and not self.text[slice(*lines[index - 2])].strip()
        return super().has_identifier(lines, index) and blank

    def text_lines(self, lines: Sequence[Span]) -> list[Span]:
        end = next((index for index, (start, end) in enumerate(lines) if start == end), len(lines))
        return super().text_lines(lines[:end])

    @staticmethod
    def write_text(text: str) -> str:
        return html.escape(text, quote=False).replace("\u00a0", "&nbsp;")


def _code(match: re.Match[str]) -> Piece:
    """Returns the piece of a matched code. Tags such as <i.loud> or <font color=…> are paired by their name."""
    raw = match[0]
    name = re.match(r"</?([A-Za-z]+)", raw)
    role = "alone" if name is None else "closing" if raw.startswith("</") else "opening"
    word = name[1].lower() if name else ""
    return Piece(role, "", raw, word, raw[0] in "♪♫", match.start(), match.end())


def _without_dash(pieces: list[Piece]) -> list[Piece]:
    """Returns the pieces after the dash of a new speaker.

    Returns all pieces if the text does not begin with such a dash, or if an opening code is before the dash.
    """
    for index, piece in enumerate(pieces):
        if piece.role == "text" and piece.text.strip():
            dash = _DASH.match(piece.text)
            if dash is None:
                return pieces
            rest = Piece("text", piece.text[dash.end() :], start=piece.start + dash.end(), end=piece.end)
            return [rest, *pieces[index + 1 :]] if not any(p.role == "opening" for p in pieces[:index]) else pieces
    return pieces
