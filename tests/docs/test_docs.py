"""The pages in docs/ are correct: their Python runs, files have the described format, and the site builds."""

import io
import json
import re
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from builders import WORDS, save_tiny_transformer, tiny_tokenizer, write_corpus
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text

import nmtkit
from nmtkit.cli import main
from nmtkit.experiments.recipes import RECIPES
from nmtkit.models import checkpoint
from nmtkit.training.run_log import lines_of

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TINY = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "d_model": 16,
    "d_ff": 24,
    "heads": 2,
    "max_epoch": 6,
    "device": "cpu",
}


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[str]:
    """Returns the Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", text(name), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder in which the Python of the pages can run. It has text, a checkpoint, a dataset and a run."""
    path = tmp_path_factory.mktemp("docs")
    (path / "data").mkdir()
    for name, pairs, seed in (("train", 60, 1), ("val", 6, 2)):
        write_corpus(path / name, pairs, seed)
        for there, here in ((".xx", "en"), (".yy", "de")):
            (path / name).with_suffix(there).rename(path / "data" / f"{name}.{here}")
    (path / "raw.en").write_text("".join(f"{word}\n" for word in WORDS))
    (path / "terms.tsv").write_text("dog\tcat|women\n")
    save_tiny_transformer(path / "averaged.pt", tiny_tokenizer(), sharpness=4)
    scope: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        train, preprocess = nmtkit.train, nmtkit.preprocess
        # the settings of the page are checked, and a smaller model is trained
        patch.setattr(nmtkit, "train", lambda settings, data: train(settings | TINY, data), raising=False)
        patch.setattr(
            nmtkit, "preprocess", lambda **settings: preprocess(**settings | {"vocab_size": 320}), raising=False
        )
        for block in blocks("python.md"):
            exec(block, scope)
        for block in (*blocks("log.md"), *blocks("files.md")):
            exec(block, {"__name__": "__main__"})
    return path


def test_the_python_of_the_pages_runs(folder: Path) -> None:
    assert {"averaged.pt", "checkpoints", "data-bin"} <= {path.name for path in folder.iterdir()}


def test_every_field_of_the_log_is_described(folder: Path) -> None:
    described = set(re.findall(r"`(\w+)`", text("log.md")))
    for line in (folder / "checkpoints/log.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["kind"] in described
        assert set(record) <= described, f"docs/log.md does not describe {set(record) - described} of {record['kind']}"


def test_the_lines_of_a_run_in_the_tutorial_have_the_form_of_the_terminal() -> None:
    shown = re.findall(r"^(?:update|valid) .*$", text("tutorial.md"), re.MULTILINE)
    train = {"update": 700, "updates": 1400, "loss": 2.574, "ppl": 4.59, "lr": 0.00315, "norm": 0.54}
    train |= {"tokens_per_second": 3019.0, "epoch": 3, "seconds_left": 15 * 60.0 + 40}
    valid = {"update": 700, "loss": 2.495, "ppl": 3.75, "bleu": 51.19, "epoch": 3, "best": True, "seconds": 5.3}
    assert shown == [*lines_of({"kind": "train", **train}), *lines_of({"kind": "valid", **valid})]


def test_the_searches_of_the_table_run_as_they_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    table = text("translating.md").partition("| flag | effect |")[2].partition("\n\n")[0]
    rows = [" ".join(re.findall(r"`(.*?)`", line.split("|")[1])) for line in table.splitlines()[2:]]
    rows = [row for row in rows if row.startswith("--") and not re.search(r"FILE|\.pt|comet|--shortlist", row)]
    assert len(rows) == 8
    for row in rows:
        command = ["generate", "--path", "averaged.pt", "--input", "raw.en", "--max-len-b", "2", *row.split()]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, f"{row}: {result.stderr}"


def test_every_file_and_key_is_described(folder: Path) -> None:
    page = text("files.md")
    described = set(re.findall(r"`([\w.-]+)`", page))
    assert set(checkpoint.load(folder / "checkpoints/last.pt")) <= described | {"model"}
    for path in (folder / "data-bin").iterdir():
        kind = re.sub(r"^(valid|test)\d?\.(source|target)\.(\w+\.bin)$", r"train.source.\3", path.name)
        kind = kind.replace("train.target", "train.source")
        assert path.is_dir() or kind in described, f"docs/files.md does not describe {path.name}"
    run = {re.sub(r"update_\d+", "update_00001000", path.name) for path in (folder / "checkpoints").iterdir()}
    visible = {name for name in run if not name.startswith(".")}
    assert all(f"`{name}`" in text("log.md") or f"`{name}/" in text("log.md") for name in visible), visible


def test_the_reference_has_every_public_name() -> None:
    names = set(re.findall(r"^::: nmtkit\.(\w+)$", text("reference.md"), re.MULTILINE))
    assert names == set(nmtkit.__all__) - {"__version__"}
    for dotted in re.findall(r"^::: (nmtkit\.\S+\.(\w+))$", text("reference.md"), re.MULTILINE):
        module = __import__(dotted[0].rpartition(".")[0], fromlist=["_"])
        assert getattr(module, dotted[1]).__doc__, f"{dotted[0]} has no docstring"


# words that a user types into the search of the site, and a page that must be among the results
SEARCHES = {
    "label-smoothing": "troubleshooting", "resume": "tutorial", "out of memory": "gpus", "placeholders": "text",
    "subtitles": "documents",
    "docker": "serving", "fairseq": "coming-from-fairseq", "beam": "translating", "lora": "fine-tuning",
}  # fmt: skip


def test_the_next_command_of_preprocess_has_the_settings_of_the_table() -> None:
    rows = re.findall(r"^\| (?:under|[\d,]+ to) ([\d,]+) \| (.*) \|$", text("settings.md"), re.MULTILINE)
    assert [limit for limit, _ in RECIPES] == [int(limit.replace(",", "")) for limit, _ in rows]
    for (_, recipe), (_, row) in zip(RECIPES, rows, strict=True):
        arch, _, dropout, batch, rate, length = row.split(" | ")
        expected = f"--arch {arch} --dropout {dropout} --batch-tokens {batch.rpartition(' ')[2]} {rate} {length}"
        number = re.sub(r"(\d[\d,]*) (epochs|updates)$", r"--max-\2 \1", expected.replace("`", "")).replace(",", "")
        assert recipe == re.sub(r"(--max-\w+)s ", r"\1 ", number)


def test_every_page_stands_in_the_site() -> None:
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES], "nav of mkdocs.yml and the pages in docs/ differ"


def test_the_site_has_six_groups_of_pages() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    groups = re.split(r"^  - \w+:\n", navigation, flags=re.MULTILINE)
    assert groups[0] == "" and len(groups) == 7
    assert all(1 < group.count(".md") < 10 for group in groups[1:])


@pytest.fixture
def picture() -> types.ModuleType:
    path = ROOT / "docs/picture.py"
    module = types.ModuleType("picture")
    module.__dict__["__file__"] = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def test_the_picture_of_the_page_shows_the_page_as_it_is(picture: types.ModuleType) -> None:
    png = (ROOT / "docs/translator.png").read_bytes()
    assert picture.page_digest().encode() in png, "the page has changed: run python docs/picture.py translator"
    assert picture.with_text(png, b"page", "x")[33:].startswith(b"\0\0\0\x06tEXtpage\0x")


@pytest.mark.slow
def test_the_picture_of_the_page_can_be_made_again(picture: types.ModuleType) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    png = picture.translator(chromium)
    assert png[16:24] == (ROOT / "docs/translator.png").read_bytes()[16:24] == struct.pack(">II", *picture.SIZE)
    assert len(png) > 20_000  # an empty page has 5,000 bytes


def test_the_picture_of_the_demo_shows_the_commands_of_the_demo(picture: types.ModuleType) -> None:
    """After a change of the demo, make the picture again with docs/picture.py."""
    out = Console(width=picture.COLUMNS, file=io.StringIO(), force_terminal=True, no_color=True)
    picture.commands(out)
    shown = Text.from_ansi(out.file.getvalue()).plain.split()  # type: ignore[attr-defined]
    tree = ElementTree.parse(ROOT / "docs/demo.svg")
    words = " ".join(text for node in tree.iter() if node.tag.endswith("}text") for text in node.itertext()).split()
    start = words.index("$")
    assert words[start : start + len(shown)] == shown
    assert "BLEU" in words[start + len(shown) :] and float(tree.getroot().get("viewBox", "").split()[3]) < 1100


def test_the_icon_of_the_site_is_the_icon_of_the_pages() -> None:
    assert (ROOT / "docs/icon.svg").read_bytes() == (ROOT / "nmtkit/pages/icon.svg").read_bytes()
    style, colours = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("nmtkit/pages/style.css", "docs/colours.css")
    )
    for accent in re.findall(r"--accent: (#\w+);", style):
        assert accent in colours


def test_a_flag_in_code_of_the_site_stays_in_one_line() -> None:
    pytest.importorskip("griffe")
    site = types.ModuleType("site_hooks")
    exec((ROOT / "docs/site.py").read_text(encoding="utf-8"), site.__dict__)
    page = site.on_page_content("<p>--lr <code>train --clip-norm 1 -s a-b</code></p>")
    flags = [f'<span class="flag">{flag}</span>' for flag in ("--clip-norm", "-s")]
    assert page == f"<p>--lr <code>train {flags[0]} 1 {flags[1]} a-b</code></p>"
    assert re.search(r"\.flag \{\s*white-space: nowrap", (ROOT / "docs/colours.css").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    index = json.loads((tmp_path / "site/search/search_index.json").read_text(encoding="utf-8"))["docs"]
    for words, page in SEARCHES.items():
        found = [
            entry
            for entry in index
            if all(word in f"{entry['title']} {entry['text']}".lower() for word in words.split())
        ]
        assert any(entry["location"].startswith(page) for entry in found), words
    reference = (tmp_path / "site/reference/index.html").read_text(encoding="utf-8")
    assert all(f'id="nmtkit.{name}"' in reference for name in nmtkit.__all__ if name != "__version__")
