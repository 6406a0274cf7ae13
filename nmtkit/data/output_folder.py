"""The folder a dataset is made in: built beside its final place and renamed when it is whole."""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from nmtkit.data.binarized import MANIFEST

MARK = ".nmtkit-unfinished"  # in a folder under construction: says that it is ours to remove


class AtomicFolder:
    """Use as a context: `folder` is there to be filled, and `finish` puts it in its place. Left without it, all goes.

    Raises ValueError, before anything is written, when `final` holds something that may not be replaced, or another
    process is making it.
    """

    def __init__(self, final: Path, overwrite: bool) -> None:
        self.final = final
        self.folder = final.with_name(final.name + ".tmp")
        self._old = final.with_name(final.name + ".old.tmp")
        check_replaceable(final, overwrite)

    def __enter__(self) -> "AtomicFolder":
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for stale in (self.folder, self._old):
            if stale.exists():
                self._remove(stale)
        self.folder.mkdir()
        (self.folder / MARK).touch()
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, however it ends
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)
        shutil.rmtree(self.folder, ignore_errors=True)  # there only if `finish` was not reached

    def finish(self) -> None:
        """Puts the folder, whose files are synced, in its final place."""
        (self.folder / MARK).unlink()
        sync(self.folder)
        if self.final.is_dir() and any(self.final.iterdir()):
            os.rename(self.final, self._old)
        os.rename(self.folder, self.final)
        sync(self.final.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _remove(self, stale: Path) -> None:
        if not (stale / MARK).is_file() and not is_dataset(stale):
            raise ValueError(f"{stale} is in the way, and no preprocess left it there; move it or remove it")
        handle = os.open(stale, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another preprocess is making {self.final}; wait for it or give another --destdir"
            ) from error
        finally:
            os.close(handle)
        shutil.rmtree(stale)


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises ValueError unless `folder` is new, empty, or a dataset that may be overwritten."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    if not any(folder.iterdir()):
        return
    if not is_dataset(folder):
        raise ValueError(f"{folder} holds something that is no nmtkit dataset; give another --destdir")
    if not overwrite:
        raise ValueError(f"{folder} holds a dataset; give --overwrite to replace it, or another --destdir")


def is_dataset(folder: Path) -> bool:
    """Whether all of it is what preprocess makes: a dataset, or parts of one."""
    if (folder / MANIFEST).is_file():
        return True
    return all((path / MANIFEST).is_file() for path in folder.iterdir())


def sync(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
