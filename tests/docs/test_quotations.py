"""Tests check the class of an error and the fact that matters, so that the words of a message can be improved.

A quotation is a text of five or more words that a test expects in an error (`match=`), in a log or in an output.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
GAP = re.compile(r"\.\*|\\S\*|\|")  # in a pattern, the words beside a gap are separate quotations

# Names of the expressions that hold messages, in `"text" in result.stderr`
MESSAGES = re.compile(r"stderr|output|caplog|capsys|\bsaid\b|\btold\b|warning|messages?\b|error|caught|notice|refus")


def texts(node: ast.expr) -> Iterator[str]:
    """Yields the literal texts of an expression. Each value in an f-string counts as a digit."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)
    elif isinstance(node, ast.BinOp):
        yield from (*texts(node.left), *texts(node.right))
    elif isinstance(node, ast.Tuple | ast.List):
        yield from (text for item in node.elts for text in texts(item))
    elif isinstance(node, ast.Call):
        yield from (text for argument in node.args for text in texts(argument))


def expected(function: ast.FunctionDef) -> Iterator[str]:
    """Yields the texts that a test expects in messages: in its body and in the cases of `parametrize`."""
    names = set()
    for node in ast.walk(function):
        patterns: list[ast.expr] = []
        if isinstance(node, ast.keyword) and node.arg == "match":
            patterns = [node.value]
        elif isinstance(node, ast.Compare) and MESSAGES.search(ast.unparse(node)):
            patterns = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("search", "startswith", "endswith"):
            patterns = node.args[:1] if MESSAGES.search(ast.unparse(node)) else []
        for pattern in patterns:
            yield from texts(pattern)
            names |= {part.id for part in ast.walk(pattern) if isinstance(part, ast.Name)}
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize"):
            parameters = re.findall(r"\w+", ast.unparse(call.args[0]))
            for case in getattr(call.args[1], "elts", []):
                values = [case] if len(parameters) == 1 else getattr(case, "elts", getattr(case, "args", []))
                for name, value in zip(parameters, values, strict=False):
                    if name in names and MESSAGES.search(name):
                        yield from texts(value)


def is_quotation(text: str) -> bool:
    return any(len(re.findall(r"\S*[A-Za-z]\S*", part)) >= 5 for part in GAP.split(text))


def test_few_tests_quote_a_message() -> None:
    quotations = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                where = f"{path.relative_to(TESTS)}: {node.name}"
                quotations += [f"{where}: {text}" for text in expected(node) if is_quotation(text)]
    assert len(quotations) < 35, "\n".join(quotations)
