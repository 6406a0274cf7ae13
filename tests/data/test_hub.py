"""The client of the Hugging Face Hub against a server that breaks: every failure is one line, and no file is left."""

import builtins
import errno
import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, Fault, HubServer

from nmtkit.data import hub as hub_client
from nmtkit.data.hub import HubUnreachableError, download, listing, upload

WEIGHTS = bytes(range(256)) * 800
FILES = {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "onnx/model.bin": b"0" * 64, "README.md": b"# x\n"}


def contents(folder: Path) -> list[Path]:
    """Returns the files under a folder of the cache that hold content of a repository."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return [path for path in files if path.parent.name in ("blobs", "onnx") or "snapshots" in path.parts]


def failure(error: type[Exception], *facts: str, **options: Any) -> str:
    """Asserts that a download fails with a single line that holds all facts, and returns the line."""
    with pytest.raises(error) as caught:
        download("org/tiny", kind=options.pop("kind", "model"), **options)
    text = str(caught.value)
    assert "\n" not in text and "hf:org/tiny" in text
    for fact in facts:
        assert fact in text, text
    return text


def test_files_of_a_revision_are_downloaded_once(hub: HubServer) -> None:
    first = hub.add("org/tiny", FILES)
    hub.add("org/tiny", FILES | {"config.json": b'{"a": 2}'}, revision="v2")
    for revision, commit, config in [
        (None, first, b'{"a": 1}'),
        ("v2", hub.repository("org/tiny").refs["v2"], b'{"a": 2}'),
    ]:
        fetched = download("org/tiny", kind="model", revision=revision, patterns=["*.json", "*.safetensors"])
        assert fetched.name == commit
        assert (fetched / "config.json").read_bytes() == config
        assert (fetched / "model.safetensors").read_bytes() == WEIGHTS
        assert not (fetched / "README.md").exists()
    hub.requests.clear()
    assert download("org/tiny", kind="model", revision=first, patterns=["*.json"]).name == first
    assert not hub.asked("^GET .*resolve")


def test_a_listing_has_the_hashes_of_all_files_and_the_licence(hub: HubServer) -> None:
    commit = hub.add("org/tiny", FILES, kind="dataset", license="cc-by-4.0")
    files = listing("org/tiny", kind="dataset")
    assert (files.commit, files.license) == (commit, "cc-by-4.0")
    assert files.hashes["model.safetensors"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert files.hashes["config.json"] == hashlib.sha1(b"blob 8\0" + FILES["config.json"]).hexdigest()
    assert sorted(files.hashes) == sorted(FILES)


def test_a_dataset_with_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES, kind="dataset", gated=True)
    failure(ValueError, "gated", f"{hub.url}/datasets/org/tiny", "HF_TOKEN", kind="dataset")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (download("org/tiny", kind="dataset") / "onnx/model.bin").read_bytes() == b"0" * 64


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "../x", "org/", "/org", "org/x.git", "a--b", "x" * 97])
def test_impossible_names_are_refused_without_a_request(hub: HubServer, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        download(name, kind="model")
    assert not hub.requests


def test_missing_repositories_revisions_and_files(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure(ValueError, "no such model", hub.url)
    hub.add("org/tiny", FILES, private=True)
    failure(ValueError, "private", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    failure(ValueError, "@nope", "no revision nope", revision="nope")
    failure(ValueError, "no revision " + "f" * 40, revision="f" * 40)
    failure(ValueError, "*.zip", "config.json", patterns=["*.zip"])
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    failure(ValueError, "token", "HF_TOKEN")
    assert not contents(tmp_path)


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_refused_requests(hub: HubServer, tmp_path: Path, status: int) -> None:
    hub.add("org/tiny", FILES)
    hub.faults = [Fault("GET /api/", status=status)]
    failure(HubUnreachableError if status >= 429 else ValueError, str(status) if status != 401 else "HF_TOKEN")
    hub.faults = [Fault("(GET|HEAD) .*safetensors", status=status)]
    failure(HubUnreachableError if status >= 429 else ValueError, str(status) if status != 401 else "HF_TOKEN")
    assert not [path for path in contents(tmp_path) if "safetensors" in path.name or path.suffix == ".incomplete"]


def test_a_busy_hub_is_asked_again(hub: HubServer) -> None:
    hub.add("org/tiny", FILES)
    hub.faults = [Fault("GET .*safetensors", status=429, times=1)]
    assert (download("org/tiny", kind="model") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_lost_connection_continues_where_it_broke(hub: HubServer) -> None:
    hub.add("org/tiny", FILES)
    hub.faults = [Fault("GET .*safetensors", truncate=100_000, times=1)]
    assert (download("org/tiny", kind="model") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_connection_that_breaks_every_time(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/tiny", FILES)
    hub.faults = [Fault("GET .*safetensors", truncate=0)]
    failure(OSError)
    assert not [path for path in contents(tmp_path) if path.stat().st_size > 100]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_hash_is_removed(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.add("org/tiny", FILES)
    hub.faults = [Fault(f"GET /.*{name}", corrupt=True, times=1)]
    failure(OSError, name, "hash", "removed")
    assert name not in [path.name for path in contents(tmp_path)]
    assert (download("org/tiny", kind="model") / name).read_bytes() == FILES[name]


def test_a_full_disk(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", FILES)

    class FullFile:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> "FullFile":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        file = builtins.open(path, mode, *rest, **options)  # noqa: SIM115
        return FullFile(file) if path.suffix == ".incomplete" else file

    monkeypatch.setattr(Path, "open", opened)
    failure(OSError, "No space left", str(tmp_path))
    monkeypatch.undo()
    assert not contents(tmp_path)


def test_without_a_network_the_cached_commit_is_used(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.add("org/tiny", FILES)
    download("org/tiny", kind="model", patterns=["*.json"])
    hub.stop()
    with caplog.at_level(logging.WARNING, "nmtkit"):
        assert download("org/tiny", kind="model", patterns=["*.json"]).name == commit
    assert commit[:12] in caplog.text and hub.url in caplog.text
    failure(HubUnreachableError, hub.url, patterns=["*.safetensors"])
    failure(HubUnreachableError, hub.url, revision="v2")


def test_the_files_that_a_cached_copy_lacks_are_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.add("org/tiny", FILES)
    download("org/tiny", kind="model", patterns=["config.json"])
    hub.stop()
    text = failure(HubUnreachableError, hub.url, "model.safetensors", patterns=["config.json", "*.safetensors"])
    assert "config.json" not in text
    checks = "huggingface_hub._snapshot_download._raise_if_incomplete_snapshot"
    monkeypatch.setattr(checks, lambda **_: None, raising=False)  # older clients do not know the files of a commit
    with caplog.at_level(logging.WARNING, "nmtkit"):
        assert download("org/tiny", kind="model", patterns=["config.json", "*.safetensors"]).name == commit
    assert "*.safetensors" in caplog.text and "config.json" not in caplog.text


def test_offline_no_request_is_made(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.add("org/tiny", FILES)
    download("org/tiny", kind="model", patterns=["*.json"])
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert download("org/tiny", kind="model", patterns=["*.json"]).name == commit
    assert "HF_HUB_OFFLINE" in caplog.text and "not cached" not in caplog.text
    failure(HubUnreachableError, "HF_HUB_OFFLINE", patterns=["*.safetensors"])
    failure(HubUnreachableError, "HF_HUB_OFFLINE", revision="v2")
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
        upload("org/tiny", {"a.txt": b"a"}, private=False, message="x")
    assert not hub.requests


def test_a_server_that_is_no_hub_and_a_cache_that_cannot_be_written(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", FILES)
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    failure(OSError, str(tmp_path / "file"), "not a folder")
    hub.faults = [Fault("GET /api/", status=200)]  # as from a login page
    failure(OSError, hub.url, "HF_ENDPOINT")


def test_without_the_extra(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"nmtkit\[hub\]"):
        hub_client.download("org/tiny", kind="model")


@pytest.mark.slow
def test_an_upload_is_one_commit(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "model.pt").write_bytes(WEIGHTS)
    files: dict[str, Path | bytes] = {"model.pt": tmp_path / "model.pt", "README.md": b"---\nlicense: mit\n---\n# x\n"}
    address = upload("org/new", files, private=True, message="first")
    repository = hub.repository("org/new")
    assert repository.private and repository.messages == ["first"]
    assert address.endswith(repository.refs["main"])
    latest = repository.commits[repository.refs["main"]]
    assert latest["model.pt"] == WEIGHTS and latest["README.md"] == files["README.md"]
    upload("org/new", {"README.md": b"---\nlicense: mit\n---\n# y\n"}, private=True, message="second")
    latest = repository.commits[repository.refs["main"]]
    assert latest["model.pt"] == WEIGHTS and latest["README.md"].endswith(b"# y\n")


def refused_upload(name: str, *facts: str, private: bool = False) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        upload(name, {"model.pt": WEIGHTS, "README.md": b"---\nlicense: mit\n---\n"}, private=private, message="x")
    assert "\n" not in str(caught.value)
    for fact in (f"hf:{name}", *facts):
        assert fact in str(caught.value), str(caught.value)


def test_uploads_without_rights_change_nothing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    refused_upload("org/new", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused_upload("org/new", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused_upload("others/new", "right to write")
    hub.add("others/model", FILES)
    hub.add("org/public", FILES)
    refused_upload("others/model", "right to write")
    refused_upload("org/public", "public", private=True)
    assert sorted(hub.repositories) == [("models", "org/public"), ("models", "others/model")]
    assert not hub.repository("others/model").messages and not hub.repository("org/public").messages


@pytest.mark.slow
@pytest.mark.parametrize("request_", ["PUT /upload", "POST .*preupload", "POST .*batch", "POST .*/commit/"])
def test_an_upload_that_breaks_leaves_nothing(hub: HubServer, monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    before = hub.add("org/old", FILES)
    hub.faults = [Fault(request_, status=500)]
    refused_upload("org/new", "500")
    refused_upload("org/old", "500")
    assert ("models", "org/new") not in hub.repositories
    assert hub.repository("org/old").refs["main"] == before
