"""A translation server as a teacher: protocols, faults of the server, limits, choices, and jobs that go on."""

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nmtkit.cli import main
from nmtkit.data.retries import LONGEST_WAIT
from nmtkit.translation import server_teacher
from nmtkit.translation.server_config import ServerConfig
from nmtkit.translation.server_teacher import PermanentError, RequestLimit, TranslationServer, best

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Faulty:
    """A local server. `faults` are answers before the good answers; `texts` are the texts that it has translated."""

    url: str = ""
    faults: list[Answer] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    at_most: int = 64  # candidates of an answer
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any], key: str) -> Answer:
        with self.lock:
            self.bodies.append(body)
            self.keys.append(key)
            if self.faults:
                return self.faults.pop(0)
            text = body["text"][0] if path.endswith("/v2/translate") else body["messages"][-1]["content"]
            self.texts.append(text)
            if path.endswith("/v2/translate"):
                return ok({"translations": [{"text": text.upper(), "detected_source_language": "EN"}]})
            count = min(self.at_most, body.get("n", 1))
            choices = [{"message": {"content": f"{text.upper()}\n{len(self.texts)}.{i}"}} for i in range(count)]
            return ok({"choices": choices})


def ok(body: Any) -> Answer:
    return 200, {}, json.dumps(body).encode()


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    state = Faulty()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, data = state.answer(self.path, body, self.headers.get("Authorization", ""))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        yield state
        http.shutdown()
        thread.join()


def server(faulty: Faulty, sleep: Callable[[float], None] = lambda seconds: None, **settings: Any) -> TranslationServer:
    return TranslationServer(ServerConfig(from_server=faulty.url, server_model="big", **settings), ("en", "de"), sleep)


def test_a_request_has_the_form_of_openai(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMTKIT_SERVER_KEY", "secret")
    assert server(faulty).candidates("a dog") == ["A DOG 1.0"]  # the line feed became a space
    (body,) = faulty.bodies
    assert body["model"] == "big" and body["temperature"] == 0 and "n" not in body
    assert body["messages"][1] == {"role": "user", "content": "a dog"}
    assert "from English to German" in body["messages"][0]["content"]
    assert faulty.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("languages", "codes"),
    [(("en", "de"), ("EN", "DE")), (("en-US", "pt_BR"), ("EN", "PT-BR")), (("eng", "deu"), ("EN", "DE"))],
)
def test_a_request_has_the_form_of_deepl(
    languages: tuple[str, str], codes: tuple[str, str], faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    config = ServerConfig(from_server=faulty.url[:-3], server_api="deepl", api_key_variable="MY_KEY")
    assert TranslationServer(config, languages).candidates("a dog") == ["A DOG"]
    assert faulty.bodies == [{"text": ["a dog"], "source_lang": codes[0], "target_lang": codes[1]}]
    assert faulty.keys == ["DeepL-Auth-Key secret"]


@pytest.mark.parametrize("at_most", [1, 3, 64])
def test_a_server_with_few_candidates_is_asked_again(faulty: Faulty, at_most: int) -> None:
    faulty.at_most = at_most
    assert len(server(faulty, candidates=4).candidates("x")) == 4
    assert all(body["temperature"] == 0.7 for body in faulty.bodies)


TRANSIENT: list[Answer] = [
    (500, {}, b"oops"),
    (429, {"Retry-After": "7"}, b"slow down"),
    (503, {}, b""),
    (200, {}, b"not JSON"),
    (200, {}, b"[]"),
    (200, {}, b'{"choices": [{"text": "an endpoint of completions"}]}'),
    (200, {"Content-Length": "100"}, b"{"),
]


def test_failures_that_may_pass_are_tried_again_after_growing_waits(
    faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    faulty.faults = list(TRANSIENT)
    assert server(faulty, waits.append).candidates("a") == ["A 1.0"]
    assert waits == [1, 7, 4, 8, 16, 32, 64]
    (warning,) = caplog.messages  # at the first failure, not at each
    assert faulty.url in warning


def test_a_server_is_asked_again_at_the_time_that_it_names(faulty: Faulty) -> None:
    waits: list[float] = []
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=300), usegmt=True)
    faulty.faults = [(503, {"Retry-After": later}, b""), (503, {"Retry-After": "1000000"}, b"")]
    assert server(faulty, waits.append).candidates("a") == ["A 1.0"]
    assert 200 < waits[0] <= 300 and waits[1] == LONGEST_WAIT


@pytest.mark.parametrize(
    ("content", "reason", "found"),
    [(None, "stop", ""), ("Ein Hund", "length", ""), ("Ein", "content_filter", ""), ("Ein Hund", None, "Ein Hund")],
)
def test_an_answer_without_text_or_with_a_part_of_the_text_is_not_a_translation(
    faulty: Faulty, content: str | None, reason: str | None, found: str
) -> None:
    faulty.faults = [ok({"choices": [{"message": {"content": content}, "finish_reason": reason}]})]
    assert server(faulty).candidates("a") == [found]


def test_the_last_failure_is_told(faulty: Faulty) -> None:
    faulty.faults = [TRANSIENT[0]] * 3
    with pytest.raises(OSError, match=r"3 attempts .*500: oops"):
        server(faulty, attempts=3).candidates("a")


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_is_not_tried_again(faulty: Faulty, status: int) -> None:
    faulty.faults = [(status, {}, b"no such model")] * 2
    with pytest.raises(PermanentError, match=f"status {status}: no such model") as told:
        server(faulty).candidates("a")
    assert len(faulty.faults) == 1
    assert ("NMTKIT_SERVER_KEY" in str(told.value)) == (status in (401, 403))


def test_requests_begin_at_the_rate_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    limit = RequestLimit(per_minute=30, sleep=waits.append)
    for _ in range(4):
        limit.wait()
    assert waits == [0, 2, 4, 6]


def test_candidates_are_chosen_by_similarity() -> None:
    candidates = ["completely other words", "the dog runs", "a dog runs", "the dog ran"]
    facts = {"metric": "chrf", "source": "der Hund läuft", "device": "cpu"}
    assert best(candidates, choose="first", **facts) == candidates[0]
    assert best(candidates, choose="mbr", **facts) == "the dog runs"
    assert best(candidates, choose="reference", reference="a dog runs fast", **facts) == "a dog runs"


def distill(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["distill", *map(str, arguments)])


def test_a_job_goes_on_after_its_last_complete_shard(
    faulty: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_teacher, "wait_after", lambda failures, asked: 0.0)
    text = tmp_path / "mono.en"
    text.write_text("".join(f"line {i}\n" for i in range(5)) + "\n" + "line 6\n")
    flags = ["-s", "en", "-t", "de", "--from-server", faulty.url, "--server-model", "big"]
    flags += ["--output-dir", tmp_path / "shards", "--shard-lines", 2, "--parallel-requests", 1, "--attempts", 2]
    faulty.faults = []
    original = faulty.answer

    def breaks(path: str, body: dict[str, Any], key: str) -> Answer:
        return (500, {}, b"down") if len(faulty.texts) == 3 else original(path, body, key)

    faulty.answer = breaks  # type: ignore[method-assign]
    stopped = distill(text, *flags)
    assert stopped.exit_code == 2 and "status 500: down" in stopped.stderr
    assert len(list((tmp_path / "shards").glob("*.done"))) == 1
    faulty.answer = original  # type: ignore[method-assign]
    assert distill(text, *flags, "--requests-per-minute", "100000").exit_code == 0  # another limit continues the job
    assert faulty.texts.count("line 0") == 1 and faulty.texts.count("line 1") == 1
    merged = CliRunner().invoke(main, ["merge", str(tmp_path / "shards"), "--output", str(tmp_path / "mono.jsonl")])
    assert merged.exit_code == 0, merged.output
    pairs = [json.loads(line) for line in (tmp_path / "mono.jsonl").read_text().splitlines()]
    assert [pair["en"] for pair in pairs] == [*(f"line {i}" for i in range(5)), "line 6"]
    assert all(pair["de"].startswith(pair["en"].upper()) for pair in pairs)
    other = distill(text, *flags, "--candidates", "2")
    assert other.exit_code == 2 and "candidates" in other.stderr


def test_the_nearest_candidate_to_the_reference_is_kept_with_the_others(faulty: Faulty, tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("x\nx\n")
    (tmp_path / "a.de").write_text("X 1.2\nX 2.1\n")
    flags = ["-s", "en", "-t", "de", "--from-server", faulty.url, "--server-model", "m", "--candidates", 3]
    flags += ["--choose", "reference", "--references", tmp_path / "a.de", "--parallel-requests", 1]
    result = distill(tmp_path / "a.en", *flags, "--output-dir", tmp_path / "shards")
    assert result.exit_code == 0, result.output
    (shard,) = (tmp_path / "shards").glob("*.jsonl")
    pairs = [json.loads(line) for line in shard.read_text().splitlines()]
    assert [pair["de"] for pair in pairs] == ["X 1.2", "X 2.1"]
    assert all(len(pair["candidates"]) == 3 for pair in pairs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from-server", "http://localhost"], "--server-model"),
        (["--from-server", "localhost:8000/v1", "--server-model", "m"], "http://"),
        (["--from-server", "http://localhost", "--server-model", "m"], "-s and -t"),
        (["--from-server", "http://localhost", "--server-model", "m", "-s", "en", "-t", "de"], "--output-dir"),
        (["--from-server", "http://localhost", "--server-model", "m", "-s", "en", "-t", "en"], "both en"),
        (["--from-server", "http://localhost", "--top-k", "4"], "--top-k"),
        (["--from-server", "http://localhost", "--server-api", "deepl", "--candidates", "2"], "one candidate"),
        (["--from-server", "http://localhost", "--server-model", "m", "--choose", "mbr"], "--candidates"),
        (["--choose", "mbr"], "--from-server"),
        ([], "--path FILE.*--from-server URL"),
    ],
)
def test_flags_without_effect_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "a.en").write_text("x\n")
    result = distill(tmp_path / "a.en", *flags)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.txt.gz"])
def test_lines_of_a_corpus_are_not_sent_to_a_server(tmp_path: Path, name: str) -> None:
    lines = b"a dog\tein Hund\n"
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    flags = ["--from-server", "http://localhost:1", "--server-model", "m", "-s", "en", "-t", "de", "--attempts", "1"]
    result = distill(tmp_path / name, *flags, "--output-dir", tmp_path / "shards")
    assert result.exit_code == 2 and name in result.stderr and "localhost" not in result.stderr, result.stderr
    assert not (tmp_path / "shards").exists()
