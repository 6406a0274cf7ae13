"""Every regular expression of text/ takes linear time on hostile text."""

import importlib
import pkgutil
import re
import time
from functools import cache

import pytest

import nmtkit.text
import nmtkit.text.documents
from nmtkit.text.protection import PATTERNS

UNITS = ["0", "a", " ", ".", "-", "%", "{", "}", "<", ">", '"', "'", "=", "&", "#", ":", "\\", "\n", "[", "*", "1.",
         ",000", "a.", "<a ", '<a x="', "<a ='", "<!--", "{\\", "{a", "{n,plural,", "%0", "%(a", "%1$", "&a", "aa.",
         "aa. ", "aa.)", "00:", "00:00:00.0 -->", "-->", "http://", "www.", "a@", "$", "€1 ", "[X1", "[[", "charset",
         "<meta ", "<?xml ", "encoding=", "msgid ",
         "<?php ", "<% ", "<%--", "{{", "{{!--", "{%", "{#", "{!!", "${", "@if(", "@if (x) {", "@php ", "%<a",
         "#\n", "日", "。", "\u0301", "x-format"]  # fmt: skip
PREFIXES = ["", '"', "<a ", "%", "aa."]


ANCHORED = [
    "_SYMBOLS",
    "_KEYWORD",
    "_STRING",
    "_STRINGS",
    "_CLOCKS",
    "web._TAG",
    "_TIMING",
    "_DASH",
    "_NUMBER",
    "_STATEMENT_OF_BRACES",
    "_VALUE_OF_PHP",
    "_VALUE_OF_ERB",
]  # matched at one position only, or not used again after its first failure


@cache
def patterns() -> dict[str, re.Pattern]:
    found = {f"PATTERNS[{index}]": re.compile(pattern) for index, pattern in enumerate(PATTERNS)}
    for package in (nmtkit.text, nmtkit.text.documents):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                values = value if isinstance(value, tuple) else (value,)
                found |= {f"{module.name}.{name}[{number}]": item for number, item in enumerate(values)
                          if isinstance(item, re.Pattern)}  # fmt: skip
    return found


def seconds(pattern: re.Pattern, text: str, anchored: bool) -> float:
    """Returns the CPU time of all matches. Interrupts only make it longer, so tests compare the shortest of several."""
    subject = text.encode() if isinstance(pattern.pattern, bytes) else text
    start = time.process_time()
    if anchored:
        pattern.match(subject)
    else:
        for _ in pattern.finditer(subject):
            pass
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("name", patterns())
def test_no_pattern_takes_quadratic_time(name):
    """A quadratic pattern took 26 s for %000… with 20,000 characters, and {{{… with a million took ten minutes."""
    pattern, anchored = patterns()[name], any(f".{each}[" in name for each in ANCHORED)
    for prefix in PREFIXES:
        for unit in UNITS:
            short, long = (prefix + unit * (length // len(unit)) for length in (2_000, 8_000))
            if seconds(pattern, long, anchored) > 0.01:  # most texts take a millisecond
                # another process on the same core can slow down one of two measurements
                assert any(is_linear(pattern, short, long, anchored) for _ in range(5)), (prefix, unit)


def is_linear(pattern: re.Pattern, short: str, long: str, anchored: bool) -> bool:
    slow, fast = (min(seconds(pattern, text, anchored) for _ in range(3)) for text in (long, short))
    return slow < max(8 * fast, 0.01)
