import gzip
from pathlib import Path

import pytest
from builders import save_transformer

from nmtkit.data import checkpoint_file
from nmtkit.scoring.texts import check_equal_counts, lines_of, read_lines, read_side, read_texts
from nmtkit.translation.likelihood import Likelihood, sentences_report, text_likelihoods


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nb", ["a", "b"]),
        ("a\n\n", ["a", ""]),
        ("\n", [""]),
        ("a\rb\u0085c\u2028d\x0ce\n", ["a\rb\u0085c\u2028d\x0ce"]),
    ],
)
def test_only_a_newline_ends_a_line(text, lines):
    assert lines_of(text.encode(), Path("x")) == lines


def test_an_empty_text_and_bytes_that_are_no_utf_8_are_refused():
    with pytest.raises(ValueError, match="f is empty"):
        lines_of(b"", Path("f"))
    with pytest.raises(ValueError, match="f:2: byte 1"):
        lines_of(b"a\n\xe4\nb\n", Path("f"))


def test_unequal_line_counts_name_both_texts_and_both_counts():
    check_equal_counts({"a": [""], "b": [""]})
    with pytest.raises(ValueError, match="a has 1, c has 2"):
        check_equal_counts({"a": [""], "b": [""], "c": ["", ""]})


def test_a_compressed_file_reads_like_a_plain_one(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress("a\nß\n".encode()))
    assert read_lines(tmp_path / "x.gz") == ["a", "ß"]


def test_a_corpus_of_three_languages_has_the_source_that_is_asked_for(tmp_path: Path) -> None:
    """`score --path MODEL --src x.tmx -s fr -t de` gave the model the English texts."""
    unit = "".join(f'<tuv xml:lang="{code}"><seg>text {code}</seg></tuv>' for code in ("en", "fr", "de"))
    (tmp_path / "x.tmx").write_text(f'<tmx version="1.4"><header/><body><tu>{unit}</tu></body></tmx>')
    assert read_side(tmp_path / "x.tmx", 0, ("fr", "de")) == ["text fr"]
    assert read_side(tmp_path / "x.tmx", 1, ("fr", "de")) == ["text de"]


def test_a_model_scores_the_side_of_a_corpus_in_its_source_language(tmp_path: Path) -> None:
    """The corpus names German as its source, and the model translates from English."""
    path = save_transformer(tmp_path / "model.pt")
    checkpoint_file.save(path, checkpoint_file.read(path) | {"origin": {"languages": ["en", "de"]}})
    texts = {"de": "Alle sind gleich", "en": "All are equal"}
    unit = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in texts.items())
    (tmp_path / "x.tmx").write_text(f'<tmx version="1.4"><header srclang="de"/><body><tu>{unit}</tu></body></tmx>')
    (tmp_path / "x.en").write_text(f"{texts['en']}\n")
    (tmp_path / "sys").write_text("born free\n")
    of_corpus, of_lines = (
        list(text_likelihoods(path, [tmp_path / "sys"], None, tmp_path / name, None, (None, None)).values())
        for name in ("x.tmx", "x.en")
    )
    assert of_corpus == of_lines


def test_a_file_of_translations_that_is_given_twice_is_named(tmp_path: Path) -> None:
    """`score --path MODEL --sys a --sys a` showed a single row."""
    path = save_transformer(tmp_path / "model.pt")
    for name in ("en", "de"):
        (tmp_path / name).write_text("all are equal\n")
    systems, source = [tmp_path / "de", tmp_path / "en", tmp_path / "de"], tmp_path / "en"
    with pytest.raises(ValueError, match=r"--sys .*de"):
        text_likelihoods(path, systems, None, source, None, (None, None))
    with pytest.raises(ValueError, match=r"--sys .*de"):
        read_texts(reference_paths=[source], data=None, subset="test", system_paths=systems)


def test_log_probabilities_of_lines_have_at_least_six_digits_and_more_on_request():
    likelihoods = [Likelihood(-1.23456789, 3)]
    assert [sentences_report(likelihoods, width).lines for width in (1, 8)] == [["-1.234568\t3"], ["-1.23456789\t3"]]
