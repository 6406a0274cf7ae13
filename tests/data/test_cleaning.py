import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.data import cleaning
from nmtkit.data.cleaning import Example, Findings, LineBytes, Rules
from nmtkit.data.corpus import Block, Span
from nmtkit.data.duplicates import pair_keys
from nmtkit.data.encoding import Files, PairEncoder, SideIds
from nmtkit.data.tokenizer import Tokenizer

CHARACTERS = st.sampled_from("ab ä\x00\x01\t\r\x1f\x7f\x80\x85\x9f\xa0\u2028")
LINES = st.lists(st.text(CHARACTERS, max_size=8), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(LINES)
def test_control_characters_and_nul_are_found_line_by_line(lines: list[str]) -> None:
    block = LineBytes("".join(line + "\n" for line in lines).encode())
    control = [any(re.fullmatch(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", c) for c in line) for line in lines]
    assert block.with_control().tolist() == control
    assert block.with_nul().tolist() == ["\0" in line for line in lines]
    assert [block.line(row).decode() for row in range(len(lines))] == lines


def test_every_reason_is_counted_once_and_the_first_one_wins(joint_tokenizer: Tokenizer, tmp_path: Path) -> None:
    rules = Rules(min_len=2, max_len=20, max_ratio=3.0, max_line_bytes=100, drop_equal=True, drop_control=True)
    pairs = [
        ("a man walks", "ein Mann läuft", None),
        ("a" * 101, "", cleaning.LONG_LINE),
        ("a\0b\x01", "ein Mann", cleaning.NUL),
        ("the man\x07 walks", "ein Mann läuft", cleaning.CONTROL),
        ("the man walks", "  ", cleaning.EMPTY),
        ("the man", "the man", cleaning.EQUAL),
        ("a", "ein Mann", cleaning.SHORT),
        ("a man " * 11, "ein Mann " * 11, cleaning.LONG),
        ("a man a man a man a man a man", "a man", cleaning.RATIO),
        ("a man a man", "ein Mann", None),
        ("the cat\t sees\r", "die Katze sieht", None),
        ("a dog", "ein Hund", cleaning.LEAKED),
    ]
    sides = ["".join(pair[side] + "\n" for pair in pairs).encode() for side in (0, 1)]
    spans = []
    for name, text in zip(("t.en", "t.de"), sides, strict=True):
        (tmp_path / name).write_bytes(text)
        spans.append(Span(tmp_path / name, 0, len(text)))
    block, files = Block(101, len(pairs), *spans), Files(tmp_path / "t.en", tmp_path / "t.de")
    encoder = PairEncoder(joint_tokenizer, ("uint16", "uint16"))
    held_out = encoder.encode_texts((b"a dog\n", b"ein  Hund\n"), files, 1)
    leaked = sorted_keys(encoder, held_out)

    encoded = encoder.encode(block, files, rules, leaked)
    kept = [pair for pair in pairs if pair[2] in (None, cleaning.LEAKED)]
    assert encoded.source.ids.tolist() == joint_tokenizer.encode_source([pair[0] for pair in kept]).ids.tolist()
    assert encoded.target.ids.tolist() == joint_tokenizer.encode_target([pair[1] for pair in kept]).ids.tolist()
    reasons = [pair[2] for pair in pairs if pair[2] not in (None, cleaning.LEAKED)]
    assert encoded.findings.dropped == dict.fromkeys(reasons, 1)
    assert encoded.findings.counted == {cleaning.LEAKED: 1}
    assert encoded.findings.examples[cleaning.EMPTY] == [Example(f"{tmp_path}/t.en:105", "the man walks", "  ")]

    dropping = encoder.encode(block, files, Rules(drop_leaked=True), leaked)
    assert dropping.findings.dropped[cleaning.LEAKED] == 1
    with pytest.raises(ValueError, match=r"t\.en:102 and \S*t\.de:102: over-long line; --strict"):
        encoder.encode(block, files, rules, leaked, strict=True)


def sorted_keys(encoder: PairEncoder, sides: tuple[SideIds, SideIds]) -> npt.NDArray[np.uint64]:
    return np.sort(pair_keys(encoder.hashes(*sides)))


def test_a_giant_line_is_dropped_without_being_read(joint_tokenizer: Tokenizer, tmp_path: Path) -> None:
    absent = Span(tmp_path / "absent", 0, 1 << 40)
    block, files = Block(7, 1, absent, Span(tmp_path / "t.de", 0, 5)), Files(tmp_path / "t.en", tmp_path / "t.de")
    encoder = PairEncoder(joint_tokenizer, ("uint16", "uint16"))
    encoded = encoder.encode(block, files, Rules(), np.empty(0, np.uint64))
    assert encoded.sizes == (0, 0, 0)
    assert encoded.findings.dropped == {cleaning.LONG_LINE: 1}


def test_findings_add_up_and_keep_the_first_examples() -> None:
    def examples(*places: int) -> list[Example]:
        return [Example(str(place), "", "") for place in places]

    total = Findings({"a": 1}, {"b": 2}, {"a": examples(1, 2, 3)})
    total.add(Findings({"a": 2, "c": 1}, {}, {"a": examples(4, 5, 6), "c": examples(7)}))
    assert total == Findings({"a": 3, "c": 1}, {"b": 2}, {"a": examples(1, 2, 3, 4, 5), "c": examples(7)})


@pytest.mark.parametrize("wrong", [{"min_len": 5, "max_len": 4}, {"max_ratio": 0.5}, {"max_line_bytes": 0}])
def test_rules_that_leave_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--"):
        Rules(**wrong)
