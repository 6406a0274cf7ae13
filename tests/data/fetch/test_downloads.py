"""Downloads resume, try again, and leave nothing behind after a failure that does not pass."""

import hashlib
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from file_server import Fault, FileServer, Handler, body, cut, file_server, stall, status

from nmtkit.data.fetch import downloads
from nmtkit.data.fetch.downloads import DownloadError, HttpClient, HttpConfig
from nmtkit.data.retries import LONGEST_WAIT

DATA = random.Random(1).randbytes(1_000_000)
PATH = "/big.zip"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as state:
        state.files[PATH] = DATA
        yield state


class Waits(list[float]):
    """Records waits instead of sleeping."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def fetch(server: FileServer, folder: Path, waits: Waits | None = None, *, md5: str | None = None, **settings: float):
    config = HttpConfig(**{"attempts": 3, "request_timeout": 5.0, **settings})
    client = HttpClient(config, waits if waits is not None else Waits())
    return client.download(server.url + PATH, folder / "big.zip", title="big", md5=md5)


def ranges(server: FileServer) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.requests]


def test_a_download_has_the_bytes_of_the_file_and_their_checksum(server: FileServer, tmp_path: Path) -> None:
    result = fetch(server, tmp_path, md5=hashlib.md5(DATA).hexdigest())
    assert (tmp_path / "big.zip").read_bytes() == DATA
    assert (result.bytes, result.sha256) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert os.listdir(tmp_path) == ["big.zip"]


def test_a_broken_connection_is_resumed_where_it_ended(server: FileServer, tmp_path: Path) -> None:
    server.faults[PATH] = [cut(300_000), cut(400_000)]
    waits = Waits()
    fetch(server, tmp_path, waits)
    assert (tmp_path / "big.zip").read_bytes() == DATA
    assert ranges(server) == [None, "bytes=300000-", "bytes=700000-"]
    assert waits == [1, 1]  # an attempt that received data is not a failure in a row


def test_a_later_command_resumes_an_interrupted_download(server: FileServer, tmp_path: Path) -> None:
    server.faults[PATH] = [cut(300_000), cut(0), cut(0)]
    with pytest.raises(DownloadError, match=r"0\.3 MB are kept"):
        fetch(server, tmp_path)
    assert not (tmp_path / "big.zip").exists()
    fetch(server, tmp_path)
    assert (tmp_path / "big.zip").read_bytes() == DATA
    assert ranges(server)[-1] == "bytes=300000-"
    assert os.listdir(tmp_path) == ["big.zip"]


@pytest.mark.parametrize("rest", [None, '"other"'], ids=["whole file", "rest of another file"])
def test_a_file_that_changed_meanwhile_is_downloaded_anew(server: FileServer, tmp_path: Path, rest: str | None) -> None:
    server.faults[PATH] = [cut(300_000, etag='"old"')]
    if rest is not None:  # a server that ignores If-Range
        server.faults[PATH].append(
            lambda handler, data: handler.answer(
                206, data[300_000:], {"ETag": rest, "Content-Range": f"bytes 300000-{len(data) - 1}/{len(data)}"}
            )
        )
    fetch(server, tmp_path)
    assert (tmp_path / "big.zip").read_bytes() == DATA


def test_a_server_without_etags_sends_the_whole_file_again(server: FileServer, tmp_path: Path) -> None:
    server.faults[PATH] = [
        lambda handler, data: handler.answer(200, data, cut=300_000),
        lambda handler, data: handler.answer(200, data),
    ]
    fetch(server, tmp_path)
    assert (tmp_path / "big.zip").read_bytes() == DATA
    assert ranges(server) == [None, None]


def test_a_file_that_became_shorter_is_downloaded_anew(server: FileServer, tmp_path: Path) -> None:
    server.faults[PATH] = [cut(900_000)]
    server.faults[PATH].append(status(416))
    fetch(server, tmp_path)
    assert (tmp_path / "big.zip").read_bytes() == DATA


@pytest.mark.slow
def test_a_stalled_server_is_left_after_the_timeout(server: FileServer, tmp_path: Path) -> None:
    server.faults[PATH] = [stall(1000)]
    fetch(server, tmp_path, request_timeout=1.0)
    assert (tmp_path / "big.zip").read_bytes() == DATA
    assert ranges(server) == [None, "bytes=1000-"]


def stalled_error(handler: Handler, data: bytes) -> None:
    """Answers with status 503 and a body that never ends."""
    handler.send_response(503)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.flush()
    handler.server.state.stopping.wait(20)


def cut_in_a_chunk(handler: Handler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"20\r\n[")
    handler.close_connection = True


@pytest.mark.slow
def test_an_error_without_its_text_keeps_the_received_part(server: FileServer, tmp_path: Path) -> None:
    server.faults[PATH] = [cut(1000), stalled_error]
    fetch(server, tmp_path, request_timeout=1.0)
    assert (tmp_path / "big.zip").read_bytes() == DATA
    assert ranges(server) == [None, "bytes=1000-", "bytes=1000-"]


@pytest.mark.parametrize("fault", [stall(1), cut(2), cut_in_a_chunk])
def test_json_is_read_again_after_a_broken_connection(server: FileServer, fault: Fault) -> None:
    server.files["/api"], server.faults["/api"] = b"[1]", [fault]
    client = HttpClient(HttpConfig(request_timeout=0.3), Waits())
    assert client.json(f"{server.url}/api") == [1]


@pytest.mark.parametrize(
    ("faults", "waits"),
    [
        ([status(500), status(503)], [1, 2]),
        ([status(429, Retry_After="7")], [7]),
        ([status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")], [1]),
        ([status(429, Retry_After="999999")], [LONGEST_WAIT]),
        ([status(429, Retry_After="soon")], [1]),
    ],
)
def test_a_busy_server_is_asked_again_when_it_says(
    server: FileServer, tmp_path: Path, faults: list[Fault], waits: list[float]
) -> None:
    server.faults[PATH] = list(faults)
    waited = Waits()
    fetch(server, tmp_path, waited)
    assert waited == waits


@pytest.mark.parametrize(
    ("faults", "fact"),
    [
        ([status(404)], "404"),
        ([status(403)], "403"),
        ([status(500)] * 3, "500"),
        ([status(302, Location="file:///etc/passwd")], "302"),
        ([status(302, Location="ftp://127.0.0.1/x")], "ftp"),
        ([body(b"other")], "MD5"),
    ],
)
def test_a_failure_is_one_line_and_leaves_nothing(
    server: FileServer, tmp_path: Path, faults: list[Fault], fact: str
) -> None:
    server.faults[PATH] = list(faults)
    with pytest.raises(DownloadError) as error:
        fetch(server, tmp_path, md5="0" * 32)
    assert fact in str(error.value) and "\n" not in str(error.value) and server.url in str(error.value)
    assert not os.listdir(tmp_path)


def test_no_network_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **settings: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    waits = Waits()
    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # some networks answer for every name, or after a long time
    client = HttpClient(HttpConfig(attempts=3), waits)
    with pytest.raises(DownloadError, match=r"nmtkit\.invalid"):
        client.download("http://nmtkit.invalid/x.zip", tmp_path / "x.zip", title="x")
    assert not waits and not os.listdir(tmp_path)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "data:,x", "host/x", "http://host:port/"])
def test_addresses_that_are_not_of_web_servers_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(DownloadError):
        HttpClient(HttpConfig(attempts=1)).download(url, tmp_path / "x", title="x")
    assert not os.listdir(tmp_path)


def without_length(handler: Handler, data: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    with suppress(ConnectionError):
        handler.wfile.write(data)
    handler.close_connection = True


def test_a_file_beyond_the_limit_is_not_downloaded(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="--max-download"):
        fetch(server, tmp_path, max_download=0.0005)
    assert not os.listdir(tmp_path)
    server.faults[PATH] = [without_length]
    with pytest.raises(DownloadError, match="--max-download"):  # a body of unknown size
        fetch(server, tmp_path, max_download=0.0005)
    assert not os.listdir(tmp_path)


def test_a_full_disk_leaves_nothing(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(downloads._Partial, "write", full)
        with pytest.raises(OSError, match=r"big\.zip: No space left"):
            fetch(server, tmp_path)
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(DownloadError, match=r"1,000,000 bytes.*free space"):
        fetch(server, tmp_path)
    assert not os.listdir(tmp_path)


def test_two_processes_do_not_write_the_same_download(server: FileServer, tmp_path: Path) -> None:
    with downloads._Partial(tmp_path / "big.zip", "other"), pytest.raises(ValueError, match=r"big\.zip"):
        fetch(server, tmp_path)


def test_json_is_limited_and_checked(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = HttpClient(HttpConfig(attempts=1))
    server.files["/json"] = b'{"a": [1, "\xc3\xa4"]}'
    assert client.json(f"{server.url}/json") == {"a": [1, "ä"]}
    server.files["/json"] = b"<html>down for maintenance</html>"
    with pytest.raises(DownloadError, match="down for maintenance"):
        client.json(f"{server.url}/json")
    monkeypatch.setattr(downloads, "LARGEST_JSON", 10)
    server.files["/json"] = b"[" * 100
    with pytest.raises(DownloadError, match="MB"):
        client.json(f"{server.url}/json")
