import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.data.corpora.blocks import LineBlock, LineSpan
from nmtkit.data.corpora.corpus import Corpus
from nmtkit.data.corpora.dropping import PairExample, ReasonCounts, pair_keys
from nmtkit.data.dataset import drop_reasons
from nmtkit.data.dataset.config import PreprocessConfig
from nmtkit.data.dataset.drop_reasons import LineBytes
from nmtkit.data.dataset.encoding import BlockEncoder, EncodingWorker
from nmtkit.data.dataset.parallel_corpora import ParallelCorpus
from nmtkit.data.dataset.storage import SideStorage, Sizes
from nmtkit.data.tokenizers.tokenizer import Tokenizer

CHARACTERS = st.sampled_from("ab ä\x00\x01\t\r\x1f\x7f\x80\x85\x9f\xa0\u2028")
LINES = st.lists(st.text(CHARACTERS, max_size=8), min_size=1, max_size=8)


def config(**settings: Any) -> PreprocessConfig:
    return PreprocessConfig(source_lang="en", target_lang="de", train=("t",), destdir=Path("data"), **settings)


@settings(max_examples=60, deadline=None)
@given(LINES)
def test_control_characters_and_nul_are_found_line_by_line(lines: list[str]) -> None:
    block = LineBytes("".join(line + "\n" for line in lines).encode())
    control = [any(re.fullmatch(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", c) for c in line) for line in lines]
    assert block.with_control().tolist() == control
    assert block.matches(re.compile(b"\0")).tolist() == ["\0" in line for line in lines]
    assert [block.line(row).decode() for row in range(len(lines))] == lines


def test_every_reason_is_counted_once_and_the_first_one_wins(joint_tokenizer: Tokenizer, tmp_path: Path) -> None:
    limits = {"min_len": 2, "max_len": 20, "max_ratio": 3.0, "max_line_bytes": 100}
    dropping = config(**limits, drop_equal=True, drop_control=True)
    pairs = [
        ("a man walks", "ein Mann läuft", None),
        ("a" * 101, "", drop_reasons.LONG_LINE),
        ("a\0b\x01", "ein Mann", drop_reasons.NUL),
        ("the man\x07 walks", "ein Mann läuft", drop_reasons.CONTROL),
        ("the man walks", "  ", drop_reasons.EMPTY),
        ("the man", "the man", drop_reasons.EQUAL),
        ("a", "ein Mann", drop_reasons.SHORT),
        ("a man " * 11, "ein Mann " * 11, drop_reasons.LONG),
        ("a man a man a man a man a man", "a man", drop_reasons.RATIO),
        ("a man a man", "ein Mann", None),
        ("the cat\t sees", "die Katze sieht", None),
        ("a dog", "ein Hund", drop_reasons.OVERLAP),
    ]
    sides = ["".join(pair[side] + "\n" for pair in pairs).encode() for side in (0, 1)]
    spans = []
    for name, text in zip(("t.en", "t.de"), sides, strict=True):
        (tmp_path / name).write_bytes(text)
        spans.append(LineSpan(tmp_path / name, 0, len(text)))
    block = LineBlock(101, len(pairs), tuple(spans))
    corpus = ParallelCorpus.of(Corpus(tmp_path / "t.en", tmp_path / "t.de"))
    encoder = BlockEncoder(joint_tokenizer, ("uint16", "uint16"))
    held_out = encoder.encode([b"a dog\n", b"ein  Hund\n"], corpus, 1)
    held_out_keys = np.sort(pair_keys(encoder.hashes(corpus, held_out)[0]))

    arrays, counts = encoded(block, corpus, joint_tokenizer, dropping, held_out_keys, tmp_path)
    kept = [pair for pair in pairs if pair[2] in (None, drop_reasons.OVERLAP)]
    assert arrays["source.ids"].tolist() == joint_tokenizer.encode_source([pair[0] for pair in kept]).ids.tolist()
    assert arrays["target.ids"].tolist() == joint_tokenizer.encode_target([pair[1] for pair in kept]).ids.tolist()
    reasons = [pair[2] for pair in pairs if pair[2] not in (None, drop_reasons.OVERLAP)]
    assert counts.dropped == dict.fromkeys(reasons, 1)
    assert counts.kept == {drop_reasons.OVERLAP: 1}
    assert counts.examples[drop_reasons.EMPTY] == [PairExample(f"{tmp_path}/t.en:105", "the man walks", "  ")]

    _, counts = encoded(block, corpus, joint_tokenizer, config(drop_overlap=True), held_out_keys, tmp_path)
    assert counts.dropped[drop_reasons.OVERLAP] == 1
    with pytest.raises(ValueError, match=r"t\.en:102 and \S*t\.de:102: .*--strict"):
        encoded(block, corpus, joint_tokenizer, config(**limits, strict=True), held_out_keys, tmp_path)


def encoded(
    block: LineBlock, corpus: ParallelCorpus, tokenizer: Tokenizer, config: PreprocessConfig,
    held_out_keys: npt.NDArray[np.uint64], folder: Path,
) -> tuple[dict[str, npt.NDArray[Any]], ReasonCounts]:  # fmt: skip
    """Encodes a block of a training set. Returns the written arrays and the counts by reason."""
    storage = SideStorage(config, tokenizer, folder, folder)
    worker = EncodingWorker(tokenizer, config, held_out_keys, storage)
    sizes, counts, *_ = worker.encode(block, corpus)
    worker.write(Sizes())
    arrays = {name: np.fromfile(storage.path("train", name), np.uint16)[: sizes[name]] for name in storage.ids_of_sides}
    return arrays, counts


def test_a_giant_line_is_dropped_without_being_read(joint_tokenizer: Tokenizer, tmp_path: Path) -> None:
    absent = LineSpan(tmp_path / "absent", 0, 1 << 40)
    block = LineBlock(7, 1, (absent, LineSpan(tmp_path / "t.de", 0, 5)), over_long=True)
    corpus = ParallelCorpus.of(Corpus(tmp_path / "t.en", tmp_path / "t.de"))
    arrays, counts = encoded(block, corpus, joint_tokenizer, config(), np.empty(0, np.uint64), tmp_path)
    assert not any(map(len, arrays.values()))
    assert counts.dropped == {drop_reasons.LONG_LINE: 1}


def test_statistics_add_up_and_keep_the_first_examples() -> None:
    def examples(*lines: int) -> list[PairExample]:
        return [PairExample(str(line), "", "") for line in lines]

    total = ReasonCounts({"a": 1}, {"b": 2}, {"a": examples(1, 2, 3)})
    total.add(ReasonCounts({"a": 2, "c": 1}, {}, {"a": examples(4, 5, 6), "c": examples(7)}))
    assert total == ReasonCounts({"a": 3, "c": 1}, {"b": 2}, {"a": examples(1, 2, 3, 4, 5), "c": examples(7)})


@pytest.mark.parametrize("wrong", [{"min_len": 5, "max_len": 4}, {"max_ratio": 0.5}, {"max_line_bytes": 0}])
def test_limits_that_leave_no_pair_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--"):
        config(**wrong)
