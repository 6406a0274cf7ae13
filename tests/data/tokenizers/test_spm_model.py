"""A SentencePiece model with renumbered pieces segments as before."""

import io
import random

import pytest
import sentencepiece
from builders import REAL_LINES

from nmtkit.data.tokenizers.batch_encoder import BatchEncoder
from nmtkit.data.tokenizers.spm_model import pieces_of, renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import SubwordModel, Tokenizer, normalize

OTHER_LINES = [line.translate(str.maketrans("aeiou", "öüäei")) for line in REAL_LINES]


def processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def random_lines(seed: int) -> list[str]:
    draw = random.Random(seed)
    letters = "".join(REAL_LINES + OTHER_LINES) + "日 ß ▁"
    words = " ".join(REAL_LINES + OTHER_LINES).split()
    lines = [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(200)]
    return [*lines, *("".join(draw.choices(letters, k=draw.randint(0, 30))) for _ in range(200))]


def test_pieces_are_those_that_the_library_reads() -> None:
    model = train_model(REAL_LINES, 340, "unigram")
    theirs = processor(model)
    for id, piece in enumerate(pieces_of(model)):
        assert (theirs.id_to_piece(id), theirs.get_score(id)) == (piece.text, piece.score)
        assert theirs.is_control(id) == (piece.type == 3) and theirs.is_byte(id) == (piece.type == 6)


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_two_models_stand_on_one_table_of_ids(model_type: str) -> None:
    models = [
        train_model(lines, 340 if model_type != "char" else 300, model_type) for lines in (REAL_LINES, OTHER_LINES)
    ]
    table = sorted({piece.text for model in models for piece in pieces_of(model)[3:]} - {"<pad>"})
    random.Random(1).shuffle(table)
    table = ["<unk>", "<pad>", "</s>", *table, ">>de<<"]
    changed = [renumbered(model, table, control={">>de<<"}) for model in models]
    tokenizer = Tokenizer(*changed)
    assert tokenizer.joint and tokenizer.languages == {"de": len(table) - 1}
    assert Tokenizer.from_state(tokenizer.state()).fingerprint == tokenizer.fingerprint
    with pytest.raises(ValueError, match=r"--target-lang fr: .*de"):
        tokenizer.language_ids(None, "fr")
    for model, other in zip(models, changed, strict=True):
        before, after = processor(model), processor(other)
        assert len(after) == len(table)
        for line in random_lines(2):
            pieces = before.encode(line, out_type=str)
            assert after.encode(line, out_type=str) == pieces
            ids = after.encode(line)
            assert ids == [table.index(piece) if before.piece_to_id(piece) else 0 for piece in pieces]
            assert after.decode(ids) == before.decode(pieces)
        assert after.decode([table.index(">>de<<"), *ids]) == before.decode(pieces)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_text_that_a_model_does_not_know_is_looked_up_among_the_other_pieces_of_the_table(model_type: str) -> None:
    model = plain_model(model_type)
    own = [piece.text for piece in pieces_of(model)[3:]]
    table = ["<unk>", "<pad>", "</s>", "ß", *own, "日", "日本", ">>ß<<"]
    lines = ["", "日 ß", "a日本 日本語", f"ß{REAL_LINES[0]}日", REAL_LINES[1], ">>ß<<", "日日", *random_lines(3)]
    lines = [normalize(line) for line in lines]
    other = renumbered(model, table, control={">>ß<<"})
    id_of = {piece: id for id, piece in enumerate(table[:-1])}
    expected = [[id_of.get(piece, 0) for piece in processor(model).encode(line, out_type=str)] for line in lines]
    assert {id_of["日"], id_of["日本"], id_of["ß"], 0} <= {id for ids in expected for id in ids}
    tokenizer, by_block = Tokenizer(other), BatchEncoder(SubwordModel(other), "int32")
    text = "".join(f"{line}\n" for line in lines)
    for encoded in (tokenizer.encode_source(lines), tokenizer.encode_target(lines), by_block.encode(text)):
        assert [ids.tolist() for ids in encoded.split()] == [[*ids, 2] for ids in expected]
    assert tokenizer.decode_target(tokenizer.encode_target(["日 ßa"]).ids) == "日 ßa"
    assert tokenizer.knows("日本") and not tokenizer.knows("日日")


def plain_model(model_type: str) -> bytes:
    """Returns a model that spells no unknown letter in bytes."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(REAL_LINES), model_writer=file, vocab_size=60, model_type=model_type,
        hard_vocab_limit=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    return file.getvalue()


def test_pieces_without_an_id_are_named() -> None:
    model = train_model(REAL_LINES, 340, "unigram")
    table = [piece.text for piece in pieces_of(model)]
    with pytest.raises(ValueError, match=r"1 pieces .*no id"):
        renumbered(model, table[:-1])
    with pytest.raises(ValueError, match="two ids"):
        renumbered(model, [*table, table[-1]])
