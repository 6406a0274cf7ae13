"""Placeholders of the string formats of gettext, such as %s in a c-format.

The programs of gettext refuse a translation whose placeholders do not take the same arguments as its source.
"""

import re
from collections import defaultdict, deque
from collections.abc import Collection

_NUMBERED = frozenset(["c", "objc", "php", "perl", "tcl", "boost", "java-printf"])

# The placeholders of each format. The patterns also match a sign that could begin a placeholder, such as a single %,
# because the translation must not contain such a sign by chance.
_PRINTF = (
    r"%%|%\{[^{}]*+\}|%(?:\([^()]*+\)|\d{1,2}\$)?[-+ #0',]{0,6}+(?:\d++|\*)?+(?:\.(?:\d++|\*)?+)?+"
    r"(?:<\w++>|[hlLqjztwI]*+[a-zA-Z@%])?"
)
_CONVERSION = re.compile(_PRINTF)
_BRACES = r"\{\{|\}\}|\{(?>[^{}]++|\{[^{}]*+\})*+\}|[{}]"
_KINDS = (
    (("c", "objc", "c++", "php", "perl", "tcl", "lua", "awk", "python", "java-printf", "javascript", "ruby", "elisp",
      "gcc-internal", "gfc-internal", "object-pascal", "modula2", "d", "boost", "sh-printf", "librep", "go", "ocaml"),
     _CONVERSION),
    (("python-brace", "csharp", "perl-brace", "rust", "java", "smalltalk", "appstream"), re.compile(_BRACES)),
    (("qt", "qt-plural", "kde", "kde-kuit", "ycp"), re.compile(r"%L?\d{1,2}|%n")),
    (("sh",), re.compile(r"\$\w+|\$\{[^}]*+\}")),
    (("scheme", "lisp"), re.compile(r"~[^a-zA-Z~%&|]*+[a-zA-Z~%&|]?")),
)  # fmt: skip
_ESCAPES = ("%%", "{{", "}}", "~~", "~%")
# a placeholder that takes the next argument
_UNNAMED = re.compile(r"%(?![({]|\d{1,2}[$%]|[-+ #0',]*+\d*+<(?!PRI))|\{[:!}]|~")
_QUOTED = re.compile(r"'[^']*+'?")  # in a java-format, a text in quotes has no placeholders
_ANY = re.compile(f"{_PRINTF}|{_BRACES}")


def placeholders(text: str, formats: Collection[str] = ()) -> list[str]:
    """Returns the placeholders of a text in order. Signs that stand for themselves, such as %%, are left out.

    `formats` are the formats of the text, such as "c". Without formats, placeholders of the usual kinds are returned.
    """
    text = _QUOTED.sub("''", text) if "java" in formats else text
    patterns = [pattern for names, pattern in _KINDS if {*formats} & {*names}] if formats else [_ANY]
    return [part for pattern in patterns for part in pattern.findall(text) if part not in _ESCAPES]


def in_order(source: str, target: str, formats: Collection[str]) -> str | None:
    """Returns the translation with placeholders that take the same arguments as in the source.

    If the order of unnamed placeholders changed, they get numbers, as in %2$d %1$s. Returns None if the translation has
    other placeholders than the source, or if the format cannot number the placeholders. Without `formats`, returns the
    translation unchanged.
    """
    wanted, present = (placeholders(text, formats) for text in (source, target))
    if not formats or wanted == present:
        return target
    if sorted(wanted) != sorted(present):
        return None
    wanted, present = (list(filter(_UNNAMED.match, each)) for each in (wanted, present))
    if wanted == present:
        return target
    if not _NUMBERED.issuperset(formats) or any("*" in part for part in wanted):
        return None
    without_argument = "%mn" if "java-printf" in formats else "%m"  # in Java, %n is a line break
    arguments: dict[str, deque[int]] = defaultdict(deque)
    for argument, conversion in enumerate((each for each in wanted if each[-1] not in without_argument), 1):
        arguments[conversion].append(argument)

    def number(match: re.Match[str]) -> str:
        return f"%{arguments[match[0]].popleft()}${match[0][1:]}" if match[0] in arguments else match[0]

    return _CONVERSION.sub(number, target)
