"""Docstrings and comments avoid the openings and words that readers had to read twice."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nmtkit

ROOT = Path(nmtkit.__file__).parents[1]
COMMENT = re.compile(r"(?:^|\s)# (.*)")  # headings between parts of a file begin with dashes
FOLDERS = ("nmtkit", "tests", "benchmarks", "examples")

PRONOUN = r"(?:It|They|Those|That|This|These|Which|What|Who|Its|Their|Them|He|Nobody)"
OPENINGS = {  # of a docstring
    "a relative clause": r"(?:Returns|Yields|Gives|Says|Tells) (?:what|how|where|which|those|that|whether it)\b",
    "a pronoun": rf"{PRONOUN}\b",
    "an inversion": r"(?:Of|As|Where|In which|Known are)\b",
}
COMMENTS = {  # of a comment
    "a relative clause": r"(?:of which|of those|in which|what|those|that which|which)\b",
    "a missing noun": r"of (?:a|an|the|each|all|every|one)? ?[\w-]+: ",
}
ANYWHERE = {
    "'is no' for 'is not a'": r"\b(?:is|are|was|were) no (?!longer|more|less|fewer|t)\w+ (?:of|that|here|there)\b",
    "'goes before' for 'overrides'": r"\bgo(?:es)? before\b",
    "an inverted end": r"\b(?:as|than|where) (?:it|they) (?:does|do|goes|go|has|have)\b",
    "'as … does' for 'like'": r"\bas [`\w]+ (?:do|does)\b",
    "'those' or 'that' for a noun": r"\b(?:those (?:of|that|which)|(?<!so )that of)\b",
    "'what' for a noun": r"\bwhat\b",
    "'of its own' for 'separate'": r"\bof (?:its|their) own\b",
    "'since' for 'because'": r", since (?!nmtkit |version |\d)",
    "a second sentence after a semicolon": r"; (?:returns|raises|yields)\b",
}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if (match := COMMENT.search(line)) and not match[1].startswith("---"):
            yield number, match[1]


def faults(path: Path) -> list[str]:
    result = []
    for kind, texts, openings in (("docstring", docstrings(path), OPENINGS), ("comment", comments(path), COMMENTS)):
        for line, text in texts:
            for name, pattern in openings.items():
                if re.match(pattern, text):
                    result.append(f"{path}:{line}: a {kind} begins with {name}: {text.splitlines()[0]}")
            for name, pattern in ANYWHERE.items():
                if match := re.search(pattern, text):
                    result.append(f"{path}:{line}: a {kind} has {name}: {match[0]}")
    return result


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_name_their_subject(folder: str) -> None:
    found = [fault for path in sorted((ROOT / folder).rglob("*.py")) for fault in faults(path)]
    assert not found, "\n".join(found)
