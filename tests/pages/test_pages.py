"""Pages need no other files. Node runs the scripts of the translator if it is installed."""

import json
import math
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import nmtkit
from nmtkit.data.corpora.dropping import PairExample, ReasonCounts
from nmtkit.data.dataset.report import CorpusReport, DatasetReport, PieceReport, SplitReport, page
from nmtkit.pages import charts
from nmtkit.pages.document import asset
from nmtkit.serving import web

FOLDER = Path(nmtkit.__file__).parent / "pages"


def test_every_file_of_the_pages_is_in_the_package() -> None:
    project = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["nmtkit"]
    files = [file for file in FOLDER.iterdir() if file.is_file() and file.suffix != ".py"]
    assert len(files) >= 8
    assert [
        file.name for file in files if not any(fnmatch(f"pages/{file.name}", pattern) for pattern in patterns)
    ] == []


@pytest.mark.parametrize("name", ["style.css", "translator.css"])
def test_every_colour_is_a_variable_of_the_scheme(name: str) -> None:
    """Every colour has a dark variant, except shadows and the arrow of the language pickers, which are grey."""
    rules = re.sub(
        r"/\*.*?\*/|url\(.*?\)\s*;|(?:box-shadow|background): [^;]*#000\w*;", "", asset(name), flags=re.DOTALL
    )
    outside = re.sub(r":root\s*\{.*?\}", "", rules, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b", outside) == []
    used = set(re.findall(r"var\((--[\w-]+)\)", outside))
    assert used <= set(re.findall(r"(--[\w-]+):", asset("style.css") + asset("translator.css")))


def luminance(colour: str) -> float:
    """Returns the relative luminance of a colour, as defined in WCAG 2.2."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_has_a_contrast_of_four_and_a_half_in_both_schemes() -> None:
    blocks = re.findall(r":root \{(.*?)\}", asset("style.css"), re.DOTALL)
    light, dark = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks[:2]]
    pairs = [(ink, ground) for ink in ("ink", "soft", "accent") for ground in ("page", "card", "shade", "accent-soft")]
    pairs += [("on-accent", "accent"), ("bad", "bad-soft"), ("bad", "card"), ("mark", "card")]
    for scheme in (light, dark):
        for ink, ground in pairs:
            one, other = sorted((luminance(scheme[ink]), luminance(scheme[ground])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, (ink, ground, scheme[ink], scheme[ground])


def test_the_page_of_a_dataset_escapes_its_texts_and_closes_what_it_opens() -> None:
    cleaning = ReasonCounts({"NUL byte": 1234}, {}, {"NUL byte": [PairExample("<f>:7", "a\0<i>", "b")]})
    split = SplitReport.of({"source": np.array([3, 4]), "target": np.array([5, 6])})
    report = DatasetReport(
        "a <b>", "de", {"source": 9}, {"<s>": split}, [CorpusReport(Path("c&d"), Path("d"), 5, 4, cleaning=cleaning)],
        {"source": PieceReport([("<p>", 4321)], 1, 9)},
    )  # fmt: skip
    html = page(report)
    assert "<title>Dataset a &lt;b&gt; → de</title>" in html and "<h2>Lengths: &lt;s&gt;</h2>" in html
    assert "<code>&lt;p&gt;</code>&nbsp;4,321" in html
    for cell in ("&lt;f&gt;:7", "a␀&lt;i&gt;", "c&amp;d"):
        assert f'<td dir="auto">{cell}</td>' in html
    for number in ("1,234", "7", "11"):
        assert f'<td class="number">{number}</td>' in html
    assert ">weight<" not in html and "(20.0%)" in html  # all weights are 1
    report.corpora[0].weight, report.corpora[0].read, report.corpora[0].written = 2.0, 29_000, 28_997
    html = page(report)
    assert ">weight<" in html and "0.0%" not in html
    assert "<h3>NUL byte (dropped)</h3>" in html and html.count("<figure") == 2
    opened: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Tags().feed(html)
    assert opened == []


def ticks(figure: str) -> list[str]:
    svg = ElementTree.fromstring(figure).find("svg")
    assert svg is not None
    return [text.text or "" for text in svg.iter("text") if text.get("text-anchor") == "end"]


def test_axes_have_round_numbers_and_a_logarithmic_one_powers_of_ten() -> None:
    falling = [(float(x), 5.3 - x / 100) for x in range(0, 500, 50)]
    assert ticks(charts.line_chart("loss", {"train": falling})) == ["0", "2", "4", "6"]
    steep = [(1.0, 30_000.0), (2.0, 20.0), (3.0, 3.0)]
    assert ticks(charts.line_chart("perplexity", {"train": steep}, logarithmic=True)) == [
        *("1", "10", "100", "1,000", "10,000", "100k")
    ]
    assert ticks(charts.line_chart("flat", {"train": [(5.0, 0.25)]})) == ["0.25"]
    assert ticks(charts.line_chart("zero", {"train": [(1.0, 0.0), (2.0, 0.0)]}, logarithmic=True)) == ["0"]


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("values", [(3.0, 30_000.0), (1.03, 1.98), (2.6, 37.0), (0.0002, 0.0007), (7.0, 7.0)])
def test_all_data_lies_between_the_first_and_the_last_tick(values: tuple[float, float], logarithmic: bool) -> None:
    figure = charts.line_chart("x", {"train": list(enumerate(values))}, logarithmic)
    svg = ElementTree.fromstring(figure).find("svg")
    assert svg is not None
    rows = [float(line.get("y1", "")) for line in svg.iter("line")]
    drawn = [float(point.split(",")[1]) for point in next(svg.iter("polyline")).get("points", "").split(" ")]
    assert min(rows) - 0.1 <= min(drawn) and max(drawn) <= max(rows) + 0.1
    assert len(rows) >= (3 if values[0] != values[1] and not logarithmic else 1)


def test_no_rule_of_a_report_changes_the_words_of_the_translator() -> None:
    """A rule of the report for `.word` broke the dotted line under doubtful translations into pieces."""
    selectors = re.findall(r"^\s*([^@{}/]+)\{", asset("style.css"), re.MULTILINE)
    shared = {name for selector in selectors for name in re.findall(r"\.([a-z][\w-]*)", selector)}
    assert not shared & {"word", "sentence", "pane", "output", "unsure", "side", "head"}


def test_a_logarithmic_axis_of_any_range_has_few_ticks_with_short_labels() -> None:
    for low, high in ((1.2, 1e304), (3e-300, 1.7e308), (1e42, 1e304), (2, 2e9)):
        start, end, ticks = charts._scale(low, high, True)
        assert start <= math.log10(low) and math.log10(high) <= end
        assert 2 <= len(ticks) <= 8 and all(len(label) <= 6 and "inf" not in label for _, label in ticks)
    assert charts._short(4e16) == "4e16"  # never 4e+07G


def test_axes_have_titles_that_are_no_ticks() -> None:
    svg = ElementTree.fromstring(charts.line_chart("loss", {"train": [(1.0, 2.0)]}, unit="nats per token")).find("svg")
    assert svg is not None
    assert [text.text for text in svg.iter("text") if text.get("class") == "axis"] == ["nats per token", "update"]


def test_bars_are_as_high_as_their_counts() -> None:
    svg = ElementTree.fromstring(charts.bar_chart("en", "sentences", [0, 5, 10], "tokens")).find("svg")
    assert svg is not None
    bars = [(float(bar.get("height", "")), bar.findtext("title")) for bar in svg.iter("rect")]
    assert [title for _, title in bars] == ["1 tokens: 5", "2 tokens: 10"]
    assert bars[1][0] == pytest.approx(2 * bars[0][0], abs=0.02)
    assert bars[1][0] == pytest.approx(charts.HEIGHT - charts.TOP - charts.BOTTOM)


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_the_translators_logic(tmp_path: Path) -> None:
    for name in ("text.js", "client.js", "messages.js"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    script = Path(__file__).with_name("logic.mjs")
    result = subprocess.run([NODE, script, tmp_path], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def texts_of_the_translator() -> set[str]:
    """Returns the texts of the page and of its scripts that a person can read, in English."""
    scripts = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.js"))
    body = asset("translator.html").partition("<body>")[2]
    page = re.sub(r"<noscript>.*?</noscript>", "", body)  # the text for browsers without scripts stays in English
    texts = {*re.findall(r"\bt\(\"((?:[^\"\\]|\\.)*)\"", scripts)}
    doubts = asset("messages.js").partition("DOUBTS = {")[2].partition("}")[0]
    texts |= {*re.findall(r"^  \w+: \"([^\"]*)\",$", doubts, re.M)}
    texts |= {*re.findall(r">([^<>]*[^<>\s][^<>]*)<", page)}
    texts |= {*re.findall(r'(?:aria-label|placeholder|title)="([^"]*)"', page)}
    return {text.strip() for text in texts} - {"nmtkit", "Ctrl", "Shift", "Enter", "Esc", "S", "←", "→", "↑", "↓"}


def test_the_page_is_translated_completely() -> None:
    """Every translation has the texts of the page, no other texts, and the same names in braces."""
    texts = texts_of_the_translator()
    assert len(texts) > 60 and {"Copy", "Detect language", "Text to translate"} <= texts
    assert sorted(web.LANGUAGES) == re.findall(
        r'"(\w+)"', asset("messages.js").partition("LANGUAGES = ")[2].partition(";")[0]
    )
    for code in web.LANGUAGES:
        translations = json.loads(asset(f"messages.{code}.json"))
        assert set(translations) == texts, code
        for text, translation in translations.items():
            names = re.findall(r"\{\w+\}", text)
            assert translation.strip() and sorted(re.findall(r"\{\w+\}", translation)) == sorted(names), (code, text)


def test_points_keep_the_digits_of_their_updates() -> None:
    chart = charts.line_chart("loss", {"a": [(1_234_567, 2.5), (1_234_568, 2.0)]})
    assert 'data-points="1234567,2.5 1234568,2"' in chart


def test_an_axis_of_a_single_value_has_a_tick() -> None:
    assert "0 pieces: 3" in charts.bar_chart("Lengths", "", [3], "pieces")
    assert "1 to 1: 3" in charts.histogram("Scores", [1, 1], [3], [], "score")
