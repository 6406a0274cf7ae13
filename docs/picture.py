"""Makes the pictures of README.md: docs/demo.svg and docs/translator.png.

    nmtkit demo --dir nmtkit-demo
    python docs/picture.py demo nmtkit-demo
    python docs/picture.py translator

The first picture shows the commands of a finished demo, three translations and the scores, as they look in a terminal.
The second picture shows the page of `nmtkit serve` in headless Chromium. The answers of the server are in
translator.json; a model of the captions of Multi30k gave them. The PNG file has the digest of the page, so that a test
notices when the page has changed.
"""

import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from nmtkit.demo.run import finished, show_scores, show_step, show_translations, steps

DOCS = Path(__file__).parent
PAGES = DOCS.parent / "nmtkit/pages"
COLUMNS = 110
SIZE = (1120, 560)  # pixels of the page
KEYWORD = b"page"  # of the text in the PNG file that has the digest
# Headless Chromium has no pointer unless these numbers say that there is a mouse.
MOUSE = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"

# Answers like the server, then points at the word "spielt".
SCRIPT = """
const language = { source: { code: "en" }, target: { code: "de" } };
const settings = { charLimit: 100000, supportedFilesFormat: [".txt"], language, detection: false };
const languages = [
  { code: "en", name: "English", targets: ["de", "it"] }, { code: "de", name: "German", targets: ["en"] },
];
const fetched = window.fetch;
window.fetch = async (path, options) => {
  if (path.startsWith("static/")) return fetched(path, options);
  const json = value => ({ ok: true, status: 200, json: async () => value });
  if (path === "frontend/settings") return json(settings);
  if (path === "languages") return json(languages);
  const rows = JSON.parse(options.body).q.map(text => ANSWERS[text]);
  const [translatedText, alignment] = ["text", "alignment"].map(name => rows.map(row => row[name]));
  return json({ translatedText, alignment, quality: rows.map(() => []) });
};
addEventListener("load", () => setTimeout(() => {
  const source = document.getElementById("source"), [first, second, third] = Object.keys(ANSWERS);
  source.value = `${first} ${second}\n\n${third}`;
  source.dispatchEvent(new Event("input"));
  setTimeout(() => {
    const word = [...document.querySelectorAll("#output .word")].find(each => each.textContent === "spielt");
    word.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  }, 2000);
}, 500));
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None: ...


def commands(out: Console) -> None:
    """Prints the call of the demo, and the commands that it shows."""
    out.print(Text("$ nmtkit demo", style="green"))
    for number, step in enumerate(steps(Path("nmtkit-demo")), start=1):
        show_step(number, step, ["nmtkit"], out)


def demo(folder: Path) -> str:
    """Returns the picture of the demo as SVG. Raises ValueError if the folder has no finished demo."""
    if finished(folder) is None:
        raise ValueError(f"{folder} has no finished demo; run nmtkit demo --dir {folder}")
    out = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    commands(out)
    show_translations(folder, out, count=3)
    show_scores(folder, out)
    return out.export_svg(title="nmtkit demo", unique_id="demo")


def page_digest() -> str:
    """Returns the digest of the files that the picture of the page shows."""
    page = (PAGES / "translator.html").read_text(encoding="utf-8")
    styles = [path for path in sorted(PAGES.glob("*.css")) if path.name in page]
    files = [PAGES / "translator.html", *styles, PAGES / "icon.svg", PAGES / "translator.js", DOCS / "translator.json"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def translator(chromium: str) -> bytes:
    """Returns the picture of the translator page as PNG, with the digest of the page."""
    page = (PAGES / "translator.html").read_text(encoding="utf-8")
    answers = (DOCS / "translator.json").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(PAGES, folder / "static")
        script = f"<head>\n<script>const ANSWERS = {json.dumps(json.loads(answers))};{SCRIPT}</script>"
        (folder / "index.html").write_text(page.replace("<head>", script), encoding="utf-8")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=name))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--lang=en", MOUSE]
        flags += ["--virtual-time-budget=8000", f"--user-data-dir={folder / 'browser'}"]
        flags += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={folder / 'page.png'}"]
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        subprocess.run([chromium, *flags, address], check=True, capture_output=True, timeout=120)
        server.shutdown()
        server.server_close()
        return with_text((folder / "page.png").read_bytes(), KEYWORD, page_digest())


def with_text(png: bytes, keyword: bytes, text: str) -> bytes:
    """Returns a PNG file with a text chunk after its first chunk, which has the size of the picture."""
    data = keyword + b"\0" + text.encode()
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data + struct.pack(">I", zlib.crc32(b"tEXt" + data))
    end = 8 + 12 + 13  # signature, and the first chunk with its 13 bytes of data
    return png[:end] + chunk + png[end:]


def main() -> None:
    if sys.argv[1:2] == ["demo"]:
        (DOCS / "demo.svg").write_text(demo(Path(sys.argv[2])) + "\n", encoding="utf-8")
        return
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("the picture of the page needs Chromium")
    (DOCS / "translator.png").write_bytes(translator(chromium))


if __name__ == "__main__":
    main()
