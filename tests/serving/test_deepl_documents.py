"""Documents of DeepL's interface without a server: quotas that end in between, and who may fetch a translation."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")

from starlette.requests import Request
from starlette.responses import Response

from nmtkit.serving.config import ServeConfig
from nmtkit.serving.content_translator import KeptFiles, UploadedFile
from nmtkit.serving.deepl import DeepL
from nmtkit.serving.door import Door
from nmtkit.serving.keys import ApiKey, Quota, Usage
from nmtkit.serving.reading import PlainText

KEY = ApiKey("a", (Quota("characters", 100, "month"),))
FIELDS = SimpleNamespace(
    target_lang="DE", source_lang="EN", file=None, filename=None, output_format=None, formality="default",
    glossary_id=None,
)  # fmt: skip


class Translator:
    """Stands for `ContentTranslator`. `used` characters of another request are counted after the check of an upload."""

    def __init__(self, used: int) -> None:
        self.used = used
        self.door = Door(ServeConfig(), {}, Usage(), None)  # type: ignore[arg-type]  # no route observes a metric
        self.pool = SimpleNamespace(pairs=[("en", "de")], models=SimpleNamespace(facts=None))
        self.threads, self.detector, self.files = self.door.threads, None, KeptFiles()

    async def read_file(self, *arguments: Any) -> UploadedFile:
        return UploadedFile(".txt", PlainText("x" * 40), ("en", "de"), [])

    async def translated_file(self, key: ApiKey, *arguments: Any) -> tuple[bytes, list[str]]:
        self.door.usage.count(key, characters=self.used)
        self.door.usage.count(key, characters=40)
        return b"translation", ["a warning"]


def upload(translator: Translator) -> tuple[DeepL, Response]:
    deepl = DeepL(translator, None)  # type: ignore[arg-type]
    request = Request({"type": "http", "path": "/v2/document", "headers": [], "state": {"key": KEY}})
    door = translator.door
    return deepl, asyncio.run(door.answer_or_error(request, lambda request: deepl.upload(request, FIELDS)))  # type: ignore[arg-type]


def test_a_quota_that_another_request_uses_up_is_456() -> None:
    """Clients of DeepL sent the document again and again after 429."""
    _, answer = upload(Translator(used=80))
    assert answer.status_code == 456 and b"quota" in answer.body


def test_a_translation_is_kept_under_the_key_of_the_document() -> None:
    """LibreTranslate's route /download_file gave the translation to everybody who knew the id of the document."""
    deepl, answer = upload(Translator(used=0))
    document = json.loads(bytes(answer.body))
    assert deepl.files.get(document["document_id"]) is None
    fields, request = SimpleNamespace(document_key=document["document_key"]), Request({"type": "http"})
    request.scope["path_params"] = {"id": document["document_id"]}
    status = json.loads(bytes(asyncio.run(deepl.status(request, fields)).body))  # type: ignore[arg-type]
    assert (status["status"], status["warnings"]) == ("done", ["a warning"])
    assert asyncio.run(deepl.result(request, fields)).body == b"translation"  # type: ignore[arg-type]
    assert deepl.files.get(document["document_key"]) is None  # a document is fetched once
