"""Validation, /openapi.json and /docs of the service come from the same models."""

import html
import json
import re
import shutil
import subprocess

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")

from builders import REAL_LINES, save_transformer
from pydantic import TypeAdapter
from serving_process import serving

from nmtkit.serving import web
from nmtkit.serving.interface import ENDPOINTS, STATUSES, Translated, openapi_document

FIELDS = {"q": REAL_LINES[0], "source": "en", "target": "de"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interface")
    model = save_transformer(folder / "model.pt")
    with serving(folder, "--path", f"en-de={model}", "--workers", "1", "--max-len-b", "5") as server:
        yield server


@pytest.fixture(scope="module")
def document(server):
    return server.ask("/openapi.json")[1]


def test_examples_are_valid_requests_and_answers():
    for endpoint in ENDPOINTS:
        if endpoint.fields is not None:
            endpoint.fields.model_validate(endpoint.example)
        if endpoint.answer is not None:
            TypeAdapter(endpoint.answer).validate_json(json.dumps(endpoint.answer_example), strict=True)
        assert set(endpoint.statuses) <= set(STATUSES)


def test_every_route_with_fields_names_the_statuses_of_the_door():
    for endpoint in ENDPOINTS:
        expected = {400, 403, 413, 415, 429, 504} if endpoint.fields is not None else set()
        assert expected <= set(endpoint.statuses), endpoint.path


@pytest.mark.parametrize(
    "fields",
    [
        FIELDS,
        {**FIELDS, "alternatives": 2, "alignment": True, "quality": True},
        {**FIELDS, "q": REAL_LINES[:2], "alternatives": 2, "alignment": True, "quality": True},
        {**FIELDS, "q": []},
    ],
)
def test_answers_are_of_the_declared_type(server, fields):
    status, answer = server.ask("/translate", fields)
    assert status == 200
    checked = TypeAdapter(Translated).validate_json(json.dumps(answer), strict=True)
    assert set(checked) == set(answer)


def test_the_document_declares_the_limits_that_the_server_enforces(server, document):
    schema = document["paths"]["/translate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    alternatives = schema["properties"]["alternatives"]
    statuses = [
        server.ask("/translate", {**FIELDS, "alternatives": number})[0]
        for number in (alternatives["minimum"], alternatives["maximum"], alternatives["maximum"] + 1)
    ]
    assert statuses == [200, 200, 400]
    assert schema["properties"]["source"]["enum"] == ["en", "auto"]
    for name in schema["required"]:
        without = {key: value for key, value in FIELDS.items() if key != name}
        assert server.ask("/translate", without) == (400, {"error": f"Invalid request: missing {name} parameter"})
    assert schema["required"] == ["q", "source", "target"]
    with_key = openapi_document([("en", "de")], needs_key=True)["paths"]["/detect"]["post"]["requestBody"]
    assert with_key["content"]["application/json"]["schema"]["required"] == ["q", "api_key"]


def test_every_reference_of_the_document_has_its_schema(document):
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert references and references <= set(document["components"]["schemas"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_of_the_page_can_be_pasted(server, document, tmp_path):
    (tmp_path / "subtitles.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nAll are equal.\n")
    page = html.unescape(web.documentation(document, server.url))
    commands = re.findall(r">(curl .*?)</pre>", page, re.DOTALL)
    assert len(commands) == len(ENDPOINTS)
    for command in commands:
        result = subprocess.run(
            f"{command} --silent --write-out '\\n%{{http_code}}'",
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        status = result.stdout.rsplit("\n", 1)[1]
        assert status == "200" or (status == "501" and "/detect" in command), (command, result.stdout)


@pytest.mark.slow
def test_the_page_shows_answers_and_every_status(document):
    page = html.unescape(web.documentation(document, "http://translate.example"))
    assert "localhost" not in page and "http://translate.example/download_file/" in page
    for endpoint in ENDPOINTS:
        section = page[page.index(f'id="{endpoint.path[1:]}"') :].split("</section>")[0]
        assert all(f"<code>{status}</code>" in section for status in endpoint.statuses)
    assert '"translatedText": "Hallo!"' in page and "nmtkit_workers 2.0" in page
