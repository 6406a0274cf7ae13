"""A web server for tests of downloads: files with ETags and ranges, JSON of the OPUS API, and faults on demand."""

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Fault = Callable[["Handler", bytes], None]  # answers a request for a file with this content


@dataclass
class FileServer:
    """Serves `files` by path. Each request for a path uses up one fault of `faults`, in order, before the file."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    corpora: list[dict[str, Any]] = field(default_factory=list)  # rows of the OPUS API
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)  # paths and headers
    url: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)

    def add_corpus(
        self, name: str, version: str, pair: tuple[str, str], data: bytes, *, latest: bool = True, pairs: int = 0
    ) -> str:
        """Adds a corpus of OPUS, whose languages are in the order of the alphabet. Returns the path of its archive."""
        source, target = sorted(pair)
        path = f"/OPUS-{name}/{version}/moses/{source}-{target}.txt.zip"
        self.files[path] = data
        self.corpora.append(
            {
                "alignment_pairs": pairs, "corpus": name, "documents": "", "id": len(self.corpora), "latest":
                str(latest), "preprocessing": "moses", "size": len(data) // 1024, "source": source,
                "source_tokens": 7, "target": target, "target_tokens": 8, "url": self.url + path, "version": version,
            }
        )  # fmt: skip
        return path

    def opus(self, query: dict[str, str]) -> dict[str, Any]:
        """Answers a question to the OPUS API, as its published source code does."""
        if query.get("version") == "latest":
            del query["version"]
            query["latest"] = "True"
        listing = [key for key in ("corpora", "languages") if query.pop(key, None)]
        pair = [query[key] for key in ("source", "target") if key in query]
        if len(pair) == 2:
            query["source"], query["target"] = sorted(pair)
        if listing == ["languages"] and "source" in query:
            source = query.pop("source")
            rows = [row for row in self.corpora if query.items() <= row.items()]
            found = {row["target"] for row in rows if row["source"] == source}
            return {"languages": sorted(found | {row["source"] for row in rows if row["target"] == source})}
        rows = [row for row in self.corpora if query.items() <= row.items()]
        if listing == ["languages"]:  # OPUS has monolingual files for each language of a corpus
            return {"languages": sorted({row[side] for row in rows for side in ("source", "target")})}
        return {"corpora": sorted({row["corpus"] for row in rows}) if listing else rows}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        state: FileServer = self.server.state
        address = urlsplit(self.path)
        state.requests.append((self.path, dict(self.headers)))
        data = state.files.get(address.path, b"")
        if faults := state.faults.get(address.path):
            faults.pop(0)(self, data)
        elif address.path == "/opusapi/":
            answer = json.dumps(state.opus(dict(parse_qsl(address.query, keep_blank_values=True)))).encode()
            self.answer(200, answer, {"Content-Type": "application/json"})
        elif address.path in state.files:
            self.send_file(data)
        else:
            self.answer(404, b"<html><h1>Not Found</h1></html>")

    def send_file(self, data: bytes, *, etag: str | None = None, cut: int | None = None) -> None:
        """Sends a file, or the rest that Range asks for, if If-Range has the same ETag. `cut` ends the body early."""
        etag = etag or f'"{hashlib.md5(data).hexdigest()}"'
        start = self.headers.get("Range", "").removeprefix("bytes=").rstrip("-")
        if start and self.headers.get("If-Range") == etag:
            if int(start) >= len(data):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            contents = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.answer(206, data[int(start) :], {"ETag": etag, "Content-Range": contents}, cut=cut)
        else:
            self.answer(200, data, {"ETag": etag}, cut=cut)

    def answer(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # the client may leave
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def file_server() -> Iterator[FileServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.state = FileServer(url=f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.state  # type: ignore[attr-defined]
    finally:
        server.state.stopping.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


# --- faults -----------------------------------------------------------------------------------------------------------


def status(code: int, **headers: str) -> Fault:
    return lambda handler, _: handler.answer(code, b"busy", {name.replace("_", "-"): headers[name] for name in headers})


def cut(size: int, etag: str | None = None) -> Fault:
    """A connection that ends after `size` bytes of the body."""
    return lambda handler, data: handler.send_file(data, etag=etag, cut=size)


def stall(size: int) -> Fault:
    """A server that sends `size` bytes and then nothing, until the test ends."""

    def fault(handler: Handler, data: bytes) -> None:
        handler.send_file(data, cut=size)
        handler.wfile.flush()
        handler.server.state.stopping.wait(20)

    return fault


def body(text: bytes) -> Fault:
    return lambda handler, _: handler.answer(200, text)


# --- archives ---------------------------------------------------------------------------------------------------------


def moses_zip(members: Mapping[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file.getvalue()
