"""Files that appear whole or not at all, and outlast a power cut. Imports no torch: preprocessing needs none."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file beside `path` to write to, which is synced and takes the place of `path` in the end.

    Whatever happens, `path` is what it was or all that was written. Raises OSError: for a full disk, say, after
    removing what was written; and, before anything is written, when `path` is a folder or a device such as /dev/null,
    which a file would replace where the user may write to its folder.
    """
    if path.exists() and not path.is_file():
        raise OSError(
            f"cannot write {path}: it is {'a folder' if path.is_dir() else 'no file'}; give the name of a file"
        )
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(destination: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside `destination` and renames it. Raises ValueError when something is there already."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; remove it or choose another name")
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        fresh.chmod(0o755)
        fill(fresh)
        fresh.replace(destination)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
