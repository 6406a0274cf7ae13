"""Hides all packages that `pip install nmtkit[EXTRAS]` would not install; NMTKIT_EXTRAS names the extras.

Python imports this file at its start if its folder is in PYTHONPATH. The environment of the tests has the packages of
all extras, so a package that nmtkit forgets to declare is missed only by users.
"""

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def declared(project: str, extras: Sequence[str], seen: set[tuple[str, str]]) -> set[str]:
    """Returns the names of all projects that a project with `extras` requires, directly or through others."""
    names = {project}
    for requirement in requirements(project):
        match = re.match(r"([\w.-]+)(?:\[([\w, -]+)\])?[^;]*;?(.*)", requirement)
        assert match
        name, marker = canonical(match[1]), match[3]
        condition = re.search(r"extra *== *[\"']([\w.-]+)[\"']", marker)
        if condition and condition[1] not in extras:
            continue
        inner = [extra.strip() for extra in (match[2] or "").split(",") if extra.strip()]
        key = (name, ",".join(inner))
        if key not in seen:
            seen.add(key)
            names |= declared(name, inner, seen)
    return names


def requirements(project: str) -> list[str]:
    """Returns the requirements of a project as in its metadata; the requirements of nmtkit come from pyproject.toml."""
    if project == "nmtkit":
        table = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = table["optional-dependencies"].items()
        return table["dependencies"] + [f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines]
    try:
        return metadata.requires(project) or []
    except metadata.PackageNotFoundError:
        return []  # a requirement of another system


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hidden_modules(extras: Sequence[str]) -> set[str]:
    wanted = declared("nmtkit", extras, set())
    return {
        module
        for module, projects in metadata.packages_distributions().items()
        if not any(canonical(project) in wanted for project in projects)
    }


class Finder:
    """A finder of Python that does not find the hidden modules."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)  # metadata of packages is found by another method

    def find_spec(self, name: str, *arguments: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in self.hidden:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(name, *arguments)
        return spec


hidden = hidden_modules(os.environ["NMTKIT_EXTRAS"].split(","))
sys.meta_path[:] = [Finder(finder, hidden) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
