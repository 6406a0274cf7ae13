"""Special spaces of a source come back in its translation."""

import random
import re

import pytest
from builders import save_ending_transformer

import nmtkit
from nmtkit.text.alignment import Link, words
from nmtkit.text.white_space import with_source_spaces

SPACES = re.compile("[\u00a0\u202f\u3000]")


def linked(source, target, pairs):
    """Returns links between words, by their numbers."""
    return [Link(*words(source)[one], *words(target)[other]) for one, other in pairs]


@pytest.mark.parametrize(
    ("source", "target", "pairs", "expected"),
    [
        ("runs 10~km .", "rennt 10 km .", [], "rennt 10~km ."),
        ("runs 10~km .", "rennt 10,5 km .", [], "rennt 10,5 km ."),
        ("see page~5", "siehe Seite 5", [(1, 1), (2, 2)], "siehe Seite~5"),
        ("a dog~: it", "ein Hund : es", [(0, 0), (1, 1), (2, 2), (3, 3)], "ein Hund~: es"),
        ("€~5 only", "nur 5 €", [(2, 0), (1, 1), (0, 2)], "nur 5~€"),
        ("a~b c", "x y z", [(0, 0), (2, 1), (1, 2)], "x y z"),
        ("~one~", "eins", [(0, 0)], "~eins~"),
        (" ~one two~ ", "eins zwei", [], " ~eins zwei~ "),
        (" one ", "eins", [(0, 0)], "eins"),
        ("one~", "", [], ""),
        ("Mr~A", "Herr A", [(0, 0), (1, 1)], "Herr~A"),
        ("a_b", "犬 猫", [(0, 0), (1, 1)], "犬 猫"),
        ("犬_猫", "Hund Katze", [(0, 0), (1, 1)], "Hund Katze"),
        ("犬_猫", "狗 貓", [(0, 0), (1, 1)], "狗_貓"),
        ("a_b", "x y", [(0, 0), (1, 1)], "x_y"),
        ("_犬", "Hund", [], "_Hund"),
        ("a ~ b", "x y", [(0, 0), (1, 1)], "x ~ y"),
        ("a b", "x y", [(0, 0), (1, 1)], "x y"),
        ("10~km", "{10 km} 10 km", [], "{10~km} 10~km"),
    ],
)
def test_a_special_space_comes_back_where_its_words_stand(source, target, pairs, expected):
    """~ stands for a no-break space and _ for an ideographic space."""
    source, expected = (text.replace("~", "\u00a0").replace("_", "\u3000") for text in (source, expected))
    links = linked(source, target, pairs)
    text, moved = with_source_spaces(source, target, links, SPACES)
    assert text == expected
    for before, after in zip(links, moved, strict=True):
        assert target[before.target_start : before.target_end] == text[after.target_start : after.target_end]
        assert (before.source_start, before.source_end) == (after.source_start, after.source_end)


def test_a_protected_text_stays_as_it_is():
    source, target = "10\u00a0km {10 km}", "10 km {10 km}"
    text, _ = with_source_spaces(source, target, [Link(6, 13, 6, 13)], SPACES)
    assert text == "10\u00a0km {10 km}"


def test_a_translation_word_by_word_keeps_all_spaces():
    draw = random.Random(1)
    for _ in range(200):
        length = draw.randint(1, 8)
        gaps = [draw.choice([" ", "\u00a0", "\u202f", "\u3000", "\u00a0 "]) for _ in range(length - 1)]
        source = "".join(word + gap for word, gap in zip("abcdefgh"[:length], [*gaps, ""], strict=True))
        target = " ".join("stuvwxyz"[:length])
        text, _ = with_source_spaces(source, target, linked(source, target, [(i, i) for i in range(length)]), SPACES)
        assert text == "".join(word + gap for word, gap in zip("stuvwxyz"[:length], [*gaps, ""], strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return nmtkit.load(save_ending_transformer(tmp_path_factory.mktemp("model") / "ending.pt"))


@pytest.mark.parametrize("options", [{"markup": "html"}, {"protect_spans": True}, {"truecase_caps": True}], ids=str)
def test_no_break_spaces_of_a_line_are_in_its_translation(model, options):
    """The model copies the first words of a line."""
    line = "Everyone has the right to life, liberty and security of person."
    (free,) = model.translate([line], **options)
    assert free.startswith("Everyone has ")
    for space in "\u00a0\u202f\u3000":
        source = f"{space}{line.replace(' ', space)}"
        assert model.translate([source], **options) == [f"{space}{free.replace(' ', space)}"]
        assert model.translate([source]) == model.translate([line])  # plain text is read like the rows of a dataset
    tagged = model.translate([line.replace("has the", "<b>has</b>\u00a0the")], markup="html")[0]
    assert "has</b>\u00a0the" in tagged or "the" not in free
