"""Plug-ins: code of users that registers components. Loads plug-ins and recognises errors in their code."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nmtkit.config.registry import RegistryEntry, full_name

log = logging.getLogger("nmtkit")

PACKAGE = str(Path(__file__).parents[1]) + "/"
INSTALLED = tuple(sysconfig.get_path(name) + "/" for name in ("stdlib", "platlib", "purelib"))

_roots: list[str] = []  # paths of plug-ins: the file, or, for a package, the folder with a final slash
_names: list[str] = []  # names that `load_plugin` has loaded
_digests: dict[str, str] = {}  # module of a plug-in -> digest of its source when it was imported


class PluginError(Exception):
    """An error of a plug-in in another process. The message was made by `plugin_message` in the other process."""


def load_plugins(names: Sequence[str]) -> None:
    """Imports the plug-ins of installed packages (entry point `nmtkit.plugins`), then all plug-ins in `names`."""
    for entry_point in _installed():
        _import(entry_point.module, f"the plug-in {entry_point.name} of an installed package")
        entry_point.load()
    for name in names:
        load_plugin(name)


@cache
def _installed() -> importlib.metadata.EntryPoints:
    """Returns the entry points of plug-ins in installed packages.

    The result is cached, because finding the plug-ins reads a file of each installed package.
    """
    return importlib.metadata.entry_points(group="nmtkit.plugins")


def load_plugin(name: str) -> None:
    """Imports a plug-in once: a Python file, or a module by its dotted name. The import registers its components.

    Warns if the source has changed since this process imported the plug-in. If the plug-in is missing, raises
    FileNotFoundError or ModuleNotFoundError with its name. Also raises any exception of the import.
    """
    module_name = plugin_module(name)
    if name.endswith(".py"):
        _import_file(name, module_name)
    else:
        _import(name, f"plug-in {name}")
    if name not in _names:
        _names.append(name)
    digest = _source_digest(module_name)
    if _digests.setdefault(module_name, digest) != digest:
        log.warning("plug-in %s has changed since this process loaded it; restart to use the new version", name)


def loaded_plugins() -> list[str]:
    """Returns the names of the plug-ins that `load_plugin` has loaded in this process, for spawned processes."""
    return list(_names)


def _import_file(name: str, module_name: str) -> None:
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"plug-in {name}: no such file")
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


def _import(name: str, title: str) -> None:
    """Imports a module. Raises ModuleNotFoundError with a hint if Python does not find the module itself."""
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
        if name.startswith("."):  # a path such as ./mine
            raise ModuleNotFoundError(name=name)
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name + ".").startswith(error.name + "."):
            raise ModuleNotFoundError(
                f"{title}: there is no module {error.name!r}; give a Python file (mine.py) or the dotted name of a "
                "module that Python finds (see PYTHONPATH)"
            ) from None
        raise


def plugin_module(name: str) -> str:
    """Returns the module name under which `sys.modules` holds a plug-in."""
    if not name.endswith(".py"):
        return name
    return "nmtkit_plugin_" + "".join(c if c.isalnum() else "_" for c in str(Path(name).resolve()))


def plugins_for(entry: RegistryEntry[Any], plugins: Sequence[str]) -> list[str]:
    """Returns the plug-ins that are needed for `entry`.

    If nmtkit defines `entry`, no plug-in is needed. If none of `plugins` defines `entry`, all of them may be needed.
    """
    if entry.module.split(".")[0] == "nmtkit":
        return []
    names = [name for name in plugins if f"{entry.module}.".startswith(f"{plugin_module(name)}.")]
    return names or list(plugins)


# --- source -----------------------------------------------------------------------------------------------------------


def source_digests(names: Sequence[str]) -> dict[str, str]:
    """Returns a digest of the source of each loaded plug-in, by name. A file is named without its folder.

    If several files have the same name, their digests are one text. For a plug-in in `names`, the digest describes the
    source at the time of the import; for a plug-in of an installed package, the current source. If the plug-in is a
    package, the digest covers all .py files of the package. The digest does not cover other modules that the plug-in
    imports.
    """
    sources: dict[str, set[str]] = {}
    for name in names:
        title = Path(name).name if name.endswith(".py") else name
        sources.setdefault(title, set()).add(_digests[plugin_module(name)])
    digests = {title: " ".join(sorted(found)) for title, found in sources.items()}
    installed = {entry_point.module for entry_point in _installed()}
    return digests | {name: _source_digest(name) for name in sorted(installed) if name in sys.modules}


def _source_digest(module_name: str) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of a module: of its file, or of all .py files of a package."""
    module = sys.modules[module_name]
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    origin = getattr(module, "__file__", None)
    files = sorted(path for folder in folders for path in folder.rglob("*.py")) or ([Path(origin)] if origin else [])
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def is_own(factory: Callable[..., Any]) -> bool:
    """Returns whether a registered class or function is part of this package and not of a plug-in."""
    return full_name(factory).startswith("nmtkit.")


# --- errors -----------------------------------------------------------------------------------------------------------


def plugin_message(error: BaseException) -> str | None:
    """Returns a message with file, line and code if the code of a plug-in caused `error`, otherwise None.

    The plug-in caused the error if the traceback has a frame of the plug-in, or if a file of the plug-in has a syntax
    error. There is one exception: if the plug-in calls nmtkit, and this call raises a ValueError, OSError or
    ImportError, the result is None. This exception does not apply while the plug-in is being imported.
    """
    if isinstance(error, PluginError):
        return str(error)
    if isinstance(error, SyntaxError) and error.filename and _is_plugins(error.filename):
        return _described(error, [])
    frames = list(traceback.extract_tb(error.__traceback__))
    plugin_frames = [index for index, frame in enumerate(frames) if _is_plugins(frame.filename)]
    if not plugin_frames:
        return None
    importing = any(frames[index].name == "<module>" for index in plugin_frames)
    below = frames[plugin_frames[-1] + 1 :]
    has_own_frames = any(frame.filename.startswith(PACKAGE) for frame in below)
    if has_own_frames and not importing and isinstance(error, ValueError | OSError | ImportError):
        return None  # a mistake of the user; the message of the error already explains the mistake
    # frames in the user's other modules, which the plug-in called
    inner = [frame for frame in below if not has_own_frames and not frame.filename.startswith(("<", *INSTALLED))]
    return _described(error, [frames[plugin_frames[-1]], *inner])


def _described(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """Returns a text with the error (`AttributeError: …`), the frames, and the flag that shows the whole traceback."""
    lines = traceback.format_exception_only(error)
    # the last line of a syntax error is its message; for any other error, all lines are the message
    before, message = (lines[:-1], lines[-1]) if isinstance(error, SyntaxError) else ([], "".join(lines))
    shown = "".join([*traceback.format_list(frames), *before])
    return f"in a plug-in: {message.rstrip()}\n{shown}For the whole traceback, add --debug"


def _is_plugins(file: str) -> bool:
    return any(file == root or (root.endswith("/") and file.startswith(root)) for root in _roots)
