from pathlib import Path

import numpy as np
import pytest

from nmtkit.data import mixing
from nmtkit.data.mixing import CorpusRows, mixed_rows, weights_of_temperature, write_offsets, write_rows


def test_weights_are_kept_on_the_whole_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "CHUNK_ROWS", 100)
    corpora = [CorpusRows(0, 5000, 1.0), CorpusRows(5000, 6000, 2.5)]
    rows = np.concatenate(list(mixed_rows(corpora, 1)))
    counts = np.bincount(rows, minlength=6000)
    assert set(counts[:5000].tolist()) == {1}
    assert set(counts[5000:].tolist()) == {2, 3}
    assert abs(counts[5000:].mean() - 2.5) < 0.1
    assert np.concatenate(list(mixed_rows(corpora, 1))).tolist() == rows.tolist()
    for part in np.array_split(rows, 10):  # both corpora all the way
        assert 0.2 < (part >= 5000).mean() < 0.5


def test_one_corpus_stays_in_its_order() -> None:
    assert np.concatenate(list(mixed_rows([CorpusRows(3, 200_000, 1.0)], 1))).tolist() == list(range(3, 200_000))


def test_temperature_gives_the_shares_of_the_formula() -> None:
    sizes = [1_000_000, 10_000, 100]
    weights = weights_of_temperature(sizes, 5.0)
    seen = np.array(sizes) * weights
    share = np.array(sizes) ** 0.2
    assert np.allclose(seen / seen.sum(), share / share.sum())
    assert min(weights) == 1
    assert weights_of_temperature(sizes, 1.0) == pytest.approx([1, 1, 1])


def test_rows_are_written_without_those_dropped(tmp_path: Path) -> None:
    lengths = np.array([3, 1, 4, 1, 5], np.int32)
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    write_offsets(tmp_path / "lengths", tmp_path / "offsets")
    assert np.fromfile(tmp_path / "offsets", np.int64).tolist() == [0, 3, 4, 8, 9]
    runs = iter([np.array([0, 1, 2]), np.array([2, 3, 4])])
    dropped = np.array([0, 1, 0, 0, 1], np.uint8)
    outputs = [tmp_path / "offsets.out", tmp_path / "lengths.out"]
    assert write_rows(runs, dropped, [tmp_path / "offsets", tmp_path / "lengths"], outputs) == 4
    assert np.fromfile(outputs[0], np.int64).tolist() == [0, 4, 4, 8]
    assert np.fromfile(outputs[1], np.int32).tolist() == [3, 4, 4, 1]
