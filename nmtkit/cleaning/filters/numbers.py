"""Reads the numbers of a line in the notations of many languages: groups (12 345), units (万, lakh), years (令和5)."""

import re
import unicodedata
from bisect import bisect
from collections.abc import Iterator
from decimal import Decimal
from operator import itemgetter

NumberReading = frozenset[str]  # the significant digits of numbers: 1,500 and 1.5 are both 15

_SPACES = " \u00a0\u2009\u202f"
_NUMBER = re.compile(r"\d+(?:[.,:'’\u00a0\u2009\u202f\u066b\u066c\uff0c\uff0e\uff1a]\d+)*")
_GROUPS = re.compile(rf"(?<!\d)\d{{1,3}}(?:[{_SPACES}]\d{{3}})+(?:[.,]\d+)?(?!\d)")
_UNITS = {
    "十": 10, "百": 100, "千": 10**3, "万": 10**4, "萬": 10**4, "億": 10**8, "亿": 10**8, "兆": 10**12, "割": 10,
    "십": 10, "백": 100, "천": 10**3, "만": 10**4, "억": 10**8, "조": 10**12,
    "hundred": 100, "thousand": 10**3, "lakhs": 10**5, "lakh": 10**5, "lacs": 10**5, "lac": 10**5, "million": 10**6,
    "crores": 10**7, "crore": 10**7, "billion": 10**9, "trillion": 10**12,
    "हज़ार": 10**3, "हजार": 10**3, "लाख": 10**5, "करोड़": 10**7, "अरब": 10**9,
    "হাজার": 10**3, "লাখ": 10**5, "লক্ষ": 10**5, "কোটি": 10**7, "ہزار": 10**3, "لاکھ": 10**5, "کروڑ": 10**7,
    "nghìn": 10**3, "ngàn": 10**3, "triệu": 10**6, "tỷ": 10**9, "tỉ": 10**9,
    "พัน": 10**3, "หมื่น": 10**4, "แสน": 10**5, "ล้าน": 10**6,
}  # fmt: skip
_DIGITS = {digit: value for value, row in enumerate(("〇零", "一", "二两兩", "三", "四", "五", "六", "七", "八", "九"))
           for digit in row}  # fmt: skip
_DIGIT = f"[{''.join(_DIGITS)}]"
_COUNT = rf"(?:\d[\d.,\uff0c\uff0e]*+|{_DIGIT}++)"
# A count of at most 40 characters. Without this limit, a search in a long line of digits takes quadratic time.
_SHORT_COUNT = rf"(?:(?<!\d)\d[\d.,\uff0c\uff0e]{{0,39}}+(?!\d)|(?<!{_DIGIT}){_DIGIT}{{1,40}}+(?!{_DIGIT}))"
_VALUES = {unicodedata.normalize("NFC", unit): value for unit, value in _UNITS.items()}
_UNIT = "|".join(sorted(_VALUES, key=len, reverse=True))
_PART = re.compile(rf"({_COUNT})?[{_SPACES}]?((?:{_UNIT})?)")
# several counts with units and perhaps a last count without unit: 1万5千, 3만 5000, 12 crore 50 lakh
_COMPOSITE = re.compile(
    rf"(?:{_SHORT_COUNT}[{_SPACES}]?|(?<=[十百千万萬億亿兆]))(?:{_UNIT})"
    rf"(?:[{_SPACES}]?{_SHORT_COUNT}?[{_SPACES}]?(?:{_UNIT}))*(?:[{_SPACES}]?{_SHORT_COUNT})?"
)
_ERAS = {"明治": 1867, "大正": 1911, "昭和": 1925, "平成": 1988, "令和": 2018, "民國": 1911, "民国": 1911}
_ERA = re.compile(rf"({'|'.join(_ERAS)})(\d{{1,3}})")
_CHINESE = re.compile(rf"[{''.join(_DIGITS)}十百千万萬億亿兆]{{1,40}}+")


def digits_of(line: str) -> set[str]:
    """Returns the significant digits of each number of a line, without separators."""
    return {significant(number) for number in _NUMBER.findall(line)}


def significant(number: str) -> str:
    """Returns the digits of a number as ASCII, without separators and without zeros at both ends."""
    return ascii_digits("".join(filter(str.isdecimal, number))).strip("0") or "0"


def ascii_digits(text: str) -> str:
    """Returns the text with ASCII digits in place of the decimal digits of all scripts."""
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)


def readings(line: str) -> list[list[NumberReading]]:
    """Returns the possible readings of each number of a line. The first reading has the digits as they are written.

    A composite number, such as 1万5千 or 12 345, also has a reading as one number. A year of an era, such as
    令和5, also has a reading as a Gregorian year, 2023.
    """
    line = ascii_digits(unicodedata.normalize("NFC", line))
    composites = [(match.span(), value) for match, value in _composites(line)]
    found = [
        (span, [NumberReading(digits_of(line[slice(*span)])), NumberReading([value])])
        for span, value in _largest(composites)
    ]
    taken = [(0, 0), *(span for span, _ in found)]
    for match in _NUMBER.finditer(line):
        if match.start() >= taken[bisect(taken, match.start(), key=itemgetter(0)) - 1][1]:
            found.append((match.span(), [NumberReading([significant(match[0])])]))
    return [options for _, options in sorted(found, key=lambda each: each[0])]


def other_numbers(line: str) -> set[str]:
    """Returns the significant digits of each run of Chinese numerals in a line: "3" for 三千."""
    numbers = (_value(match[0]) for match in _CHINESE.finditer(unicodedata.normalize("NFC", line)))
    return {significant(str(number)) for number in numbers}


def _composites(line: str) -> Iterator[tuple[re.Match[str], str]]:
    for match in _GROUPS.finditer(line):
        yield match, significant(match[0])
    for match in _COMPOSITE.finditer(line):
        if re.search(r"\d", match[0]):
            yield match, significant(format(_value(match[0]), "f"))
    for match in _ERA.finditer(line):
        yield match, significant(str(_ERAS[match[1]] + int(match[2])))


def _largest(composites: list[tuple[tuple[int, int], str]]) -> list[tuple[tuple[int, int], str]]:
    """Returns composite numbers without overlap, from left to right. Keeps the longest number at each position."""
    ordered = sorted(composites, key=lambda each: (each[0][0], -each[0][1]))
    kept: list[tuple[tuple[int, int], str]] = []
    for each in ordered:
        if not kept or each[0][0] >= kept[-1][0][1]:
            kept.append(each)
    return kept


def _value(text: str) -> Decimal:
    """Returns the value of counts with units: 1億2,345万 is 123,450,000.

    Units below 万 belong to the count of the next larger unit: 2千万 is 20,000,000.
    """
    total = section = count = Decimal(0)
    for match in _PART.finditer(text):
        if match[1]:
            count = _count(match[1])
        if not match[2]:
            continue
        unit = _VALUES[match[2]]
        if unit < 10**4:
            section, count = section + (count or 1) * unit, Decimal(0)
        else:
            total, section, count = total + (section + count or 1) * unit, Decimal(0), Decimal(0)
    return total + section + count


def _count(text: str) -> Decimal:
    digits = "".join(str(_DIGITS.get(char, char)) for char in text)
    digits = digits.translate({ord("，"): "", ord(","): "", ord("．"): "."}).rstrip(".")
    return Decimal(digits if digits.count(".") < 2 else digits.replace(".", ""))
