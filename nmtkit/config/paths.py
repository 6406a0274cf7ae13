"""Paths in settings: relative to the folder of a config file, or to the folder of a run."""

import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nmtkit.config.fields import field_types
from nmtkit.config.files import located_in


def relative_to(path: str, folder: Path) -> str:
    """Returns `path` relative to `folder`, or absolute if the two share only the root directory."""
    both = os.path.abspath(path), os.path.abspath(folder)
    return both[0] if os.path.commonpath(both) == os.sep else os.path.relpath(*both)


def in_folder(settings: Mapping[str, Any], cls: type, folder: Path) -> dict[str, Any]:
    """Returns `settings` with `folder` as a prefix of each relative path. `folder` is the folder of the config file."""
    return map_paths(settings, cls, lambda text: located_in(folder, text))


def map_paths(settings: Mapping[str, Any], cls: type, change: Callable[[str], str]) -> dict[str, Any]:
    """Returns settings of the config class `cls` in plain types, with `change(path)` in place of each path."""
    types = field_types(cls)

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, str) else value

    return {name: changed(value) if Path in _parts(types.get(name)) else value for name, value in settings.items()}


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns all types in an annotation. For `tuple[Path, ...] | None`, the result contains Path."""
    return (hint, *(part for argument in typing.get_args(hint) for part in _parts(argument)))
