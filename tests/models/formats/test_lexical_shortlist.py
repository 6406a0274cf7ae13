import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import tiny_tokenizer

from nmtkit.data.tokenizers.spm_model import pieces_of, renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.formats.lexical_shortlist import LexicalEntries, read, write_binary, write_text

MAGIC = 0xF11A48D5013417F5


def marian_checksum(body: bytes) -> int:
    """Computes `hashMem` of Marian number by number. An incomplete last number does not count."""
    seed = 0
    for position in range(0, len(body) - 7, 8):
        (value,) = struct.unpack_from("<Q", body, position)
        seed = seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % 2**64)
    return seed


def binary(lists: list[list[int]], frequent: int) -> bytes:
    ends = [sum(map(len, lists[:end])) for end in range(len(lists) + 1)]
    entries = [target for targets in lists for target in targets]
    body = struct.pack("<QQQQ", frequent, 50, len(ends), len(entries))
    body += struct.pack(f"<{len(ends)}Q", *ends) + struct.pack(f"<{len(entries)}I", *entries)
    return struct.pack("<QQ", MAGIC, marian_checksum(body)) + body


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_the_checksum_is_that_of_marian() -> None:
    # boost::hash_combine by hand: 0 ^ (1 + c) = s; s ^ (2 + c + (s << 6) + (s >> 2)) with c = 0x9E3779B9
    assert marian_checksum(struct.pack("<Q", 1)) == 0x9E3779BA
    second = 0x9E3779BA ^ (0x9E3779BB + 0x9E3779BA * 64 + 0x9E3779BA // 4)
    assert marian_checksum(struct.pack("<QQ", 1, 2)) == second


def test_a_binary_file_has_the_bytes_of_marian(tokenizer: Tokenizer, tmp_path: Path) -> None:
    size = tokenizer.source_size
    entries = LexicalEntries(np.array([7, 5, 7, size]), np.array([9, 6, 8, 30]), None, np.array([4, 11]))
    write_binary(tmp_path / "lex.bin", entries, tokenizer)
    lists: list[list[int]] = [[] for _ in range(size)]
    lists[2], lists[5], lists[7], lists[-1] = [4, 11], [6], [8, 9], [2]  # frequent pieces: the list of eos
    written = (tmp_path / "lex.bin").read_bytes()
    expected = binary(lists, 3)
    assert written[16:24] == expected[16:24] and written[32:] == expected[32:]
    assert written[24:32] == struct.pack("<Q", 2)  # the longest list
    assert written[:16] == struct.pack("<QQ", MAGIC, marian_checksum(written[16:]))


def test_a_binary_file_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lists: list[list[int]] = [[] for _ in range(tokenizer.source_size)]
    lists[5], lists[7] = [6], [8, 9]
    (tmp_path / "lex.bin").write_bytes(binary(lists, 4))
    entries = read(tmp_path / "lex.bin", tokenizer)
    assert entries.sources.tolist() == [5, 7, 7] and entries.targets.tolist() == [6, 8, 9]
    assert entries.probabilities is None and entries.frequent is not None and entries.frequent.tolist() == [0, 1, 2, 3]


def test_the_ids_of_another_vocabulary_are_converted_by_their_pieces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = tiny_tokenizer(300)  # has fewer merges than `tokenizer`, so characters have other ids
    (tmp_path / "other.spm").write_bytes(next(iter(other.files().values())))
    pieces = other.source_pieces(range(other.source_size))
    lists: list[list[int]] = [[] for _ in range(other.source_size)]
    lists[290] = [295, 270]
    (tmp_path / "lex.bin").write_bytes(binary(lists, 3))
    entries = read(tmp_path / "lex.bin", tokenizer, (tmp_path / "other.spm",))
    assert tokenizer.source_pieces(entries.sources.tolist()) == [pieces[290]] * 2
    assert tokenizer.target_pieces(entries.targets.tolist()) == [pieces[295], pieces[270]]
    with pytest.raises(ValueError, match=r"300 source pieces, .*330"):
        read(tmp_path / "lex.bin", tokenizer)


def test_a_target_piece_beyond_the_vocabulary_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The message compared the numbers of source pieces, which are equal here."""
    (tmp_path / "lex.bin").write_bytes(binary([[2, 1_000_000]] * tokenizer.source_size, 3))
    with pytest.raises(ValueError, match="1,000,000"):
        read(tmp_path / "lex.bin", tokenizer)


def test_a_text_file_has_target_source_and_probability(tokenizer: Tokenizer, tmp_path: Path) -> None:
    piece = tokenizer.source_pieces(range(tokenizer.source_size))
    path = tmp_path / "lex.s2t"
    entries = LexicalEntries(
        np.array([300, 301, tokenizer.source_size]), np.array([302, 303, 304]), np.array([0.25, 0.5, 0.125]), None
    )
    write_text(path, entries, tokenizer)
    lines = [f"{piece[302]} {piece[300]} 0.2500000", f"{piece[303]} {piece[301]} 0.5000000"]
    assert path.read_text(encoding="utf-8").splitlines() == [*lines, f"{piece[304]} NULL 0.1250000"]
    path.write_text("\n".join([*lines, f"{piece[302]} absent 0.5", f"{piece[303]} NULL 0.1", ""]), encoding="utf-8")
    again = read(path, tokenizer)
    assert (again.sources.tolist(), again.targets.tolist(), again.unknown) == ([300, 301], [302, 303], 1)
    assert again.probabilities is not None and again.probabilities.tolist() == [0.25, 0.5]


def test_pieces_that_are_spaces_are_read_again(tmp_path: Path) -> None:
    tokenizer = Tokenizer(train_model(["Bonjour\u00a0: le chat"] * 20, 285, "bpe"))
    space = tokenizer.source_pieces(range(tokenizer.source_size)).index("\u00a0")
    write_text(tmp_path / "lex.s2t", LexicalEntries(*(np.array([x]) for x in (space, space, 0.5)), None), tokenizer)
    assert read(tmp_path / "lex.s2t", tokenizer).targets.tolist() == [space]


def test_pieces_of_two_models_with_one_table_have_the_names_of_the_table(tmp_path: Path) -> None:
    models = [train_model([text] * 20, 280, "bpe") for text in ("the cat runs", "die Katze läuft")]
    pieces = {piece.text for model in models for piece in pieces_of(model)} - {"<unk>", "<s>", "</s>"}
    table = ["<unk>", "<s>", "</s>", *sorted(pieces)]
    tokenizer = Tokenizer(*(renumbered(model, table) for model in models))
    assert tokenizer.source_pieces(range(len(table))) != table != tokenizer.target_pieces(range(len(table)))
    ids = np.arange(3, len(table))
    write_text(tmp_path / "lex.s2t", LexicalEntries(ids, ids, np.full(len(ids), 0.5), None), tokenizer)
    names = [line.split(" ")[:2] for line in (tmp_path / "lex.s2t").read_text(encoding="utf-8").splitlines()]
    assert names == [[piece, piece] for piece in table[3:]]
    assert read(tmp_path / "lex.s2t", tokenizer).sources.tolist() == ids.tolist()


def test_the_best_entries_of_each_source_piece_are_kept() -> None:
    entries = LexicalEntries(np.array([5, 6, 5, 5]), np.array([1, 2, 3, 4]), np.array([0.1, 0.2, 0.5, 0.3]), None)
    best = entries.best(2)
    assert list(zip(best.sources.tolist(), best.targets.tolist(), strict=True)) == [(5, 3), (5, 4), (6, 2)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated or damaged"),
        (lambda data: data[:40], "truncated or damaged"),
        (lambda data: data[:60] + b"\x01" + data[61:], "match their checksum"),
    ],
    ids=["short", "header", "flipped"],
)
def test_damaged_binary_files_are_refused(
    damage: Callable[[bytes], bytes], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "lex.bin").write_bytes(damage(binary([[2]] * tokenizer.source_size, 3)))
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "lex.bin", tokenizer)


def test_wrong_text_files_are_named_with_their_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "lex").write_text("a b 0.5\na b\n")
    with pytest.raises(ValueError, match="lex, line 2: "):
        read(tmp_path / "lex", tokenizer)
    entries = LexicalEntries(np.array([5]), np.array([6]), None, np.array([4]))
    with pytest.raises(ValueError, match="binary shortlist"):
        write_text(tmp_path / "out", entries, tokenizer)
