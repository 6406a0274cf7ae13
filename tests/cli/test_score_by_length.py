"""`nmtkit score --by-length`: scores of short and long lines."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sacrebleu.metrics import BLEU, CHRF, TER

from nmtkit.cli import main

WORDS = ["Hund", "läuft", "groß", "3.5", "U-Bahn", "don't", "Straße", "rot"]
PARTS = {"3.5": 2, "U-Bahn": 2, "don't": 2}  # words that count as two
EDGES = [(0, 0), (1, 3), (4, 10), (11, 20), (21, 40), (41, None)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def score(*words: Any) -> Result:
    return CliRunner().invoke(main, ["score", *map(str, words)])


def text(generator: random.Random, lines: int) -> tuple[list[str], list[int]]:
    """Returns lines of all lengths, some without a word, and their numbers of words."""
    chosen = [generator.choices(WORDS, k=generator.choice([0, 1, 1, 2, 5, 9, 15, 25, 45])) for _ in range(lines)]
    return [" ".join([*words, "!"]) for words in chosen], [sum(PARTS.get(w, 1) for w in words) for words in chosen]


@pytest.mark.parametrize(
    ("side", "flags", "metrics"),
    [
        ("reference", [], [BLEU(), CHRF(), TER()]),
        ("source", ["--lowercase", "--metric", "chrf,bleu"], [CHRF(lowercase=True), BLEU(lowercase=True)]),
        ("reference", ["--metric", "bleu,chrf++", "--confidence", "--samples", "50"], [BLEU(), CHRF(word_order=2)]),
    ],
)
def test_the_scores_of_each_band_are_those_of_sacrebleu(
    side: str, flags: list[str], metrics: list[Any], tmp_path: Path
) -> None:
    generator = random.Random(side)
    (source, source_counts), (reference, counts), (other, _) = (text(generator, 30) for _ in range(3))
    system = [" ".join(w for w in line.split() if generator.random() < 0.9) for line in reference]
    named = {"src": source, "ref": reference, "ref2": other, "sys": system}
    paths = {name: write(tmp_path / name, lines) for name, lines in named.items()}
    arguments = ["--sys", paths["sys"], "--ref", paths["ref"], "--ref", paths["ref2"], "--by-length", side, *flags]
    arguments += ["--src", paths["src"]] if side == "source" else []
    result = score(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["words_of"] == side
    chosen_counts = source_counts if side == "source" else counts
    samples = 50 if "--confidence" in flags else 1
    parts = [([i for i, n in enumerate(chosen_counts) if a <= n and (b is None or n <= b)], a, b) for a, b in EDGES]
    for band, (rows, fewest, most) in zip(report["bands"], parts, strict=True):
        assert (band["fewest"], band["most"], band["lines"]) == (fewest, most, len(rows))
        for mine, metric in zip(band["scores"], metrics, strict=True):
            lines = [[reference[row] for row in rows], [other[row] for row in rows]]
            theirs = metric.corpus_score([system[row] for row in rows], lines, n_bootstrap=samples)
            assert mine["score"] == theirs.score and mine["signature"] == str(metric.get_signature())
            assert samples == 1 or (mine["mean"], mine["interval"]) == pytest.approx((theirs._mean, theirs._ci))
    whole = score(*(a for a in arguments if a not in ("--by-length", side, "--src", paths["src"])), "--format", "json")
    assert report["all"] == {"lines": 30, "scores": json.loads(whole.stdout)}
    rows = [line.split("  ") for line in score(*arguments).stdout.splitlines()]
    titles = [["0", "1 to 3", "4 to 10", "11 to 20", "21 to 40", "41 or more"][EDGES.index(p[1:])] for p in parts]
    assert [row[0].strip() for row in rows[1:8]] == [*titles, "all"]
    numbers = [[cell.split()[0] for cell in row[1:] if cell.strip()] for row in rows[1:7]]
    shown = [[str(b["lines"]), *(f"{s['score']:.1f}" for s in b["scores"])] for b in report["bands"]]
    assert [row[: len(shown[0])] for row in numbers] == shown or samples > 1


def test_a_character_of_a_script_without_spaces_is_a_word(tmp_path: Path) -> None:
    lines = ["犬", "犬が走る", "สวัสดีครับทุกคน", "The dog", "🙂 …", ""]
    path = write(tmp_path / "text", lines)
    report = json.loads(score("--sys", path, "--ref", path, "--by-length", "reference", "--format", "json").stdout)
    assert {(band["fewest"], band["lines"]) for band in report["bands"]} == {(0, 2), (1, 2), (4, 1), (11, 1)}


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--by-length", "source"], ["--by-length source", "--src"]),
        (["--by-length", "reference", "--src", "text"], ["--src"]),
        (["--by-length", "reference", "--sentence-level"], ["--by-length", "--sentence-level"]),
        (["--by-length", "reference", "--sys", "other"], ["--by-length", "--sys"]),
        (["--by-length", "target"], ["target", "source", "reference"]),
    ],
)
def test_flags_that_do_not_match_are_named(
    flags: list[str], facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text", ["ein Hund"])
    write(tmp_path / "other", ["ein Kater"])
    result = score("--sys", "text", "--ref", "text", *flags)
    assert result.exit_code == 2 and not result.stdout
    assert all(fact in result.stderr for fact in facts), result.stderr
