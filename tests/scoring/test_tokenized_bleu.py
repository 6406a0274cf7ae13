import math
from collections import Counter

import pytest

pytest.importorskip("sacremoses")

from nmtkit.scoring.extra_metrics import split_compounds
from nmtkit.scoring.metrics import MetricSettings, score


def multi_bleu(hypotheses, references):
    """Returns unsmoothed corpus BLEU over white-space tokens with one reference, by the definition."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        tokens = hypothesis.split(), reference.split()
        lengths[0] += len(tokens[0])
        lengths[1] += len(tokens[1])
        for n in range(1, 5):
            ours, theirs = (Counter(tuple(side[i : i + n]) for i in range(len(side) - n + 1)) for side in tokens)
            matches[n - 1] += sum((ours & theirs).values())
            totals[n - 1] += sum(ours.values())
    if 0 in matches:
        return 0.0
    penalty = min(1.0, math.exp(1 - lengths[1] / lengths[0]))
    return 100 * penalty * math.exp(sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / 4)


def test_compounds_are_split_as_one_pass_of_the_original_expression_splits_them():
    assert split_compounds("ein rich-text Format - neu") == "ein rich ##AT##-##AT## text Format - neu"
    assert split_compounds("a-b-c -d") == "a ##AT##-##AT## b-c -d"


def test_it_counts_moses_tokens_with_split_compounds():
    hypotheses = ["Das Rich-Text-Format, z.B. hier (neu).", "Er kam 2,5 Stunden zu spät nach Baden-Baden!"]
    references = ["Das Rich-Text-Format, z.B. dort (neu).", "Er kam 2,5 Stunden zu spät in Baden-Baden an!"]
    tokens = [
        [
            "Das Rich ##AT##-##AT## Text ##AT##-##AT## Format , z.B. hier ( neu ) .",
            "Er kam 2,5 Stunden zu spät nach Baden ##AT##-##AT## Baden !",
        ],
        [
            "Das Rich ##AT##-##AT## Text ##AT##-##AT## Format , z.B. dort ( neu ) .",
            "Er kam 2,5 Stunden zu spät in Baden ##AT##-##AT## Baden an !",
        ],
    ]
    plain, tokenized = score(hypotheses, [references], ["bleu", "tokenized-bleu"], MetricSettings(target_lang="de"))
    assert tokenized.value == pytest.approx(multi_bleu(*tokens))
    assert "not comparable" in tokenized.name
    assert plain.name == "BLEU" and plain.value != pytest.approx(tokenized.value, abs=0.1)
    assert "tok:moses-de+compounds|smooth:none|sacremoses:" in tokenized.signature


def test_a_code_with_a_script_has_the_rules_of_its_language():
    texts = ["Er kam bzw. blieb lange im Haus ."], [["Er kam bzw. blieb kurz im Haus ."]]
    scores = [score(*texts, ["tokenized-bleu"], MetricSettings(target_lang=code))[0] for code in ("de", "deu_Latn")]
    assert scores[0] == scores[1]


def test_without_a_common_4_gram_it_is_zero_as_nothing_is_smoothed():
    [result] = score(
        ["ein kleiner Hund läuft"], [["ein großer Hund läuft"]], ["tokenized-bleu"], MetricSettings(target_lang="de")
    )
    assert result.value == 0
