"""Hides modules, functions and signals that only Linux or only Unix has, from the modules of nmtkit.

Python imports this file at its start if its folder is in PYTHONPATH. Other packages still find the modules of Unix,
because they have separate code for each system.
"""

import builtins
import os
import pathlib
import signal
from typing import Any

MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
imported, opened = builtins.__import__, builtins.open


def import_without_unix(name: str, globals: Any = None, *arguments: Any, **settings: Any) -> Any:
    if name in MODULES and str((globals or {}).get("__name__", "")).split(".")[0] == "nmtkit":
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return imported(name, globals, *arguments, **settings)


def open_without_proc(file: Any, *arguments: Any, **settings: Any) -> Any:
    if str(file).startswith("/proc/"):
        raise FileNotFoundError(2, "no such file", str(file))
    return opened(file, *arguments, **settings)


def no_symlink(*arguments: Any, **settings: Any) -> None:
    raise OSError(1314, "a required privilege is not held by the client")


builtins.__import__, builtins.open = import_without_unix, open_without_proc
pathlib.io.open = open_without_proc  # type: ignore[attr-defined]
os.symlink = no_symlink
for name in ("fork", "sched_getaffinity", "killpg", "nice"):
    delattr(os, name)
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP"):
    delattr(signal, name)
