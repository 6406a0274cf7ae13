"""The plug-in that allows only well-formed trees, against all token sequences of a small vocabulary."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from trees import tree_of
from well_formed import WellFormedConfig, WellFormedTrees

from nmtkit.cli import main
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")


def tokenizer(folder: Path, tree: str = "(S (NP XX )NP XX )S") -> Tokenizer:
    for name, text, settings in (
        ("words", "the dog runs\na dog sleeps here now\n" * 5, {"model_type": "bpe", "vocab_size": 30}),
        ("trees", f"{tree}\n" * 5, {"model_type": "word", "vocab_size": 9, "use_all_vocab": True}),
    ):
        (folder / f"{name}.txt").write_text(text)
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / f"{name}.txt"), model_prefix=str(folder / name), unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
            normalization_rule_name="identity", minloglevel=2, hard_vocab_limit=False, **settings,
        )  # fmt: skip
    return Tokenizer((folder / "words.model").read_bytes(), (folder / "trees.model").read_bytes())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def accepted(both: Tokenizer, sentence: str, longest: int, tag_dictionary: Path | None = None) -> set[tuple[int, ...]]:
    """Returns every complete output that the processor allows, built token by token."""
    processor = WellFormedTrees(WellFormedConfig(max_unary=2, tag_dictionary=tag_dictionary), both)
    source = Packed.from_lists([both.encode_source([sentence]).ids.tolist()])
    complete: set[tuple[int, ...]] = set()
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        prefix = prefixes.pop()
        state = processor.start(source, torch.tensor([longest]), 1)
        log_probs = torch.zeros(1, both.target_size)
        for token in (BOS, *prefix):
            changed = state.step(torch.tensor([token]), log_probs)
        allowed = changed[0].isfinite().nonzero().flatten().tolist()
        assert allowed, f"{both.target_pieces(list(prefix))} has no continuation"
        for token in allowed:
            if token == EOS:
                complete.add(prefix)
            else:
                prefixes.append((*prefix, token))
    return complete


@pytest.mark.parametrize(("sentence", "words"), [("dog", 1), ("the dog", 2), ("the dog runs", 3)])
def test_exactly_the_well_formed_trees_of_the_words_are_allowed(both: Tokenizer, sentence: str, words: int) -> None:
    compare_with_all_sequences(both, sentence, words, ["XX"])


def test_parts_of_speech_are_preterminals(tmp_path: Path) -> None:
    tagged = tokenizer(tmp_path, "(S (NP NN )NP . )S")
    compare_with_all_sequences(tagged, "the dog", 2, ["NN", "."])


@pytest.mark.slow
def test_a_word_of_the_tag_dictionary_has_the_tags_that_it_has_there(tmp_path: Path) -> None:
    tagged = tokenizer(tmp_path, "(S (NP NN )NP . )S")
    tag = {id: piece.strip("▁") for id, piece in enumerate(tagged.target_pieces(range(tagged.target_size)))}
    (tmp_path / "train.mrg").write_text("(S (NP (NN dog) (XX dog)) (. runs))\n(S (NP (. runs)) (NN runs))\n")
    free, limited = (accepted(tagged, "the dog runs", 7, file) for file in (None, tmp_path / "train.mrg"))
    expected = {ids for ids in free if [tag[id] for id in ids if tag[id] in ("NN", ".")][1] == "NN"}
    assert limited == expected and 0 < len(limited) < len(free)


def test_a_tag_dictionary_without_a_tag_of_the_vocabulary_is_refused(both: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "train.mrg").write_text("(S (NN dog))\n")
    with pytest.raises(ValueError, match=r"train\.mrg: .*XX"):
        WellFormedTrees(WellFormedConfig(tag_dictionary=tmp_path / "train.mrg"), both)


def compare_with_all_sequences(both: Tokenizer, sentence: str, words: int, preterminals: list[str]) -> None:
    longest = words + 4
    pieces = [piece.removeprefix("▁") for piece in both.target_pieces(range(both.target_size))]
    usable = [id for id, piece in enumerate(pieces) if piece in ("(S", "(NP", ")S", ")NP", *preterminals)]
    expected = set()
    for length in range(1, longest + 1):
        for ids in itertools.product(usable, repeat=length):
            tokens = [pieces[id] for id in ids]
            try:
                tree = tree_of(tokens, ["w"] * words)
            except ValueError:
                continue
            runs = [len(list(group)) for opens, group in itertools.groupby(tokens, lambda t: t[0] == "(") if opens]
            if len(tree.children) == 1 and tree.children[0].word is None and max(runs) <= 2:
                expected.add(ids)
    assert expected
    assert accepted(both, sentence, longest) == expected


def test_rows_are_independent_and_follow_the_search(both: Tokenizer) -> None:
    source = Packed.from_lists([both.encode_source([text]).ids.tolist() for text in ("dog", "the dog runs")])
    processor = WellFormedTrees(WellFormedConfig(), both)
    state = processor.start(source, torch.tensor([9, 9]), 2)
    pieces = [piece.removeprefix("▁") for piece in both.target_pieces(range(both.target_size))]
    opening, word, closing = pieces.index("(S"), pieces.index("XX"), pieces.index(")S")

    def allowed(tokens: list[int]) -> list[set[str]]:
        changed = state.step(torch.tensor(tokens), torch.zeros(len(tokens), both.target_size))
        return [{pieces[id] for id in row.isfinite().nonzero().flatten().tolist()} for row in changed]

    assert allowed([BOS] * 4) == [{"(S", "(NP"}] * 4
    assert allowed([opening] * 4) == [{"(S", "(NP", "XX"}] * 4
    assert allowed([word] * 4) == [{")S"}, {")S"}, {"(S", "(NP", "XX"}, {"(S", "(NP", "XX"}]
    state.drop_finished(torch.tensor([1]))
    assert allowed([word, opening]) == [{"(S", "(NP", "XX"}, {"(S", "(NP", "XX"}]
    state.reorder(torch.tensor([1, 0]))  # now the row with an open constituent comes first
    assert allowed([word, word]) == [{")S", "(S", "(NP", "XX"}, {")S"}]
    assert allowed([closing, closing])[1] == {"</s>"}


def test_a_vocabulary_without_trees_is_refused(tmp_path: Path) -> None:
    from builders import tiny_tokenizer

    with pytest.raises(ValueError, match="vocabulary of trees"):
        WellFormedTrees(WellFormedConfig(), tiny_tokenizer())


def test_scores_of_allowed_tokens_are_not_changed(both: Tokenizer) -> None:
    source = Packed.from_lists([both.encode_source(["dog"]).ids.tolist()])
    state = WellFormedTrees(WellFormedConfig(), both).start(source, torch.tensor([9]), 1)
    before = torch.linspace(-5, -1, both.target_size)[None]
    after = state.step(torch.tensor([BOS]), before.clone())
    kept = after[0] > -math.inf
    assert torch.equal(after[0][kept], before[0][kept]) and 0 < int(kept.sum()) < both.target_size


def test_the_processor_keeps_the_contract_of_logits_processors(both: Tokenizer, tmp_path: Path) -> None:
    """The command writes trees with a vocabulary of trees. Without such a vocabulary, the plug-in names the reason."""
    both.save(tmp_path / "tokenizer")
    plugin = ["check", "--plugin", str(Path(__file__).parents[3] / "examples/parsing/well_formed.py")]
    kept = CliRunner().invoke(main, [*plugin, "well_formed_trees", "--tokenizer-from", str(tmp_path / "tokenizer")])
    assert kept.exit_code == 0 and kept.stdout.endswith("6 of 6 checks passed\n"), kept.output
    other = CliRunner().invoke(main, [*plugin, "well_formed_trees"])
    assert other.exit_code == 1 and "vocabulary of trees" in other.stdout
