"""Recognizes files that are not text, and formats that nmtkit cannot read."""

import codecs
import re
from pathlib import PurePath

from nmtkit.text.markup import names

HEAD = 4096  # number of bytes at the start of a file that are checked
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")  # extensions of compressed text files

_SIGNATURES = (
    (rb"PK\x03\x04.{26}(?:mimetype|\[Content_Types\]\.xml|word/|xl/|ppt/)", "an office document or an e-book"),
    (rb"PK(?:\x03\x04|\x05\x06)", "a ZIP archive"),
    (rb"%PDF-", "a PDF file"),
    (rb"\{\\rtf", "an RTF file"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"BZh[1-9]1AY", "a bzip2 file"),
    (rb"\xfd7zXZ\0", "an xz file"),
    (rb"\x28\xb5\x2f\xfd", "a zstd file"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (rb"Rar!\x1a\x07", "a RAR archive"),
    (rb".{257}ustar", "a tar archive"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", "an image"),
    (rb"ID3[\x02-\x04]\0|OggS\0|fLaC\0|RIFF....WAVE|....ftyp|\x1aE\xdf\xa3", "an audio or video file"),
    (rb"\xd0\xcf\x11\xe0", "an office document"),
    (rb"SQLite format 3\0", "a database"),
)
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # BOM_UTF32_LE begins with BOM_UTF16_LE

# Structured formats, which should not be translated as lines of text, by extension.
STRUCTURED = {
    ".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON", ".arb": "JSON", ".ipynb": "Jupyter", ".xml": "XML",
    ".resx": "XML", ".ts": "Qt or TypeScript", ".tmx": "TMX", ".ttml": "TTML", ".dfxp": "TTML", ".svg": "SVG",
    ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML", ".ini": "INI", ".properties": "Java properties",
    ".strings": "Apple strings", ".md": "Markdown", ".markdown": "Markdown", ".rst": "reStructuredText",
    ".adoc": "AsciiDoc", ".tex": "LaTeX", ".csv": "CSV", ".tsv": "TSV", ".ass": "ASS", ".ssa": "SSA", ".sbv": "SBV",
    ".sub": "SUB", ".py": "Python", ".js": "JavaScript", ".css": "CSS",
}  # fmt: skip
# extensions of templates of web pages; the reader of web pages protects the code in them
TEMPLATES = names(".php .phtml .erb .ejs .hbs .mustache .jinja .jinja2 .j2 .twig .liquid .jsp .vue")

# Formats that nmtkit can read, by their first characters.
_COMMENTS = r"\s*(?:<\?xml[^>]*+>\s*)?(?:(?><!--.*?-->)\s*+)*+"
_KNOWN = (
    (rf"{_COMMENTS}<(?:\w+:)?xliff\b|{_COMMENTS}<!doctype xliff\b", "xliff"),
    (rf"{_COMMENTS}<(?:!doctype html|html|head|body|title|meta|link|script|style|div|p|h[1-6]|ul|ol|table|section|"
     r"article|main|nav|header|footer|form|\?php)(?![\w-])", "html"),
    (r"WEBVTT(?:\s|$)", "vtt"),
    (r"\s*(?:\d+[ \t]*\n\s*)?[-+]?\d+[:.]\d+[:.]\d+(?:[,.:;]\d+)?\s*[-–—]+>", "srt"),
    (r"(?:#[^\n]*\n|\s)*+(?:msgid|msgctxt|domain)\s+\"", "po"),
)  # fmt: skip
_STRUCTURED = (
    (r"\s*[\[{]\s*(?:[\[{\"]|\Z)", "JSON"), (r"\s*<\?xml\b", "XML"), (r"\s*\[Script Info\]", "ASS"), (r"%YAML ", "YAML")
)  # fmt: skip


def check_text(data: bytes, name: str) -> None:
    """Raises ValueError, with the kind of the file, if `data` is not text. `data` is a file, or its first bytes."""
    kind = next((kind for pattern, kind in _SIGNATURES if re.match(pattern, data, re.DOTALL)), None)
    if kind is None and b"\0" in data and not data.startswith(_MARKS):
        kind = "a binary file"
    if kind is not None:
        raise ValueError(f"{name} is {kind}, not text; extract its text, or convert it to a format that nmtkit reads")


def notice(data: bytes, name: str) -> str | None:
    """Returns a notice if a file that is read as lines of text looks like a different format, else None."""
    path = PurePath(name)
    suffix = path.with_suffix("").suffix if path.suffix.lower() in COMPRESSIONS else path.suffix
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    text = (
        data[:HEAD].decode(encoding, errors="replace").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    )
    known = next((kind for pattern, kind in _KNOWN if re.match(pattern, text, re.DOTALL | re.IGNORECASE)), None)
    known = known or ("html" if suffix.lower() in TEMPLATES else None)
    if known is not None:
        return (
            f"{name} looks like {known}, but is read as lines; to translate only its text, add --input-format {known}"
        )
    by_content = (kind for pattern, kind in _STRUCTURED if re.match(pattern, text))
    kind = STRUCTURED.get(suffix.lower()) or next(by_content, None)
    if kind is None:
        return None
    return (
        f"{name} looks like {kind}, a format that nmtkit cannot read: all its lines are translated, including markup "
        "and keys; if the file is plain text, add --input-format text"
    )
