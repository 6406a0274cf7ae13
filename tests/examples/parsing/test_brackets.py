"""Bracket scores against counts made by hand from evalb's rules, and against a published implementation."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from brackets import Counts, score, score_tree
from test_trees import random_tree
from trees import Tree, read_trees

EXAMPLES = Path(__file__).parents[3] / "examples/parsing"


def one(text: str) -> Tree:
    (tree,) = read_trees(text, "text")
    return tree


def counts(gold: str, parsed: str) -> tuple[int, int, int]:
    result = score_tree(one(gold), one(parsed))
    return result.matched, result.gold, result.parsed


@pytest.mark.parametrize(
    ("gold", "parsed", "expected"),
    [
        # S, NP, VP and NP against S, NP, VP: NP over "a dog" is missing
        (
            "(TOP (S (NP (NN x)) (VP (VB y) (NP (DT a) (NN dog)))))",
            "(TOP (S (NP (XX x)) (VP (XX y) (XX a) (XX dog))))",
            (3, 4, 3),
        ),
        # punctuation is deleted: the two S have the same words, though only one holds the full stop
        ("(TOP (S (S (NN a) (, ,)) (NN b) (. .)))", "(TOP (S (S (XX a)) (XX ,) (XX b) (XX .)))", (2, 2, 2)),
        # ADVP and PRT count as one label
        ("(TOP (VP (VB give) (PRT (RP up))))", "(TOP (VP (XX give) (ADVP (XX up))))", (2, 2, 2)),
        # a bracket that occurs twice in one tree and once in the other matches once
        ("(TOP (NP (NP (NN a))))", "(TOP (NP (XX a)))", (1, 2, 1)),
        ("(TOP (NP (NN a)))", "(TOP (NP (NP (NP (XX a)))))", (1, 1, 3)),
        # other labels over the same span do not match
        ("(TOP (NP (NN a)))", "(TOP (VP (XX a)))", (0, 1, 1)),
        # preterminals and TOP never count
        ("(TOP (NN a))", "(TOP (XX a))", (0, 0, 0)),
    ],
)
def test_counts_are_those_of_evalb(gold: str, parsed: str, expected: tuple[int, int, int]) -> None:
    assert counts(gold, parsed) == expected


def test_a_tree_over_other_words_is_an_error_and_counts_no_bracket() -> None:
    result = score([(one("(TOP (NP (NN a)))"), one("(TOP (NP (NN b)))")), (one("(TOP (NP (NN a)))"),) * 2])
    assert (result.errors, result.sentences, result.matched, result.exact) == (1, 1, 1, 1)


def test_scores_are_percentages_of_the_corpus() -> None:
    result = Counts(matched=6, gold=8, parsed=12, sentences=3)
    assert (result.recall, result.precision, result.f1) == (75.0, 50.0, 60.0)
    assert Counts().f1 == 0.0


def relabelled(tree: Tree, draw: random.Random) -> Tree:
    """Returns a tree over the same words, with other labels here and there and some constituents dissolved."""
    if tree.word is not None:
        return Tree("XX", word=tree.word)
    children: list[Tree] = []
    for child in tree.children:
        changed = relabelled(child, draw)
        dissolved = changed.word is None and draw.random() < 0.3
        children += changed.children if dissolved else [changed]
    return Tree(tree.label if draw.random() < 0.7 else "PP", children)


def without_punctuation(tree: Tree) -> Tree:
    if tree.word is not None:
        return Tree("NN", word="w")
    return Tree(tree.label, [without_punctuation(child) for child in tree.children])


@pytest.mark.parametrize("seed", range(10))
def test_counts_agree_with_pyevalb_on_random_trees(seed: int) -> None:
    """PYEVALB deletes no punctuation and counts equal brackets once: both are kept out of these trees."""
    parser = pytest.importorskip("PYEVALB.parser")
    scorer = pytest.importorskip("PYEVALB.scorer")
    draw = random.Random(seed)
    compared = 0
    while compared < 20:
        gold = without_punctuation(Tree("S", [random_tree(draw, 4), random_tree(draw, 4)]))
        parsed = relabelled(gold, draw)
        trees = [parser.create_from_bracket_string(str(tree)) for tree in (gold, parsed)]
        nodes = [tree.non_terminal_labels for tree in trees]
        if any(len(set(of_tree)) < len(of_tree) for of_tree in nodes):
            continue
        theirs = scorer.Scorer().score_trees(*trees)
        ours = score_tree(gold, parsed)
        assert (ours.matched, ours.gold, ours.parsed) == (
            theirs.matched_brackets,
            theirs.gold_brackets,
            theirs.test_brackets,
        )
        compared += 1


def test_the_command_scores_two_files(tmp_path: Path) -> None:
    (tmp_path / "gold.mrg").write_text("(TOP (S (NP (NN a)) (VP (VB b))))\n")
    (tmp_path / "parsed.mrg").write_text("(TOP (S (NP (XX a)) (XX b)))\n")
    command = [sys.executable, str(EXAMPLES / "brackets.py"), str(tmp_path / "gold.mrg"), str(tmp_path / "parsed.mrg")]
    result = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert result == {"f1": 80.0, "precision": 100.0, "recall": 66.67, "sentences": 1, "exact": 0, "errors": 0}
