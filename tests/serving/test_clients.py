"""Clients of LibreTranslate, called like their users call them, and the formats of their requests."""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")

from builders import REAL_LINES, save_transformer
from serving_process import serving

from nmtkit.serving.languages import served_code
from nmtkit.translation.translator import Translator

pytestmark = pytest.mark.slow  # clients of other projects, and a server
LINE = REAL_LINES[0]
KEY = "a-key"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_transformer(tmp_path_factory.mktemp("clients") / "model.pt")


@pytest.fixture(scope="module")
def server(model):
    (model.parent / "keys").write_text(f"{KEY}\n")
    flags = ["--workers", "1", "--max-len-b", "5", "--api-keys", str(model.parent / "keys")]
    with serving(model.parent, "--path", f"en-de={model}", "--path", f"pt_BR-de={model}", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def expected(model):
    return Translator.load(model).translate([LINE], max_len_b=5)[0].text


def post(server, path, body=b"", headers=None):
    request = urllib.request.Request(server.url + path, body, headers or {}, method="POST")
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.url, json.loads(answer.read())


def test_deep_translator_translates(server, expected):
    """The client sends all fields, also the key, in the query string of a POST without a body."""
    deep_translator = pytest.importorskip("deep_translator")
    translator = deep_translator.LibreTranslator("en", "de", api_key=KEY, custom_url=f"{server.url}/")
    assert translator.translate(LINE) == expected
    with pytest.raises(deep_translator.exceptions.AuthorizationException):
        deep_translator.LibreTranslator("en", "de", api_key="wrong", custom_url=f"{server.url}/").translate(LINE)


def test_libretranslatepy_translates(server, expected):
    client = pytest.importorskip("libretranslatepy").LibreTranslateAPI(server.url, KEY)
    assert client.translate(LINE, "en", "de") == expected
    assert {"code": "en", "name": "English", "targets": ["de"]} in client.languages()


@pytest.mark.parametrize(
    ("package", "script"),
    [
        # the package sends its key as apiKey, which LibreTranslate does not know
        ("libretranslate", "translate({query: text, source: 'en', target: 'de', apiurl: url})"),
        ("translate", "Translate({engine: 'libre', url: `${url}/translate`, key, from: 'en', to: 'de'})(text)"),
    ],
)
def test_clients_in_javascript_translate(model, server, expected, package, script, tmp_path):
    """NODE_PATH names the folder of the packages: npm install -g libretranslate; export NODE_PATH=$(npm root -g)."""
    node, folder = shutil.which("node"), os.environ.get("NODE_PATH", "")
    if node is None or not os.path.isdir(os.path.join(folder, package)):
        pytest.skip(f"node and the npm package {package} are not installed")
    os.symlink(folder, tmp_path / "node_modules")
    program = f"import * as client from {package!r}; const [text, url, key] = process.argv.slice(2);"
    (tmp_path / "run.mjs").write_text(f"{program} console.log(await (client.{script}));")
    with serving(tmp_path, "--path", f"en-de={model}", "--workers", "1", "--max-len-b", "5") as open_server:  # no key
        command = [node, "run.mjs", LINE, open_server.url, KEY]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.stdout == f"{expected}\n", result.stderr


def test_fields_may_be_in_the_query_string_and_a_body_overrides_them(server, expected):
    fields = {"q": LINE, "source": "en", "target": "de", "api_key": KEY}
    query = urllib.parse.urlencode(fields)
    assert post(server, f"/translate?{query}")[1] == {"translatedText": expected}
    query = urllib.parse.urlencode({**fields, "q": "another text", "target": "xx"})
    body = json.dumps({"q": LINE, "target": "de"}).encode()
    answer = post(server, f"/translate?{query}", body, {"Content-Type": "application/json"})[1]
    assert answer == {"translatedText": expected}
    assert server.ask("/translate?q=%ff", b"")[0] == 400


def test_a_key_may_be_a_bearer_token(server, expected):
    fields = {"q": LINE, "source": "en", "target": "de"}
    assert server.ask("/translate", fields, {"Authorization": f"Bearer {KEY}"}) == (200, {"translatedText": expected})
    assert server.ask("/translate", fields, {"Authorization": "Bearer wrong"})[0] == 403
    assert server.ask("/translate", {**fields, "api_key": KEY}, {"Authorization": "Bearer wrong"})[0] == 403


def test_languages_are_told_to_a_post_and_with_a_slash_at_the_end(server):
    expected = server.ask("/languages")[1]
    assert [language["code"] for language in expected] == ["de", "en", "pt_BR"]
    for address, answer in (post(server, "/languages"), post(server, "/languages/")):
        assert answer == expected
        assert urllib.parse.urlsplit(address).path.startswith("/languages")
    assert server.ask("/languages/") == (200, expected)


def test_no_redirect_leaves_the_scheme_or_the_prefix_of_a_proxy(server):
    """A proxy may serve https://example.org/mt/ from this server: redirects are relative to the requested page."""

    class Kept(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *arguments):
            return None

    opener = urllib.request.build_opener(Kept)
    locations = []
    for path in ("/languages/", "/translate/", "/detect/", "/health/", "/metrics/", "/docs/", "/openapi.json/"):
        try:
            opener.open(server.url + path)
        except urllib.error.HTTPError as error:
            locations.append(error.headers.get("Location"))
    assert [location for location in locations if location] == ["../docs"]


def test_codes_match_without_regard_to_case_and_hyphen(server):
    """Weblate writes pt-BR for pt_BR."""
    fields = {"q": LINE, "target": "DE", "api_key": KEY}
    statuses = [server.ask("/translate", {**fields, "source": code})[0] for code in ("pt_BR", "pt-BR", "PT-br", "pt")]
    assert statuses == [200, 200, 200, 400]
    assert served_code("zh-hant", ["zh_Hans", "zh_Hant"]) == "zh_Hant"
    assert served_code("pt-BR", ["pt_BR", "pt-BR"]) == "pt-BR"


def test_placeholders_of_weblate_are_kept(server):
    """Weblate sends variables as [X6X] and refuses a translation that lacks one."""
    text = "All [X4X] are born [X17X] and equal in [X41X]."
    fields = {"source": "en", "target": "de", "api_key": KEY}
    for q in (text, [LINE, text], f"{text}\n{LINE}\n{text}"):
        status, answer = server.ask("/translate", {**fields, "q": q})
        found = "".join(answer["translatedText"])
        assert status == 200
        for placeholder in ("[X4X]", "[X17X]", "[X41X]"):
            assert found.count(placeholder) == "".join(q).count(placeholder)
    page = server.ask("/translate", {**fields, "q": f"<p>{text}</p>", "format": "html"})[1]["translatedText"]
    assert all(placeholder in page for placeholder in ("[X4X]", "[X17X]", "[X41X]"))
