import pytest

from nmtkit.scoring.lines import check_equal_counts, lines_of


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
    assert lines_of(text.encode(), "x") == lines


def test_an_empty_text_and_bytes_that_are_no_utf_8_are_refused():
    with pytest.raises(ValueError, match="f is empty"):
        lines_of(b"", "f")
    with pytest.raises(ValueError, match="f, line 2: these bytes are no UTF-8"):
        lines_of(b"a\n\xe4\nb\n", "f")


def test_unequal_line_counts_name_both_texts_and_both_counts():
    check_equal_counts({"a": [""], "b": [""]})
    with pytest.raises(ValueError, match="a has 1, c has 2"):
        check_equal_counts({"a": [""], "b": [""], "c": ["", ""]})
