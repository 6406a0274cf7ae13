"""A small Hugging Face Hub for tests: an HTTP server that answers the requests of the real client `huggingface_hub`.

`HubServer` keeps repositories in memory. Large files (`lfs`) are stored as with Git LFS: `resolve` redirects to another
address, and uploads go through the LFS batch API. `faults` break chosen requests.
"""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LFS = ("*.pt", "*.bin", "*.safetensors", "*.spm", "*.parquet", "*.npz")
TOKEN = "hf_writer"  # the token of an account that may read everything and write to the organization "org"
REPOSITORY = r"/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> files
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    messages: list[str] = field(default_factory=list)  # one for each commit that a client made
    private: bool = False
    gated: bool = False
    license: str | None = None

    def commit_of(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        identity = hashlib.sha1(repr((sorted(files), len(self.commits), [*files.values()])).encode()).hexdigest()
        self.commits[identity] = dict(files)
        self.refs[revision] = identity
        return identity


@dataclass
class Fault:
    """Changes the answers to requests whose "METHOD PATH" matches the pattern, the first `times` times.

    `status` replaces the answer. `truncate` sends only so many bytes of the body. `corrupt` changes the first byte.
    """

    pattern: str
    status: int | None = None
    error_code: str | None = None
    truncate: int | None = None
    corrupt: bool = False
    times: int = 1_000_000


class HubServer:
    cache: Path  # of the client

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.uploads: dict[str, bytes] = {}  # SHA-256 -> contents of uploaded LFS files
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "METHOD PATH?QUERY" of each request
        self.connections: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def add(
        self,
        name: str,
        files: dict[str, bytes] | Path,
        *,
        kind: str = "model",
        revision: str = "main",
        private: bool = False,
        gated: bool = False,
        license: str | None = None,
    ) -> str:
        """Commits files, given by name or as a folder, and returns the commit."""
        if isinstance(files, Path):
            found = sorted(path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        repository = self.repositories.setdefault((f"{kind}s", name), Repository())
        repository.private, repository.gated, repository.license = private, gated, license
        return repository.commit(files, revision)

    def repository(self, name: str, kind: str = "model") -> Repository:
        return self.repositories[f"{kind}s", name]

    def asked(self, pattern: str) -> list[str]:
        """Returns the requests, as "METHOD PATH", that match a pattern."""
        return [request for request in self.requests if re.search(pattern, request)]

    def stop(self) -> None:
        """Stops the server and closes the connections that clients keep open."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.hub.connections.append(self.connection)

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        self.close_connection = False
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {self.path}")
        for fault in self.hub.faults:
            if (
                fault.status is not None
                and fault.times > 0
                and re.search(fault.pattern, f"{self.command} {parts.path}")
            ):
                fault.times -= 1
                return self._error(fault.status, fault.error_code)
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            return self._error(401, message="Invalid credentials in Authorization header")
        for pattern, answer in ROUTES:
            method, path = pattern.split(" ", 1)
            match = re.fullmatch(path, parts.path)
            if match and self.command in method.split("|"):
                return answer(self, **{key: unquote(value) for key, value in match.groupdict(default="").items()})
        self._error(404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

    # --- answers ---

    def _send(self, body: bytes, *, status: int = 200, type: str = "application/json", **headers: str) -> None:
        path = urlsplit(self.path).path
        faults = [fault for fault in self.hub.faults if re.search(fault.pattern, f"{self.command} {path}")]
        for fault in faults:
            if fault.corrupt and fault.times > 0 and self.command == "GET":
                fault.times -= 1
                body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        headers = {"Content-Type": type, "Content-Length": str(len(body)), "X-Request-Id": "test"} | headers
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        for fault in faults:
            if fault.truncate is not None and fault.times > 0 and self.command == "GET":
                fault.times -= 1
                body = body[: fault.truncate]
                self.close_connection = True
                self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status=status)

    def _error(self, status: int, code: str | None = None, message: str = "refused by the test") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(json.dumps({"error": message}).encode(), status=status, **headers)

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _find(self, kind: str, name: str, revision: str) -> tuple[Repository, str] | None:
        """Returns the repository and the commit of a revision, or answers with an error of the Hub."""
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and not self._authorized()):
            self._error(404 if self._authorized() else 401, "RepoNotFound" if self._authorized() else None)
            return None
        if (commit := repository.commit_of(revision)) is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    # --- routes ---

    def info(self, kind: str, name: str, revision: str = "") -> None:
        if found := self._find(kind, name, revision or "main"):
            repository, commit = found
            files = repository.commits[commit]
            siblings = [{"rfilename": path, **_entry(path, content)} for path, content in files.items()]
            for sibling in siblings:
                sibling["blobId"] = sibling.pop("oid")
                if "lfs" in sibling:
                    sibling["lfs"] = {"sha256": sibling["lfs"]["oid"], **sibling["lfs"]}
                if "blobs" not in self.query:
                    sibling = {"rfilename": sibling["rfilename"]}
            card = {"license": repository.license} if repository.license else {}
            facts = {"id": name, "sha": commit, "private": repository.private, "gated": repository.gated and "manual"}
            self._json({**facts, "siblings": siblings, "cardData": card, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, kind: str, name: str, revision: str) -> None:
        if found := self._find(kind, name, revision):
            files = found[0].commits[found[1]]
            self._json([{"type": "file", "path": path, **_entry(path, content)} for path, content in files.items()])

    def resolve(self, name: str, revision: str, path: str, kind: str = "") -> None:
        found = self._find("datasets" if kind else "models", name, revision)
        if not found:
            return
        repository, commit = found
        if repository.gated and not self._authorized():
            return self._error(403, "GatedRepo", f"Access to {name} is restricted")
        if path not in repository.commits[commit]:
            return self._error(404, "EntryNotFound", "Entry not found")
        content = repository.commits[commit][path]
        facts = {"X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        entry = _entry(path, content)
        if "lfs" not in entry:
            return self._ranged(content, ETag=f'"{entry["oid"]}"', **facts)
        # The host is written in another way, so that the client sees another host than the Hub: it sends no token.
        address = self.hub.url.replace("127.0.0.1", "localhost") + f"/lfs/{commit}/{path}"
        facts |= {"X_Linked_Etag": f'"{entry["lfs"]["oid"]}"', "X_Linked_Size": str(len(content)), "Location": address}
        self._send(b"", status=302, ETag='"redirect"', **facts)

    def lfs_file(self, commit: str, path: str) -> None:
        for repository in self.hub.repositories.values():
            if commit in repository.commits:
                content = repository.commits[commit][path]
                return self._ranged(content, ETag=f'"{hashlib.md5(content).hexdigest()}"', Accept_Ranges="bytes")
        self._error(404)

    def _ranged(self, content: bytes, **headers: str) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return self._send(content, type="application/octet-stream", **headers)
        start, end = int(match[1]), int(match[2] or len(content) - 1)
        if start >= len(content):
            return self._error(416)
        headers["Content_Range"] = f"bytes {start}-{min(end, len(content) - 1)}/{len(content)}"
        self._send(content[start : end + 1], status=206, type="application/octet-stream", **headers)

    # --- uploads ---

    def who(self) -> None:
        self._json(
            {"name": "writer", "type": "user", "orgs": [{"name": "org"}]}
        ) if self._authorized() else self._error(401)

    def create(self) -> None:
        request = json.loads(self.body)
        if not self._authorized():
            return self._error(401)
        if request["organization"] != "org":
            return self._error(403, message="You don't have the rights to create a model under this namespace")
        name, kind = f"{request['organization']}/{request['name']}", f"{request.get('type', 'model')}s"
        if (kind, name) in self.hub.repositories:
            return self._error(409, message="You already created this model repo")
        private = request.get("visibility") == "private" or bool(request.get("private"))
        repository = self.hub.repositories[kind, name] = Repository(private=private)
        repository.commit({".gitattributes": b"*.pt filter=lfs\n"})
        self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": "0"})

    def delete(self) -> None:
        request = json.loads(self.body)
        self.hub.repositories.pop((f"{request.get('type', 'model')}s", f"{request['organization']}/{request['name']}"))
        self._json({})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        good = re.match(r"---\n.*?\n---\n", content, re.DOTALL)
        self._json({"warnings": [] if good else [{"message": "empty or missing yaml metadata"}], "errors": []})

    def preupload(self, kind: str, name: str, revision: str) -> None:
        if not self._writable(kind, name):
            return
        files = [
            {"path": file["path"], "uploadMode": "lfs" if _is_lfs(file["path"]) else "regular", "shouldIgnore": False}
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files})

    def lfs_batch(self, name: str, kind: str = "") -> None:
        if not self._writable("datasets" if kind else "models", name):
            return
        objects = [
            {**file, "actions": {"upload": {"href": f"{self.hub.url}/upload/{file['oid']}", "header": {}}}}
            for file in json.loads(self.body)["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._error(400)
        self.hub.uploads[oid] = self.body
        self._json({})

    def commit(self, kind: str, name: str, revision: str) -> None:
        repository = self._writable(kind, name)
        if not repository:
            return
        files = dict(repository.commits[repository.refs[revision]])
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files, revision)
        repository.messages.append(message)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit})

    def _writable(self, kind: str, name: str) -> Repository | None:
        repository = self.hub.repositories.get((kind, name))
        if not self._authorized():
            self._error(401)
        elif repository is None:
            self._error(404, "RepoNotFound")
        elif not name.startswith("org/"):
            self._error(403, message="You have no right to write to this repository")
        else:
            return repository
        return None


ROUTES: list[tuple[str, Callable[..., None]]] = [
    (f"GET /api{REPOSITORY}", _Handler.info),
    (f"GET /api{REPOSITORY}/revision/(?P<revision>[^/]+)", _Handler.info),
    (f"GET /api{REPOSITORY}/tree/(?P<revision>[^/]+)", _Handler.tree),
    (r"GET|HEAD /(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    (r"GET|HEAD /lfs/(?P<commit>[^/]+)/(?P<path>.+)", _Handler.lfs_file),
    ("GET /api/whoami-v2", _Handler.who),
    ("POST /api/repos/create", _Handler.create),
    ("DELETE /api/repos/delete", _Handler.delete),
    ("POST /api/validate-yaml", _Handler.validate),
    (f"POST /api{REPOSITORY}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (r"POST /(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /upload/(?P<oid>\w+)", _Handler.lfs_upload),
    (f"POST /api{REPOSITORY}/commit/(?P<revision>[^/]+)", _Handler.commit),
]


def _is_lfs(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in LFS)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = content
    lfs = {}
    if _is_lfs(path):
        oid = hashlib.sha256(content).hexdigest()
        blob = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n".encode()
        lfs = {"lfs": {"oid": oid, "size": len(content), "pointerSize": len(blob)}}
    return {"size": len(content), "oid": hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest(), **lfs}


def _sleep_briefly(seconds: float, sleep: Callable[[float], None]) -> None:
    """Shortens the waits of the client between two tries."""
    sleep(min(seconds, 0.01))


@contextmanager
def running_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Starts a server, and points the client at the server and at an empty cache: here and in child processes."""
    import huggingface_hub
    from huggingface_hub import constants

    server = HubServer()
    server.cache = cache
    folder = str(cache / "hub")
    values = {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_CACHE": folder, "HF_HUB_DISABLE_XET": "1"}
    for name, value in (values | {"HF_TOKEN_PATH": str(cache / "token")}).items():
        monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, name.removeprefix("HF_") if name == "HF_ENDPOINT" else name, value)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(time, "sleep", partial(_sleep_briefly, sleep=time.sleep))
    try:
        yield server
    finally:
        huggingface_hub.close_session()
        server.stop()
