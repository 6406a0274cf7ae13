"""Headless Chromium runs the scripts of the translator page. The answers of the server are made up here."""

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = Path(__file__).parents[2] / "nmtkit/pages"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

# Translates into capitals. A request with the word "waits" is answered when `release` is called.
SERVER = """
let release = () => {};
const released = new Promise(resolve => { release = resolve; });
const language = { source: { code: "en" }, target: { code: "de" } };
const settings = { charLimit: 5000, supportedFilesFormat: [".txt"], language };
const languages = [{ code: "en", name: "English", targets: ["de"] }, { code: "de", name: "German", targets: ["en"] }];
window.fetch = async (path, options) => {
  const json = value => ({ ok: true, status: 200, json: async () => value });
  if (path === "frontend/settings") return json(settings);
  if (path === "languages") return json(languages);
  const { q } = JSON.parse(options.body);
  if (q.some(text => text.includes("waits"))) await released;
  if (q.some(text => text.includes("fails"))) return { ok: false, status: 400, json: async () => ({ error: "No." }) };
  const none = q.map(() => []);
  return json({ translatedText: q.map(text => text.toUpperCase()), alignment: none, quality: none });
};
const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));
const type = text => {
  const source = document.getElementById("source");
  source.value = text;
  source.dispatchEvent(new Event("input"));
};
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serves the files of `tmp_path`, with the scripts of the page in static/."""
    shutil.copytree(PAGES, tmp_path / "static")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def told(address: str, folder: Path, script: str) -> Any:
    """Runs `script` in the page. Returns the value that the script passes to `tell`."""
    page = (PAGES / "translator.html").read_text(encoding="utf-8")
    begin = f"<script>{SERVER}\nconst tell = value => {{ document.body.dataset.told = JSON.stringify(value); }};\n"
    begin += f"addEventListener('load', async () => {{ {script} }});</script>"
    (folder / "index.html").write_text(page.replace("<head>", f"<head>\n{begin}"), encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]
    command += [f"--user-data-dir={folder / 'browser'}", f"{address}/index.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-told="([^"]*)"', dom)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def test_a_text_is_copied_and_downloaded_only_when_all_of_it_is_translated(address: str, tmp_path: Path) -> None:
    script = """
        const seen = {}, buttons = ["copy", "download"].map(id => document.getElementById(id));
        const look = name => { seen[name] = buttons.map(button => !button.disabled); };
        await pause(500); look("empty");
        type("All is well."); look("typed"); await pause(1000); look("translated");
        type("All is well. This waits."); look("more typed"); await pause(1000); look("pending");
        release(); await pause(1000); look("answered");
        type("All is well. This fails."); await pause(1000); look("a part failed");
        type("This fails."); await pause(1000); look("all failed");
        tell(seen);
    """
    assert told(address, tmp_path, script) == {
        "empty": [False, False],
        "typed": [False, False],
        "translated": [True, True],
        "more typed": [False, False],
        "pending": [False, False],
        "answered": [True, True],
        "a part failed": [True, True],
        "all failed": [False, False],
    }


def test_a_text_over_the_limit_waits_for_nothing(address: str, tmp_path: Path) -> None:
    script = """
        await pause(500);
        type("All is well. ".repeat(500));
        await pause(1000);
        const bars = [...document.querySelectorAll(".pending")].map(bar => getComputedStyle(bar).backgroundImage);
        const get = id => document.getElementById(id);
        tell({
            notice: get("notice").textContent, progress: get("progress").hidden, count: get("pending").textContent,
            busy: get("output").getAttribute("aria-busy"), bars: [...new Set(bars)], copy: get("copy").disabled,
        });
    """
    assert told(address, tmp_path, script) == {
        "notice": "The text has 6,500 characters, but this server accepts 5,000. Shorten it, or translate it in parts.",
        "progress": True,
        "count": "",
        "busy": "false",
        "bars": ["none"],
        "copy": True,
    }
