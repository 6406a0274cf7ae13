"""A browser gets the translator and its files from the server, and runs no script from a text."""

import html
import http.client
import importlib.util
import re
import shutil
import subprocess
import urllib.parse

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")

from builders import REAL_LINES, save_transformer
from serving_process import serving

from nmtkit.serving import web
from nmtkit.serving.app import Service
from nmtkit.serving.config import ServeConfig
from nmtkit.serving.glossaries import GlossaryStore
from nmtkit.serving.keys import Usage
from nmtkit.translation.translator import Translator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NASTY = "<script>document.title = 'taken'</script> <img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_transformer(tmp_path_factory.mktemp("web") / "model.pt")


@pytest.fixture(scope="module")
def server(model):
    flags = ["--workers", "1", "--max-len-a", "0", "--max-len-b", "4", "--char-limit", "5000"]
    with serving(model.parent, "--path", f"en-de={model}", "--path", f"de-en={model}", *flags) as server:
        yield server


def get(server, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    return answer, answer.read().decode()


def test_the_page_and_its_files_come_with_a_strict_policy(server, model):
    answer, page = get(server, "/")
    assert answer.status == 200 and answer.getheader("Content-Type") == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.getheader("Content-Security-Policy").split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert not re.search(r"<style|<script[^>]*>[^<]|\son\w+=|\sstyle=", page)  # the policy would refuse them
    files = set(re.findall(r'(?:href|src)="(static/[^"]+)"', page))
    files |= {f"static/messages.{code}.json" for code in web.LANGUAGES}
    files |= {f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', get(server, "/static/translator.js")[1])}
    assert {"static/style.css", "static/translator.js", "static/client.js", "static/text.js"} <= files
    for file in files:
        answer, contents = get(server, f"/{file}")
        assert answer.status == 200 and contents and answer.getheader("X-Content-Type-Options") == "nosniff"
        assert not re.search(rf"https?://(?!www\.w3\.org/)|{re.escape(str(model.parent))}", contents), file
        again, nothing = get(server, f"/{file}", {"If-None-Match": answer.getheader("ETag")})
        assert (again.status, nothing) == (304, "")


@pytest.mark.parametrize(
    "path", ["/static/app.py", "/static/../app.py", "/static/%2e%2e/app.py", "/static/attention.html"]
)
def test_other_files_are_not_there(server, path):
    assert get(server, path)[0].status == 404


def test_settings_tell_the_page_what_the_server_takes(server):
    status, settings = server.ask("/frontend/settings")
    assert status == 200
    assert (settings["charLimit"], settings["keyRequired"], settings["supportedFilesFormat"][0]) == (
        5000,
        False,
        ".txt",
    )
    assert settings["detection"] is (importlib.util.find_spec("py3langid") is not None)
    assert settings["language"] == {
        "source": {"code": "en", "name": "English"},
        "target": {"code": "de", "name": "German"},
    }


def test_the_interface_is_a_page_in_the_same_style(server):
    answer, page = get(server, "/docs")
    assert answer.status == 200 and "frame-ancestors 'none'" in answer.getheader("Content-Security-Policy")
    assert 'href="static/style.css"' in page and "<style" not in page
    assert "<code>/translate</code>" in page


def test_without_the_page_the_interface_stays():
    def paths(**settings):
        service = Service(ServeConfig(**settings), None, {}, Usage(), GlossaryStore(None))
        return {route.path for route in service.application().routes}

    assert paths() - paths(disable_web_ui=True) == {"/", "/frontend/settings"}
    assert {"/translate", "/docs"} <= paths(disable_web_ui=True)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_translates_and_shows_script_as_text(server, model, tmp_path):
    text = f"{REAL_LINES[6]}\n{NASTY}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-component-update"]
    command += ["--disable-background-networking", "--disable-sync", f"--user-data-dir={tmp_path}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=15000", "--dump-dom"]
    address = f"{server.url}/#en/de/{urllib.parse.quote(text)}"
    shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=600).stdout
    assert "<title>English – German · nmtkit</title>" in shown
    (mirror,) = re.findall(r'<div class="mirror".*?</div>', shown, re.DOTALL)
    plain = re.sub(r"<[^>]*>", "", mirror)
    assert "&lt;script&gt;document.title = 'taken'&lt;/script&gt; &lt;img src=x" in plain
    (output,) = re.findall(r'<div class="output".*?</div>', shown, re.DOTALL)
    (expected, *_) = Translator.load(model).translate([REAL_LINES[6]], max_len_a=0, max_len_b=4)
    assert expected.text in html.unescape(re.sub(r"<[^>]*>", "", output))
    assert 'class="word"' in output and "<img" not in output


@pytest.mark.slow
def test_pages_with_the_host_of_the_client_fill_no_memory() -> None:
    for number in range(200):
        web._tag(f"a page for host {number}".encode())
    assert web._tag.cache_info().currsize < 100
