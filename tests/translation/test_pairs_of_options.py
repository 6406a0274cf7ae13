"""`nmtkit generate` with every pair of text options, on lines and on every document format.

Each format has the same three segments in its notation. The markup of the documents is written out, so that the rest of
a file are the translations. A model that copies the first words is loaded once.
"""

import functools
import itertools
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import save_ending_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.translation.translator import Translator

pytest.importorskip("sentencex")  # --split-sentences

SEGMENTS = [
    "All human <b>beings</b> are UN-5 born {name}",
    "NO ONE SHALL <b>BE</b> HELD",
    "They are <b>endowed</b> with reason. They %s shall be 5 km.",
]
OPTIONS = {
    "sentences": ["--split-sentences", "en"],
    "spans": ["--protect-spans"],
    "regex": ["--protect", r"UN-\d"],
    "glossary": ["--glossary", "terms.tsv"],
    "capitals": ["--truecase-caps"],
    "tag": ["--source-tag", "<2de>"],
    "cut": ["--max-source-len", "9", "--long-lines", "cut"],
    "parts": ["--max-source-len", "9", "--long-lines", "split"],
}
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if pair != ("cut", "parts")]

# The texts before, between and after the segments. A translated catalogue has additional text.
HTML = ["<!DOCTYPE html>\n<ul><li>", "</li>\n<li>", "</li>\n<li>", "</li></ul>\n"]
SRT = [
    "1\n00:00:01,000 --> 00:00:02,000\n",
    "\n\n2\n00:00:02,000 --> 00:00:03,000\n",
    "\n\n3\n00:00:03,000 --> 00:00:04,000\n",
    "\n",
]
VTT = ["WEBVTT\n\n00:01.000 --> 00:02.000\n", "\n\n00:02.000 --> 00:03.000\n", "\n\n00:03.000 --> 00:04.000\n", "\n"]


def between(parts: list[str], segments: list[str]) -> str:
    return "".join(part + segment for part, segment in itertools.zip_longest(parts, segments, fillvalue=""))


def po(segments: list[str], targets: list[str] | None = None) -> str:
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
    flag = "" if targets is None else "#, fuzzy\n"
    messages = zip(segments, targets or [""] * 3, strict=True)
    return header + "".join(f'\n{flag}msgid "{source}"\nmsgstr "{target}"\n' for source, target in messages)


def xliff(segments: list[str], targets: list[str] | None = None) -> str:
    state = ' state="needs-review-translation" state-qualifier="mt-suggestion"'
    units = "".join(
        f'<trans-unit id="{number}"><source>{inline(source)}</source>'
        + ("" if targets is None else f"<target{state}>{inline(targets[number])}</target>")
        + "</trans-unit>\n"
        for number, source in enumerate(segments)
    )
    return f'<xliff version="1.2"><file source-language="en"><body>{units}</body></file></xliff>\n'


def inline(text: str) -> str:
    return text.replace("<b>", '<g id="1">').replace("</b>", "</g>")


# The function that writes the file, of segments alone or of segments and their translations.
FORMATS: dict[str, Callable[..., str]] = {
    "html": lambda segments, targets=None: between(HTML, targets or segments),
    "srt": lambda segments, targets=None: between(SRT, targets or segments),
    "vtt": lambda segments, targets=None: between(VTT, targets or segments),
    "po": po,
    "xliff": xliff,
}
CATALOGUES = ("po", "xliff")  # spans are protected without a flag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs")
    save_ending_transformer(path / "model.pt", tags=["<2de>"])
    (path / "terms.tsv").write_text("reason\tVernunft\nborn\tgeboren\n")
    return path


@pytest.fixture(autouse=True)
def loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    load = Translator.load
    monkeypatch.setattr(Translator, "load", lambda *given, **settings: translator_of(load, given, settings))


TRANSLATORS: dict[str, Translator] = {}


def translator_of(
    load: Callable[..., Translator], given: tuple[object, ...], settings: dict[str, object]
) -> Translator:
    key = repr((given, settings))
    if key not in TRANSLATORS:
        TRANSLATORS[key] = load(*given, **settings)
    return TRANSLATORS[key]


def generate(text: str, *flags: str) -> str:
    base = ["generate", "--path", "model.pt", "--device", "cpu", "--beam", "2", "--max-len-b", "10"]
    result = CliRunner().invoke(main, [*base, *flags], input=text)
    assert result.exit_code == 0, result.output
    return result.stdout


@functools.cache
def lines(flags: tuple[str, ...]) -> list[str]:
    """Returns the translations of the segments as lines."""
    return generate("".join(f"{segment}\n" for segment in SEGMENTS), *flags).splitlines()


def translations(format: str, document: str) -> list[str]:
    """Returns the three translations of a document, in which everything else must be unchanged."""
    places = ["\x01", "\x02", "\x03"]
    written = re.escape(FORMATS[format](SEGMENTS, places))
    for place in places:
        written = written.replace(place, "(.*?)")
    found = re.fullmatch(written, document, re.DOTALL)
    assert found, document
    texts = [text.replace('<g id="1">', "<b>").replace("</g>", "</b>") for text in found.groups()]
    return [text.replace('\\"', '"').replace('"\n"', "") for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_of_options_in_a_document(folder: Path, pair: tuple[str, str], format: str) -> None:
    flags = [word for option in pair for word in OPTIONS[option]]
    document = generate(FORMATS[format](SEGMENTS), "--input-format", format, *flags)
    texts = translations(format, document)
    for source, text in zip(SEGMENTS, texts, strict=True):
        assert Counter(re.findall("</?b>", text)) == Counter(re.findall("</?b>", source)), text
        kept = []
        if "cut" not in pair:
            if "spans" in pair or format in CATALOGUES:
                kept += [r"\{name\}", "%s", r"5 km"]
            if "regex" in pair:
                kept.append(r"UN-\d")
        for pattern in kept:
            assert re.findall(pattern, text) == re.findall(pattern, source), text
        if "glossary" in pair and "cut" not in pair:
            for term, target in (("reason", "Vernunft"), ("born", "geboren")):
                assert text.lower().count(target.lower()) == source.count(term), text
    if "capitals" in pair:
        upper = re.sub("<.*?>|UN-.", "", texts[1])
        assert upper == upper.upper() and re.search("[A-Z]", upper)
    if format == "xliff":
        ET.fromstring(document)
    if format == "po" and shutil.which("msgfmt"):
        subprocess.run(["msgfmt", "--check-format", "-o", "/dev/null", "-"], input=document.encode(), check=True)
    # the segments as lines, with the options that the format always has
    alike = ["--markup", "html", *(["--protect-spans"] if format in CATALOGUES and "spans" not in pair else [])]
    if format in ("srt", "vtt"):  # long cues are broken into two lines
        texts = [text.replace("\n", " ") for text in texts]
    assert texts == lines((*flags, *alike))
