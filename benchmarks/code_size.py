"""Code size: how many files, lines and lines of code does each first-level folder of a Python package have?

    python benchmarks/code_size.py nmtkit

A line of code is a line that contains a Python token other than a comment. Lines of docstrings and lines of import
statements do not count, wherever the statement is. Each line of a statement of several lines counts. By this rule,
nmtkit at commit 8c19c94 has 51,752 lines, of which 32,789 are lines of code.
"""

import argparse
import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LOOSE = "(loose files)"


@dataclass(frozen=True)
class Size:
    files: int = 0
    lines: int = 0
    code: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.files + other.files, self.lines + other.lines, self.code + other.code)


def size(path: Path) -> Size:
    text = path.read_text(encoding="utf-8")
    return Size(1, text.count("\n"), len(token_lines(text) - uncounted_lines(ast.parse(text))))


def token_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that contain a token other than a comment."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in LAYOUT]
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}


def uncounted_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of the lines of docstrings and import statements."""
    nodes = [*ast.walk(tree)]
    statements: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    statements += [node.body[0] for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node, False)]
    return {line for node in statements for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def sizes(root: Path) -> dict[str, Size]:
    """Returns the size of each first-level folder that has Python files, and of all files directly in `root`."""
    result: dict[str, Size] = {}
    for path in sorted(root.rglob("*.py")):
        first, *others = path.relative_to(root).parts
        name = f"{first}/" if others else LOOSE
        result[name] = result.get(name, Size()) + size(path)
    return result


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", type=Path)
    root = flags.parse_args().folder
    if not root.is_dir():
        flags.error(f"{root} is not a folder")
    counted = sizes(root)
    print(f"{'':24}{'files':>8}{'lines':>10}{'code':>10}")
    for name, of_name in [*counted.items(), ("total", sum(counted.values(), Size()))]:
        print(f"{name:24}{of_name.files:8,}{of_name.lines:10,}{of_name.code:10,}")
    loose = counted.get(LOOSE, Size()).files
    print(f"first level: {len(counted.keys() - {LOOSE})} folders and {loose} loose files")


if __name__ == "__main__":
    main()
