"""A public name of a class or of a type means one thing in the whole package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nmtkit

ROOT = Path(nmtkit.__file__).parent


def type_names(path: Path) -> Iterator[str]:
    """Yields the public classes and type aliases that a file defines at its top level."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_a_type_is_defined_once() -> None:
    files = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for name in type_names(path):
            files[name].add(str(path.relative_to(ROOT)))
    several = {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}
    assert not several, f"names of classes or types with several definitions: {several}"
