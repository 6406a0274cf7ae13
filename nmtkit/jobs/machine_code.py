"""The machine code of the engine `numba`: the folder that keeps the code, and the process that compiles the code.

Compilation takes about ten seconds of one core, once per machine. The code lies in a folder whose name depends on the
sources, the processor and the versions of Python and Numba. A file in the folder lists the digests of all other files.
If this file is missing or a digest differs, the code counts as not compiled. So a killed process, a full disk, or a
folder that was copied to a machine with a different processor does no harm.

This module imports neither torch nor numba.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nmtkit
from nmtkit.config.files import cache_folder, parse_json, sha256_of, user_cache, write_atomically
from nmtkit.jobs.folder_lock import lock

COMPLETE = "complete.json"  # digest of each file of a complete folder
COMPILED_MODULES = "nmtkit.translation.engines.compiled_code"  # all compiled modules import this module
NOTICE_SECONDS = 3.0  # if a process waits longer than this for compiled code, the log explains the wait
LOWEST_PRIORITY = 19

log = logging.getLogger("nmtkit")


def installed() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def processor() -> tuple[str, str]:
    """Returns the name and the features of the processor for which code is compiled, in the notation of LLVM.

    Like Numba, the function follows NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
    """
    import llvmlite.binding as llvm

    name, features = (os.environ.get(f"NUMBA_CPU_{part}") for part in ("NAME", "FEATURES"))
    return name or llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten() if features is None else features


@functools.cache
def folder_name() -> str:
    """Returns the name of the folder with the machine code of these sources, this processor and these packages."""
    sources = sorted((Path(nmtkit.__file__).parent / "translation" / "engines").glob("*.py"))
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    facts = repr((sys.implementation.cache_tag, versions, processor())).encode()
    digest = hashlib.blake2b(facts + b"".join(path.read_bytes() for path in sources), digest_size=10)
    return f"machine-code-{digest.hexdigest()}"


def folder() -> Path:
    """Returns the folder with the machine code.

    If the cache of the user cannot be written and has no complete code, the folder is temporary.
    """
    kept = user_cache() / folder_name()
    return kept if is_complete(kept) else cache_folder() / folder_name()


def is_ready() -> bool:
    """Returns whether the machine code is compiled. Needs the package numba."""
    return is_complete(user_cache() / folder_name())


def is_complete(folder: Path) -> bool:
    try:
        digests = parse_json((folder / COMPLETE).read_bytes())
        return bool(digests) and digests == digests_of(folder)
    except (OSError, ValueError):
        return False


def is_closed() -> bool:
    """Returns whether the folder has a list of its files. Files must not be added after the list is written."""
    return (folder() / COMPLETE).exists()


def digests_of(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def is_kept() -> bool:
    """Returns whether machine code that this process compiles will be available to later processes."""
    return cache_folder() == user_cache()


@contextlib.contextmanager
def compiling(wait: bool) -> Iterator[bool]:
    """Holds the lock of compilation. Yields False if another process has the lock and `wait` is false."""
    locked = True  # stays True if the file cannot be opened, or if the file system has no locks
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context((cache_folder() / "machine-code.lock").open("ab"))
            locked = lock(file, wait=wait)
        yield locked


def ensure(compile_all: Callable[[], None]) -> None:
    """Calls `compile_all`, which compiles all code into `folder()`, unless the code is complete.

    If another process is compiling, waits for the end of that compilation.
    """
    if is_complete(folder()):
        return
    message = "compiling the beam search for this processor; this happens once per machine"
    notice = threading.Timer(NOTICE_SECONDS, log.info, (message,))
    notice.daemon = True
    notice.start()
    try:
        with compiling(wait=True):
            if is_complete(folder()):
                return
            if COMPILED_MODULES not in sys.modules:  # otherwise, this process has written a part already
                shutil.rmtree(folder(), ignore_errors=True)  # parts of an interrupted compilation
            compile_all()
            digests = json.dumps(digests_of(folder()))
            with contextlib.suppress(OSError):
                write_atomically(folder() / COMPLETE, digests)
    finally:
        notice.cancel()


class Compilation:
    """The compilation of the machine code in a child process with the lowest priority.

    The child process continues after this process has ended, so that its work is not lost. An object of this class
    starts at most one child process.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.starting = threading.Lock()
        self.checked_at, self.ready, self.told = -1.0, False, False

    def start(self) -> None:
        """Starts the process, unless a process on this machine compiles already or machine code cannot be kept."""
        with self.starting:
            if self.process is not None or not is_kept():
                return
            with compiling(wait=False) as locked:
                if not locked:
                    return
            log.info("compiling the beam search for this processor in the background; this happens once per machine")
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nmtkit", "precompile", "--quiet"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: Windows
                os.setpriority(os.PRIO_PROCESS, self.process.pid, LOWEST_PRIORITY)

    def is_ready(self) -> bool:
        """Returns whether the machine code is compiled. Looks at the files at most once a second."""
        now = time.monotonic()
        if not self.ready and not 0 <= now - self.checked_at < 1:
            self.checked_at, self.ready = now, is_ready()
            failed = self.process is not None and (self.process.poll() or 0) > 0  # negative: killed
            if failed and not self.ready and not self.told:
                self.told = True
                log.warning("the compilation of the beam search failed; nmtkit precompile shows the reason")
        return self.ready


background = Compilation()
