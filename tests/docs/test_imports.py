"""Imports point down: every module imports only from the layers below its own."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nmtkit
from nmtkit import extend
from nmtkit.config.moved import MOVED

ROOT = Path(nmtkit.__file__).parent


def table_of_rooms() -> tuple[tuple[str, ...], ...]:
    """Returns the rows of the layout table in CONTRIBUTING.md, from the top down: the folders and files of each row."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| modules | content |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return tuple(tuple(re.findall(r"`([\w/]+?)(?:/|\.py)`", cell)) for cell in cells)


ROOMS = table_of_rooms()
HEIGHT = {name: -index for index, names in enumerate(ROOMS) for name in names}


def room_of(module: str) -> str:
    """Returns the room of a module: nmtkit.data.corpora.tmx -> data/corpora; nmtkit.data.packed -> data."""
    parts = module.split(".")[1:]
    return next((room for end in (2, 1) if (room := "/".join(parts[:end])) in HEIGHT), "/".join(parts[:1]))


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Returns line and module of every nmtkit import in a file, also inside functions."""
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


def imported_names(path: Path) -> list[tuple[str, list[str]]]:
    """Returns the modules and names of the `from nmtkit… import` statements of a file."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    named = [(node.module or "", [alias.name for alias in node.names]) for node in nodes]
    return [(module, names) for module, names in named if module.startswith("nmtkit")]


SOURCES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def module_of(path: Path) -> str:
    return ".".join(("nmtkit", *path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_imports_point_down(path: Path) -> None:
    own = room_of(module_of(path))
    assert own in HEIGHT, f"{path} is in no row of the table; add {own} to the table in CONTRIBUTING.md"
    for line, module in imported(path):
        room = room_of(module)
        if room in ("", "__version__", own):
            continue
        assert room in HEIGHT, f"{path}:{line} imports {module}, which is in no row of the table"
        assert HEIGHT[room] < HEIGHT[own], f"{path}:{line} imports {module}, which is not below {own}"


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
    model = ROOT.parent / "tests" / "models" / "formats" / "huggingface" / "marian"
    script = "import pathlib, sys, nmtkit.translation.translator; from nmtkit.models.formats import detect; "
    script += f"detect.load(pathlib.Path({str(model)!r})); sys.exit('torch._dynamo' in sys.modules)"
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


def test_the_first_level_shows_the_stages_of_the_work() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "extend.py"}
    assert len([path for path in ROOT.iterdir() if (path / "__init__.py").exists()]) <= 16


def test_an_import_of_an_old_path_names_the_new_path() -> None:
    for old, new in MOVED.items():
        new_module = importlib.util.find_spec(f"nmtkit.{new}")
        assert new_module is not None and new_module.origin != "unknown", new
        said = error_of_import(f"nmtkit.{old}")
        assert f"nmtkit.{old} was moved to nmtkit.{new};" in said and "nmtkit.extend" in said
    assert "nmtkit.layers.losses was moved to nmtkit.models.layers.losses" in error_of_import("nmtkit.layers.losses")


def error_of_import(module: str) -> str:
    """Returns the message of the error that `from module import name` raises."""
    with pytest.raises(ModuleNotFoundError) as error:
        exec(f"from {module} import name", {})
    return str(error.value)


def test_extend_has_every_name_that_a_plugin_needs() -> None:
    for name in extend.__all__:
        assert getattr(extend, name) is not None
    typed = {name for _, names in imported_names(ROOT / "extend.py") for name in names}
    assert typed == set(extend.__all__)
    for path in [*(ROOT.parent / "examples/plugin").glob("*.py"), *(ROOT.parent / "docs").glob("*.md")]:
        deep = re.findall(r"^from (nmtkit\.\S+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(deep) <= {"nmtkit.extend"}, path


def test_extend_imports_no_model_for_a_schedule() -> None:
    script = "import sys; from nmtkit.extend import LR_SCHEDULERS, option; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
