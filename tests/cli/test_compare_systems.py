"""`nmtkit compare --sys A --sys B`: a page with the translations of two systems side by side."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sacrebleu.metrics import CHRF

from nmtkit.cli import main
from nmtkit.scoring.side_by_side import differences, faults

SOURCE = ["Anna has 3 dogs.", "It rains.", "The NATO met in 2019.", "He sleeps."] * 12
REFERENCE = ["Anna hat 3 Hunde.", "Es regnet.", "Die NATO traf sich 2019.", "Er schläft."] * 12
FIRST = ["Anna hat 3 Hunde.", "Es <b>schneit</b>.", "Die NATO traf sich 2018.", "Er schläft."] * 12
SECOND = ["Anne hat drei Hunde.", "Es regnet.", "Die Nato traf sich 2019.", "Er schläft."] * 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, lines in (("src.en", SOURCE), ("ref.de", REFERENCE), ("a.de", FIRST), ("b.de", SECOND)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(*words: str) -> Result:
    return CliRunner().invoke(main, ["compare", *words])


SYSTEMS = ["--sys", "a.de", "--sys", "b.de"]


def articles(page: str) -> list[dict[str, Any]]:
    found = []
    for attributes, body in re.findall(r"<article class=\"card\"([^>]*)>(.*?)</article>", page, re.DOTALL):
        data = dict(re.findall(r'data-([a-z]+)="([^"]*)"', attributes))
        texts = re.findall(r'<span class="system">.</span><p[^>]*>(.*?)</p>', body, re.DOTALL)
        plain = [unescape(re.sub(r"<[^>]+>", "", text)) for text in texts]
        found.append({**data, "texts": plain, "html": texts, "equal": "data-equal" in attributes, "body": body})
    return found


def test_every_sentence_has_its_scores_and_both_texts(folder: Path) -> None:
    result = compare(*SYSTEMS, "--ref", "ref.de", "--src", "src.en")
    assert result.exit_code == 0, result.output
    assert "comparison.html" in result.stderr and "chrF2" in result.stdout and "p = " in result.stdout
    page = (folder / "comparison.html").read_text(encoding="utf-8")
    assert "<b>schneit" not in page  # text is escaped
    sentences = {int(each["number"]): each for each in articles(page)}
    assert sorted(sentences) == list(range(1, 49))
    metric = CHRF()
    for number, each in sentences.items():
        row = number - 1
        assert each["texts"] == [FIRST[row], SECOND[row]]
        a, b = (metric.sentence_score(text[row], [REFERENCE[row]]).score for text in (FIRST, SECOND))
        assert float(each["differences"].split()[0]) == pytest.approx(b - a, abs=1e-3)
        assert each["equal"] == (FIRST[row] == SECOND[row])
        assert SOURCE[row] in unescape(each["body"])
    assert (sentences[1]["a"], sentences[1]["b"]) == ("0", "2")  # Anna and 3 are missing
    assert (sentences[3]["a"], sentences[3]["b"]) == ("2", "1")  # 2019 is missing and 2018 was added; NATO is missing
    assert page.count("<script>") == 1 and "http" not in page.replace("http://www.w3.org", "")


def test_settings_are_those_of_score(folder: Path) -> None:
    result = compare(*SYSTEMS, "--ref", "ref.de", "--metric", "ter,chrf", "--report", "other.html", "--samples", "100")
    assert result.exit_code == 0, result.output
    assert not (folder / "comparison.html").exists()
    first = articles((folder / "other.html").read_text(encoding="utf-8"))
    by_number = {int(each["number"]): list(map(float, each["differences"].split())) for each in first}
    assert by_number[2][0] > 0 and by_number[2][1] > 0  # a lower TER is better
    scored = CliRunner().invoke(
        main, ["score", *SYSTEMS, "--ref", "ref.de", "--metric", "ter,chrf", "--samples", "100"]
    )
    assert result.stdout == scored.stdout


@pytest.mark.slow
def test_words_are_marked_as_in_the_reference_or_not() -> None:
    first, second = differences("Der Hund läuft schnell .", "Der Kater läuft weit weg .", ["Der Hund rennt weit weg ."])
    assert first == [("Der ", ""), ("Hund", "right"), (" läuft ", ""), ("schnell", "wrong"), (" .", "")]
    assert second == [("Der ", ""), ("Kater", "wrong"), (" läuft ", ""), ("weit weg", "right"), (" .", "")]
    japanese = differences("犬が走る", "猫が走る", ["犬が走る"])
    assert japanese == ([("犬", "right"), ("が走る", "")], [("猫", "wrong"), ("が走る", "")])
    assert differences("a", "a", ["b"]) == ([("a", "")], [("a", "")])
    assert differences("", "a", ["b"]) == ([], [("a", "wrong")])
    long = differences("x " * 1500, "y " * 1500, ["x"])
    assert ["".join(part for part, _ in text) for text in long] == ["x " * 1500, "y " * 1500]


@pytest.mark.parametrize(
    ("text", "references", "source", "expected"),
    [
        ("Er kam 2018.", ["Er kam 2019."], "He came in 2019.", ["- 2019", "+ 2018"]),
        ("Er kam im Jahr neun.", ["Er kam 9.", "Er kam im Jahr neun."], None, []),
        ("Die Nato", ["Die NATO"], None, ["- NATO"]),
        ("Der Hund", ["Die Katze"], "The cat", []),  # a German noun is not a name
        ("Hans", ["Peter"], "Peter", ["- Peter"]),
        ("Windows 11", ["Windows 11"], "Windows 11", []),
    ],
)
def test_names_and_numbers(text: str, references: list[str], source: str | None, expected: list[str]) -> None:
    assert faults(text, references, source) == expected


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--sys", "a.de", "--ref", "ref.de"], ["--sys", "1"]),
        (["run", *SYSTEMS, "--ref", "ref.de"], ["RUN", "--sys"]),
        ([*SYSTEMS, "--ref", "ref.de", "--format", "json"], ["--format"]),
        (["run", "--ref", "ref.de"], ["--ref", "--sys"]),
        ([*SYSTEMS], ["--ref"]),
        ([*SYSTEMS, "--ref", "ref.de", "--report", "a.de"], ["--report", "a.de"]),
        ([*SYSTEMS, "--ref", "ref.de", "--metric", "ter", "--tokenize", "zh"], ["--tokenize"]),
        ([*SYSTEMS, "--ref", "ref.de", "--columns", "1,2"], ["--columns"]),
        ([], ["--sys"]),
    ],
)
def test_flags_that_do_not_match_are_named(words: list[str], facts: list[str], folder: Path) -> None:
    result = compare(*words)
    assert result.exit_code == 2
    assert all(fact in result.stderr for fact in facts), result.stderr
    assert not (folder / "comparison.html").exists()


def test_runs_with_absolute_and_relative_paths(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        record = '{"kind": "start", "update": 0, "config": {"run": {"seed": 1}}, "dataset": "a", "time": 1}\n'
        (folder / name / "log.jsonl").write_text(record)
    result = compare("one", str(folder / "two"))
    assert result.exit_code == 0, result.output
    assert "one" in result.stdout and "two" in result.stdout


def test_the_page_has_the_bands_of_lengths_of_score(folder: Path) -> None:
    """7 of 48 references have up to three words. BLEU is 0 without 4-grams, so BLEU has no band for them."""
    short, long = ["Ja.", "Nein, danke."], [f"{'sehr ' * number}gut." for number in range(2, 44)]
    for name in ("ref.de", "a.de", "b.de"):
        (folder / name).write_text("".join(f"{line}\n" for line in [*short * 3, *long]), encoding="utf-8")
    bands = [("1 to 3", "7"), ("4 to 10", "7"), ("11 to 20", "10"), ("21 to 40", "20"), ("41 or more", "4")]
    for metric, expected in (("chrf", bands), ("bleu", bands[1:])):
        assert compare(*SYSTEMS, "--ref", "ref.de", "--metric", metric).exit_code == 0
        page = (folder / "comparison.html").read_text(encoding="utf-8").replace("\u00a0", " ")
        assert re.findall(r"<td[^>]*>(\d+ (?:to \d+|or more))</td>\s*<td[^>]*>(\d+)</td>", page) == expected
