"""Repositories of the Hugging Face Hub: the only module that calls the client `huggingface_hub` (nmtkit[hub]).

Files go to the cache that all programs of this user share (`HF_HUB_CACHE`), and the settings of the client apply:
`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`. The client compares only the size of a download, so this module compares
the hash of each file with the Hub's list.
"""

import fnmatch
import hashlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmtkit.config.extras import imported
from nmtkit.config.files import disk_full, explained
from nmtkit.data.retries import may_pass
from nmtkit.jobs import progress

Kind = Literal["model", "dataset"]

REPOSITORY = re.compile(r"(?=.{1,96}$)(\w[\w.-]*/)?\w[\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_SECONDS = 30.0  # timeout of a request for facts about a repository
HTTP_LIBRARIES = ("httpx", "httpx2", "requests", "urllib3")
# finds the names of the missing files in the error of the client about an incomplete cached copy
INCOMPLETE = re.compile(r"missing \((.+?)\)\. ")

log = logging.getLogger("nmtkit")


class HubUnreachableError(OSError):
    """The Hub does not answer, is overloaded, or must not be asked (`HF_HUB_OFFLINE`). A cached copy can be used."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository in one commit: for each name, the SHA-256 of the file or the SHA-1 of its git blob."""

    commit: str
    hashes: Mapping[str, str]
    license: str | None

    def matching(self, patterns: Sequence[str]) -> list[str]:
        return [name for name in self.hashes if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class _Repository:
    """A repository at a branch, a tag or a commit. If `revision` is None, the revision is the main branch."""

    name: str
    kind: Kind = "model"
    revision: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{'' if self.kind == 'model' else 'dataset '}hf:{self.name}{revision}"


def listing(repository: str, *, kind: Kind, revision: str | None = None) -> Listing:
    """Returns the files of a repository at a branch, a tag or a commit; None is the main branch.

    Raises HubUnreachableError, ValueError for a wrong name, a wrong revision or missing rights, and ImportError without
    nmtkit[hub].
    """
    options = {"revision": revision, "files_metadata": True, "timeout": TIMEOUT_SECONDS}
    with _explaining(_Repository(repository, kind, revision)):
        info = _api().repo_info(repository, repo_type=kind, **options)
    hashes = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in info.siblings or ()}
    license_name = (info.card_data or {}).get("license")
    return Listing(info.sha, hashes, license_name if isinstance(license_name, str) else None)


def download(repository: str, *, kind: Kind, revision: str | None = None, patterns: Sequence[str] = ("*",)) -> Path:
    """Returns a folder with the files of a repository whose names match one of `patterns` (`*` also matches `/`).

    The name of the folder is the commit. Other programs share the files, so never change the files.

    Cached files are not downloaded again. A file whose hash differs from the Hub's list is removed. If the Hub
    cannot be reached, the cached copy, which may lack files, is used with a warning. Raises the errors of `listing`,
    ValueError if no file matches, and OSError for a broken download and for a full disk.
    """
    wanted = _Repository(repository, kind, revision)
    try:
        files = listing(repository, kind=kind, revision=revision)
    except HubUnreachableError as error:
        return _cached(wanted, patterns, error)
    if not files.matching(patterns):
        present = ", ".join(sorted(files.hashes)[:8]) or "no files"
        raise ValueError(f"{wanted} has no file {' or '.join(patterns)}; the repository holds {present}")
    fetched = _snapshot(wanted, patterns)
    if fetched.name != files.commit:  # the branch has moved since the first request
        files = listing(repository, kind=kind, revision=fetched.name)
    with ExitStack() as checks:  # runs all checks, so that all broken files are removed before an error is raised
        for name in files.matching(patterns):
            checks.callback(_check, fetched / name, files.hashes[name], wanted)
    return fetched


def upload(repository: str, files: Mapping[str, Path | bytes], *, private: bool, message: str) -> str:
    """Uploads `files` (name in the repository: content) in one commit. Returns the URL of the commit.

    Makes the model repository if it is missing, and removes a new repository if the upload fails. Raises the errors of
    `listing`, and ValueError if `private` is set for a repository that is public.
    """
    api = _api()
    exists = check_upload(repository, private=private)
    with _explaining(_Repository(repository), writes=True), _progress_bars():
        if not exists:
            api.create_repo(repository, repo_type="model", private=private)
        operations = [
            _client().CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        try:
            return str(api.create_commit(repository, operations, commit_message=message, repo_type="model").commit_url)
        except BaseException:
            if not exists:
                api.delete_repo(repository, repo_type="model", missing_ok=True)
            raise


def check_upload(repository: str, *, private: bool) -> bool:
    """Returns whether a model repository exists. Raises the errors of `upload` that do not depend on the files."""
    client = _client()
    with _explaining(_Repository(repository), writes=True):
        if client.constants.HF_HUB_OFFLINE:
            raise client.errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        if client.get_token() is None:
            raise ValueError(
                f"hf:{repository}: an upload needs a token with the right to write: set HF_TOKEN, or run: hf auth login"
            )
        try:
            found = _api().repo_info(repository, repo_type="model", timeout=TIMEOUT_SECONDS)
        except client.errors.RepositoryNotFoundError:
            return False
        if private and not found.private:
            raise ValueError(
                f"hf:{repository} exists and is public, so a private upload is not possible; give another name, or "
                "make the repository private in its settings"
            )
        return True


def check_name(repository: str) -> None:
    """Raises ValueError unless `repository` can be the name of a repository, such as ORG/NAME."""
    if not REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository or repository.endswith(".git"):
        raise ValueError(f"{repository!r} is not the name of a repository of the Hugging Face Hub; give ORG/NAME")


# --- the client -------------------------------------------------------------------------------------------------------


def _client() -> Any:
    need = "names of the Hugging Face Hub need pip install 'nmtkit[hub]'"
    return imported("huggingface_hub", "constants", "errors", need=need)


def _api() -> Any:
    from nmtkit import __version__

    return _client().HfApi(library_name="nmtkit", library_version=__version__)


@contextmanager
def _progress_bars() -> Iterator[None]:
    """Shows the progress bars of the client only in a terminal, and only if nmtkit shows no progress itself."""
    bars = _client().utils
    visible = sys.stderr is not None and sys.stderr.isatty() and not progress.is_shown()
    if visible or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


def _snapshot(repository: _Repository, patterns: Sequence[str], **options: Any) -> Path:
    options |= {"repo_type": repository.kind, "revision": repository.revision, "allow_patterns": list(patterns)}
    with _explaining(repository), _progress_bars():
        return Path(_client().snapshot_download(repository.name, **options))


def _cached(repository: _Repository, patterns: Sequence[str], reason: HubUnreachableError) -> Path:
    """Returns the cached copy of a repository. Logs a warning with `reason`, the error of the Hub.

    `patterns` are patterns of file names. The warning has the patterns that match no cached file. Raises `reason` if no
    cached file matches, and HubUnreachableError with the missing files if the client finds the copy incomplete.
    """
    try:
        cached = _snapshot(repository, patterns, local_files_only=True)
    except OSError as error:
        missing = INCOMPLETE.search(str(error.__cause__))
        raise reason if missing is None else HubUnreachableError(f"{reason}; the cache lacks {missing[1]}") from None
    names = [path.relative_to(cached).as_posix() for path in cached.rglob("*") if path.is_file()]
    unmatched = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if len(unmatched) == len(patterns):
        raise reason
    lacking = f", which has no {' and no '.join(unmatched)}" if unmatched else ""
    log.warning("%s; the cached commit %s is used%s", reason, cached.name[:12], lacking)
    return cached


def _check(path: Path, expected: str, repository: _Repository) -> None:
    """Removes a file whose hash is not `expected`, and raises OSError."""
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        hashlib.file_digest(file, lambda: digest)
    if digest.hexdigest() == expected:
        return
    path.resolve().unlink()  # the file in the cache; `path` is a link to this file
    path.unlink(missing_ok=True)
    raise OSError(
        f"{repository}: {path.name} was downloaded with the hash {digest.hexdigest()[:12]}…, but the Hub lists "
        f"{expected[:12]}…; the file was removed, so try again"
    )


# --- errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def _explaining(repository: _Repository, *, writes: bool = False) -> Iterator[None]:
    """Turns an error of the client into a ValueError if the user made a mistake, otherwise into an OSError.

    The message has one line.
    """
    check_name(repository.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the client are about its cache
            yield
    except (json.JSONDecodeError, KeyError, TypeError, AssertionError) as error:  # an answer that is not from a Hub
        endpoint = _client().constants.ENDPOINT
        raise OSError(
            f"{repository}: {endpoint} does not answer like the Hugging Face Hub; check HF_ENDPOINT and proxies"
        ) from error
    except (ValueError, HubUnreachableError) as error:
        if isinstance(error, ValueError) and f"hf:{repository.name}" not in str(error):
            raise ValueError(f"{repository}: {_line(error)}") from error
        raise
    except Exception as error:
        raise _explained(error, repository, writes) from error


def _explained(error: Exception, repository: _Repository, writes: bool) -> Exception:
    client = _client()
    errors, endpoint = client.errors, client.constants.ENDPOINT
    page = f"{endpoint}/{'' if repository.kind == 'model' else 'datasets/'}{repository.name}"
    token = "set HF_TOKEN, or log in once with: hf auth login"
    cause: BaseException | None = error
    status = None
    while cause is not None:  # the client wraps the first error, for example in LocalEntryNotFoundError
        if isinstance(cause, errors.GatedRepoError):
            return ValueError(f"{repository} is gated: accept its conditions at {page} with your account; then {token}")
        if isinstance(cause, errors.RevisionNotFoundError):
            return ValueError(f"{repository}: no revision {repository.revision}; give a branch, a tag or a commit")
        if isinstance(cause, errors.RepositoryNotFoundError):
            status = status or 404
            break
        if isinstance(cause, errors.EntryNotFoundError) and isinstance(cause, errors.HfHubHTTPError):
            return ValueError(f"{repository}: a file that the Hub lists is missing there: {_line(cause)}")
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return HubUnreachableError(
                f"{repository}: HF_HUB_OFFLINE forbids requests to {endpoint}, so only cached files can be used"
            )
        if reason := disk_full(cause):
            return OSError(f"{repository}: cannot write to the cache {client.constants.HF_HUB_CACHE}: {reason}")
        if "onsistency check" in str(cause):  # the size of the download is wrong
            return OSError(f"{repository}: the download ended before the end of the file; try again")
        if isinstance(cause, errors.HfHubHTTPError):
            status = cause.response.status_code
            break
        if type(cause).__module__.split(".")[0] in HTTP_LIBRARIES:
            return HubUnreachableError(
                f"{repository}: {endpoint} does not answer ({type(cause).__name__}: {_line(cause)})"
            )
        cause = cause.__cause__ or cause.__context__
    if status == 401 and "Invalid credentials" in str(cause):
        return ValueError(f"{repository}: {endpoint} does not accept this token; {token}")
    if status == 404 or (status == 401 and not writes):  # without a token, the Hub answers 401 for a missing repository
        advice = f"check the name. If it is private, {token}"
        return ValueError(f"{repository}: no such {repository.kind} repository at {endpoint}; {advice}")
    if status in (401, 403):
        right = "write to" if writes else "read"
        return ValueError(f"{repository}: this account has no right to {right} the repository ({status}); {token}")
    if status is not None and may_pass(status):
        return HubUnreachableError(f"{repository}: {endpoint} answers with error {status} now; try again later")
    shown = cause or error
    return OSError(
        f"{repository}: {explained(shown) if isinstance(shown, OSError) and shown.filename else _line(shown)}"
    )


def _line(error: BaseException) -> str:
    """Returns the text of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
