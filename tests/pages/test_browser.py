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

# Translates into capitals. A request with the word "waits" is answered when `release` is called. A text with "Hund" is
# German. English is translated to German and Italian, German only to English.
SERVER = """
let release = () => {};
const released = new Promise(resolve => { release = resolve; });
const language = { source: { code: "en" }, target: { code: "de" } };
const settings = { charLimit: 5000, supportedFilesFormat: [".txt"], language, detection: true };
const languages = [
  { code: "en", name: "English", targets: ["de", "it"] }, { code: "de", name: "German", targets: ["en"] },
  { code: "it", name: "Italian", targets: [] },
];
const fetched = window.fetch, asked = [];
window.fetch = async (path, options) => {
  if (path.startsWith("static/")) return fetched(path, options);
  const json = value => ({ ok: true, status: 200, json: async () => value });
  if (path === "frontend/settings") return json(settings);
  if (path === "languages") return json(languages);
  const { q, ...fields } = JSON.parse(options.body);
  if (path === "detect") return json([{ language: q.includes("Hund") ? "de" : "en", confidence: 95 }]);
  asked.push([`${fields.source} ${fields.target}`, q]);
  if (fields.alternatives) {
    return json({ translatedText: q.toUpperCase(), alternatives: [`${q}!`, `${q}?`], alternativesAlignment: [[], []] });
  }
  if (q.some(text => text.includes("waits"))) await released;
  if (q.some(text => text.includes("fails"))) {
    return { ok: false, status: 400, headers: new Headers(), json: async () => ({ error: "No." }) };
  }
  const none = q.map(() => []);
  return json({ translatedText: q.map(text => text.toUpperCase()), alignment: none, quality: none });
};
const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));
const get = id => document.getElementById(id);
const shown = () => get("output").textContent.trim();
const chosenNames = () => ["from", "to"].map(id => get(id).selectedOptions[0].textContent);
const noticed = () => get("notice").hidden ? "" : get("notice").textContent;
const press = node => node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const enter = (field, text) => { field.value = text; field.dispatchEvent(new Event("input")); };
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


def told(address: str, folder: Path, script: str, *flags: str, place: str = "") -> Any:
    """Runs `script` in the page at `place`, the part of the address after #. Returns the value given to `tell`."""
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
    command += [*flags, f"--user-data-dir={folder / 'browser'}", f"{address}/index.html#{place}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = re.search(r'data-told="([^"]*)"', dom)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_text_over_the_limit_waits_for_nothing(address: str, tmp_path: Path) -> None:
    script = """
        await pause(500);
        type("All is well. ".repeat(500));
        await pause(1000);
        const bars = [...document.querySelectorAll(".pending")].map(bar => getComputedStyle(bar).backgroundImage);
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


@pytest.mark.slow
def test_a_notice_offers_to_translate_from_the_language_of_the_text(address: str, tmp_path: Path) -> None:
    script = """
        await pause(500);
        type("A dog runs."); await pause(1000);
        const before = noticed();
        type("Ein Hund rennt."); await pause(1000);
        const offered = noticed();
        press(get("notice").querySelector("button")); await pause(1000);
        const after = noticed(), names = chosenNames(), last = asked.at(-1), translation = shown();
        get("from").value = "en"; get("from").dispatchEvent(new Event("change")); await pause(500);
        tell({ before, offered, after, names, last, translation, again: noticed() });
    """
    assert told(address, tmp_path, script) == {
        "before": "",
        "offered": "The text seems to be in German.Translate from German",
        "after": "",
        "names": ["German", "English"],
        "last": ["de en", ["Ein Hund rennt."]],
        "translation": "EIN HUND RENNT.",
        "again": "The text seems to be in German.Translate from German",
    }


@pytest.mark.slow
def test_detect_language_is_first_in_the_list_and_follows_the_text(address: str, tmp_path: Path) -> None:
    script = """
        await pause(500);
        const first = get("from").options[0];
        const seen = [first.value, ...chosenNames()];
        type("Ein Hund rennt."); await pause(1000);
        seen.push(...chosenNames(), asked.at(-1)[0]);
        type("A dog runs."); await pause(1000);
        seen.push(...chosenNames(), asked.at(-1)[0]);
        get("to").value = "it"; get("to").dispatchEvent(new Event("change")); await pause(500);
        seen.push(...chosenNames());
        get("to").value = "de"; get("to").dispatchEvent(new Event("change")); await pause(500);
        press(get("swap")); await pause(500);
        tell({ seen, names: chosenNames(), text: get("source").value });
    """
    assert told(address, tmp_path, script, place="auto/de") == {
        "seen": [
            *("auto", "Detect language", "German"),
            *("Detected: German", "English", "de en"),
            *("Detected: English", "German", "en de"),
            *("Detected: English", "Italian"),
        ],
        "names": ["German", "English"],
        "text": "A DOG RUNS.",
    }


@pytest.mark.slow
def test_the_text_and_edits_survive_a_reload_until_they_are_cleared(address: str, tmp_path: Path) -> None:
    script = """
        const visit = Number(sessionStorage.visit ?? 0);
        sessionStorage.visit = visit + 1;
        await pause(1000);
        if (visit === 0) {
            type("A dog runs. Two men."); await pause(1000);
            press(document.querySelector("#output .sentence")); await pause(500);
            enter(get("alternatives").querySelector("textarea"), "My own words.");
            get("alternatives").querySelector("form").requestSubmit();
        } else if (visit === 1) {
            sessionStorage.seen = JSON.stringify([get("source").value, shown(), get("copy").disabled]);
            press(get("clear"));
        } else {
            const seen = JSON.parse(sessionStorage.seen);
            return tell({ seen, after: get("source").value, empty: !get("empty").hidden });
        }
        await pause(500);
        location.reload();
    """
    assert told(address, tmp_path, script) == {
        "seen": ["A dog runs. Two men.", "My own words. TWO MEN.", False],
        "after": "",
        "empty": True,
    }


@pytest.mark.slow
def test_a_sentence_is_edited_or_replaced_and_the_copy_is_what_is_shown(address: str, tmp_path: Path) -> None:
    script = """
        let copied = [];
        Object.defineProperty(navigator, "clipboard", { value: { writeText: async text => copied.push(text) } });
        await pause(500);
        type("A dog runs.\\nTwo men."); await pause(1000);
        const [one, other] = document.querySelectorAll("#output .sentence");
        press(one); await pause(500);
        const rows = [...get("alternatives").querySelectorAll(":scope > div button")].map(row => row.textContent);
        press(get("alternatives").querySelectorAll(":scope > div button")[1]); await pause(200);
        press(document.querySelectorAll("#output .sentence")[1]); await pause(500);
        enter(get("alternatives").querySelector("textarea"), " Zwei\\nMänner. ");
        get("alternatives").querySelector("form").requestSubmit(); await pause(200);
        press(get("copy")); await pause(200);
        const choose = code => { get("to").value = code; get("to").dispatchEvent(new Event("change")); };
        choose("it"); await pause(500); choose("de"); await pause(500);
        type("A dog runs.\\nTwo men. Three."); await pause(1000);
        tell({ rows, copied, hidden: get("alternatives").hidden, later: shown() });
    """
    assert told(address, tmp_path, script) == {
        "rows": ["A DOG RUNS.", "A dog runs.!", "A dog runs.?"],
        "copied": ["A dog runs.!\nZwei Männer."],
        "hidden": True,
        "later": "A dog runs.!\nZwei Männer. THREE.",
    }


@pytest.mark.slow
def test_swap_says_why_it_is_off_and_the_empty_page_has_an_example(address: str, tmp_path: Path) -> None:
    script = """
        await pause(500);
        const privacy = get("privacy").textContent;
        press(get("swap")); await pause(200);
        const why = noticed(), disabled = get("swap").getAttribute("aria-disabled");
        press(get("example")); await pause(1000);
        tell({ privacy: privacy.includes(location.host), why, disabled, names: chosenNames(), notice: noticed(),
            example: get("source").value.toUpperCase() === shown() && shown() !== "", empty: get("empty").hidden });
    """
    assert told(address, tmp_path, script, place="en/it") == {
        "privacy": True,
        "why": "This server does not translate Italian to English.",
        "disabled": "true",
        "names": ["English", "Italian"],
        "notice": "",
        "example": True,
        "empty": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1280])
def test_languages_errors_and_tools_stay_in_view_and_nothing_is_cut(address: str, tmp_path: Path, width: int) -> None:
    """The page is in a frame, because the window of a browser may have a minimum width."""
    script = """
        if (window === top) {
            const frame = Object.assign(document.createElement("iframe"), { src: "index.html#en/de" });
            Object.assign(frame.style, { position: "fixed", width: "WIDTHpx", height: "600px", border: "0" });
            window.done = tell;
            document.body.append(frame);
            return;
        }
        await pause(500);
        type("A dog runs in the snow. ".repeat(180) + "This fails."); await pause(1500);
        const boxes = ids => ids.map(id => get(id).getBoundingClientRect());
        const seen = {};
        const look = (name, ids) => {
            seen[name] = boxes(ids).every(box => box.height > 0 && box.top >= 0 && box.bottom <= innerHeight
                && box.left >= 0 && box.right <= innerWidth);
        };
        const ends = [0, get("output").getBoundingClientRect().top + 800, document.documentElement.scrollHeight];
        scrollTo(0, ends[1]); await pause(100);
        look("middle", ["from", "to", "swap", "notice", "copy", "download"]);
        scrollTo(0, ends[0]); await pause(100);
        look("top", ["from", "to", "swap", "notice", "open-file", "clear", "count", "copy"]);
        seen.wide = document.documentElement.scrollWidth > innerWidth;
        seen.cut = [...document.querySelectorAll("button, select, .notice, .hint, h1, nav a")]
            .filter(node => node.offsetWidth && node.scrollWidth > node.clientWidth + 1)
            .map(node => node.id || node.className);
        seen.notice = noticed();
        seen.behind = get("mirror").clientHeight === get("source").clientHeight
            && get("source").scrollHeight <= get("source").clientHeight + 30;
        top.done(seen);
    """.replace("WIDTH", str(width))
    seen = told(address, tmp_path, script, "--window-size=1400,900")
    assert seen["notice"].startswith("A part of the text could not be translated. No.")
    assert (seen["middle"], seen["top"], seen["wide"], seen["cut"]) == (True, True, False, [])
    assert seen["behind"]  # the marked words are behind the words of the field, of which no line is hidden


@pytest.mark.slow
def test_the_page_is_in_the_language_of_the_browser(address: str, tmp_path: Path) -> None:
    script = """
        await pause(1500);
        tell({ lang: document.documentElement.lang, copy: get("copy").textContent.trim(), names: chosenNames(),
            detect: get("from").options[0].textContent, placeholder: get("source").placeholder,
            label: get("swap").title });
    """
    assert told(address, tmp_path, script, "--lang=de", "--accept-lang=de-AT,de") == {
        "lang": "de",
        "copy": "Kopieren",
        "names": ["Englisch", "Deutsch"],
        "detect": "Sprache erkennen",
        "placeholder": "Text eingeben oder einfügen, oder eine Datei hierher ziehen",
        "label": "Sprachen tauschen",
    }
