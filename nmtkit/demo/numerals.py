"""Numbers, dates and clock times written out in English and German."""

from nmtkit.demo.lexicon import MONTHS

# 0 to 19, then the tens from 20 on: English, German
_NAMES = """\
zero null, one eins, two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun,
ten zehn, eleven elf, twelve zwölf, thirteen dreizehn, fourteen vierzehn, fifteen fünfzehn, sixteen sechzehn,
seventeen siebzehn, eighteen achtzehn, nineteen neunzehn,
twenty zwanzig, thirty dreißig, forty vierzig, fifty fünfzig, sixty sechzig, seventy siebzig, eighty achtzig,
ninety neunzig
"""
_ENGLISH, _GERMAN = zip(*(name.split() for name in _NAMES.split(",")), strict=True)
_FIRST_TENS = 18  # tens are at 18 + their digit: 20 is at 20, 30 at 21
_ENGLISH_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_GERMAN_ORDINALS = {1: "ersten", 3: "dritten", 7: "siebten", 8: "achten"}


def english(number: int) -> str:
    """0 to 99: twenty-one."""
    if number < 20:
        return _ENGLISH[number]
    tens, ones = divmod(number, 10)
    return _ENGLISH[_FIRST_TENS + tens] + (f"-{_ENGLISH[ones]}" if ones else "")


def german(number: int) -> str:
    """0 to 99: einundzwanzig."""
    if number < 20:
        return _GERMAN[number]
    tens, ones = divmod(number, 10)
    if not ones:
        return _GERMAN[_FIRST_TENS + tens]
    return ("ein" if ones == 1 else _GERMAN[ones]) + "und" + _GERMAN[_FIRST_TENS + tens]


def english_ordinal(number: int) -> str:
    """1 to 99: twenty-first."""
    head, hyphen, last = english(number).rpartition("-")
    if last.endswith("y"):
        return head + hyphen + last[:-1] + "ieth"
    return head + hyphen + _ENGLISH_ORDINALS.get(last, last + "th")


def german_ordinal(number: int) -> str:
    """1 to 99, in the form that follows "am": einundzwanzigsten."""
    return _GERMAN_ORDINALS.get(number, german(number) + ("ten" if number < 20 else "sten"))


def date(day: int, month: str) -> tuple[str, str]:
    """`on the twenty-first of March`, `am einundzwanzigsten März`; `month` in English."""
    return f"on the {english_ordinal(day)} of {month}", f"am {german_ordinal(day)} {MONTHS[month]}"


def clock(hour: int, minute: int) -> tuple[str, str]:
    """The time of day for hours 1 to 12, without "at" or "um": `half past seven`, `halb acht`.

    A full hour, a quarter, a half and multiples of ten are said relative to the hour, others in digits' order.
    """
    following = hour % 12 + 1
    if minute == 0:
        return f"{english(hour)} o'clock", f"{_hour(hour)} Uhr"
    if minute == 30:
        return f"half past {english(hour)}", f"halb {german(following)}"
    if minute in (5, 10, 15, 20):
        amount = ("a quarter", "Viertel") if minute == 15 else (english(minute), german(minute))
        return f"{amount[0]} past {english(hour)}", f"{amount[1]} nach {german(hour)}"
    if minute in (40, 45, 50, 55):
        rest = 60 - minute
        amount = ("a quarter", "Viertel") if rest == 15 else (english(rest), german(rest))
        return f"{amount[0]} to {english(following)}", f"{amount[1]} vor {german(following)}"
    return f"{english(hour)} {_minutes(minute)}", f"{_hour(hour)} Uhr {german(minute)}"


def _hour(hour: int) -> str:
    return "ein" if hour == 1 else german(hour)


def _minutes(minute: int) -> str:
    return english(minute) if minute >= 10 else f"oh {english(minute)}"
