"""Patterns of text that is not translated (addresses, placeholders, numbers with units), and searches for strings.

A search takes linear time: repetitions that can start at many positions of a line are bounded or possessive.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

from nmtkit.text.alignment import Span, is_joined, is_letter

Edges = tuple[set[str], set[str]]  # letters that may directly precede a string, and letters that may directly follow it

_UNITS = (
    "%|‰|°C|°F|°|[kcmµnd]?m[²³23]?|km/h|m/s|mph|ft|yd|mi|[kmµ]?g|lbs?|oz|[mcdh]?l|L|gal|[kMG]?Wh?|[km]?V|[km]?A|[kMG]?Hz|"
    "[kKMGTP]i?[Bb]|[kMG]?bit/s|[kMG]bps|[mµn]?s|min|h|[kh]?Pa|bar|k?J|kcal|px|pt|dpi|fps|€|\\$|£|¥|EUR|USD|GBP|CHF|JPY"
)
_SIGNS, _MINUS = "-−–+±", "-−–"
_SPACES = " \u00a0\u2009\u202f"
_SEPARATORS = ".,'’٫٬"
_NUMBER = (
    rf"(?:\d{{1,3}}(?:[{_SPACES}{_SEPARATORS}]\d{{3}}){{1,10}}+(?!\d)|\d{{1,3}}(?:,\d\d){{1,8}},\d{{3}}(?!\d)|\d{{1,30}}+)"
    r"(?:[.,]\d{1,30}+)?+"
)
# the characters of a URL; braces only in pairs, as in a URL with a placeholder
_LINK = r"(?:[^\s<>\"“”«»{}]|\{[^\s<>{}]{0,100}\})"
_LINK_END = r"(?<![.,;:!?)\]'’…%])"  # a percent sign at the end is the start of a placeholder such as %<count>d

# printf: flags, width, precision and length before the conversion. The space flag is left out, and the minus flag
# needs a width, because "50 % discount" and "50 %-ig" are not conversions.
_SPECIFICATION = r"[-+#0',]{0,5}+(?:\d{1,9}|\*(?:\d{1,2}\$)?)?(?:\.(?:\d{1,9}+|\*(?:\d{1,2}\$)?)?)?(?:hh?|ll?|[Lqzjt])?"
CONVERSION = rf"%(?!-[A-Za-z])(?:\d{{1,2}}\$)?{_SPECIFICATION}[diouxXeEfFgGaAcCsSrp@]"
_CONVERSION_ALONE = re.compile(CONVERSION)
# %(count)d of Python; %<count>d and %-5<count>.2f of Ruby; %<PRIu64> of gettext
_PARENTHESIZED = rf"%\([\w. -]{{1,100}}+\){_SPECIFICATION}[diouxXeEfFgGaAcrs]"
NAMED_CONVERSION = re.compile(
    r"%(?:\d{1,2}\$)?[-+#0', ]{0,5}+\d{0,9}+(?:\.\d{0,9}+)?+(<([A-Za-z_]\w{0,60}+)>)"
    rf"(?:{_SPECIFICATION}[diouxXeEfFgGaAcsp](?![a-z]))?"
)

_BRACES = r"\{\s*+(?:[\w.$@\[\]'\"-]++)?\s*+(?:[!:,|](?>[^{}\n]++|\{[^{}\n]{0,100}+\})*+)?\}"
# One pattern for all placeholders with a percent sign, so that %%{n} is a percent sign before {n}.
_PERCENT = "|".join(
    (
        "%%",
        f"%{_BRACES}",
        _PARENTHESIZED,
        NAMED_CONVERSION.pattern,
        rf"%[A-Za-z_]\w{{1,63}}+(?!%%|{CONVERSION})%",  # a variable such as %name%, not text between two conversions
        r"(?<!\d)%[A-Za-z_][A-Za-z0-9_]{3,63}+(?!%|://)",  # a variable of Drupal, such as %title
        r"(?<!\d)%(?:\d{1,2}%(?![\w%])|\d{1,2}\$t[A-Za-z]|#@\w{1,63}+@)",  # Boost; Java; Apple
        rf"(?<!\d){CONVERSION}",
        r"(?<!\d)%(?:L?\d{1,2}(?![\w$%])|[+#]?[A-Za-z](?!\w))",  # %1 and %n of Qt, %m of C, %v of Go
    )
)

MESSAGE = re.compile(
    r"\{\s*+[\w.-]++\s*+,\s*+(?:(?:plural|selectordinal|select)\s*+,\s*+(?:offset:\s*+\d++\s*+)?+(?:=\d++|[\w-]++)\s*+\{"
    r"|choice\s*+,\s*+[-\d.∞]++\s*+[#<≤])"
)
WEBLATE = r"\[X\d{1,9}X\]"  # placeholders that Weblate puts into texts for a translation service

# Spans that a translation may write in the number format of its language, such as 5,50 € for €5.50.
MEASURES = (
    rf"(?<![\w.,])(?:[{_SIGNS}])?{_NUMBER}[{_SPACES}]?(?!{_PARENTHESIZED}|{CONVERSION})(?:{_UNITS})(?![\w²³%])",
    rf"[€$£¥][{_SPACES}]?{_NUMBER}(?!\w)",
)
PATTERNS = (
    rf"(?:https?|ftps?|file)://{_LINK}+{_LINK_END}",
    rf"\bwww\.{_LINK}+{_LINK_END}",
    r"\b(?:mailto:)?[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]+)+",
    rf"\b(?:[a-z0-9-]{{1,63}}\.){{1,8}}[a-z]{{2,63}}/{_LINK}*{_LINK_END}",
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b",  # IP addresses
    r"(?<![\w.@])@\w+",
    r"\$?\{\{[^{}\n]*+\}\}|\{%[^{}\n]*%\}|"
    rf"[$#]?{_BRACES}",
    _PERCENT,
    r"(?<![\w:/])::?[a-z_]\w{2,63}+:?|(?<!\w)@:\(?[\w.]{1,63}+\)?",  # :count of Laravel, @:key of Vue I18n
    r"\$t\([^()\n]{1,100}+\)|\$[A-Za-z_]\w*",  # i18next; variables
    WEBLATE,
    *MEASURES,
)

_TOKEN = re.compile(rf"(?<![^\W\d_])(?<!\d[{_SEPARATORS}])(?:(?<!\w)[{_SIGNS}])?{_NUMBER}")


def is_message(text: str) -> bool:
    """Returns whether a text holds a plural, select or choice argument of ICU MessageFormat.

    The branches of such an argument repeat parts of a sentence, so a model of sentences cannot translate the text.
    """
    return MESSAGE.search(text) is not None


def numbers(text: str) -> list[tuple[int, int, frozenset[Decimal]]]:
    """Returns the start, the end and the possible values of each number of a text: 1,500 can be 1500 or 1.5."""
    return [(*match.span(), values(match[0])) for match in _TOKEN.finditer(text)]


def values(number: str) -> frozenset[Decimal]:
    """Returns the values that a number can have. Languages use different decimal and thousands separators."""
    sign = -1 if number[0] in _MINUS else 1
    digits = re.sub(f"[{_SPACES}]", " ", number.lstrip(_SIGNS))
    last = max((index for index, char in enumerate(digits) if not char.isdecimal()), default=-1)
    readings = []
    if last < 0 or _is_grouped(digits):
        readings.append(re.sub(r"\D", "", digits))
    if last >= 0 and digits[last] in ".,٫" and digits[last] not in digits[:last] and _is_grouped(digits[:last]):
        readings.append(re.sub(r"\D", "", digits[:last]) + "." + digits[last + 1 :])
    try:
        return frozenset(sign * Decimal(reading) for reading in readings)
    except InvalidOperation:  # Decimal does not support the digits of some scripts
        return frozenset()


def _is_grouped(digits: str) -> bool:
    """Returns whether all separators of a number are the same and separate thousands (or lakhs, as in 1,00,000)."""
    first, *groups = re.split(r"\D", digits)
    separators = set(re.findall(r"\D", digits))
    return not groups or (
        len(separators) == 1
        and len(first) <= 3
        and len(groups[-1]) == 3
        and all(len(part) in (2, 3) for part in groups)
    )


# --- occurrences of strings -------------------------------------------------------------------------------------------


def strings_of(text: str, spans: Iterable[Sequence[int]]) -> dict[str, Edges]:
    """Maps the text of each span to the letters that directly precede or follow its occurrences."""
    strings: dict[str, Edges] = {}
    for start, end, *_ in spans:
        left, right = strings.setdefault(text[start:end], (set(), set()))
        if _touch(text, start):
            left.add(text[start - 1])
        if _touch(text, end):
            right.add(text[end])
    return strings


def occurrences(text: str, strings: Mapping[str, Edges]) -> list[Span]:
    """Returns the positions of the strings as whole words.

    If matches overlap, the match that begins first is returned, or the longest of the matches with the same start. A
    letter may touch an occurrence if `strings` has this letter among the edges of the string, or if the letter follows
    a printf conversion, as in %dpx.
    """
    lengths: dict[str, set[int]] = defaultdict(set)  # first character -> lengths of the strings
    for string in strings:
        lengths[string[0]].add(len(string))
    longest_first = {char: sorted(each, reverse=True) for char, each in lengths.items()}
    spans = []
    last = 0
    for start, char in enumerate(text):
        if start < last or char not in longest_first:
            continue
        for length in longest_first[char]:
            string = text[start : start + length]
            end = start + len(string)  # `string` is shorter than `length` at the end of the text
            if string in strings and _is_whole(text, start, end, strings[string]):
                spans.append((start, end))
                last = end
                break
    return spans


def _touch(text: str, index: int) -> bool:
    """Returns whether the characters before and at `index` belong to the same word or identifier."""
    if not 0 < index < len(text):
        return False
    pair = text[index - 1 : index + 1]
    return is_joined(text, index) or ("_" in pair and all(char == "_" or is_letter(char) for char in pair))


def _is_whole(text: str, start: int, end: int, letters: Edges) -> bool:
    if _touch(text, start) and text[start - 1] not in letters[0]:
        return False
    return not _touch(text, end) or text[end] in letters[1] or _CONVERSION_ALONE.fullmatch(text, start, end) is not None
