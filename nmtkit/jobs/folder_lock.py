"""Locks on files, and the lock on the folder of a run. A file in the folder names the process that holds the lock."""

import contextlib
import json
import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from nmtkit.config.files import parse_json

log = logging.getLogger("nmtkit")

NAME = ".lock"
TOUCH_SECONDS = 10.0  # time between two updates of the file by the process with the lock
WATCHED_SECONDS = 30.0  # a process on another machine counts as dead if it has not updated the file for this time
TRIES = 10  # attempts to lock within one second; the first may fail, because `holder_of` locks the file for a moment


def lock(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Locks an open file or folder until `file` is closed, or until the process ends.

    Returns False if another process has the lock and `wait` is false. Raises OSError if the file system has no locks.
    Without `fcntl`, does nothing and returns True.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


class FolderLock:
    """An exclusive lock on a folder, held from `acquire` to `release`.

    The operating system locks a file in the folder (`flock`), so that the lock ends with the process. On some shared
    file systems, other machines do not see such locks. So the process also updates the modification time of the file
    regularly.
    """

    def __init__(self, folder: Path, flag: str = "--save-dir") -> None:
        self.folder, self.flag = folder, flag
        self.path = folder / NAME
        self.file: IO[str] | None = None
        self.released = threading.Event()

    def acquire(self) -> None:
        """Takes the lock. Raises ValueError, which names the other process, if another process has the lock."""
        file = self.path.open("a+", encoding="utf-8")
        try:
            is_locked, holder = self._lock(file), read_holder(self.path)
            if not is_locked or (holder and holder["host"] != platform.node() and self._shows_life(holder)):
                raise ValueError(f"{self.flag} {self.folder} is in use by {described(holder)}; give another folder")
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(json.dumps({"process": os.getpid(), "host": platform.node(), "since": since}))
        file.flush()
        self.file = file
        threading.Thread(target=_touch, args=(self.path, self.released), name="folder lock", daemon=True).start()

    def release(self) -> None:
        if self.file:
            self.released.set()
            self.file.truncate(0)
            self.file.close()
            self.file = None

    def _lock(self, file: IO[str]) -> bool:
        try:
            for _ in range(TRIES):
                if lock(file):
                    return True
                time.sleep(1 / TRIES)
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): make sure that no other run uses the folder", self.folder, error.strerror
            )
            return True
        return False

    def _shows_life(self, holder: dict[str, Any]) -> bool:
        """Returns whether the modification time of the file changes while this process waits.

        The time is not compared with a clock, because the clocks of two machines may differ.
        """
        message = "%s was last used by %s; waiting %g s for an update of its lock file"
        log.info(message, self.folder, described(holder), WATCHED_SECONDS)
        before, end = self.path.stat().st_mtime_ns, time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < end:
            time.sleep(WATCHED_SECONDS / 30)
            with self.path.open("rb") as file:  # opening the file makes a network file system refresh the time
                if os.fstat(file.fileno()).st_mtime_ns != before:
                    return True
        return False

    def __del__(self) -> None:
        self.release()


def _touch(path: Path, released: threading.Event) -> None:
    while not released.wait(TOUCH_SECONDS):
        try:
            os.utime(path)
        except OSError as error:
            log.debug("cannot update the time of %s: %s", path, error)


def read_holder(path: Path) -> dict[str, Any] | None:
    """Returns "process", "host" and "since" of the last process with the lock, or None if the lock was released."""
    try:
        holder = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) and {"process", "host", "since"} <= holder.keys() else None


def described(holder: dict[str, Any] | None) -> str:
    return "process {process} on {host}, since {since}".format(**holder) if holder else "another run"


def holder_of(folder: Path) -> dict[str, Any] | None:
    """Returns the facts of `read_holder` about the process that has locked a folder. Without a lock, returns None."""
    path = folder / NAME
    holder = read_holder(path)
    if holder is None:
        return None
    with contextlib.suppress(OSError):  # the file may be missing by now, or its file system may have no locks
        with path.open("rb") as file:
            if not lock(file, shared=True):
                return holder
        # A lock of a process on another machine might not be visible on this machine.
        if holder["host"] != platform.node() and time.time() - path.stat().st_mtime < WATCHED_SECONDS:
            return holder
    return None
