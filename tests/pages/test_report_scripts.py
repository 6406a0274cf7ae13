"""Headless Chromium runs the scripts of the pages that compare runs and systems."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nmtkit.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


def evaluated(page: Path, script: str) -> Any:
    """Returns the value of the JavaScript function body `script` on the page."""
    run = f"<script>addEventListener('load', () => {{ document.title = JSON.stringify((() => {{ {script} }})()); }});"
    changed = page.with_name(f"scripted-{page.name}")
    changed.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{run}</script></body>"), encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--dump-dom"]
    dom = subprocess.run([*command, changed.as_uri()], capture_output=True, text=True, timeout=600).stdout
    match = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert match is not None
    return json.loads(unescape(match[1]))


def test_the_values_at_a_point_are_those_of_runs_that_have_reached_it(tmp_path: Path) -> None:
    for name, updates in (("short", 3), ("long", 10)):
        (tmp_path / name).mkdir()
        records: list[dict[str, Any]] = [
            {"kind": "start", "update": 0, "config": {"run": {}}, "dataset": "a", "time": 1}
        ]
        records += [{"kind": "train", "update": n, "loss": 9.0 - n / 2, "time": n} for n in range(1, updates + 1)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = tmp_path / "runs.html"
    result = CliRunner().invoke(
        main, ["compare", str(tmp_path / "short"), str(tmp_path / "long"), "--report", str(page)]
    )
    assert result.exit_code == 0, result.output
    script = """
      const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
      return [0.2, 0.95].map(share => {
        const where = { clientX: box.left + share * box.width, clientY: box.top + 60 };
        svg.dispatchEvent(new PointerEvent("pointermove", where));
        return [...document.querySelectorAll(".reading .key")].map(key => key.textContent.split("/").at(-1));
      });
    """
    assert evaluated(page, script) == [["short", "long"], ["long"]]


def test_sentences_are_sorted_and_found(tmp_path: Path) -> None:
    references = ["Anna hat 3 Hunde.", "Es regnet heute.", "Er schläft und träumt von vielen Dingen."] * 4
    first = ["Anna hat 3 Hunde.", "Es schneit heute.", "Er schläft und träumt von Dingen."] * 4
    second = ["Anne hat vier Hunde.", "Es regnet heute.", "Er schläft und träumt von Dingen."] * 4
    for name, lines in (("ref", references), ("a", first), ("b", second)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    page = tmp_path / "page.html"
    words = ["--sys", tmp_path / "a", "--sys", tmp_path / "b", "--ref", tmp_path / "ref", "--report", page]
    result = CliRunner().invoke(main, ["compare", *map(str, words), "--samples", "40"])
    assert result.exit_code == 0, result.output
    script = """
      const order = { number: [], "down:0": [], "up:0": [], "faults:b": [], "length:down": [], found: [], all: [] };
      const visible = () => [...document.querySelectorAll("article:not([hidden])")];
      const shown = () => visible().map(each => Number(each.dataset.number));
      for (const name of Object.keys(order)) {
        if (name === "found") form.elements.text.value = "regnet";
        else if (name === "all") { form.elements.text.value = ""; form.elements.different.checked = false; }
        else form.elements.order.value = name;
        form.dispatchEvent(new Event("input"));
        order[name] = shown();
      }
      return order;
    """
    better, worse = [2, 5, 8, 11], [1, 4, 7, 10]  # B is better, A is better; every third sentence is equal
    order = evaluated(page, script)
    assert order["number"] == sorted(better + worse)
    assert order["down:0"] == better + worse and order["up:0"] == worse + better
    assert order["faults:b"][:4] == worse and order["length:down"][:4] == worse
    assert sorted(order["found"]) == better and sorted(order["all"]) == list(range(1, 13))
