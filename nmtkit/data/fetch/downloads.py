"""Downloads of files and JSON over HTTP.

The received data goes to a hidden file next to the destination. When the download is complete, the hidden file gets the
name of the destination. A later call resumes an interrupted download, if the server says that the file has not changed
(RFC 9110, sections 13.1.5 and 14.2).
"""

import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote, urlsplit

from nmtkit import __version__
from nmtkit.config import Config, option
from nmtkit.config.files import disk_full, parse_json, sync_folder
from nmtkit.data.retries import asked_wait, may_pass, wait_after
from nmtkit.jobs import progress
from nmtkit.jobs.folder_lock import lock

CHUNK = 1 << 18
MEGABYTE = 1e6
LARGEST_JSON = 64 << 20

log = logging.getLogger("nmtkit")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HttpConfig(Config):
    """Settings of downloads."""

    attempts: int = option(
        5, "attempts for a request that fails for a temporary reason", min=1, max=100, section="Downloads"
    )
    request_timeout: float = option(60.0, "seconds without data until an attempt fails", above=0, max=86_400)
    max_download: float | None = option(None, "refuse files of more than X gigabytes", above=0, metavar="X")


@dataclass(frozen=True, kw_only=True)
class Downloaded:
    """A complete download. `url` is the address after redirections."""

    path: Path
    url: str
    bytes: int
    sha256: str


class DownloadError(OSError):
    """A request failed. Another request would fail again, or all attempts are used up."""


class _TemporaryError(Exception):
    """A request failed for a temporary reason. `wait` is the number of seconds that the server asks for.

    `offline` means that there is probably no network. Then only a download that has received data is tried again.
    """

    def __init__(self, reason: str, wait: float = 0.0, *, offline: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.offline = wait, offline


class _ChangedError(_TemporaryError):
    """The file on the server has changed since its first part was received, so the download must begin again."""


class HttpClient:
    """Makes requests, and repeats requests that fail for a temporary reason. `sleep` replaces `time.sleep`."""

    def __init__(self, config: HttpConfig | None = None, sleep: Callable[[float], None] | None = None) -> None:
        self.config, self.sleep = config or HttpConfig(), time.sleep if sleep is None else sleep
        # Only these handlers: the default opener also reads local files (file:) and FTP.
        self.opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler, urllib.request.UnknownHandler, urllib.request.HTTPHandler,
            urllib.request.HTTPSHandler, urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPRedirectHandler,
            urllib.request.HTTPErrorProcessor,
        ):  # fmt: skip
            self.opener.add_handler(handler())

    def json(self, url: str) -> Any:
        """Returns the JSON value at `url`. Raises DownloadError if the request fails or the answer is not JSON."""

        def read() -> Any:
            with self._open(url) as response:
                text = _received(response.read, LARGEST_JSON + 1)
                if response.length and len(text) <= LARGEST_JSON:
                    raise _TemporaryError("the connection ended in the middle of the answer")
            if len(text) > LARGEST_JSON:
                raise DownloadError(f"{url}: the answer has more than {LARGEST_JSON >> 20} MB")
            try:
                return parse_json(text)
            except ValueError:
                raise DownloadError(f"{url}: the answer is not JSON: {_shown(text)}") from None

        return self._repeated(url, read, lambda: 0)

    def download(self, url: str, path: Path, *, title: str, md5: str | None = None) -> Downloaded:
        """Downloads a file to `path`, and resumes an interrupted download. `title` names the file in the progress.

        Raises DownloadError, ValueError if another process downloads the same file, and OSError for a full disk. If
        only the connection has failed, the first part of the file stays, so that the next call resumes the download.
        """
        with _Partial(path, url) as partial:
            try:
                final_url = self._repeated(url, lambda: self._transfer(url, partial, title), lambda: partial.size)
                sha256 = partial.digest("sha256")
                if md5 is not None and (found := partial.digest("md5")) != md5:
                    raise DownloadError(f"{url}: the MD5 checksum is {found}, but must be {md5}; nothing is kept")
                size = partial.size
                partial.finish()
            except OSError as error:
                if not isinstance(error, _UnfinishedError):
                    partial.remove()
                if reason := disk_full(error):
                    raise OSError(f"cannot write {path}: {reason}") from error
                raise
        return Downloaded(path=path, url=final_url, bytes=size, sha256=sha256)

    # --- one request ------------------------------------------------------------------------------------------------

    def _repeated(self, url: str, request: Callable[[], T], received: Callable[[], int]) -> T:
        """Calls `request` until it succeeds. Raises _UnfinishedError after too many failures without progress.

        `received()` is the number of bytes received so far. The count of failures restarts when this number grows.
        """
        failures = 0
        while True:
            before = received()
            try:
                return request()
            except _TemporaryError as error:
                failures = 1 if received() > before else failures + 1
                if failures >= self.config.attempts or (error.offline and not received()):
                    raise _UnfinishedError(_last_words(url, failures, str(error), received())) from None
                seconds = wait_after(failures, asked=error.wait)
                log.info("%s: %s; the next attempt is in %g s", url, error, seconds)
                self.sleep(seconds)

    def _open(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        """Returns the answer to a request. Raises DownloadError, or _TemporaryError for a temporary failure."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise DownloadError(f"{url} is not an address of a web server; give http://… or https://…")
        sent = {"User-Agent": f"nmtkit/{__version__}", "Accept-Encoding": "identity", **(headers or {})}
        try:
            request = urllib.request.Request(quote(url, safe="%/:=&?~#+!$,;'@()*[]"), headers=sent)
            return self.opener.open(request, timeout=self.config.request_timeout)
        except urllib.error.HTTPError as error:
            answer = ""
            with error, suppress(OSError, http.client.HTTPException):  # the error message can omit the body
                answer = _shown(error.read(300))
            reason = f"status {error.code} ({printable(str(error.reason))[:60] or 'no reason'})"
            if error.code == 416 and headers:
                raise _ChangedError("the server has no data after the received part") from None
            if may_pass(error.code):
                raise _TemporaryError(reason, asked_wait(error.headers.get("Retry-After"))) from None
            raise DownloadError(f"{url}: {reason}{f': {answer}' if answer else ''}") from None
        except urllib.error.URLError as error:
            cause = error.reason
            if isinstance(cause, socket.gaierror):
                host = urlsplit(url).hostname
                raise _TemporaryError(f"no address of {host} is known; is there a network?", offline=True) from None
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise DownloadError(f"{url}: the certificate is not valid: {cause.verify_message}") from None
            if not isinstance(cause, OSError):  # an unknown protocol after a redirection
                raise DownloadError(f"{url}: {cause}") from None
            raise _TemporaryError(_words(cause)) from None
        except http.client.InvalidURL as error:
            raise DownloadError(f"{url}: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _TemporaryError(_words(error)) from None

    def _transfer(self, url: str, partial: "_Partial", title: str) -> str:
        """Downloads the rest of a file. Returns the address after redirections."""
        start, headers = partial.size, {}
        if start and (validator := partial.validator()):
            headers = {"Range": f"bytes={start}-", "If-Range": validator}
        try:
            with self._open(url, headers) as response:
                total = partial.begin(response, resumes=bool(headers))
                self._check_size(url, total, partial)
                unit, size = ("KB", 1e3) if total is not None and total < 10 * MEGABYTE else ("MB", MEGABYTE)
                progress.begin(f"Downloading {title}", unit, None if total is None else total / size)
                progress.advance(partial.size / size)
                while chunk := _received(response.read1, CHUNK):
                    partial.write(chunk)
                    progress.advance(len(chunk) / size)
                    self._check_size(url, partial.size, partial)
                if total is not None and partial.size < total:
                    raise _TemporaryError(f"the connection ended after {partial.size:,} of {total:,} bytes")
                return str(response.url)
        except _ChangedError:
            log.info("%s: the received part does not fit the file on the server, so the download begins again", url)
            partial.clear()
            raise

    def _check_size(self, url: str, size: int | None, partial: "_Partial") -> None:
        """Raises DownloadError if a file of `size` bytes is too large for --max-download or for the disk."""
        limit = self.config.max_download
        if size is None:
            return
        if limit is not None and size > limit * 1e9:
            raise DownloadError(f"{url} has {size / 1e9:.3g} GB, more than --max-download {limit:g}")
        if size - partial.size > shutil.disk_usage(partial.path.parent).free:
            raise DownloadError(f"{url} has {size:,} bytes, and the disk of {partial.path.parent} has less free space")


class _UnfinishedError(DownloadError):
    """All attempts failed for temporary reasons, so the received part of a file is kept."""


class _Partial:
    """The received part of a file, as a context manager. A JSON file next to it has its URL and version."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        hidden = f".{path.name.removeprefix('.')}"
        self.part, self.notes = path.with_name(f"{hidden}.part"), path.with_name(f"{hidden}.part.json")

    def __enter__(self) -> "_Partial":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.file: IO[bytes] = open(self.part, "ab", buffering=0)  # __exit__ closes the file
            if not lock(self.file):
                self.file.close()
                raise ValueError(f"another process downloads {self.path}; wait until it ends")
            # A process that had the lock may have renamed or removed the file after this process opened the file.
            if self.part.exists() and os.path.samestat(os.fstat(self.file.fileno()), self.part.stat()):
                break
            self.file.close()
        if self.validator() is None:
            self.clear()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.file.closed and not self.size:
            self.remove()
        self.file.close()

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def validator(self) -> str | None:
        """Returns the value of If-Range to request the rest of this file, or None if the rest cannot be requested."""
        try:
            notes = parse_json(self.notes.read_text(encoding="utf-8"))
            value = notes["validator"] if notes["url"] == self.url else None
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return value if isinstance(value, str) else None

    def begin(self, response: Any, *, resumes: bool) -> int | None:
        """Prepares for the body of an answer. Returns the size of the whole file, or None if it is unknown.

        Raises _ChangedError if the answer is the rest of a different file. An answer with the whole file replaces the
        received part.
        """
        validator = _validator(response.headers)
        if response.status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not resumes or match is None or int(match[1]) != self.size or validator != self.validator():
                raise _ChangedError("the server sent the part of a different file")
            return None if match[2] == "*" else int(match[2])
        self.clear()
        if validator is not None:
            self.notes.write_text(json.dumps({"url": self.url, "validator": validator}), encoding="utf-8")
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.file.write(view) :]

    def digest(self, name: str) -> str:
        with self.part.open("rb") as file:
            return hashlib.file_digest(file, name).hexdigest()

    def clear(self) -> None:
        self.notes.unlink(missing_ok=True)
        self.file.truncate(0)

    def remove(self) -> None:
        self.file.close()  # Windows removes and renames only closed files
        self.notes.unlink(missing_ok=True)
        self.part.unlink(missing_ok=True)

    def finish(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)
        self.notes.unlink(missing_ok=True)
        sync_folder(self.path.parent)


def printable(text: str) -> str:
    """Returns a text of a server in one line, without characters that control a terminal."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


# --- answers ----------------------------------------------------------------------------------------------------------


def _received(read: Callable[[int], bytes], size: int) -> bytes:
    try:
        return bytes(read(size))
    except (OSError, http.client.HTTPException) as error:
        raise _TemporaryError(_words(error)) from None


def _validator(headers: Any) -> str | None:
    """Returns the value of If-Range for a later request: a strong ETag, the time of the last change, or None."""
    etag: str = headers.get("ETag", "")
    validator: str | None = etag if etag.startswith('"') else headers.get("Last-Modified")
    return validator


def _words(error: BaseException) -> str:
    """Returns the reason of a failed connection in one line."""
    if isinstance(error, TimeoutError):
        return "no data arrived in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended in the middle of the file"
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


def _shown(answer: bytes) -> str:
    """Returns the beginning of an answer in one line, without HTML."""
    return printable(re.sub(r"<[^>]*>", " ", answer.decode(errors="replace")))[:80]


def _last_words(url: str, failures: int, reason: str, kept: int) -> str:
    count = "the attempt failed" if failures == 1 else f"{failures} attempts failed, the last"
    rest = f"; {kept / MEGABYTE:,.1f} MB are kept, and the same command resumes the download" if kept else ""
    return f"{url}: {count} with: {reason}{rest}"
