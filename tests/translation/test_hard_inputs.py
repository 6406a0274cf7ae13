"""Hard inputs of users: single words, capitals, lists of numbers, one emoji, a repeated line, signs only."""

import unicodedata
from pathlib import Path

import pytest
from builders import REAL_LINES, save_ending_transformer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main

HARD = [
    *("free", "FREE", "Free", "a", "I", "OK", "All human beings", "ALL HUMAN BEINGS ARE BORN FREE", "é", "ß", "İ", "ﬁ"),
    *("1 2 3 4 5 6 7 8 9 10", "1, 2, 3", "42", "3.14", "1,000,000", "0000000000", "50%", "12:30", "$ 5.00", "½", "٣"),
    *(".", "...", "…", "?", "!!!!!!!!", "-", "--------", "(", ")", '"', "&", "&amp;", "{", "}", "{}", "\\", "|", "<b>"),
    *("😀", "😀😀😀", "👍🏽", "👨\u200d👩\u200d👧", "☃", "♥♥♥♥♥♥", "I ♥ free 😀", "\u0301", "\ufffd", "\u202e", "🇩🇪"),
    *("你好", "哈哈哈哈", "Привет", "สวัสดี", "العربية", "free 你好", "a\tb", "a b c d e f g h i j k l m n o p"),
    *("free free free free free free free free", "All are equal. " * 6, "ha" * 40, "x" * 300, "https://example.com/a/b"),
    *("Mr. J. R. R. T. Smith", "- 1", "1. free", "* free", "# FREE", "iPhone", "U.S.A.", "A&B", "C++", "free-", "'"),
]  # fmt: skip
BLANK = ["", " ", "\u00a0", "\u200b", "\t"]
PROTECTED = {"protect_spans": True, "truecase_caps": True}
SHORT = {"max_len_a": 0.1, "max_len_b": 6, "beam": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ending_transformer(tmp_path_factory.mktemp("model") / "model.pt")


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("torch", {}),
        ("torch", PROTECTED),
        ("numba", {}),
        ("numba", {"markup": "html"}),
        ("torch", {"split_sentences": "en"}),
    ],
)
def test_a_hard_input_has_one_translation_and_other_lines_do_not_change(path: Path, engine: str, text: dict) -> None:
    if engine == "numba":
        pytest.importorskip("numba")
    model = nmtkit.load(path, engine=engine, device="cpu")
    usual = model.translate(REAL_LINES, **SHORT, **text)
    mixed = [line for pair in zip(HARD, REAL_LINES * 20, strict=False) for line in pair]
    found = model.translate([*mixed, *BLANK], **SHORT, **text)
    assert found[1 : len(mixed) : 2] == (usual * 20)[: len(HARD)]
    assert [output.strip("\u00a0\u200b \t") for output in found[len(mixed) :]] == [""] * len(BLANK)
    assert found[: len(mixed) : 16] == [model.translate(line, **SHORT, **text) for line in HARD[::8]]
    assert not any("\n" in output or output != unicodedata.normalize("NFC", output) for output in found)


def test_a_line_without_letters_is_copied_with_protected_spans(path: Path) -> None:
    """Without --protect-spans, the model decides; with it, a list of numbers or a row of signs is never translated."""
    model = nmtkit.load(path, engine="torch", device="cpu")
    signs = [line for line in HARD if not any(map(str.isalpha, line)) and "&" not in line]
    assert len(signs) > 30
    assert model.translate(signs, **SHORT, **PROTECTED) == [unicodedata.normalize("NFC", line) for line in signs]
    page = "".join(f"<p>{line}</p>\n" for line in ("1, 2, 3", "42", "…", "--"))
    result = CliRunner().invoke(
        main, ["generate", "--path", str(path), "--input-format", "html", "--protect-spans"], page
    )
    assert result.exit_code == 0 and result.stdout == page


@pytest.mark.parametrize("option", [{"truecase_caps": True}, {"protect": ["ACME"]}])
def test_options_that_protect_nothing_in_a_line_do_not_empty_the_line(path: Path, option: dict) -> None:
    """A line of signs became an empty line."""
    model = nmtkit.load(path, engine="torch", device="cpu")
    signs = [".", "?", "-", "42", "1, 2, 3", "(", "!!!"]
    assert model.translate(signs, **SHORT, **option) == model.translate(signs, **SHORT)


def test_emoji_and_unknown_words_survive_beside_other_words(path: Path) -> None:
    model = nmtkit.load(path, engine="torch", device="cpu")
    for line, kept in {
        "I ♥ free 😀": "♥😀",
        "free 你好": "你好",
        "All 👍🏽 equal": "👍🏽",
        "free 😀😀😀": "😀😀😀",
    }.items():
        output = model.translate(line, **SHORT, **PROTECTED)
        assert [output.count(char) for char in kept] == [line.count(char) for char in kept]
