"""Trees and their token sequences, on sentences written out by hand and on hostile trees."""

import random
from pathlib import Path

import pytest
from trees import Tree, alignment, linearized, normalized, read_files, read_trees, tree_of

TREEBANK = """
( (S
    (NP-SBJ-1 (NNP John) )
    (VP (VBZ has)
      (NP (DT a) (NN dog) )
      (S (NP-SBJ (-NONE- *-1) ) ) )
    (. .) ))
( (FRAG (-LRB- -LRB-) (NP=2 (CD 5)) (-RRB- -RRB-)))
"""
NORMALIZED = [
    "(TOP (S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .)))",
    "(TOP (FRAG (-LRB- -LRB-) (NP (CD 5)) (-RRB- -RRB-)))",
]
TAGGED = ["(S (NP NNP )NP (VP VBZ (NP DT NN )NP )VP . )S", "(FRAG -LRB- (NP CD )NP -RRB- )FRAG"]
SEQUENCES = ["(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S", "(FRAG XX (NP XX )NP XX )FRAG"]


def one(text: str) -> Tree:
    (tree,) = read_trees(text, "text")
    return tree


def test_traces_empty_constituents_and_function_tags_are_removed() -> None:
    assert [str(normalized(tree)) for tree in read_trees(TREEBANK, "text")] == NORMALIZED


def test_a_tree_becomes_the_sequence_of_vinyals_et_al() -> None:
    for text, sequence in zip(NORMALIZED, SEQUENCES, strict=True):
        assert " ".join(linearized(one(text))) == sequence


def test_a_sequence_may_have_the_parts_of_speech() -> None:
    for text, sequence in zip(NORMALIZED, TAGGED, strict=True):
        tree = one(text)
        assert " ".join(linearized(tree, tags=True)) == sequence
        assert str(tree_of(sequence.split(), tree.words())) == text


def test_each_token_of_a_sequence_belongs_to_a_word() -> None:
    tokens = ["(S", "(NP", "NNP", ")NP", "(VP", "VBZ", "(NP", "DT", "NN", ")NP", ")VP", ".", ")S"]
    words = dict((token, word) for word, token in alignment(tokens))
    assert [words[index] for index in range(len(tokens))] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4]


def test_a_sequence_becomes_the_tree_again() -> None:
    for text, sequence in zip(NORMALIZED, SEQUENCES, strict=True):
        tree = one(text)
        tags = [node.label for node in tree.preterminals()]
        assert str(tree_of(sequence.split(), tree.words(), tags)) == text


def test_a_tree_of_traces_alone_is_dropped() -> None:
    assert normalized(one("( (S (NP (-NONE- *))))")) is None


@pytest.mark.parametrize(
    ("sequence", "problem"),
    [
        ("(S XX", "1 constituents are open"),
        ("(S XX )NP", "token 3: '\\)NP' closes"),
        ("(S )S XX", "token 2: '\\)S' closes"),
        ("(S XX XX XX )S", "token 4: .*2 words"),
        ("(S XX )S", "0 constituents .*1 of 2"),
        ("(S XX ( )S", "token 3: '\\(' has no label"),
        (")S", "token 1"),
    ],
)
def test_a_sequence_that_is_no_tree_is_refused_with_its_place(sequence: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tree_of(sequence.split(), ["a", "b"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(S (NP\n(NN a)", "text: 2 brackets"),
        ("(S (NN a)))", "text, line 1: a bracket"),
        ("(S\n(NP ))", "text, line 2: .*empty"),
        ("(S\n\n(NN a b))", "text, line 3: 'b'"),
        ("word", "text, line 1: 'word'"),
        ("(NN a (NN b))", "text, line 1: the word 'a'"),
    ],
)
def test_damaged_treebanks_are_refused_with_the_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        list(read_trees(text, "text"))


def test_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.mrg").write_text("(S (NN a)")
    with pytest.raises(ValueError, match=r"bad\.mrg: 1 brackets"):
        list(read_files([tmp_path / "bad.mrg"]))


def random_tree(draw: random.Random, depth: int) -> Tree:
    if depth == 0 or draw.random() < 0.3:
        return Tree(draw.choice(["NN", ",", "VB"]), word=draw.choice(["a", "b", "…", "-LRB-"]))
    children = [random_tree(draw, depth - 1) for _ in range(draw.randint(1, 4))]
    return Tree(draw.choice(["NP", "VP", "S"]), children)


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_survives_its_text_and_its_sequence(seed: int) -> None:
    draw = random.Random(seed)
    tree = Tree("TOP", [Tree("S", [random_tree(draw, 6), random_tree(draw, 6)])])
    assert str(one(str(tree))) == str(tree)
    tags = [node.label for node in tree.preterminals()]
    assert str(tree_of(linearized(tree), tree.words(), tags)) == str(tree)


def test_trees_of_any_depth_are_read_and_written() -> None:
    text = "(NP " * 20_000 + "(NN a)" + ")" * 20_000
    tree = one(text)
    assert str(tree) == text and tree.words() == ["a"]
    assert len(linearized(tree)) == 40_001
