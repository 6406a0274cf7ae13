"""Copied pieces, links and parts of lines use the text and the spaces of pieces, for vocabularies of every kind."""

import io
import re
import sys

import pytest
import sentencepiece
from builders import tiny_tokenizer

from nmtkit.data.tokenizers.piece_spans import decoded_pieces, source_spans
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import UNK, Tokenizer
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Hypothesis, Request

LINES = ["the dog runs in the park .", "einer der Hunde ( im Park ) .", "a cat sleeps !"] * 20


def imported(**settings):
    """Returns a vocabulary as of other toolkits: without byte fallback, and with the rules of NFKC."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=40, hard_vocab_limit=False, unk_id=0, bos_id=1,
        eos_id=2, normalization_rule_name="nmt_nfkc", minloglevel=2, **settings,
    )  # fmt: skip
    return Tokenizer(model.getvalue())


WORDS, UNIGRAM, BPE = Tokenizer(train_model(LINES, 20, "word")), imported(), tiny_tokenizer()
SUBWORDS_TO_WORDS = Tokenizer(UNIGRAM.source_model, WORDS.source_model)


def output_of(tokenizer, source, pieces, alignment=None):
    """Returns the translation whose <unk> number i attends to the source piece that has the text `pieces[i]` in <>."""
    search = SearchOptions(replace_unknown=True, alignment=alignment)
    pipeline = Pipeline(tokenizer, search)
    (line,) = pipeline.segments([Request(source)])
    (leaf,) = line.leaves()
    ids = leaf.input.ids
    encoded = tokenizer.source.processor.encode(tokenizer.source.prepared_line(source), out_type=str)
    assert len(encoded) == len(ids) - 1
    tokens, attention, known = [], [], tokenizer.target_pieces(range(tokenizer.target_size))
    for piece in pieces:
        copied = re.fullmatch("<(.+)>", piece)
        tokens.append(UNK if copied else known.index(piece))
        row = [0.0] * len(ids)
        row[encoded.index(copied[1]) if copied else len(encoded) - 1] = 1.0
        attention.append(row)
    leaf.hypotheses = [Hypothesis(tokens, 0.0, 0.0, attention)]
    return pipeline.translation(line).hypotheses[0]


@pytest.mark.parametrize(
    ("tokenizer", "source", "pieces", "text"),
    [
        # SentencePiece joins successive unknown words to one piece
        (WORDS, "the New Quxville", ["▁einer", "<▁New▁Quxville>"], "einer New Quxville"),
        (WORDS, "Quxville runs", ["<▁Quxville>", "▁der"], "Quxville der"),
        (WORDS, "in Quxville .", ["▁im", "<▁Quxville>", "▁."], "im Quxville ."),
        (WORDS, "in ▁Qux .", ["▁im", "<▁\ufdd0_Qux>", "▁."], "im ▁Qux ."),
        (UNIGRAM, "the Ж .", ["▁", "e", "i", "n", "▁", "<Ж>", "."], "ein Ж."),
        (UNIGRAM, "the ЖЩ dog", ["▁", "<ЖЩ>", "▁d", "e"], "ЖЩ de"),
        (UNIGRAM, "the Жe Щ", ["▁", "e", "▁", "<Ж>", "e", "▁", "<Щ>", "n"], "e Жe Щn"),
        (UNIGRAM, "the (Жe)", ["▁", "(", "<Ж>", "e", ")"], "(Жe)"),
        (UNIGRAM, "the Ж dog", ["▁", "e", "<▁d>", "n"], "e dn"),
        (UNIGRAM, "Ω… ﬁ", ["▁", "<Ω>", "."], "Ω."),
        (SUBWORDS_TO_WORDS, "the Ж in", ["▁im", "<Ж>", "▁."], "im Ж ."),
        (SUBWORDS_TO_WORDS, "the Ж dog", ["<Ж>", "<▁d>"], "Ж d"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("alignment", [None, "words", "hard"])
def test_a_copied_piece_has_the_spaces_of_the_pieces(tokenizer, source, pieces, text, alignment):
    translation = output_of(tokenizer, source, pieces, alignment)
    assert translation.text == text
    if alignment == "words":
        copied = [
            (source[start:end], translation.text[first:last]) for start, end, first, last in translation.alignment
        ]
        for word in re.findall("<▁?([^▁_]+?)>", " ".join(pieces)):
            assert any(word in one and word in other for one, other in copied), copied


@pytest.mark.parametrize("tokenizer", [WORDS, UNIGRAM, BPE], ids=["words", "unigram", "bpe"])
@pytest.mark.parametrize(
    "line",
    [
        "the dog runs in the park .", "a … b. c. ﬁ! ．", "x ▁ b _c ▁▁ \ufdd0 d", "😀a ü Ж", "  the   dog", "。「犬」。",
        "", "½ km² … b", "Ωmega ﬃ the",
    ],
)  # fmt: skip
def test_the_spans_of_the_pieces_follow_each_other_and_cover_the_line(tokenizer, line):
    ids = tokenizer.encode_source([line]).ids[:-1].tolist()
    spans = source_spans(tokenizer.source, ids, line)
    assert len(spans) == len(ids)
    covered, last = set(), (0, 0)
    for start, end in spans:
        assert start >= last[1] or (start, end) == last or start == end == last[0]
        covered |= set(range(start, end))
        last = (start, end)
    assert all(index in covered or line[index].isspace() for index in range(len(line)))
    text, spans = decoded_pieces(tokenizer.target, tokenizer.target_pieces(ids))
    assert text == tokenizer.decode_target(ids) and len(spans) == len(ids)


def test_each_known_piece_has_its_text_at_its_span():
    line = "the dog ▁ runs … in _ the park ."
    for tokenizer in (UNIGRAM, BPE):
        ids = tokenizer.encode_source([line]).ids[:-1].tolist()
        for piece, (start, end) in zip(
            tokenizer.source_pieces(ids), source_spans(tokenizer.source, ids, line), strict=True
        ):
            letters = re.fullmatch("▁?([a-z]+)", piece)
            assert letters is None or line[start:end].strip() == letters[1], (piece, start, end)


def test_spans_need_no_package_for_protocol_buffers(monkeypatch):
    """SentencePiece does not install protobuf; on a fresh installation, documents were not translated."""
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    monkeypatch.setattr(sentencepiece, "_protobuf_loaded", False)
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_pb2", raising=False)
    monkeypatch.delattr(sentencepiece, "sentencepiece_pb2", raising=False)
    assert source_spans(BPE.source, BPE.encode_source("the dog").ids[:-1], "the dog")[-1][1] == len("the dog")
    assert decoded_pieces(BPE.target, ["▁dog", "…"]) == ("dog…", [(0, 3), (3, 4)])
