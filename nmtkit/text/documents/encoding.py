"""Finds the encoding of a file from its byte order mark or declaration. Translated files keep the encoding."""

import codecs
import contextlib
import re
from dataclasses import dataclass

_MARKS = (
    # UTF-32 is listed before UTF-16, because the mark of UTF-32-LE begins with the mark of UTF-16-LE
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
XML_ENCODING = re.compile(rb"<\?xml[^<>]*?encoding\s*=\s*[\"']([\w:.-]+)")  # encoding in an XML declaration
# Allowed encodings. Some other codecs of Python compress or escape data instead.
_KNOWN = re.compile(
    r"utf-8|utf-16-[lb]e|ascii|cp(?:125\d|437|720|8[56]\d|874|932|949|950)|iso8859-\d+|koi8-[ru]|gb2312|gbk|gb18030|big5(?:hkscs)?|"
    r"euc_(?:jp|kr)|shift_jis|mac-(?:roman|cyrillic)|tis-620|iso2022_jp"
)
# Browsers read some declared encodings as a different encoding, for example ISO 8859-1 as Windows-1252.
_WEB = {
    "iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
    "utf-16-le": "utf-8", "utf-16-be": "utf-8", "cp950": "big5hkscs",
}  # fmt: skip
_UNDEFINED = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")  # bytes that Latin-1 defines, but Windows-1252 does not
# Labels of the WHATWG encoding standard that Python does not know.
_LABELS = {
    "windows-874": "cp874", "dos-874": "cp874", "x-sjis": "cp932", "windows-31j": "cp932", "ms_kanji": "cp932",
    "csshiftjis": "cp932", "x-euc-jp": "euc_jp", "cseucpkdfmtjapanese": "euc_jp", "windows-949": "cp949",
    "ks_c_5601-1987": "cp949", "ks_c_5601-1989": "cp949", "ksc5601": "cp949", "ksc_5601": "cp949", "korean": "cp949",
    "cseuckr": "cp949", "csksc56011987": "cp949", "iso-ir-149": "cp949", "x-gbk": "gb18030", "chinese": "gb18030",
    "gb_2312": "gb18030", "gb_2312-80": "gb18030", "csgb2312": "gb18030", "csiso58gb231280": "gb18030",
    "iso-ir-58": "gb18030", "cn-big5": "big5hkscs", "x-x-big5": "big5hkscs", "csbig5": "big5hkscs", "koi": "koi8-r",
    "koi8": "koi8-r", "koi8-ru": "koi8-u", "cskoi8r": "koi8-r", "macintosh": "mac-roman", "mac": "mac-roman",
    "x-mac-roman": "mac-roman", "csmacintosh": "mac-roman", "x-mac-cyrillic": "mac-cyrillic",
    "x-mac-ukrainian": "mac-cyrillic", "unicode-1-1-utf-8": "utf-8", "unicode11utf8": "utf-8",
    "unicode20utf8": "utf-8", "x-unicode20utf8": "utf-8", "visual": "iso8859-8", "logical": "iso8859-8",
    "iso-8859-8-i": "iso8859-8", "iso-8859-8-e": "iso8859-8", "csiso88598i": "iso8859-8", "csiso88598e": "iso8859-8",
    "sun_eu_greek": "iso8859-7", "dos-862": "cp862", "dos-720": "cp720",
    **{f"x-cp125{number}": f"cp125{number}" for number in range(9)},
}  # fmt: skip


@dataclass(frozen=True)
class Encoding:
    """A codec of Python, and the byte order mark of the file."""

    codec: str = "utf-8"
    mark: bytes = b""

    def encode(self, text: str, errors: str = "strict") -> bytes:
        return self.mark + text.encode(self.codec, errors)


def codec_of(name: str) -> str:
    """Returns Python's name of an encoding. Raises ValueError for an unknown encoding."""
    codec = ""
    with contextlib.suppress(LookupError, ValueError):
        if len(name) <= 40:  # Python caches every unknown name, so long names are not looked up
            codec = codecs.lookup(_LABELS.get(name.lower(), name)).name
    if not _KNOWN.fullmatch(codec):
        raise ValueError(f"the file declares the encoding {name[:40]!r}, which is unknown; convert the file to UTF-8")
    return codec


def decode(data: bytes, declared: str | None = None, web: bool = False) -> tuple[str, Encoding]:
    """Returns the text and the encoding of a file.

    The byte order mark gives the encoding. Without a mark, the encoding is `declared`, or UTF-8 without `declared`.

    With `web`, names of encodings have the same meaning as in browsers, and a file without a declaration is read as
    Windows-1252 if it is not valid UTF-8. Raises ValueError for an unknown encoding, and, with the line, for invalid
    bytes. Also raises ValueError if writing the text would change the bytes of the file.
    """
    mark, codec = next(((mark, codec) for mark, codec in _MARKS if data.startswith(mark)), (b"", ""))
    if not codec:
        codec = codec_of(declared) if declared else "utf-8"
        codec = _WEB.get(codec, codec) if web else codec
    body = data[len(mark) :]
    try:
        text = body.decode(codec)
    except UnicodeDecodeError as error:
        if not web or mark or (declared and codec != "cp1252"):
            line, byte = body.count(b"\n", 0, error.start) + 1, body[error.start]
            raise ValueError(
                f"line {line}: byte 0x{byte:02x} is not {codec.upper()}; declare the encoding of the file, or convert "
                "the file with iconv -f ENCODING -t UTF-8, where ENCODING is for example WINDOWS-1252 or SHIFT_JIS"
            ) from None
        codec = "latin-1" if _UNDEFINED.search(body) else "cp1252"
        text = body.decode(codec)
    if text.encode(codec) != body:
        raise ValueError(f"the file would change when it is read and written as {codec.upper()}; convert it to UTF-8")
    return text, Encoding(codec, mark)
