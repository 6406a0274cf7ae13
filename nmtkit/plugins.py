"""Plug-ins: users' code that registers components. Loads it, and tells its errors from those of this package."""

import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nmtkit.registry import Entry

PACKAGE = str(Path(__file__).parent) + "/"
INSTALLED = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platlib", "purelib"))

_roots: list[str] = []  # files of plug-ins, and folders of plug-ins that are packages, with a slash


class PluginError(Exception):
    """An error of a plug-in in another process, as `plugin_message` describes it there."""


def load_plugins(names: Sequence[str]) -> None:
    """Imports what installed packages declare under the entry point `nmtkit.plugins`, then each of `names`."""
    for entry_point in importlib.metadata.entry_points(group="nmtkit.plugins"):
        _import(entry_point.module, f"the plug-in {entry_point.name} of an installed package")
        entry_point.load()
    for name in names:
        load_plugin(name)


def load_plugin(name: str) -> None:
    """Imports a plug-in, a Python file or a module's dotted name, once. Its import registers its components.

    Raises FileNotFoundError or ModuleNotFoundError naming it, and whatever its import raises.
    """
    if not name.endswith(".py"):
        _import(name, f"plug-in {name}")
        return
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"plug-in {name}: no such file")
    module_name = plugin_module(name)
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _roots.append(str(path))
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def plugin_module(name: str) -> str:
    """Returns the name of the module that a plug-in becomes."""
    if not name.endswith(".py"):
        return name
    return "nmtkit_plugin_" + "".join(c if c.isalnum() else "_" for c in str(Path(name).resolve()))


def plugins_for(entry: Entry[Any], plugins: Sequence[str]) -> list[str]:
    """Returns those of `plugins` that a registered name needs: the one it comes from; all where that cannot be told."""
    if entry.module.split(".")[0] == "nmtkit":
        return []
    own = [name for name in plugins if f"{entry.module}.".startswith(f"{plugin_module(name)}.")]
    return own or list(plugins)


def _import(name: str, title: str) -> None:
    """Imports a module. Raises ModuleNotFoundError if it is not there itself."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is not None and top != "nmtkit":
        _roots.extend(folder + "/" for folder in spec.submodule_search_locations or ())
        if spec.origin and not spec.submodule_search_locations:
            _roots.append(spec.origin)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name + ".").startswith(error.name + "."):
            raise ModuleNotFoundError(
                f"{title}: there is no module {error.name!r}; give a Python file (mine.py) or the dotted name of a "
                "module that Python finds (see PYTHONPATH)"
            ) from None
        raise


def is_own(factory: Callable[..., Any]) -> bool:
    """Returns whether a registered class or function is part of this package, and not a plug-in's."""
    named = factory if hasattr(factory, "__module__") else type(factory)
    return str(named.__module__).startswith("nmtkit.")


# --- errors -----------------------------------------------------------------------------------------------------------


def plugin_message(error: BaseException) -> str | None:
    """Returns the message of an error of a plug-in with file, line and code; None where it is not a plug-in's.

    It is a plug-in's if the innermost frame that is either a plug-in's or this package's is the plug-in's: what torch
    refuses in a plug-in's line belongs to that line. While a plug-in is imported, all errors are.
    """
    if isinstance(error, PluginError):
        return str(error)
    if isinstance(error, SyntaxError) and error.filename and _is_plugins(error.filename):
        return _described(error, [])
    frames = list(traceback.extract_tb(error.__traceback__))
    theirs = [index for index, frame in enumerate(frames) if _is_plugins(frame.filename)]
    if not theirs:
        return None
    importing = any(frames[index].name == "<module>" for index in theirs)
    below = frames[theirs[-1] + 1 :]
    ours = any(frame.filename.startswith(PACKAGE) for frame in below)
    if ours and not importing and isinstance(error, ValueError | OSError | ImportError):
        return None  # a user's mistake, which our message explains
    inner = [frame for frame in below if not ours and not _is_installed(frame.filename)]  # modules that it imports
    return _described(error, [frames[theirs[-1]], *inner])


def _described(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """Returns `AttributeError: …` of a plug-in, its place, and how to see more."""
    *place, message = traceback.format_exception_only(error) if isinstance(error, SyntaxError) else [_summary(error)]
    lines = "".join([*traceback.format_list(frames), *place])
    return f"in a plug-in: {message.rstrip()}\n{lines}The whole traceback: --debug"


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error))


def _is_plugins(file: str) -> bool:
    return any(file == root or (root.endswith("/") and file.startswith(root)) for root in _roots)


def _is_installed(file: str) -> bool:
    return file.startswith(("<", *INSTALLED))
