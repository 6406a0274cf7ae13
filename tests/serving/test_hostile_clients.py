"""Requests of hostile clients are refused, bounded or harmless. docs/serving.md lists the answers."""

import asyncio
import gzip
import io
import json
import re
import socket
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")

from builders import save_transformer
from serving_process import serving
from starlette.requests import ClientDisconnect, Request

from nmtkit.serving import reading
from nmtkit.serving.config import ServeConfig
from nmtkit.serving.content_translator import ContentTranslator
from nmtkit.serving.door import Door
from nmtkit.serving.fair_queue import BatchKey
from nmtkit.serving.keys import ApiKey, Usage
from nmtkit.serving.refusal import Refusal

JSON = "Content-Type: application/json\r\n"
EMPTY = b'{"q": "", "source": "en", "target": "de"}'  # translates without a model


def hostile(folder, *more):
    model = save_transformer(folder / "model.pt")
    (folder / "keys").write_text("secret-key\n")
    # outputs of random weights never end: a line takes as long as --max-len-b lets it
    limits = ["--max-len-b", "10000", "--char-limit", "200000", "--beam", "1", *more]
    flags = ["--workers", "1", "--protect-spans", "--path", f"en-de={model}", "--api-keys", str(folder / "keys")]
    return serving(folder, *flags, *limits)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with hostile(tmp_path_factory.mktemp("hostile")) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """A server that ends requests after five seconds, in which a busy machine may not answer other requests either."""
    with hostile(tmp_path_factory.mktemp("impatient"), "--timeout", "5") as server:
        yield server


def exchange(server, data, answers=1, alone=False):
    """Returns so many whole answers to `data`, and all that comes before the end of a connection that the server ends.

    With `alone`, waits a moment for further answers, which should not come.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        connection.sendall(data)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
                if are_whole(found, answers) and b"close" not in found.lower():
                    if not alone:
                        break
                    connection.settimeout(0.5)
        except ConnectionError:
            pass
        except TimeoutError:
            assert are_whole(found, answers), found
        return found


def are_whole(found, answers):
    """Returns whether so many answers have come, each with its body."""
    for _ in range(answers):
        head_, end, found = found.partition(b"\r\n\r\n")
        length = re.search(rb"\ncontent-length: *(\d+)", head_.lower())
        size = int(length[1]) if length else 0
        if not end or len(found) < size:
            return False
        found = found[size:]
    return True


def statuses(answer):
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def head(*lines, method="POST", path="/translate"):
    return "".join(
        [f"{method} {path} HTTP/1.1\r\n", "Host: x\r\n", *(f"{line}\r\n" for line in lines), "\r\n"]
    ).encode()


SMUGGLED = b"GET /languages HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        head("Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked", f"Content-Length: {len(SMUGGLED) + 5}") + b"0\r\n\r\n" + SMUGGLED,
        head("Content-Length: 0", "Transfer-Encoding: chunked", method="GET", path="/health") + b"0\r\n\r\n" + SMUGGLED,
        head("Content-Length: 0", f"Content-Length: {len(SMUGGLED)}") + SMUGGLED,
        head(f"Content-Length: 0, {len(SMUGGLED)}") + SMUGGLED,
        head("Content-Length: -1") + SMUGGLED,
        head("Content-Length: +0") + SMUGGLED,
        head("Content-Length: 0x10") + SMUGGLED,
        head("Transfer-Encoding: chunked, identity") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: xchunked") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding : chunked") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked") + b"-1\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked") + b"0x0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked") + b"f" * 30 + b"\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked") + b"2\r\nabXX0\r\n\r\n" + SMUGGLED,
        head("X: a\0b") + SMUGGLED,
    ],
)
def test_a_request_whose_length_is_doubtful_ends_its_connection(server, request_):
    found = statuses(exchange(server, request_, alone=True))
    assert found in ([400], [501]), found


def test_an_invalid_request_gets_a_json_error_and_no_line_in_the_log(server):
    log = server.log.read_text()
    for _ in range(20):
        found = exchange(server, b"\x00\xff nonsense\r\n\r\n")
    head_, body = found.split(b"\r\n\r\n")
    assert b"content-type: application/json" in head_.lower() and b"connection: close" in head_.lower()
    assert list(json.loads(body)) == ["error"]
    assert server.log.read_text() == log
    assert server.metric('nmtkit_requests_total{route="",status="400"}') >= 20


def test_two_equal_lengths_are_one_length(server):
    """RFC 9110, section 8.6, allows such a length. The bytes after the body are the next request."""
    twice = head("Content-Length: 2", "Content-Length: 2", JSON.strip()) + b"{}"
    assert statuses(exchange(server, twice + SMUGGLED, answers=2)) == [403, 200]


def test_a_body_of_tiny_chunks_is_refused_before_the_event_loop_is_busy_for_long(server):
    """h11 takes some 20 µs for a chunk, so 600,000 chunks of one byte would delay all other clients for seconds."""
    chunked = head("Transfer-Encoding: chunked", JSON.strip())
    found = exchange(server, chunked + b"1\r\na\r\n" * 600_000)
    assert statuses(found) == [413] and b"small chunks" in found
    whole = json.dumps({"q": " " * 2000, "source": "en", "target": "de", "api_key": "secret-key"}).encode()
    for size in (3, 400):  # few tiny chunks, or larger ones, are answered
        parts = [whole[start : start + size] for start in range(0, len(whole), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        assert len(parts) < 1000 and statuses(exchange(server, chunked + body)) == [200]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/translate?api_key=wrong", "X: y"),
        ("/translate", "Authorization: Bearer wrong"),
        ("/v2/translate", "X: y"),
        ("/v2/document", "Authorization: DeepL-Auth-Key wrong"),
        ("/v3/glossaries", "Authorization: DeepL-Auth-Key"),
    ],
)
def test_a_wrong_key_outside_the_body_is_refused_before_the_body_has_come(server, path, field):
    found = exchange(server, head("Content-Length: 100000", JSON.strip(), field, path=path))
    assert statuses(found) == [403]  # 504 would be the answer after a wait for the body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/translate", {"q": "a" + "\u0345\u0301\u0316\u0334" * 24_000, "alignment": True}),
        ("/translate", {"q": "<p>" + "\u0301\u0316" * 49_000, "format": "html"}),
        ("/translate", {"q": [[]] * 300_000}),
        ("/translate", {"q": [""] * 420_000}),
        ("/detect", {"q": [""] * 420_000}),
        ("/translate", {"q": "", "source": "a" * 300_000, "target": "A" * 300_000}),
        ("/v2/translate", {"text": [""] * 420_000}),
        ("/v2/translate", {"text": "", "target_lang": "A-" * 50_000, "source_lang": "a_" * 50_000}),
        ("/v2/translate", {"text": "1<b>" * 49_000, "tag_handling": "xml", "ignore_tags": "c"}),
        ("/v2/translate", {"text": "", "ignore_tags": [["a"]] * 300_000}),
        ("/v2/translate", {"text": "", "splitting_tags": "a," * 600_000}),
        ("/v2/glossaries", {"name": "x", "source_lang": "en", "target_lang": "de", "entries": "a\tb\n" * 49_000}),
        ("/v3/glossaries", {"name": "x", "dictionaries": [{}] * 600_000}),
    ],
    ids=[
        *("combining marks", "combining marks in HTML", "a list with an error in each element"),
        *("a list of empty texts", "a list of empty texts to detect", "long names of languages"),
        *("a list for DeepL", "long names for DeepL", "tags of XML", "a list of tags", "a text of tags"),
        *("terms of a glossary", "a list of dictionaries"),
    ],
)
def test_no_text_holds_up_other_clients(server, path, body):
    """Each of these texts once kept the server from all other clients for 4 to 12 seconds of CPU time."""
    fields = {"source": "en", "target": "de", "source_lang": "EN", "target_lang": "DE", **body}

    def status():
        try:
            return server.ask(path, fields, {"Authorization": "Bearer secret-key"}, timeout=3)[0]
        except TimeoutError:  # the text is being translated without an end
            return 504

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(status)
        longest = 0.0
        while not answer.done():
            start = server.cpu_seconds()
            assert server.ask("/health")[0] == 200
            longest = max(longest, server.cpu_seconds() - start)
    assert answer.result() in (200, 400, 413, 504)
    assert longest < 2


def test_a_folded_header_is_one_header(server):
    folded = head("Content-Type: application/json;", f"\tcharset=utf-8\r\nContent-Length: {len(EMPTY)}") + EMPTY
    assert statuses(exchange(server, folded + SMUGGLED, answers=2)) in ([403, 200], [400])


def test_requests_sent_at_once_are_answered_in_order(server):
    body = EMPTY[:-1] + b', "api_key": "secret-key"}'
    both = head(JSON.strip(), f"Content-Length: {len(body)}") + body + SMUGGLED + head(method="GET", path="/nowhere")
    assert statuses(exchange(server, both, answers=3)) == [200, 200, 404]


@pytest.mark.parametrize(
    "request_",
    [
        head(*(f"X-{number}: a" for number in range(20_000)), method="GET", path="/health"),
        head("X: " + "a" * 1_000_000, method="GET", path="/health"),
        head(method="GET", path="/" + "a" * 1_000_000),
        b"\x16\x03\x01" + b"\0" * 200,
    ],
    ids=["many headers", "a long header", "a long address", "TLS"],
)
def test_a_head_that_is_too_large_or_none_is_refused(server, request_):
    found = statuses(exchange(server, request_))
    assert found in ([400], [431], []), found
    assert server.ask("/health")[0] == 200


@pytest.mark.slow
def test_other_methods_are_refused(server):
    for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PROPFIND", "X" * 500):
        lines = ("X-Secret: 1", "Content-Length: 0", "Connection: close")
        found = exchange(server, head(*lines, method=method))
        assert statuses(found)[0] in (400, 404, 405), (method, found)
        assert b"x-secret" not in found.lower()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 1_000_000, 400),
        (b'{"a":' * 200_000, 400),
        (b'{"q": ' + b"9" * 1_000_000 + b"}", 400),
        (b'{"q": "a", "source": "en", "target": "de", "alternatives": 1e999, "api_key": "secret-key"}', 400),
        (b'{"q": "a", "source": "en", "target": "de", "alternatives": NaN, "api_key": "secret-key"}', 400),
        (b'{"q": ["\\ud800"], "source": "en", "target": "de", "api_key": "secret-key"}', 400),
        (b'{"q": "a", "source": "\\udfff", "target": "de", "api_key": "secret-key"}', 400),
        (b'{"q": "", "q": "", "source": "xx", "source": "en", "target": "de", "api_key": "secret-key"}', 200),
        (b'{"q": "", "source": "en", "target": "de", "api_key": "\\ud800"}', 403),
        (b'{"q": "", "source": "en", "target": "de", "api_key": ["secret-key"]}', 403),
        (b'{"q": "", "source": "en", "target": "de", "api_key": null}', 403),
        (b'\xef\xbb\xbf{"q": ""}', 403),
        (b'{"q": [' + b"[]," * 300_000 + b'[]], "api_key": "secret-key"}', 413),
        (b'{"q": "<script>alert(1)</script>", "source": "<script>", "target": "de", "api_key": "secret-key"}', 400),
    ],
    ids=range(14),
)
def test_json_of_all_kinds_gets_an_answer(server, body, status):
    found = exchange(server, head(JSON.strip(), f"Content-Length: {len(body)}") + body)
    assert statuses(found) == [status], found[:500]
    assert b"content-type: application/json" in found.lower() and b"x-content-type-options: nosniff" in found.lower()


def multipart(parts, boundary="x"):
    return b"".join(b"--%s\r\n%s\r\n\r\n%s\r\n" % (boundary.encode(), *part) for part in parts) + b"--x--\r\n"


def upload(server, name, contents, **headers):
    fields = [(f'Content-Disposition: form-data; name="{key}"'.encode(), value.encode())
              for key, value in (("source", "en"), ("target", "de"), ("api_key", "secret-key"))]  # fmt: skip
    file = (f'Content-Disposition: form-data; name="file"; filename="{name}"'.encode(), contents)
    body = multipart([*fields, file])
    return server.ask("/translate_file", body, {"Content-Type": "multipart/form-data; boundary=x", **headers})


@pytest.mark.slow
def test_uploads_are_bounded_and_their_names_are_not_used(server):
    assert upload(server, "../../../tmp/evil.txt", b"\n")[0] == 200
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", b"0" * 50_000_000)
    for name in ("bomb.zip", "bomb.txt", "bomb.docx", "bomb.txt\0.zip", ""):
        assert upload(server, name, packed.getvalue())[0] == 400, name
    kinds = {
        b"PK\x03\x04": "a ZIP archive",
        gzip.compress(b"0"): "a gzip file",
        b"%PDF-1.7\n": "a PDF file",
        b"7z\xbc\xaf\x27\x1c": "a 7z archive",
        b"a\0b": "a binary file",
        b"a" * 5000 + b"\0": "a binary file",
    }
    for extension in ("txt", "html", "srt", "po", "xlf"):
        for contents, kind in kinds.items():
            status, answer = upload(server, f"a.{extension}", contents)
            assert status == 400 and f"the file is {kind}" in answer["error"], (extension, answer)
    assert upload(server, "a.html", "<p> </p>".encode("utf-16"))[0] == 200
    bomb = gzip.compress(b"0" * 50_000_000)
    assert upload(server, "a.txt", b"a", **{"Content-Encoding": "gzip"})[0] == 415
    assert server.ask("/translate", bomb, {"Content-Type": "application/json", "Content-Encoding": "gzip"})[0] == 415
    for kind in (
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "y" * 5000,
    ):
        assert server.ask("/translate_file", b"--x\r\n", {"Content-Type": kind})[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        multipart([(b'Content-Disposition: form-data; name="a"', b"")] * 40_000),
        multipart([(b'Content-Disposition: form-data; name="a"; filename="a.txt"', b"")] * 100),
        b"--x\r\n" + b"X-A: b\r\n" * 250_000,
        b"--x\r\nX-A: " + b"b" * 2_000_000,
        b"--x\r\n" * 400_000,
        b"-" * 2_000_000,
    ],
    ids=["many parts", "many files", "endless headers", "an endless header", "nothing but boundaries", "no boundary"],
)
def test_a_form_of_many_parts_or_endless_headers_is_refused_soon(server, body):
    found, _ = server.ask("/translate_file", body, {"Content-Type": "multipart/form-data; boundary=x"})
    assert found in (400, 403)


@pytest.mark.parametrize("token", ["..", "../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "", "%00", "a" * 5000])
def test_no_token_leads_to_a_file(server, token):
    assert server.ask(f"/download_file/{token}")[0] == 404


def test_no_host_of_a_client_gets_into_a_link(server):
    contents = multipart([
        (b'Content-Disposition: form-data; name="file"; filename="a.txt"', b"\n"),
        *((f'Content-Disposition: form-data; name="{key}"'.encode(), value)
          for key, value in (("source", b"en"), ("target", b"de"), ("api_key", b"secret-key"))),
    ])  # fmt: skip
    headers = ["Content-Type: multipart/form-data; boundary=x", f"Content-Length: {len(contents)}"]
    forwarded = ["X-Forwarded-Host: evil.example", "X-Forwarded-Proto: gopher", "Forwarded: host=evil.example"]
    for host in ('x"><script>', "a b", "evil.example/path", "evil.example@x", "a,b", "x?y", "ä"):
        request = f"POST /translate_file HTTP/1.1\r\nHost: {host}\r\n".encode() + "\r\n".join(headers).encode()
        assert statuses(exchange(server, request + b"\r\n\r\n" + contents)) == [400], host
    found = exchange(server, head(*headers, *forwarded, path="/translate_file") + contents)
    assert statuses(found) == [200] and b"evil" not in found and b"gopher" not in found


@pytest.mark.slow
def test_a_body_that_dawdles_is_ended_and_disturbs_no_other(impatient):
    server = impatient
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=300) for _ in range(50)]
    for connection in slow:
        connection.sendall(head(JSON.strip(), "Content-Length: 1000") + b'{"q"')
    assert server.ask("/health")[0] == 200
    assert statuses(slow[0].recv(65536)) == [504]
    for connection in slow:
        connection.close()


@pytest.mark.slow  # it waits for ten seconds
def test_a_head_that_dawdles_is_ended(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        start = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\nA")
        try:
            while time.monotonic() - start < 300:
                time.sleep(0.5)
                connection.sendall(b"X")
            raise AssertionError("the connection is still open")
        except ConnectionError:
            assert time.monotonic() - start > 9


@pytest.mark.slow
def test_a_line_that_takes_too_long_is_stopped_and_its_worker_replaced(impatient):
    server = impatient
    request = {"source": "en", "target": "de", "api_key": "secret-key"}
    said = "whose clients have disconnected"
    ended, deaths = server.log.read_text().count(said), server.metric("nmtkit_worker_deaths_total")
    for text in ("a" * 100_000, "a\0b"):  # no output ends here
        assert server.ask("/translate", request | {"q": text})[0] == 504
        deadline = time.monotonic() + 300
        while server.metric("nmtkit_workers_busy") or server.metric("nmtkit_workers") < 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert server.metric("nmtkit_worker_deaths_total") == deaths
    assert server.log.read_text().count(said) == ended + 2
    assert server.ask("/translate", request | {"q": "{x}"}) == (200, {"translatedText": "{x}"})


def test_nothing_of_a_request_is_in_the_log(server):
    marker = "s3cr3t-marker"
    server.ask("/translate", {"q": f"{marker}\nERROR: forged", "source": marker, "target": "de", "api_key": marker})
    server.ask(f"/{marker}%0aERROR:%20forged")
    exchange(server, f"GET /{marker} HTTP/1.1\r\n{marker}\r\n\r\n".encode())
    log = server.log.read_text()
    assert marker not in log and "secret-key" not in log and "forged" not in log and "Traceback" not in log


@pytest.mark.parametrize("path", ["/translate", "/detect"])
def test_the_limits_are_checked_before_a_list_is_validated(server, path):
    """The elements are invalid too, but the limit of their number is the first error."""
    fields = {"source": "en", "target": "de", "api_key": "secret-key"}
    status, answer = server.ask(path, {"q": [0] * 1001, **fields})
    assert status == 413 and "(1001)" in answer["error"] and "(1000)" in answer["error"]
    status, answer = server.ask(path, {"q": ["a" * 200_000, "b", 0], **fields})
    assert status == 413 and "(200001)" in answer["error"] and "(200000)" in answer["error"]


@pytest.mark.parametrize("field", ["source", "target"])
def test_a_language_code_is_bounded(server, field):
    fields = {"q": "", "source": "en", "target": "de", "api_key": "secret-key", field: "a" * 101}
    status, answer = server.ask("/translate", fields)
    assert status == 400 and field in answer["error"] and len(answer["error"]) < 200


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-16", "latin-1", "zlib", "unknown", "../../x", '"'])
def test_a_form_is_utf_8_whatever_it_declares(server, charset):
    """A form of 1.2 MB in punycode took minutes, without an API key."""
    kind = {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"}
    fields = {"q": "é {x}", "source": "en", "target": "de", "api_key": "wrong", "other": "a" * 1_200_000}
    parts = [
        (f'Content-Disposition: form-data; name="{name}"'.encode(), value.encode()) for name, value in fields.items()
    ]
    before = server.cpu_seconds()
    assert server.ask("/translate", multipart(parts), kind)[0] in (400, 403)
    assert server.cpu_seconds() - before < 2
    parts = [(header, value) for header, value in parts if len(value) < 1000 and value != b"wrong"]
    key = {"Authorization": "Bearer secret-key"}
    damaged = [(header, value.replace("é".encode(), b"\xe9")) for header, value in parts]
    assert server.ask("/translate", multipart(damaged), {**kind, **key})[0] == 400
    if charset != '"':
        status, answer = server.ask("/detect", multipart(parts), {**kind, **key})
        assert status in (200, 501), answer


def test_an_unsupported_kind_of_body_is_refused_before_the_body_has_come(server):
    found = exchange(server, head("Content-Length: 100000", "Content-Type: text/plain"))
    assert statuses(found) == [415]  # 504 would be the answer after a wait for the body


def test_http_1_0_without_a_host_gets_an_answer(server):
    for path in ("/health", "/docs", "/openapi.json"):
        found = exchange(server, f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert statuses(found) == [200], path


def test_a_target_with_an_address_names_the_host(server):
    for target in ("http://y.example/health", "HTTPS://y.example/health", "http://y.example:80/health?a=b"):
        assert statuses(exchange(server, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())) == [200], target
    found = exchange(server, b"GET http://y.example/docs HTTP/1.1\r\nHost: x.example\r\n\r\n")
    assert b"http://y.example/translate" in found and b"x.example" not in found
    assert statuses(exchange(server, b"GET http://y<z/docs HTTP/1.1\r\nHost: x\r\n\r\n")) == [400]


@pytest.mark.parametrize("proto", ["ws", "wss", "gopher"])
def test_links_have_a_scheme_of_http(server, proto):
    found = exchange(server, head(f"X-Forwarded-Proto: {proto}", method="GET", path="/docs"))
    assert (b"https://x/" if proto == "wss" else b"http://x/") in found and b"ws://" not in found


def test_every_answer_has_nosniff(server):
    for method, path in (("GET", "/nowhere"), ("PUT", "/translate"), ("GET", "/translate"), ("GET", "/health")):
        found = exchange(server, head("Content-Length: 0", method=method, path=path)).lower()
        assert found.count(b"x-content-type-options: nosniff") == 1, (method, path)


@pytest.mark.parametrize(("encoding", "status"), [("Identity", 200), ("identity", 200), ("GZIP", 415)])
def test_names_of_encodings_have_no_case(server, encoding, status):
    body = EMPTY[:-1] + b', "api_key": "secret-key"}'
    request = head(JSON.strip(), f"Content-Length: {len(body)}", f"Content-Encoding: {encoding}") + body
    assert statuses(exchange(server, request)) == [status]


def test_unfinished_bodies_share_a_limit_that_leaves_room_for_short_bodies(monkeypatch):
    monkeypatch.setattr(reading, "BODIES_BYTES", 200_000)
    memory = reading.BodyMemory()
    with memory.body() as first, memory.body() as second:
        first(150_000)
        second(60_000)
        with pytest.raises(Refusal) as refused:
            second(40_000)
        assert refused.value.status == 429 and memory.bytes == 210_000
        with memory.body() as short:
            short(1000)
    assert memory.bytes == 0
    with memory.body() as third:
        third(200_000)


def test_work_that_waits_for_a_thread_ends_with_its_client():
    """The client leaves while a long text is read. The work on another long text never begins; a short text is read."""
    begun = []

    async def receive():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def run():
        release = threading.Event()
        threads = reading.TextThreads()
        busy = asyncio.create_task(threads.run(reading.LONG_TEXT + 1, release.wait))
        await asyncio.sleep(0)
        request = Request({"type": "http"}, receive)
        with pytest.raises(ClientDisconnect):
            await reading.unless_disconnected(request, threads.run(100_000, begun.append, "long"))
        await threads.run(10, begun.append, "short")
        assert not busy.done()
        release.set()
        await busy
        await threads.run(100_000, lambda: None)

    asyncio.run(run())
    assert begun == ["short"]


@pytest.mark.parametrize(("leaves", "counted"), [(True, 5), (False, 0)])
def test_only_a_client_that_leaves_pays_for_an_unfinished_translation(leaves, counted):
    """The characters of a request that took too long were counted too."""

    async def never(*arguments):
        await asyncio.Event().wait()

    async def receive():
        await (asyncio.sleep(0) if leaves else never())
        return {"type": "http.disconnect"}

    async def run():
        door = Door(ServeConfig(timeout=600.0 if leaves else 0.05), {}, Usage(), None)
        translator = ContentTranslator(door, SimpleNamespace(translate=never))
        work = translator.translations(ApiKey(), [reading.PlainText("words")], [("en", "de")], BatchKey())
        request = Request({"type": "http", "path": "/translate", "headers": []}, receive)
        response = await door.answer_or_error(request, lambda each: reading.unless_disconnected(each, work))
        await asyncio.sleep(0)
        assert response.status_code == (499 if leaves else 504)
        return door.usage.counts(ApiKey())["month"].characters

    assert asyncio.run(run()) == counted


@pytest.mark.slow
def test_long_texts_are_read_one_after_another():
    reading_now, most = 0, 0

    def read():
        nonlocal reading_now, most
        reading_now += 1
        most = max(most, reading_now)
        time.sleep(0.01)
        reading_now -= 1

    async def run():
        threads = reading.TextThreads()
        await asyncio.gather(*(threads.run(reading.LONG_TEXT + 1, read) for _ in range(8)))

    asyncio.run(run())
    assert most == 1
