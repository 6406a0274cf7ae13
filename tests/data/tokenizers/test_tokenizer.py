import io
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmtkit.data.corpora.sampling import Sample, random_numbers
from nmtkit.data.tokenizers.batch_encoder import BatchEncoder
from nmtkit.data.tokenizers.spm_model import model_facts
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, Tokenizer, normalize, unescape

ODD = [
    "▁", "▁▁", "\ufdd0", "\ufdd0_", "▅", "…", "½", "ﬁ", "№", "①", "Å", "e\u0301", "\u0301", "한", "\u1112\u1161\u11ab",
    "\t", "\r", "\x00", "\x07", "\x0b", "\x0c", "\x1c", "\x7f", "\x85", "\x9f", "\xa0", "\xad", "\u2003", "\u200b",
    "\u2028", "\u2029", "\u202e", "\u3000", "\ufeff", "\ufffd", "\U0010ffff", "👩‍👩‍👧", "👍🏽", "🇩🇪", "שלום", "سلام",
    "日本語", "ไทย", "<2de>", "<s>", "</s>", "<unk>", "<0x41>", "⁇", "a", "man", "Haus", " ", "  ", "   ",
]  # fmt: skip
LINES = st.lists(
    st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30
).map("".join)


def survives(line: str) -> str:
    """Returns the line as the tokenizer promises to restore it: NFC, single spaces, nothing invisible."""
    line = re.sub("[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u2060\ufeff]", "", line)  # none has a piece
    line = re.sub("[\t\v\f\r\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]", " ", line)
    return " ".join(part for part in unicodedata.normalize("NFC", line).split(" ") if part)


def words(line: str) -> list[str]:
    return [word for word in normalize(survives(line)).split(" ") if word]


def pieces(char: str, known: set[str]) -> int:
    return 1 if char in known else len(char.encode())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(LINES)
def test_text_round_trips_but_for_runs_of_spaces(joint_tokenizer: Tokenizer, line: str) -> None:
    encoded = joint_tokenizer.encode_source([line])
    assert encoded.ids[-1] == EOS
    assert EOS not in encoded.ids[:-1]
    assert joint_tokenizer.decode_source(encoded.ids.tolist()) == survives(line)


@settings(max_examples=25, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=8))
def test_text_round_trips_with_a_unigram_model(unigram_tokenizer: Tokenizer, lines: list[str]) -> None:
    encoded = unigram_tokenizer.encode_target(lines)
    decoded = [unigram_tokenizer.decode_target(ids.tolist()) for ids in encoded.split()]
    assert decoded == [survives(line) for line in lines]


@settings(max_examples=50, deadline=None)
@given(st.lists(LINES, max_size=8))
def test_characters_round_trip_and_come_one_by_one(character_tokenizer: Tokenizer, lines: list[str]) -> None:
    encoded = character_tokenizer.encode_target(lines)
    assert [character_tokenizer.decode_target(ids.tolist()) for ids in encoded.split()] == list(map(survives, lines))
    # a character of the vocabulary is one piece, another character is bytes, and each word begins with a space
    known = set("amnwlkshoetgru")
    cost = {line: sum(1 + sum(pieces(char, known) for char in word) for word in words(line)) for line in lines}
    assert encoded.lengths.tolist() == [cost[line] + 1 for line in lines]
    encoder = BatchEncoder(character_tokenizer.target, "uint16")
    assert encoder.encodes_by_word
    assert encoder.encode("".join(line + "\n" for line in lines)).ids.tolist() == encoded.ids.tolist()


@pytest.fixture(scope="session")
def unigram_tokenizer() -> Tokenizer:
    return Tokenizer(train_model(["a man walks home", "the man sees a green house"] * 50, 275, "unigram"))


@pytest.fixture(scope="session")
def character_tokenizer() -> Tokenizer:
    """The vocabulary has the characters of the text, because the requested size is only a limit."""
    return Tokenizer(train_model(["a man walks home", "the man sees a green house"] * 50, 10_000, "char"))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.lists(LINES, max_size=8), st.sampled_from([(0, "uint16"), (3, "uint32"), (1000, "uint16")]))
def test_the_word_cache_gives_the_ids_of_whole_lines(
    joint_tokenizer: Tokenizer, lines: list[str], cache: tuple[int, str]
) -> None:
    encoder = BatchEncoder(joint_tokenizer.source, cache[1], cached_words=cache[0])
    assert encoder.encodes_by_word
    plain = joint_tokenizer.encode_source(lines)
    for _ in range(2):  # first with new words, then with known words
        encoded = encoder.encode("".join(line + "\n" for line in lines))
        assert encoded.ids.tolist() == plain.ids.tolist()
        assert encoded.lengths.tolist() == plain.lengths.tolist()


def foreign_model(**settings: Any) -> bytes:
    """Returns a model by SentencePiece's defaults: nmt_nfkc, and no byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["a man walks home", "the woman sees ein grünes Haus", "…½ ﬁ ¨a"] * 20),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 50, "model_type": "bpe", **settings},
    )
    return model.getvalue()


FOREIGN = {
    "nmt_nfkc": {},
    "case folding and bytes": {"normalization_rule_name": "nmt_nfkc_cf", "byte_fallback": True, "vocab_size": 310},
    "characters": {"model_type": "char"},
    "symbols": {"user_defined_symbols": ["<2de>", "man", "▁ho"], "vocab_size": 60},
}


@pytest.fixture(scope="module", params=FOREIGN)
def foreign(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(foreign_model(**FOREIGN[request.param]))


WORDS_OF_RULES = [
    "¨",
    "a¨b",
    "\xa0",
    "\u200b",
    "\u0344",
    "\u0308",
    "½½",
    "Ǆ",
    "\u3000a",
    "A\u030a",
    "ＨＡＵＳ",
    "x",
    "日本",
    "日",
]
NORMALIZED = st.lists(
    st.sampled_from([*ODD, *WORDS_OF_RULES, " "]) | st.characters(exclude_categories=["Cs"]), max_size=30
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(NORMALIZED.map("".join).map(lambda line: line.replace("\n", " ")), max_size=8), st.sampled_from([0, 1000])
)
def test_words_of_a_model_with_a_normaliser_have_the_ids_of_whole_lines(
    foreign: Tokenizer, lines: list[str], cached_words: int
) -> None:
    encoder = BatchEncoder(foreign.source, "uint16", cached_words)
    assert encoder.encodes_by_word
    plain = foreign.encode_source(lines)
    for _ in range(2):  # first with new words, then with known words
        encoded = encoder.encode("".join(line + "\n" for line in lines))
        assert encoded.ids.tolist() == plain.ids.tolist()
        assert encoded.lengths.tolist() == plain.lengths.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"])
def test_rules_about_spaces_are_found(name: str, tmp_path: Path) -> None:
    model = foreign_model(normalization_rule_name=name)
    rules = sentencepiece.SentencePieceNormalizer(model_proto=model).Decompile()
    assert model_facts(model).splits_at_spaces == (not any(" " in key for key, _ in rules))
    for key, by_word in (("61 62", True), ("61 20 62", False), ("20 308", False), ("61 20", False)):
        (tmp_path / "rules.tsv").write_text(f"41\t61\n{key}\t63\n")
        model = foreign_model(normalization_rule_tsv=str(tmp_path / "rules.tsv"))
        assert model_facts(model).splits_at_spaces == by_word


def test_the_word_cache_is_left_out_where_it_would_not_be_exact(unigram_tokenizer: Tokenizer) -> None:
    encoder = BatchEncoder(unigram_tokenizer.source, "uint16")
    assert not encoder.encodes_by_word
    lines = ["a man", "", "the  green man\u2028 walks"]
    plain = unigram_tokenizer.encode_source(lines)
    encoded = encoder.encode("".join(line + "\n" for line in lines))
    assert (encoded.ids.tolist(), encoded.lengths.tolist()) == (plain.ids.tolist(), plain.lengths.tolist())


def test_long_words_are_not_kept(joint_tokenizer: Tokenizer) -> None:
    encoder = BatchEncoder(joint_tokenizer.source, "uint16")
    line = "ab" * 200
    first = encoder.encode(f"a {line} man\n").ids.tolist()
    assert len(encoder._table) == 2
    assert encoder.encode(f"a {line} man\n").ids.tolist() == first


def test_escape_is_undone() -> None:
    for text in ("▁", "\ufdd0", "\ufdd0_", "_\ufdd0\ufdd0▁_"):
        assert "▁" not in normalize(text)
        assert unescape(normalize(text)) == text


def test_decoding_never_breaks_a_line(joint_tokenizer: Tokenizer) -> None:
    piece = joint_tokenizer.source.processor.piece_to_id("<0x0A>")
    assert joint_tokenizer.decode_target([BOS, piece, EOS]) == " "


def test_decoding_stands_bytes_that_are_no_text(joint_tokenizer: Tokenizer) -> None:
    piece = joint_tokenizer.source.processor.piece_to_id("<0xFF>")
    assert joint_tokenizer.decode_target([piece]) == "\ufffd"


def test_an_empty_line_is_eos_alone(joint_tokenizer: Tokenizer) -> None:
    encoded = joint_tokenizer.encode_source(["", "  ", "a"])
    assert encoded.lengths[:2].tolist() == [1, 1]
    assert encoded.ids[:2].tolist() == [EOS, EOS]
    assert joint_tokenizer.encode_source([]).ids.tolist() == []


@pytest.mark.parametrize("name", ["joint_tokenizer", "separate_tokenizer"])
def test_saved_state_and_files_give_the_same_tokenizer(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path)
    state = tokenizer.state()
    assert all(tensor.dtype == torch.uint8 for tensor in state.values())
    for other in (Tokenizer.load(tmp_path), Tokenizer.from_state(state)):
        assert other.fingerprint == tokenizer.fingerprint
        assert (other.source_size, other.target_size, other.joint) == (
            tokenizer.source_size,
            tokenizer.target_size,
            tokenizer.joint,
        )
        assert other.encode_target(["ein Haus"]).ids.tolist() == tokenizer.encode_target(["ein Haus"]).ids.tolist()


def test_different_models_have_different_fingerprints(
    joint_tokenizer: Tokenizer, separate_tokenizer: Tokenizer
) -> None:
    swapped = Tokenizer(separate_tokenizer.target_model, separate_tokenizer.source_model)
    both = {joint_tokenizer.fingerprint, separate_tokenizer.fingerprint, swapped.fingerprint}
    assert len(both) == 3


def test_a_tag_is_one_token_and_an_unknown_one_is_named(joint_tokenizer: Tokenizer) -> None:
    joint_tokenizer.check_tag("<2de>")
    assert joint_tokenizer.source_pieces(joint_tokenizer.encode_source(["<2de> a man"]).ids)[0] == "▁<2de>"
    with pytest.raises(ValueError, match="no tag '<2fr>'"):
        joint_tokenizer.check_tag("<2fr>")
    word_model = Tokenizer(train_model(["the cat sat", "a dog ran"] * 20, 9, "word"))
    with pytest.raises(ValueError, match="<2fr>"):
        word_model.check_tag("<2fr>")


def test_an_ordinary_word_is_no_tag() -> None:
    lines = ["<bt> the cat sat", "<bt> a dog ran"] * 20
    words = Tokenizer(train_model(lines, 10, "word"))
    assert len(words.source.processor.encode("cat")) == 1
    with pytest.raises(ValueError, match="no tag 'cat'"):
        words.check_tag("cat")
    words.check_tag("<bt>")  # the text of the training has this tag
    Tokenizer(train_model(lines, 290, tags=["cat"])).check_tag("cat")


def test_a_model_with_other_special_ids_is_refused() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["a man", "a woman"] * 20),
        model_writer=model,
        vocab_size=12,
        pad_id=0,
        unk_id=3,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=r"ids are \(3, 1, 2\)"):
        Tokenizer(model.getvalue())
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Tokenizer(b"nonsense")
    assert model_facts(model.getvalue()).rewrites


def test_a_vocabulary_of_the_wrong_size_names_one_that_would_do() -> None:
    lines = ["a man walks", "a woman walks"] * 20
    with pytest.raises(ValueError, match=r"largest .*size is (\d+)") as too_large:
        train_model(lines, 5000)
    with pytest.raises(ValueError, match=r"smallest .*size is (\d+)") as too_small:
        train_model(lines, 100)
    for error in (too_large, too_small):
        size = int("".join(filter(str.isdigit, str(error.value).rsplit(" ", 1)[1])))
        assert Tokenizer(train_model(lines, size)).source_size == size
    with pytest.raises(ValueError, match="no room for characters"):
        train_model(["a man"], 258, "char")


def test_a_word_vocabulary_has_whole_words() -> None:
    tokenizer = Tokenizer(train_model(["a man walks", "a woman walks"] * 20, 7, "word"))
    assert tokenizer.source_pieces(tokenizer.encode_source(["a man walks"]).ids)[:3] == ["▁a", "▁man", "▁walks"]


def test_the_sample_is_uniform_and_depends_on_the_seed_alone() -> None:
    lines = [f"line {index}" for index in range(1000)]

    def sampled(seed: int, step: int) -> list[str]:
        sample = Sample[str](50, seed)
        for start in range(0, len(lines), step):
            sample.add(lines[start : start + step])
        return sample.items()

    assert sampled(1, 7) == sampled(1, 1000) == sorted(sampled(1, 64), key=lambda line: int(line.split()[1]))
    assert len(sampled(1, 7)) == 50
    assert sampled(1, 7) != sampled(2, 7)
    middle = sum(int(line.split()[1]) for seed in range(20) for line in sampled(seed, 99)) / 1000
    assert abs(middle - 500) < 5 * 1000 / (12 * 1000) ** 0.5


def test_random_numbers_do_not_depend_on_where_the_block_begins() -> None:
    assert random_numbers(5, 10, 4).tolist() == random_numbers(5, 0, 14)[10:].tolist()
