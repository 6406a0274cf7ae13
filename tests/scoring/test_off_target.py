"""The metric off-target counts the lines whose language by py3langid is wrong."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.scoring.metrics import MetricSettings, part_scores, score, sentence_scores

langid = pytest.importorskip("py3langid.langid")

ITALIAN = [
    "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti.",
    "Ogni individuo ha diritto alla vita, alla libertà ed alla sicurezza della propria persona.",
    "Nessun individuo potrà essere tenuto in stato di schiavitù o di servitù.",
]
DANISH = [
    "Alle mennesker er født frie og lige i værdighed og rettigheder.",
    "Enhver har ret til liv, frihed og personlig sikkerhed.",
    "Ingen må holdes i slaveri eller trældom.",
]
MIXED = [DANISH[0], ITALIAN[1], "", "12 % / 3", DANISH[2], "All human beings are born free and equal in dignity."]
REFERENCE = [DANISH[0], DANISH[1], "", "12 % / 3", DANISH[2], DANISH[0]]


@pytest.mark.slow
def test_lines_of_another_language_are_counted() -> None:
    settings = MetricSettings(target_lang="da", languages=("en", "it", "da", "de"))
    (found,) = score(MIXED, [REFERENCE], ["off-target"], settings)
    assert found.value == pytest.approx(100 * 2 / 6)
    assert found.details == "0.0 % of the references"
    assert "lang:da|among:da,de,en,it|version:py3langid-" in found.signature
    (column,) = sentence_scores(MIXED, [REFERENCE], ["off-target"], settings)
    assert [each.value for each in column] == [0, 100, 0, 0, 0, 100]
    (of_references,) = score(REFERENCE, [MIXED], ["off-target"], settings)
    assert of_references.value == 0 and of_references.details == "33.3 % of the references"


def test_the_share_of_the_references_is_the_share_of_the_part() -> None:
    settings, parts = MetricSettings(target_lang="da", languages=("it",)), [[0, 1, 2], [3, 4, 5], range(6)]
    (column,) = part_scores([*DANISH, *DANISH], [[*DANISH, *ITALIAN]], parts, ["off-target"], settings)
    assert [each.details.split()[0] for each in column] == ["0.0", "100.0", "50.0"]


@pytest.mark.slow
def test_without_languages_the_identifier_chooses_among_all_as_py3langid_does() -> None:
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    lines = [*ITALIAN, *DANISH, "Hei verden", "Ja", "for at se"]
    expected = [100.0 * (identifier.classify(line)[0] != "da") for line in lines]
    (column,) = sentence_scores(lines, [lines], ["off-target"], MetricSettings(target_lang="dan_Latn"))
    assert [each.value for each in column] == expected and expected[:6] == [100, 100, 100, 0, 0, 0]


def test_the_command_scores_and_compares(tmp_path: Path) -> None:
    for name, lines in (("ref", REFERENCE), ("mixed", MIXED), ("good", REFERENCE)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    base = ["score", "--ref", tmp_path / "ref", "--metric", "off-target", "-t", "da", "--languages", "en,it,da"]
    one = CliRunner().invoke(main, [*map(str, base), "--sys", str(tmp_path / "mixed")], catch_exceptions=False)
    assert one.stdout.startswith("off-target  33.3  0.0 % of the references\n"), one.output
    both = [*map(str, base), "--sys", str(tmp_path / "mixed"), "--sys", str(tmp_path / "good"), "--samples", "40"]
    result = CliRunner().invoke(main, both, catch_exceptions=False)
    assert result.exit_code == 0 and "p = " in result.stdout, result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metric", "off-target"], "add --target-lang"),
        (["--metric", "off-target", "-t", "xx"], "language 'xx'"),
        (["--metric", "chrf", "--languages", "en"], "--languages does nothing"),
    ],
    ids=["none", "unknown", "without"],
)
def test_mistakes_are_told(flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Alle mennesker\n")
    text = str(tmp_path / "text")
    result = CliRunner().invoke(main, ["score", "--ref", text, "--sys", text, *flags])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr
