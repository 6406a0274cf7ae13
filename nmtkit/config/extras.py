"""Imports packages that only an extra of nmtkit installs."""

import importlib
from typing import Any


def imported(name: str, *submodules: str, need: str) -> Any:
    """Imports and returns the module `name` with its `submodules`.

    Raises ImportError with the text `need`, which contains the install command, if a package is missing.
    """
    try:
        for submodule in submodules:
            importlib.import_module(f"{name}.{submodule}")
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(need) from error
