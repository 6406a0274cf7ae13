"""Imports point down: every module imports only from the layers below its own."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nmtkit

ROOT = Path(nmtkit.__file__).parent


def table_of_layers() -> tuple[tuple[str, ...], ...]:
    """Returns the rows of the layout table in CONTRIBUTING.md, from the top down: the modules that each row names."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| modules | content |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return tuple(tuple(re.findall(r"`(\w+)(?:/|\.py)`", cell)) for cell in cells)


LAYERS = table_of_layers()
HEIGHT = {name: -index for index, names in enumerate(LAYERS) for name in names}


def part_of(module: str) -> str:
    """`nmtkit.data.corpus` -> `data`; `nmtkit` itself -> empty."""
    return [*module.split("."), ""][1]


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and module of every nmtkit import in a file, those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import; write it from nmtkit on"
            if node.module == "nmtkit":
                found += [(node.lineno, f"nmtkit.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
    return [(line, module) for line, module in found if module.split(".")[0] == "nmtkit"]


SOURCES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    assert own in HEIGHT, f"{path} stands in no layer; give {own} a place in LAYERS"
    for line, module in imported(path):
        part = part_of(module)
        if part in ("", "__version__", own):
            continue
        assert part in HEIGHT, f"{path}:{line} imports {module}, which stands in no layer"
        assert HEIGHT[part] < HEIGHT[own], f"{path}:{line} imports {module}, which is not below {own}"


def test_within_a_package_no_two_modules_import_each_other() -> None:
    names = {".".join(("nmtkit", *path.relative_to(ROOT).with_suffix("").parts)): path for path in SOURCES}
    graph = {name: {module for _, module in imported(path) if module in names} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " imports ".join((*above[above.index(name) :], name))
        if name not in done:
            for module in sorted(graph[name]):
                visit(module, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_the_command_line_imports_torch_only_inside_commands() -> None:
    for path in (ROOT / "cli").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert "torch" not in {name.split(".")[0] for name in names}, f"{path}:{node.lineno} imports torch"


@pytest.mark.slow
def test_translating_imports_no_compiler() -> None:
    """torch._dynamo takes as long to import as the rest of torch, and every command would pay for it."""
    script = "import sys, nmtkit.translation.translator; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.slow
def test_nothing_below_the_command_line_imports_click() -> None:
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in ("cli", "__main__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert "click" not in {name.split(".")[0] for name in names}, f"{path}:{node.lineno} imports click"


def test_at_most_six_modules_stand_outside_a_folder() -> None:
    assert len([path for path in ROOT.glob("*.py") if not path.name.startswith("__")]) <= 6
