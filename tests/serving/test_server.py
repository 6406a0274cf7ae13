"""The interface and the limits of the server, and requests during the end of a process."""

import codecs
import dataclasses
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from unicodedata import normalize

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")

from builders import REAL_LINES, save_transformer
from click.testing import CliRunner
from serving_process import serving

import nmtkit
from nmtkit.cli import main
from nmtkit.serving import loading
from nmtkit.translation.translator import Translator

LINES = REAL_LINES * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_transformer(tmp_path_factory.mktemp("serving") / "model.pt")


@pytest.fixture(scope="module")
def server(model):
    limits = ["--char-limit", "20000", "--batch-limit", "100", "--max-len-b", "5"]
    with serving(model.parent, "--path", f"en-de={model}", "--workers", "2", *limits) as server:
        yield server


@pytest.fixture(scope="module")
def expected(model):
    """Returns the translations of single lines by the Python interface."""
    found = Translator.load(model).translate(LINES, max_len_b=5)
    return {line: translation.text for line, translation in zip(LINES, found, strict=True)}


def test_a_text_and_a_list_are_translated_as_generate_does(server, expected):
    assert server.translate(LINES[0]) == expected[LINES[0]]
    assert server.translate(LINES) == [expected[line] for line in LINES]


def test_a_form_and_json_say_the_same(server, expected):
    form = urllib.parse.urlencode([("q", LINES[0]), ("q", LINES[1]), ("source", "en"), ("target", "de")]).encode()
    assert server.ask("/translate", form) == (200, {"translatedText": [expected[LINES[0]], expected[LINES[1]]]})


def test_line_ends_and_white_space_come_out_as_they_went_in(server, expected):
    a, b = LINES[:2]
    assert server.translate(f"\n  {a}\t\r\n\r\n\n{b}\n") == f"\n  {expected[a]}\t\r\n\r\n\n{expected[b]}\n"
    assert server.translate(["", "  "]) == ["", "  "]


def test_alternatives_are_the_next_best_translations(server, model):
    status, answer = server.ask("/translate", {"q": LINES[0], "source": "en", "target": "de", "alternatives": 2})
    best, *others = Translator.load(model).translate([LINES[0]], max_len_b=5, nbest=3)[0].hypotheses
    assert status == 200
    assert answer == {"translatedText": best.text, "alternatives": [output.text for output in others]}


def test_a_text_has_alternatives_if_one_of_its_lines_has_none(server, model):
    fields = {"q": f"{LINES[0]}\n\u200b", "source": "en", "target": "de", "alternatives": 2}
    outputs = Translator.load(model).translate([LINES[0]], max_len_b=5, nbest=3)[0].hypotheses
    _, answer = server.ask("/translate", fields)
    assert answer["alternatives"] == [f"{output.text}\n" for output in outputs[1:]]


def test_alignment_links_characters_of_the_whole_text_as_the_search_does(server, model):
    first, second = "Cafe\u0301 " + LINES[0], LINES[1]  # the text is not in NFC; links refer to its NFC
    fields = {"q": f" {first}\n\n{second}", "source": "en", "target": "de", "alternatives": 1, "alignment": True}
    status, answer = server.ask("/translate", fields)
    assert status == 200
    one, two = Translator.load(model).translate([first, second], max_len_b=5, nbest=2, alignment="words")
    offsets = len(" " + normalize("NFC", first) + "\n\n")
    for rank, links in enumerate((answer["alignment"], answer["alternativesAlignment"][0])):
        above, below = one.hypotheses[rank], two.hypotheses[rank]
        target = 1 + len(above.text) + 2
        assert links == [
            *([a + 1, b + 1, c + 1, d + 1] for a, b, c, d in above.alignment),
            *([a + offsets, b + offsets, c + target, d + target] for a, b, c, d in below.alignment),
        ]
    assert any(a == 1 and b == 5 for a, b, _, _ in answer["alignment"]), "no word attends to Café"
    form = urllib.parse.urlencode([("q", second), ("source", "en"), ("target", "de"), ("alignment", "true")]).encode()
    assert server.ask("/translate", form)[1]["alignment"] == two.hypotheses[0].alignment


def test_quality_is_that_of_each_line_that_is_not_empty(server, model):
    fields = {"q": [f"{LINES[0]}\n\n{LINES[1]}", " ", LINES[1]], "source": "en", "target": "de", "quality": True}
    status, answer = server.ask("/translate", fields)
    assert status == 200
    found = nmtkit.load(model).translate(LINES[:2], max_len_b=5, nbest=1, quality=True)
    one, two = (dataclasses.asdict(translation.hypotheses[0].quality) for translation in found)
    assert [len(lines) for lines in answer["quality"]] == [2, 0, 1]
    for ours, theirs in zip([*answer["quality"][0], *answer["quality"][2]], [one, two, two], strict=True):
        assert ours.pop("flags") == theirs["flags"]
        assert ours == pytest.approx({name: value for name, value in theirs.items() if name != "flags"}, abs=1e-5)
    assert "quality" not in server.ask("/translate", {**fields, "quality": False})[1]


def test_many_clients_at_once_each_get_their_own_translations(server, expected):
    def client(number):
        lines = [LINES[(number * 7 + step) % len(LINES)] for step in range(6)]
        return [server.translate(line) for line in lines] == [expected[line] for line in lines]

    before = server.metric("nmtkit_batches_total")
    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(client, range(16)))
    assert server.metric("nmtkit_batches_total") - before < 6 * 16  # the server has batched some lines


def test_html_keeps_its_tags_around_their_words(server):
    sources = [f"<p>{LINES[0]}</p>", '<a href="x">All</a> human beings<br>are\n<b>born</b> &amp; free']
    tags = r"</?[a-z]+[^>]*>"
    for source, found in zip(sources, server.translate(sources, format="html"), strict=True):
        assert sorted(re.findall(tags, found)) == sorted(re.findall(tags, source))


def test_libretranslates_own_client_works(server, expected):
    client = pytest.importorskip("libretranslatepy").LibreTranslateAPI(server.url)
    assert client.translate(LINES[0], "en", "de") == expected[LINES[0]]
    assert client.languages() == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de"]},
    ]


def upload(server, name, contents, target="de"):
    fields = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
        for key, value in (("source", "en"), ("target", target))
    )
    file = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    body = (fields + file).encode() + contents + b"\r\n--x--\r\n"
    return server.ask("/translate_file", body, {"Content-Type": "multipart/form-data; boundary=x"})


def fetch(server, answer):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", urllib.parse.urlsplit(answer["translatedFileUrl"]).path)
    return connection.getresponse()


def test_without_a_detector_no_language_is_told(server):
    if importlib.util.find_spec("py3langid"):
        pytest.skip("one is installed")
    assert server.ask("/detect", {"q": "a"})[0] == 501
    status, answer = server.ask("/translate", {"q": "a", "source": "auto", "target": "de"})
    assert status == 400 and "language detector" in answer["error"]


def test_the_language_of_a_text_is_told_among_those_served(server, expected):
    pytest.importorskip("py3langid")
    client = pytest.importorskip("libretranslatepy").LibreTranslateAPI(server.url)
    for text, language in ((LINES[0], "en"), ("Alle Menschen sind frei und gleich an Würde geboren.", "de")):
        best, other = client.detect(text)
        assert best["language"] == language and 90 < best["confidence"] <= 100
        assert other["language"] != language and other["confidence"] == pytest.approx(100 - best["confidence"], abs=0.2)
    assert client.detect("12 %") == [{"confidence": 0.0, "language": "en"}]
    assert client.translate(LINES[0], "auto", "de") == expected[LINES[0]]
    status, answer = server.ask("/translate", {"q": LINES[:2], "source": "auto", "target": "de"})
    assert status == 200 and answer["translatedText"] == [expected[line] for line in LINES[:2]]
    assert [found["language"] for found in answer["detectedLanguage"]] == ["en", "en"]
    assert server.ask("/translate", {"q": "a", "source": "auto", "target": "xx"})[0] == 400
    assert server.ask("/detect", {"q": "a" * 20_001})[0] == 413
    assert server.ask("/detect", {})[0] == 400


def test_each_text_of_a_list_has_its_own_language_and_a_text_in_the_target_language_stays(server, expected):
    pytest.importorskip("py3langid")
    german = "Alle Menschen sind frei und gleich an Würde geboren."
    fields = {"source": "AUTO", "target": "de", "alignment": True, "quality": True, "alternatives": 1}
    status, answer = server.ask("/translate", {"q": [german, LINES[0], f"{german}\n"], **fields})
    assert status == 200 and answer["translatedText"] == [german, expected[LINES[0]], f"{german}\n"]
    assert [found["language"] for found in answer["detectedLanguage"]] == ["de", "en", "de"]
    assert [len(texts) for texts in answer["alternatives"]] == [0, 1, 0]
    assert [len(lines) for lines in answer["quality"]] == [0, 1, 0]
    assert [german[link[2] : link[3]] for link in answer["alignment"][0]][:2] == ["Alle", "Menschen"]
    assert server.translate(f"<p>{german}</p>", source="auto", format="html") == f"<p>{german}</p>"
    english = '<a href="http://example.org/with-the-name-of-the-page/and-what-they-have-written-there-which-you-read">'
    link = f"{english}Alle sind frei geboren.</a>"
    assert server.translate(link, source="auto", format="html") == link
    assert server.ask("/translate", {"q": [], "source": "auto", "target": "de"})[1]["translatedText"] == []
    assert server.translate(german) != german  # a source that is given counts


def test_a_text_file_is_translated_and_fetched(server, expected):
    status, answer = upload(server, "../../a.txt", "\n".join(LINES[:3]).encode())
    assert status == 200
    assert fetch(server, answer).read().decode() == "\n".join(expected[line] for line in LINES[:3])
    assert upload(server, "a.docx", b"PK")[0] == upload(server, "a.txt", b"\xff")[0] == 400
    assert server.ask("/download_file/../../etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("mark", "codec"), [(codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (b"", "utf-8")]
)
def test_a_text_file_keeps_its_encoding_and_its_byte_order_mark(server, expected, mark, codec):
    status, answer = upload(server, "a.txt", mark + f"{LINES[0]}\r\n".encode(codec))
    assert status == 200, answer
    assert fetch(server, answer).read() == mark + f"{expected[LINES[0]]}\r\n".encode(codec)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a.HTML", '<html lang="en"><script>1 < 2</script><p>', "</p>\r\n"),
        ("a.srt", "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>", "</i>\r\n"),
        ("a.vtt", "WEBVTT\n\n00:01.000 --> 00:02.000 line:0\n<v Bob>", "\n"),
        ("a.po", 'msgid "', '"\nmsgstr ""\n'),
        ("a.xlf", '<xliff version="1.2"><file target-language="x"><body><trans-unit id="1"><source>',
         "</source></trans-unit></body></file></xliff>"),
    ],
)  # fmt: skip
def test_documents_are_translated_and_fetched_as_files_to_save(server, name, before, after):
    status, answer = upload(server, name, f"{before}{LINES[0]}{after}".encode())
    assert status == 200, answer
    response = fetch(server, answer)
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers["Content-Disposition"] == f'attachment; filename="translated{name[1:].lower()}"'
    assert response.headers["Content-Security-Policy"] == "sandbox"
    found = response.read().decode()
    assert found.startswith(before.replace('lang="en"', 'lang="de"').replace('msgid "', '#, fuzzy\nmsgid "'))
    assert found != f"{before}{LINES[0]}{after}" and found.endswith(after.split('"')[-1].split("<")[-1])


def test_a_document_has_the_served_code_of_its_language_however_the_client_spells_it(server):
    unit = f'<body><trans-unit id="1"><source>{LINES[0]}</source></trans-unit></body>'
    document = f'<xliff version="1.2"><file source-language="en">{unit}</file></xliff>'
    found = [fetch(server, upload(server, "a.xlf", document.encode(), code)[1]).read() for code in ("de", "DE")]
    assert b' target-language="de"' in found[0] and found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "contents", "status", "message"),
    [
        ("a.xlf", b'<!DOCTYPE a [<!ENTITY b "c">]><xliff version="1.2">&b;</xliff>', 400, "line 1: a document type"),
        ("a.xlf", b"<a>" * 5_000, 400, "nested more than 200"),
        ("a.srt", b"1\n00:00:01,000 --> then\nx", 400, "Invalid request: line 2: "),
        ("a.html", b"<meta charset=zlib>x", 400, "declares the encoding 'zlib'"),
        ("a.html", b"<b>" * 5_000 + b"x", 200, ""),
        ("a.html", b"<p>x " * 4_100, 413, "exceeds text limit"),
        ("a.html", b"x" * 80_001, 413, "exceeds the text limit"),
        ("a.html", b"<p>x" * 101, 413, "exceeds batch limit"),
    ],
)
def test_documents_are_bounded_as_texts_are(server, name, contents, status, message):
    found, answer = upload(server, name, contents)
    assert found == status and message in str(answer)


def test_a_whole_page_is_translated_as_its_parts_are(server):
    page = (
        f"<!DOCTYPE html><html lang=en><title>{LINES[0]}</title><script>1<2</script><p>{LINES[1]}<p>{LINES[2]}</html>"
    )
    found = server.translate(page, format="html")
    parts = [server.translate(line, format="html") for line in LINES[:3]]
    assert found == '<!DOCTYPE html><html lang="de"><title>{}</title><script>1<2</script><p>{}<p>{}</html>'.format(
        *parts
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"source": "en", "target": "de"}, 400, "missing q"),
        ({"q": "a", "target": "de"}, 400, "missing source"),
        ({"q": ["a", 1], "source": "en", "target": "de"}, 400, "q parameter is not"),
        ({"q": "a", "source": ["en"], "target": "de"}, 400, "source parameter: "),
        ({"q": "a", "source": "en", "target": "xx"}, 400, "xx is not supported"),
        (
            {"q": "a", "source": "en", "target": "de", "format": "rtf"},
            400,
            "format parameter: ",
        ),
        (
            {"q": "a", "source": "en", "target": "de", "alternatives": -1},
            400,
            "alternatives parameter: ",
        ),
        (
            {"q": "a", "source": "en", "target": "de", "alignment": "perhaps"},
            400,
            "alignment parameter: ",
        ),
        (
            {"q": "a", "source": "en", "target": "de", "alignment": True, "format": "html"},
            400,
            "with format html",
        ),
        ({"q": "a" * 20_001, "source": "en", "target": "de"}, 413, "text limit (20000)"),
        ({"q": "a\n" * 101, "source": "en", "target": "de"}, 413, "batch limit (100)"),
        ({"q": ["a"] * 101, "source": "en", "target": "de"}, 413, "batch limit (100)"),
        ({"q": "\ud800", "source": "en", "target": "de"}, 400, "surrogate"),
        (b"[" * 100_000, 400, "not JSON in UTF-8"),
        (b"[]", 400, "not an object"),
        (b'{"q": 1' + b"0" * 5000 + b"}", 400, "not JSON in UTF-8"),
        (b"x" * 400_000, 413, "larger than"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(server, body, status, message):
    found, answer = server.ask("/translate", body, {"Content-Type": "application/json"})
    assert found == status and message in answer["error"] and list(answer) == ["error"]


def test_no_answer_holds_a_path_or_a_traceback(server, model):
    answers = [
        server.ask(path, body, headers)
        for path in ("/translate", "/translate_file", "/detect", "/nowhere", "/download_file/x")
        for body in (None, b"", b"\xff", b"q=%ff", b"{}", b'{"q": {}}')
        for headers in ({}, {"Content-Type": "multipart/form-data"}, {"Content-Encoding": "gzip"})
    ]
    assert {status for status, _ in answers} <= {400, 403, 404, 405, 413, 415, 501}
    assert not re.search(rf"Traceback|\.py|{re.escape(str(model.parent))}|/home|/usr|/tmp", json.dumps(answers))


def test_metrics_count_requests_lines_and_loops(server, model):
    server.translate(LINES[0])
    name = 'nmtkit_sentences_total{source="en",target="de"}'
    before = server.metric(name)
    loops = 'nmtkit_loops_total{source="en",target="de"}'
    again = Translator.load(model).translate(LINES[:5], max_len_b=5)
    counted = server.metric(loops)
    server.translate("\n".join(LINES[:5]))
    assert server.metric(name) == before + 5
    assert server.metric(loops) == counted + sum(line.decoded_again for line in again) > counted
    assert server.metric('nmtkit_request_seconds_count{route="/translate"}') >= 1
    assert server.ask("/health") == (200, {"status": "ok", "engines": {"en-de": "torch"}})
    assert server.ask("/openapi.json")[1]["paths"]["/translate"]["post"]["requestBody"]


def test_clients_that_go_away_or_dawdle_disturb_no_other(server, expected):
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    open_ones = []
    for number in range(20):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall([head, head + b'{"q": "a', b"POST /trans", b"\x00\xff\r\n\r\n"][number % 4])
        open_ones.append(connection)
        if number % 2:
            connection.close()
    assert server.translate(LINES[:8]) == [expected[line] for line in LINES[:8]]
    for connection in open_ones:
        connection.close()


@pytest.mark.slow
def test_short_requests_are_answered_while_long_lines_are_translated(tmp_path, model):
    """A line of 60,000 words keeps its worker busy for long. Two of them stopped translation for all others."""
    flags = ["--workers", "2", "--char-limit", "400000", "--max-len-a", "0", "--max-len-b", "40"]
    with serving(tmp_path, "--path", f"en-de={model}", *flags) as server, ThreadPoolExecutor(2) as threads:
        alone = server.translate(LINES[0])
        long = [
            threads.submit(server.ask, "/translate", {"q": "a b c " * 20_000, "source": "en", "target": "de"})
            for _ in "ab"
        ]
        while server.metric("nmtkit_workers_busy") < 2:
            time.sleep(0.01)
        assert [server.translate(LINES[0]) for _ in range(4)] == [alone] * 4
        assert not any(request.done() for request in long)
        (parent,) = children(server.process.pid)
        assert sorted(os.getpriority(os.PRIO_PROCESS, pid) for pid in children(parent)) == [0, 0, 10, 10]
        server.process.kill()
        assert [isinstance(request.exception(), OSError) for request in long] == [True, True]


def children(pid):
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def test_a_killed_worker_is_replaced_and_no_request_is_lost(server, expected):
    (parent,) = children(server.process.pid)
    done = threading.Event()

    def client(number):
        found = []
        while not done.is_set():
            line = LINES[len(found) % len(LINES)]
            found.append(server.translate(line) == expected[line])
        return all(found) and bool(found)

    killed = set()

    def alive():
        return [child for child in children(parent) if child not in killed]

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client, number) for number in range(4)]
        deaths = server.metric("nmtkit_worker_deaths_total")
        try:
            for number in range(3):
                process = alive()[0]
                killed.add(process)
                os.kill(process, signal.SIGKILL)
                while server.metric("nmtkit_worker_deaths_total") <= deaths + number or len(alive()) < 2:
                    time.sleep(0.05)
        finally:
            done.set()
        assert all(client.result() for client in clients)
    while server.metric("nmtkit_workers") < 2:  # a process exists before the server counts it
        time.sleep(0.05)
    assert server.metric("nmtkit_workers") == 2


@pytest.mark.slow
def test_sighup_loads_a_changed_model_and_sigterm_finishes_what_is_running(tmp_path):
    first, second = save_transformer(tmp_path / "m.pt"), save_transformer(tmp_path / "other.pt", d_ff=64)
    texts = [Translator.load(path).translate([LINES[0]], max_len_b=5)[0].text for path in (first, second)]
    assert texts[0] != texts[1]
    with serving(tmp_path, "--path", f"en-de={first}", "--workers", "1", "--max-len-b", "5") as server:
        assert server.translate(LINES[0]) == texts[0]
        first.write_bytes(b"damaged")
        server.process.send_signal(signal.SIGHUP)
        while "could not reload" not in server.log.read_text():
            time.sleep(0.05)
        assert server.translate(LINES[0]) == texts[0]
        second.replace(first)
        server.process.send_signal(signal.SIGHUP)
        while (found := server.translate(LINES[0])) == texts[0]:
            time.sleep(0.05)
        assert found == texts[1]
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(server.translate, LINES * 10)
            while not server.metric("nmtkit_workers_busy") and not running.done():
                pass
            assert server.stop() == 0
            assert len(running.result()) == len(LINES) * 10
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_keys_cors_and_a_full_queue(tmp_path, model):
    (tmp_path / "keys").write_text("# of the team\nsecret\n")
    flags = ["--api-keys", str(tmp_path / "keys"), "--cors-origin", "https://a.org", "--max-queue", "10"]
    flags += ["--timeout", "600", "--max-len-a", "0", "--max-len-b", "40"]
    with serving(tmp_path, "--path", f"en-de={model}", "--workers", "1", *flags) as server:
        request = {"q": LINES[0], "source": "en", "target": "de"}
        assert [server.ask("/translate", request | {"api_key": key})[0] for key in ("", "wrong", "secret")] == [
            *(403, 403, 200)
        ]
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        for origin, allowed in (("https://a.org", "https://a.org"), ("https://b.org", None)):
            connection.request("GET", "/languages", headers={"Origin": origin})
            answer = connection.getresponse()
            answer.read()
            assert answer.getheader("Access-Control-Allow-Origin") == allowed
        long = request | {"q": LINES * 30, "api_key": "secret"}
        with ThreadPoolExecutor(3) as threads:
            statuses = [answer[0] for answer in threads.map(lambda _: server.ask("/translate", long), range(3))]
        assert sorted(statuses)[0] == 200 and sorted(statuses)[-1] == 429


@pytest.mark.slow
def test_the_help_shows_the_default_of_the_server():
    text = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    assert "[default: 1024 on a CPU, 16384 on a GPU]" in text
    assert loading.CPU_MAX_TOKENS == 1024


@pytest.mark.slow
def test_mistakes_end_with_one_line(tmp_path, model):
    taken = socket.create_server(("127.0.0.1", 0))
    for flags, message in (
        (["--path", str(model)], "does not name its languages; name them with --path en-de="),
        (["--path", "en-de=none.pt"], "none.pt: no such file"),
        (["--path", f"en-de={model}", "--port", str(taken.getsockname()[1])], "cannot listen on 127.0.0.1:"),
        (["--path", f"en-de={model}", "--workers", "2", "--threads", "2"], "every worker has one thread"),
        ([], "--models FILE"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "nmtkit", "serve", "--port", "0", *flags],
            capture_output=True,
            text=True,
            timeout=600,
        )
        lines = [line for line in result.stderr.splitlines() if not line.startswith("loading ")]
        assert result.returncode == 2 and len(lines) == 1 and message in lines[0], result.stderr
