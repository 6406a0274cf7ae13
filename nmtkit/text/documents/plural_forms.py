"""Plural forms of languages in gettext catalogues."""

import gettext
import re
from collections.abc import Callable

from nmtkit.text.languages import subtags

MAX_FORMS = 10  # maximum number of plural forms; Arabic has 6

_SLAVIC = "n%10>=2 && n%10<=4 && (n%100<12 || n%100>14) ? 1 : 2"
# Number of forms, rule and languages, from the table of Unicode CLDR. All other languages have two forms, with the rule
# n != 1, as in English.
_RULES = (
    (1, "0", "ja ko zh cmn yue vi th id in ms zsm lo my km jv yo bo wo su sah dz bm ig ii jbo kde kea lkt nqo osa ses "
        "sg to tpi hnj"),
    (2, "n != 1", "pt-pt"),
    (2, "n > 1", "fr pt hi fa pes bn gu kn am zu hy pa as oc mg ti ln ff wa bho csw doi ht nso pcm guw ak si kab"),
    (2, "n%10!=1 || n%100==11", "is mk"),
    (2, "n!=1 && n!=2 && n!=3 && (n%10==4 || n%10==6 || n%10==9)", "fil tl ceb"),
    (2, "n>1 && (n<11 || n>99)", "tzm"),
    (3, f"n%10==1 && n%100!=11 ? 0 : {_SLAVIC}", "ru uk be sr sh hbs hr bs"),
    (3, f"n==1 ? 0 : {_SLAVIC}", "pl"),
    (3, "n==1 ? 0 : n>=2 && n<=4 ? 1 : 2", "cs sk"),
    (3, "n%10==1 && (n%100<11 || n%100>19) ? 0 : n%10>=2 && (n%100<11 || n%100>19) ? 1 : 2", "lt"),
    (3, "n%10==1 && n%100!=11 ? 0 : n!=0 ? 1 : 2", "lv lvs"),
    (3, "n==1 ? 0 : n==0 || (n%100>0 && n%100<20) ? 1 : 2", "ro mo"),
    (3, "n==1 ? 0 : n==2 ? 1 : 2", "he iw iu naq sat se sma smj smn sms"),
    (3, "n==0 ? 0 : n==1 ? 1 : 2", "ksh lag blo"),
    (3, "n<=1 ? 0 : n<=10 ? 1 : 2", "shi"),
    (4, "n%100==1 ? 0 : n%100==2 ? 1 : n%100==3 || n%100==4 ? 2 : 3", "sl dsb hsb"),
    (4, "n%10==1 ? 0 : n%10==2 ? 1 : n%20==0 ? 2 : 3", "gv"),
    (4, "n==1 || n==11 ? 0 : n==2 || n==12 ? 1 : n>2 && n<20 ? 2 : 3", "gd"),
    (5, "n==1 ? 0 : n==2 ? 1 : n==0 || (n%100>2 && n%100<11) ? 2 : n%100>10 && n%100<20 ? 3 : 4", "mt"),
    (3, "n%10==0 || (n%100>10 && n%100<20) ? 0 : n%10==1 ? 1 : 2", "prg"),
    (5, "n%10==1 && n%100!=11 && n%100!=71 && n%100!=91 ? 0 : n%10==2 && n%100!=12 && n%100!=72 && n%100!=92 ? 1 : "
        "(n%10==3 || n%10==4 || n%10==9) && n%100/10!=1 && n%100/10!=7 && n%100/10!=9 ? 2 : "
        "n!=0 && n%1000000==0 ? 3 : 4", "br"),
    (5, "n==1 ? 0 : n==2 ? 1 : n>2 && n<7 ? 2 : n>6 && n<11 ? 3 : 4", "ga"),
    (6, "n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n==3 ? 3 : n==6 ? 4 : 5", "cy"),
    (6, "n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5", "ar arb"),
)  # fmt: skip
_BY_LANGUAGE = {language: (count, rule) for count, rule, languages in _RULES for language in languages.split()}


def plural_rule(language: str | None) -> str:
    """Returns the value of Plural-Forms for a language code, such as ru, rus_Cyrl or pt-BR."""
    parts = subtags(language or "")
    count, rule = _BY_LANGUAGE.get("-".join(parts)) or _BY_LANGUAGE.get(parts[0]) or (2, "n != 1")
    return f"nplurals={count}; plural=({rule});"


class Plurals:
    """The plural forms that the Plural-Forms header of a PO file declares.

    `count` is the number of forms, or None if the header has no valid rule. `numbers` maps each form to the numbers
    that use it.
    """

    def __init__(self, header: str) -> None:
        match = re.search(r"Plural-Forms:\s*nplurals\s*=\s*(\d{1,2})\s*;\s*plural\s*=([^;\n]{1,500});?", header)
        self.count = int(match[1]) if match and 0 < int(match[1]) <= MAX_FORMS else None
        self.numbers: dict[int, set[int]] = {}  # only numbers up to 200
        try:
            rule: Callable[[int], int] = gettext.c2py(match[2]) if match else int
            for number in range(201):
                self.numbers.setdefault(rule(number), set()).add(number)
        except (ValueError, RecursionError, ArithmeticError):
            self.count = None

    def is_singular(self, form: int, same_placeholders: bool) -> bool:
        """Returns whether a form translates msgid. Other forms translate msgid_plural.

        Some languages have one form for 1 and for other numbers, such as 21 in Russian. Such a form translates msgid
        only if msgid and msgid_plural have the `same_placeholders`.
        """
        numbers = self.numbers.get(form, set())
        if 1 not in numbers or self.count == 1:
            return False
        return numbers == {1} or same_placeholders
