"""Checks paths. Writes files and folders completely or not at all, even if the power fails. Does not import torch."""

import atexit
import errno
import hashlib
import importlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

# Words for frequent errors of the operating system; other errors keep the words of the system.
REASONS = {errno.ENOENT: "no such file or folder", errno.EISDIR: "it is a folder, not a file"}
REASONS |= {errno.ENOTDIR: "a part of the path is a file, not a folder", errno.EACCES: "permission denied"}
RUN_CHECKPOINTS = ("best.pt", "last.pt")  # checkpoints in the folder of a run, the preferred one first
HUB_PREFIX = "hf:"  # begins the name of a model on the Hugging Face Hub: hf:ORG/NAME, hf:ORG/NAME@REVISION
HUB_MODELS = "nmtkit.models.formats.hub_models"  # opens models of the Hub; imported when used, because it loads torch
MODEL_FOLDER = "models"  # folder of the cache; each model of the Hub has a folder ORG--NAME/COMMIT-VERSION in it
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger("nmtkit")


class _RecordingFile(io.FileIO):
    """A file that keeps the OSError of a failed write, because torch.save hides this error behind an unclear error."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def explained(error: OSError) -> str:
    """Returns the text of an error for users. If the operating system names a file, the text is "PATH: REASON"."""
    if error.errno is None or error.filename is None:
        return str(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
    return f"{path}: {reason_of(error)}"


def sha256_of(*paths: Path) -> str:
    """Returns the SHA-256 of the contents of files, one after the other, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def reason_of(error: OSError) -> str:
    """Returns the reason of an error of the operating system in words, such as "no such file or folder"."""
    return REASONS.get(error.errno or 0) or error.strerror or str(error)


def checkpoint_of(path: Path) -> Path:
    """Returns the checkpoint file that a user means with a path or with the name of a model.

    The folder of a run stands for its best.pt, or else for its last.pt with a notice. `hf:ORG/NAME@REVISION` is a model
    of the Hugging Face Hub, which is downloaded and imported at its first use. All other paths stay as they are.
    """
    if is_hub_name(path.as_posix()) and not path.exists():
        return importlib.import_module(HUB_MODELS).checkpoint(path.as_posix())
    if path.is_dir():
        for name in RUN_CHECKPOINTS:
            if (path / name).is_file():
                if name != RUN_CHECKPOINTS[0]:
                    log.info("%s has no %s, so %s is used", path, RUN_CHECKPOINTS[0], name)
                return path / name
    return path


def tidy(path: Path) -> Path:
    """Returns a path without `..`, such as `data` for `runs/../data`.

    If symbolic links make the shorter path a different file, returns `path`.
    """
    short = Path(os.path.normpath(path))
    return short if os.path.realpath(short) == os.path.realpath(path) else path


def is_hub_name(text: str) -> bool:
    return text.startswith(HUB_PREFIX)


def located_in(folder: Path, text: str) -> str:
    """Returns the path `text`, which was read from a file in `folder`. A relative path gets the prefix `folder`.

    Absolute paths, names of the Hugging Face Hub, "none" and an empty text do not change.
    """
    return text if text in ("", "none") or is_hub_name(text) else str(folder / text)


def portable_name(path: Path) -> str:
    """Returns the text of a path for configs and checkpoints. A cached model of the Hub becomes hf:ORG/NAME@COMMIT."""
    try:
        parts = Path(os.path.realpath(path)).relative_to(os.path.realpath(user_cache() / MODEL_FOLDER)).parts
    except ValueError:
        return str(path)
    if len(parts) != 3:
        return str(path)
    return f"{HUB_PREFIX}{parts[0].replace('--', '/', 1)}@{parts[1].partition('-')[0]}"


def listed_lines(path: Path, kind: str) -> dict[int, str]:
    """Returns the items of a file, such as API keys, by line number. Lines that begin with # are comments.

    Raises ValueError, with the `kind` of the items, for a file that is not UTF-8 or has no items.
    """
    try:
        lines = enumerate(map(str.strip, path.read_text(encoding="utf-8-sig").split("\n")), 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8; write one {kind} per line") from error
    listed = {number: line for number, line in lines if line and not line.startswith("#")}
    if not listed:
        raise ValueError(f"{path} lists no {kind}; write one per line")
    return listed


def parse_json(text: str | bytes) -> Any:
    """Returns the JSON value of a text. Raises ValueError also for bytes that are not UTF-8, and for deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of a TOML file. Raises OSError, or ValueError with a message that lacks the path."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file to write to. At the end, the file is synced and replaces `path`.

    In every case, `path` has either its old contents or all of the new contents. If the file cannot be written, for
    example on a full disk, the new file is removed and OSError is raised. If `path` is a folder or a device, OSError is
    raised before anything is written, so that the new file does not replace a device such as /dev/null.
    """
    check_writable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with _naming(path):
        raw = _RecordingFile(temporary, "xb")
    file = io.BufferedWriter(raw)
    try:
        try:
            yield file
        except Exception as error:
            if raw.error is not None:
                raise OSError(f"cannot write {path}: {reason_of(raw.error)}") from error
            raise
        with _naming(path):
            file.flush()
            os.fsync(raw.fileno())
            file.close()
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):  # After a failed write, close() fails too.
            file.close()
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, contents: bytes | str) -> None:
    """Writes `contents` to a file with `atomic_write`. A text is encoded as UTF-8."""
    with atomic_write(path) as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the name of the file to the message of an OSError that occurs inside the context."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {reason_of(error)}") from error


def check_writable(path: Path) -> None:
    """Raises OSError if no file can be written to `path`: its folder is missing, or `path` is a folder or device."""
    if not path.parent.is_dir():
        raise OSError(f"cannot write {path}: the folder {path.parent} does not exist; make it first")
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise OSError(f"cannot write {path}: it is {kind}; give the name of a file")


def check_readable(path: Path, name: str, several: bool | None = None) -> None:
    """Raises OSError if there is no file or folder `path`. The message begins with `name`, the flag or the setting.

    If `several` is true, the user may repeat the flag. For a list such as `a.pt:b.pt` or `a.pt,b.pt`, the message then
    says to repeat the flag for each path. If `several` is false, the message asks for a single path. If `several` is
    None, the message does not mention a list. Does nothing if `path` is a name of the Hugging Face Hub, because
    checking such a name needs the network.
    """
    if is_hub_name(path.as_posix()):
        return
    try:
        path.stat()
    except OSError as error:
        parts = re.split("[:,]", str(path))
        joined = len(parts) > 1 and all(parts) and any(os.path.exists(part) for part in parts)
        advice = ""
        if joined and several:
            advice = f"; give {' '.join(f'{name} {part}'.lstrip() for part in parts)}"
        elif joined and several is False:
            advice = f"; give a single path, not a list of {len(parts)}"
        raise OSError(f"{name} {path}: {reason_of(error)}{advice}".lstrip()) from error


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path | None]) -> None:
    """Raises ValueError if an output would overwrite an input or another output. The keys of `outputs` are flags."""
    taken = {os.path.realpath(path): "which this command reads" for path in inputs if path is not None}
    for flag, path in outputs.items():
        if path is None:
            continue
        if os.path.realpath(path) in taken:
            raise ValueError(f"{flag} {path} would overwrite a file {taken[os.path.realpath(path)]}; give another name")
        taken[os.path.realpath(path)] = f"that {flag} writes"


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yields a new, empty folder beside `destination`. At the end of the block, the folder becomes `destination`.

    If the block raises an error, the folder is removed. Raises ValueError if `destination` exists and is not an empty
    folder, and OSError if the disk is full.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; remove it or choose another name")
    target = destination.resolve()  # a folder cannot replace a symbolic link to a folder
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fresh.chmod(0o755)
        yield fresh
        for path in (*fresh.rglob("*"), fresh):
            sync_folder(path)
        fresh.replace(target)
        sync_folder(target.parent)
    except Exception as error:
        if reason := disk_full(error):
            raise OSError(f"cannot write {destination}: {reason}") from error
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def disk_full(error: BaseException) -> str | None:
    """Returns the reason if `error` reports a full disk, or None.

    Errors of Rust libraries have the error number of the operating system only in their text.
    """
    numbers = (number for number in DISK_FULL if f"(os error {number})" in str(error))
    number = error.errno if isinstance(error, OSError) and error.errno in DISK_FULL else next(numbers, None)
    return None if number is None else os.strerror(number)


def sync_folder(path: Path) -> None:
    """Writes the contents of a file, or the names in a folder, to disk, so that a power cut does not lose them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """Returns NMTKIT_CACHE, or else nmtkit's folder in the user's cache. The folder may be missing or read-only."""
    if folder := os.environ.get("NMTKIT_CACHE"):
        return Path(folder).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "nmtkit"
    except RuntimeError:  # the user has no home folder
        return Path(os.devnull) / "nmtkit"


def cache_folder() -> Path:
    """Returns nmtkit's folder in the user's cache, or a temporary folder of this process if no cache can be written."""
    return _writable_or_temporary(user_cache())


@cache
def _writable_or_temporary(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        temporary = Path(tempfile.mkdtemp(prefix="nmtkit-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
