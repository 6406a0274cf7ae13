"""Reads and writes translation memories (TMX 1.4b)."""

import logging
import re
from collections.abc import Iterator
from functools import lru_cache
from html import escape
from xml.etree import ElementTree

from nmtkit.data.corpora.compression import open_bytes
from nmtkit.data.corpora.corpus import Corpus
from nmtkit.data.corpora.tables import Row
from nmtkit.text.alignment import is_joined
from nmtkit.text.languages import best_match

HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<tmx version="1.4">
<header creationtool="nmtkit" creationtoolversion="1" datatype="plaintext" segtype="sentence" adminlang="en" \
srclang="{source}" o-tmf="lines"/>
<body>
"""
TAIL = "</body>\n</tmx>\n"
INVALID = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML cannot hold
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"

log = logging.getLogger("nmtkit")


def read_tmx(corpus: Corpus) -> Iterator[Row]:
    """Yields a pair for each translation unit that has both languages. Units are read one by one, in bounded memory.

    Inline codes in a segment (`bpt`, `ph`, …) are left out, and a space stands for a `ph` between two letters. The
    properties of a unit become further columns of the pair, next to the two texts. Logs the number of units without
    both languages. Raises ValueError if the file is not XML, or if no unit has both languages.
    """
    path = corpus.source
    languages = corpus.languages
    body: ElementTree.Element | None = None
    pairs = incomplete = 0
    seen: dict[str, None] = {}
    with open_bytes(path) as file:
        events = ElementTree.iterparse(file, ("start", "end"))
        try:
            for event, element in events:
                tag = element.tag.rpartition("}")[2]
                if event == "start":
                    if tag == "header" and languages[0] is None and element.get("srclang", "*all*") != "*all*":
                        languages = element.get("srclang"), languages[1]
                    elif tag == "body":
                        body = element
                elif tag == "tu":
                    texts = _texts(element)
                    sides = _sides(tuple(texts), languages)
                    if len(seen) < 20:
                        seen.update(dict.fromkeys(texts))
                    if sides is None:
                        incomplete += 1
                    else:
                        pairs += 1
                        yield texts[sides[0]], texts[sides[1]], _properties(element)
                    (element if body is None else body).clear()
        except ElementTree.ParseError as error:
            line, column = error.position
            reason = str(error).partition(": line ")[0]
            raise ValueError(f"{path}:{line}: the file is not valid XML at column {column + 1}: {reason}") from None
        except (LookupError, ValueError) as error:  # the encoding in the first line is unknown or not supported
            raise error if str(path) in str(error) else ValueError(f"{path}: {error}; save it in UTF-8") from None
    wanted = " and ".join(language for language in languages if language)
    if not pairs and None in languages and len(seen) > 2:
        raise ValueError(f"{path} has units of several languages ({', '.join(seen)}); name the source and the target")
    if not pairs:
        raise ValueError(f"{path} has no unit with {wanted or 'two languages'}; its languages are {', '.join(seen)}")
    if incomplete:
        units = "1 unit" if incomplete == 1 else f"{incomplete:,} units"
        log.warning("%s: skipped %s without %s", path, units, wanted or "exactly two languages")


def _children(element: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    """Returns the children with the tag `name`, in any namespace. With iterfind, reading would be slower by a third."""
    return (child for child in element if child.tag.rpartition("}")[2] == name)


def _texts(unit: ElementTree.Element) -> dict[str, str]:
    """Returns the text of each language of a unit. Only the first text of a language counts."""
    result: dict[str, str] = {}
    for variant in _children(unit, "tuv"):
        segment = next(_children(variant, "seg"), None)
        if segment is not None:
            result.setdefault(variant.get(_LANGUAGE) or variant.get("lang") or "", _text(segment))
    return result


def _text(element: ElementTree.Element) -> str:
    parts = [element.text or ""]
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "hi":
            parts.append(_text(child))
        elif tag == "ph" and is_joined(parts[-1][-1:] + (child.tail or "")[:1], 1):
            parts.append(" ")  # a placeholder, such as a line break, separates two words
        parts.append(child.tail or "")
    return "".join(parts)


@lru_cache(maxsize=256)
def _sides(codes: tuple[str, ...], languages: tuple[str | None, str | None]) -> tuple[str, str] | None:
    """Returns the codes of source and target. If a language is None, the unit must have exactly two languages."""
    source, target = languages
    first = None if source is None else best_match(source, codes)
    second = None if target is None else best_match(target, codes)
    if len(codes) == 2:  # without a source language, the source is the text that is not the target
        first = 0 if source is None and second != 0 else 1 if source is None else first
        second = 1 - first if target is None and first is not None else second
    return None if first is None or second is None or first == second else (codes[first], codes[second])


def _properties(unit: ElementTree.Element) -> dict[str, object]:
    return {each.get("type", "prop"): each.text or "" for each in _children(unit, "prop")}


def unit_of(source: str, target: str, others: dict[str, object], languages: tuple[str, str]) -> str:
    """Returns a pair as the XML of a unit. The texts must not contain characters that match `INVALID`."""
    properties = "".join(
        f'<prop type="{_escaped(name)}">{_escaped(str(value))}</prop>' for name, value in others.items()
    )
    variants = "".join(
        f'<tuv xml:lang="{language}"><seg>{_escaped(text)}</seg></tuv>'
        for language, text in zip(languages, (source, target), strict=True)
    )
    return f"<tu>{properties}{variants}</tu>\n"


def _escaped(text: str) -> str:
    return escape(text).replace("\r", "&#13;")
