"""Each architecture is in one file. The trainer, the search and the command line know no architecture by name."""

import ast
from pathlib import Path

import nmtkit
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.architectures.transformer import Transformer

ROOT = Path(nmtkit.__file__).parent


def test_only_the_registry_imports_a_rival_and_nothing_asks_for_one_by_name() -> None:
    rivals = {
        name: entry
        for name, entry in ARCHITECTURES.entries.items()
        if entry.factory is not Transformer and entry.factory.__module__.startswith("nmtkit.models.architectures.")
    }  # without the plug-ins that other tests load
    modules = {entry.factory.__module__ for entry in rivals.values()}
    assert len(modules) == 6
    for path in ROOT.rglob("*.py"):
        module = ".".join(("nmtkit", *path.relative_to(ROOT).with_suffix("").parts))
        if module in modules or module == "nmtkit.models.architectures.__init__":
            continue
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in (*rivals, *(module.rpartition(".")[2] for module in modules))):
            continue  # parsing all files takes a second
        for node in ast.walk(ast.parse(text)):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & modules, where
            elif isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                assert not names & modules, where
            elif isinstance(node, ast.Constant):
                assert node.value not in rivals, f"{where} names the architecture {node.value!r}"
