import math

import pytest

from nmtkit.scoring.metrics import MetricSettings, score, sentence_scores


def test_bleu_equals_the_formula_worked_by_hand():
    # "a b c d e" against "a b c d f": precisions 4/5, 3/4, 2/3, 1/2; equal lengths, so no brevity penalty
    [bleu] = score(["a b c d e"], [["a b c d f"]], ["bleu"])
    assert bleu.value == pytest.approx(100 * math.exp(sum(map(math.log, (4 / 5, 3 / 4, 2 / 3, 1 / 2))) / 4))
    assert "tok:13a" in bleu.signature


def test_a_perfect_translation_scores_full_marks():
    values = {
        result.name: result.value
        for result in score(["eine kleine Katze schläft ."], [["eine kleine Katze schläft ."]])
    }
    assert values == pytest.approx({"BLEU": 100, "chrF2": 100, "TER": 0})


def test_the_better_of_several_references_counts():
    text, wrong = ["das ist ein Haus am See"], ["ganz etwas anderes steht in diesem Text"]
    alone, both = score(text, [wrong], ["bleu"]), score(text, [wrong, text], ["bleu"])
    assert alone[0].value < 5 and both[0].value == pytest.approx(100)
    assert "nrefs:2" in both[0].signature


@pytest.mark.parametrize("name", ["bleu", "chrf", "chrf++", "ter"])
def test_a_resample_that_matches_nothing_has_a_score(name):
    """A quarter of the resamples of two lines have only the empty line, and a quarter only the perfect one."""
    [result] = score(["", "Ein Hund läuft hier."], [["Eine Katze.", "Ein Hund läuft hier."]], [name], bootstrap=200)
    assert result.mean is not None and 30 < result.mean < 70 and result.interval == pytest.approx(50, abs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [[]]), "no translations"),
        ((["a"], []), "no references"),
        ((["a"], [["a", "b"]]), "1 translations and 2 references"),
        ((["a"], [["a"]], ["blue"]), "unknown metric 'blue'; .*bleu"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)


def test_an_unknown_tokenizer_names_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown tokenizer 'moses'.*13a"):
        score(["a"], [["a"]], ["bleu"], MetricSettings(tokenize="moses"))


def test_a_sentence_shorter_than_four_words_is_scored_by_the_n_grams_it_has():
    [column] = sentence_scores(["ein Hund", "eine Katze"], [["ein Hund", "kein Hund"]], ["bleu"])
    assert [cell.value for cell in column] == pytest.approx([100, 0])
    assert "eff:yes" in column[0].signature
