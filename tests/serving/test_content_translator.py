"""Requests without a server: warnings reach the client, and quotas are counted in one thread."""

import asyncio
import hashlib
import io
import json
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from nmtkit.serving.config import ServeConfig
from nmtkit.serving.content_translator import ContentTranslator
from nmtkit.serving.door import Door
from nmtkit.serving.fair_queue import BatchKey, LineResult
from nmtkit.serving.interface import TranslateFields, TranslateFileFields
from nmtkit.serving.keys import ApiKey, Quota, Usage
from nmtkit.serving.libretranslate import LibreTranslate
from nmtkit.serving.metrics import Metrics
from nmtkit.serving.pool import Pool

HEADER = 'msgid ""\nmsgstr "Language: {}\\n"\n\n'
ENTRY = '#, python-format\nmsgid "{}"\nmsgstr ""\n'


async def translate(key: BatchKey, lines: Sequence[str]) -> list[list[LineResult]]:
    """Stands for `Pool.translate`. The translations lack the placeholders of the lines."""
    return [[{"text": "Hallo"}] for _ in lines]


def answer(document: str) -> dict[str, object]:
    """Returns the answer to an upload of a PO file, as English to German."""
    metrics = cast(Metrics, SimpleNamespace(count=lambda *counts: None))
    door = Door(ServeConfig(public_url="http://x"), {}, Usage(), metrics)
    translator = ContentTranslator(door, cast(Pool, SimpleNamespace(pairs=[("en", "de")], translate=translate)))
    request = Request({"type": "http", "headers": [], "state": {"key": ApiKey()}})
    file = UploadFile(io.BytesIO(document.encode()), filename="a.po")
    fields = TranslateFileFields(file=file, source="en", target="DE")
    found = asyncio.run(LibreTranslate(translator).translate_file(request, fields))
    return cast(dict[str, object], json.loads(bytes(found.body)))


@pytest.mark.parametrize(
    ("language", "source", "facts"),
    [
        ("de", "Hello!", []),
        ("fr", "Hello!", [("fr", "de")]),
        ("de", "Hello, %s!", [("1", "placeholders")]),
        ("fr", "Hello, %s!", [("fr", "de"), ("1", "placeholders")]),
    ],
)
def test_warnings_about_a_document_are_in_the_answer_and_not_in_the_log(
    language: str, source: str, facts: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    warnings = answer(HEADER.format(language) + ENTRY.format(source)).get("warnings", [])
    assert isinstance(warnings, list) and len(warnings) == len(facts)
    for warning, words in zip(warnings, facts, strict=True):
        assert all(word in warning for word in words)
    assert caplog.messages == []


def test_quotas_are_counted_in_the_thread_of_the_event_loop() -> None:
    """A thread that checked a quota replaced the counts of a new minute, to which the event loop had just added."""
    threads: set[int] = set()

    def now() -> datetime:
        threads.add(threading.get_ident())
        return datetime.now(UTC)

    key = ApiKey("a", (Quota("characters", 5, "day"),))
    usage = Usage(now=now)
    metrics = cast(Metrics, SimpleNamespace(observe=lambda *facts: None))
    door = Door(ServeConfig(), {hashlib.sha256(b"key").digest(): key}, usage, metrics)

    async def handle(request: Request, fields: TranslateFields) -> Response:
        return Response(fields.q)

    async def ask(text: str) -> Response:
        sent = json.dumps({"q": text, "source": "en", "target": "de"}).encode()
        messages = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Event().wait() or {}

        headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
        scope = {"type": "http", "path": "/translate", "query_string": b"", "headers": headers, "server": ("x", 80)}
        return await door.answer_or_error(Request(scope, receive), door.with_fields(TranslateFields, handle))

    assert [asyncio.run(ask(text)).status_code for text in ("short", "longer")] == [200, 413]
    assert threads == {threading.get_ident()}
