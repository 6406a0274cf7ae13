"""The cache of models of the Hugging Face Hub: a folder for each commit, with an imported checkpoint.

`models/ORG--NAME/COMMIT-VERSION/model.pt` in the cache of nmtkit is the imported checkpoint of a commit. VERSION is the
version of the importer. `models/ORG--NAME/revisions.json` maps branches and tags to commits, for use without a network.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nmtkit.config.files import HUB_PREFIX, MODEL_FOLDER, cache_folder, parse_json, user_cache, write_atomically
from nmtkit.data.checkpoint_file import FORMAT
from nmtkit.jobs.folder_lock import lock

IMPORTER = 1  # increased by every change of an importer that changes the imported checkpoint
VERSION = f"{FORMAT}.{IMPORTER}"
REVISIONS, CHECKPOINT = "revisions.json", "model.pt"
LEFT_SECONDS = 86400.0  # age in seconds from which an unfinished folder is treated as left over from a killed process

log = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class CacheEntry:
    """A part of the cache: a model of the Hub, or a folder or file of another kind, such as machine code."""

    name: str
    path: Path
    size: int  # bytes
    used: float  # time of the last use of a model, or of the last change of another part, in seconds since 1970
    revisions: tuple[str, ...] = ()  # branches and tags that pointed to this commit when they were last looked up
    stale: bool = False  # made by another version of nmtkit, or never finished

    @property
    def days(self) -> float:
        """Days since the last use."""
        return (time.time() - self.used) / 86400


def folder_of(repository: str) -> Path:
    """Returns the folder of a repository in the cache, which may be missing."""
    return cache_folder() / MODEL_FOLDER / repository.replace("/", "--")


def checkpoint_path(repository: str, commit: str) -> Path:
    return folder_of(repository) / f"{commit}-{VERSION}" / CHECKPOINT


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Locks the folder of a repository, and waits with a notice while another process has the lock.

    Makes the folder, and removes the folder if it is empty at the end.
    """
    descriptor = None
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # a system or a file system without locks: both processes import, and one result stays
            descriptor = os.open(folder, os.O_RDONLY)
            if not lock(descriptor):
                log.info("%s: waiting for another process, which downloads and imports this model", name)
                lock(descriptor, wait=True)
        with suppress(OSError):  # an error means that the other process has removed the folder
            found = folder.stat()
            if descriptor is None or os.path.samestat(os.fstat(descriptor), found):
                break
        if descriptor is not None:
            os.close(descriptor)
            descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
        with suppress(OSError):  # the folder is not empty
            folder.rmdir()


def revisions_of(folder: Path) -> dict[str, str]:
    """Maps the branches and tags of a repository to their commits, as far as they were looked up."""
    try:
        noted = parse_json((folder / REVISIONS).read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def note_revision(folder: Path, revision: str, commit: str) -> None:
    """Notes the commit of a branch or a tag, for use without a network. Raises OSError if writing fails."""
    noted = revisions_of(folder)
    if noted.get(revision) != commit:
        write_atomically(folder / REVISIONS, json.dumps(noted | {revision: commit}, indent=1))


# --- listing and removal ----------------------------------------------------------------------------------------------


def entries() -> list[CacheEntry]:
    """Returns all parts of the cache: models by name, then other folders and files."""
    models = user_cache() / MODEL_FOLDER
    found = [entry for repository in _children(models) for entry in _commits(repository)]
    others = [
        CacheEntry(path.name, path, _size(path), path.stat().st_mtime)
        for path in _children(user_cache())
        if path != models and path.suffix != ".lock"
    ]
    return found + others


def _commits(folder: Path) -> Iterator[CacheEntry]:
    repository, noted = folder.name.replace("--", "/", 1), revisions_of(folder)
    for path in filter(Path.is_dir, _children(folder)):
        commit, _, version = path.name.partition("-")
        used, unfinished = path.stat().st_mtime, path.name.startswith(".")
        if unfinished and time.time() - used < LEFT_SECONDS:
            continue  # another process may be importing
        yield CacheEntry(
            name=f"{HUB_PREFIX}{repository}@{commit}",
            path=path,
            size=_size(path),
            used=used,
            revisions=tuple(revision for revision, known in noted.items() if known == commit),
            stale=version != VERSION or unfinished,
        )


def named(entry: CacheEntry, name: str) -> bool:
    """Returns whether `name` names an entry: NAME, NAME@REVISION, or NAME@ and at least five digits of a commit."""
    whole, at, revision = name.partition("@")
    repository, _, commit = entry.name.partition("@")
    is_revision = revision in entry.revisions or (len(revision) >= 5 and commit.startswith(revision))
    return whole == repository and (not at or is_revision)


def remove(entry: CacheEntry) -> None:
    """Removes an entry. Raises OSError."""
    if not entry.path.is_dir():
        entry.path.unlink(missing_ok=True)
    elif not entry.name.startswith(HUB_PREFIX):
        shutil.rmtree(entry.path)
    else:
        folder = entry.path.parent
        with locked(folder, entry.name):
            shutil.rmtree(entry.path)
            if not any(map(Path.is_dir, _children(folder))):
                shutil.rmtree(folder)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
