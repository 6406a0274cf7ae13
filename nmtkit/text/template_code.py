"""Finds the code of templates in text and markup: PHP, ERB and JSP, Jinja, Handlebars, Blade, Angular.

A template engine replaces its code before a browser reads the markup. So the code may stand inside a tag, and may
contain quotes, `<` and `>`. Each pattern takes linear time: code without an end extends at most to the next code.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from nmtkit.text.edits import spliced
from nmtkit.text.patterns import MESSAGE

MAX_MESSAGE = 10_000  # maximum number of characters of a message of ICU

# The content of template code, which has no tags outside quotes. A quoted text may have tags, but no braces that begin
# or end code.
_EXPRESSION = (
    r"(?>[^\"'{}%<]++|\"(?>[^\"\n{}%]++|\{(?![{%])|[%}](?!\}))*+\"|'(?>[^'\n{}%]++|\{(?![{%])|[%}](?!\}))*+'|[\"']"
    r"|<(?!!|/?[A-Za-z][^<>{}%]{0,200}+>)|\{(?![{%])|[%}](?!\}))*+"
)
_PARENTHESES = r"\((?>[^()\n]{1,200}+|\((?>[^()\n]{1,200}+|\([^()\n]{0,200}+\)){0,20}+\)){0,20}+\)"
_START = re.compile(r"<(?=[?%])|[{}@]|[$#](?=\{)")
_CODE = re.compile(
    r"(?P<php><\?(?:php\b|=|(?=\s))(?>[^?<]++|\?(?!>)|<(?!\?(?:php\b|=)))*+\?>)"
    r"|(?P<comment><%--(?>[^-<]++|<(?!%--)|-(?!-%>))*+--%>|\{\{!?--(?>[^-{]++|\{(?!\{!?--)|-(?!-\}\}))*+--\}\}"
    r"|\{#(?>[^#{]++|\{(?!#)|\#(?!\}))*+\#\})"
    r"|(?P<erb><%(?>[^<%]++|<(?!%)|%(?!>))*+%>)"
    rf"|(?P<statement>\{{%{_EXPRESSION}%\}})"
    rf"|(?P<value>(?<!\{{)\{{\{{++{_EXPRESSION}\}}\}}++|\{{!!(?>[^!{{]++|!(?!!\}})|\{{(?!!!))*+!!\}}|[$#]\{{[^{{}}<>\n]{{1,200}}+\}})"
    r"|(?P<blade>@php\b(?!\s*\()(?>[^@]++|@(?!(?:end)?php\b))*+@endphp\b|@let\s+\w+\s*+=[^;<>{}\n]{1,200}+;)"
    rf"|(?P<directive>(?<![\w@.])@(?:else[ ]if|[A-Za-z]{{2,20}}+)\b(?:[ \t]*+{_PARENTHESES})?(?:\s*+\{{(?![{{%#!]))?)"
    r"|(?P<brace>[{}])"
)
_VALUE_OF_PHP = re.compile(r"<\?=|<\?(?:php)?\s+(?:echo|print|printf|_e|_ex|esc_\w+_e|the_\w+)\b(?![^?]*[{}])")
_VALUE_OF_ERB = re.compile(r"<%==?(?!.*(?:\bdo\b(?:\s*\|[^|]*\|)?|\{)\s*-?%>\Z)", re.DOTALL)
_STATEMENT_OF_BRACES = re.compile(
    r"\{\{+[-~]?\s*(?:[#/^>]|(?:else|end|if|range|with|define|block|template|partial)\b(?![.(]|\s*\|))"
)
# directives of Blade with arguments, directives of Blade without arguments (_ALONE), and blocks of Angular (_BLOCK)
_DIRECTIVE = re.compile(
    "(?:end)?(?:if|elseif|unless|isset|empty|auth|guest|for|foreach|forelse|while|switch|case|section|yield|extends|"
    "include(?:If|When|Unless|First)?|each|push|stack|prepend|php|method|error|lang|choice|json|component|slot|props|"
    "class|checked|selected|disabled|readonly|required|env|can|cannot|canany|once|livewire|vite|inject|hasSection|"
    "sectionMissing|use|session|style|aware|fragment|continue|break|dump|dd|asset|route|verbatim|production)"
)
_ALONE = re.compile(
    f"end(?:{_DIRECTIVE.pattern})|else|default|empty|auth|guest|csrf|show|stop|overwrite|append|parent|production|once|"
    "verbatim|break|continue|livewireStyles|livewireScripts"
)
_BLADE = re.compile(  # a text with one of these directives is a template of Blade, where each @name is a directive
    r"(?<![\w@.])@(?:csrf|vite|extends|section|yield|include|foreach|endif|end[a-z]+|push|stack|props|php)\b|\{!!|\{\{--"
)
_BLOCK = re.compile("if|else|for|empty|switch|case|default|defer|placeholder|loading|error")
_BRACE = re.compile(r"'[{}][^'\n]{0,200}+'|[{}]")


CodeRole = Literal["value", "comment", "statement", "message"]


class TemplateCode(NamedTuple):
    """Code of a template, and its role.

    A value is a part of a sentence. A statement, such as a condition, must not move, so no sentence continues after a
    statement. A message is a plural or select message of ICU with all its branches.
    """

    start: int
    end: int
    role: CodeRole


def codes(text: str) -> list[TemplateCode]:
    """Returns the code in a text, in order."""
    found: list[TemplateCode] = []
    blocks: list[bool] = []  # for each open brace: whether the brace opens a block of Angular, such as @if (x) {
    partners: dict[int, int] | None = None
    blade = _BLADE.search(text) is not None
    position = 0
    for candidate in _START.finditer(text):
        start = candidate.start()
        match = _CODE.match(text, start) if start >= position else None
        if match is None:
            continue
        kind, end = match.lastgroup, match.end()
        if kind == "brace":
            if text[start] == "{" and MESSAGE.match(text, start) is not None:
                partners = _partners(text) if partners is None else partners
                if 0 < partners.get(start, 0) - start <= MAX_MESSAGE:
                    position = partners[start]
                    found.append(TemplateCode(start, position, "message"))
                    continue
            if text[start] == "{" and blocks:
                blocks.append(False)
            if text[start] == "{" or not blocks or not blocks.pop():
                continue
        elif kind == "directive":
            end = start + _directive_length(match[0], blade)
            if end == start:
                continue
            if text[end - 1] == "{":
                blocks.append(True)
        found.append(TemplateCode(start, end, _role(kind, match[0])))
        position = end
    return found


def _role(kind: str | None, code: str) -> CodeRole:
    if kind == "comment" or code.startswith("<%#"):
        return "comment"
    if kind == "php":
        return "value" if _VALUE_OF_PHP.match(code) else "statement"
    if kind == "erb":
        return "value" if _VALUE_OF_ERB.match(code) else "statement"
    return "value" if kind == "value" and not _STATEMENT_OF_BRACES.match(code) else "statement"


def _directive_length(text: str, blade: bool) -> int:
    """Returns the length of a directive of Blade or Angular at the start of a text, or 0 if there is none.

    In a template of Blade, each name is a directive, because libraries add directives.
    """
    name = re.match(r"@(\w+)", text)
    assert name is not None
    if text.endswith("{") and _BLOCK.fullmatch(name[1]):
        return len(text)
    if "(" in text and (blade or _DIRECTIVE.fullmatch(name[1])):
        return text.rindex(")") + 1
    return name.end() if blade or _ALONE.fullmatch(name[1]) else 0


def _partners(text: str) -> dict[int, int]:
    """Maps the position of each opening brace to the end of its closing brace. Braces in quotes do not count."""
    partners: dict[int, int] = {}
    waiting: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            waiting.append(brace.start())
        elif brace[0] == "}" and waiting:
            partners[waiting.pop()] = brace.end()
    return partners


def masked(text: str, spans: Sequence[TemplateCode]) -> str:
    """Returns a text of the same length in which letters replace code, so that code cannot be mistaken for markup."""
    return spliced(text, [(start, end, "x" * (end - start)) for start, end, _ in spans])
