from pathlib import Path

import numpy as np
import pytest

from nmtkit.data.corpora import dropping
from nmtkit.data.corpora.dropping import RowHash, find_duplicates, pair_keys, partition, salt


def test_duplicates_are_those_a_set_would_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropping, "PARTITION_PAIRS", 100)
    monkeypatch.setattr(dropping, "CHUNK_PAIRS", 37)
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 1 << 64, 40, np.uint64)  # sources and targets meet in every combination
    hashes = numbers[rng.integers(0, 40, (1500, 2))]
    (tmp_path / "hashes").write_bytes(hashes.tobytes())
    files = partition(tmp_path / "hashes", tmp_path)
    assert len(files) == 15
    seen, expected = set(), []
    for row, key in enumerate(map(tuple, hashes.tolist())):
        if key in seen:
            expected.append(row)
        seen.add(key)
    assert sorted(row for file in files for row in find_duplicates(file).tolist()) == expected


def test_the_best_of_equal_pairs_stays(tmp_path: Path) -> None:
    hashes = np.array([[1, 2], [1, 3], [1, 2], [1, 2], [1, 3], [4, 4]], np.uint64)
    (tmp_path / "hashes").write_bytes(hashes.tobytes())
    (file,) = partition(tmp_path / "hashes", tmp_path)
    quality = np.array([0.5, 0.7, 0.9, 0.9, 0.7, 0.1], np.float32)
    assert find_duplicates(file, quality).tolist() == [0, 3, 4]  # of equally good rows, the first row stays
    assert find_duplicates(file).tolist() == [2, 3, 4]


@pytest.mark.parametrize("part", [1 << 15, 3, 1])
def test_hashes_are_those_of_a_plain_loop(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropping, "PART_TOKENS", part)
    hasher = RowHash(50, 0)
    lengths = np.array([1, 3, 2500, 4])
    ids = np.random.default_rng(0).integers(0, 50, lengths.sum()).astype(np.uint16)
    expected, start = [], 0
    for length in lengths.tolist():
        total = 0
        for position, token in enumerate(ids[start : start + length].tolist()):
            turn, index = divmod(position, dropping.POSITIONS)
            total += int(hasher._id_numbers[token]) * (int(hasher._position_numbers[index]) + 2 * turn)
        expected.append(total % (1 << 64))
        start += length
    assert hasher(ids, lengths).tolist() == expected
    assert RowHash(50, 0)(ids, lengths).tolist() == expected
    assert RowHash(50, 1)(ids, lengths).tolist() != expected


def test_different_sentences_have_different_hashes() -> None:
    hasher = RowHash(8, 0)
    rows = [(a, b, c) for a in range(8) for b in range(8) for c in range(8)] + [
        (a, b) for a in range(8) for b in range(8)
    ]
    ids = np.array([token for row in rows for token in row])
    assert len(np.unique(hasher(ids, np.array(list(map(len, rows)))))) == len(rows)


def test_swapped_sides_have_another_key() -> None:
    keys = np.array([[1, 2], [2, 1], [1, 1], [2, 2], [0, 3], [3, 0]], np.uint64)
    assert len(np.unique(pair_keys(keys))) == len(keys)
    assert salt("<2de>") != salt("<2fr>")
