from pathlib import Path

import numpy as np
import pytest

from nmtkit.data.dataset import mixing
from nmtkit.data.dataset.mixing import CorpusRows, mixed_rows, weights_of_temperature, write_offsets


@pytest.mark.parametrize("chunk_rows", [1, 7, 100, 1 << 16])
@pytest.mark.parametrize("weights", [(1.0, 2.5, 1.0), (3.0, 1.25, 0.5), (0.1, 1.0, 700.7)])
def test_every_corpus_has_its_exact_share_of_every_beginning_of_an_epoch(
    weights: tuple[float, ...], chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixing, "CHUNK_ROWS", chunk_rows)
    bounds = [0, 2000, 2400, 2410]
    dropped = np.zeros(2410, np.uint8)
    dropped[[3, 1000, 2001, 2399]] = 1
    kept = [1998, 398, 10]
    corpora = [CorpusRows(*it) for it in zip(bounds[:-1], bounds[1:], weights, strict=True)]
    rows = np.concatenate(list(mixed_rows(corpora, dropped, 1)))
    counts = np.bincount(rows, minlength=2410)
    assert not counts[dropped == 1].any()
    sizes = []
    for start, end, weight, pairs in zip(bounds[:-1], bounds[1:], weights, kept, strict=True):
        own = counts[start:end][dropped[start:end] == 0]
        assert set(own.tolist()) <= {int(weight), int(weight) + 1}  # no pair is lost or favoured
        sizes.append(int(own.sum()))
        assert sizes[-1] == pytest.approx(weight * pairs, abs=0.5)
    corpus = np.searchsorted(bounds, rows, side="right") - 1
    beginnings = np.arange(1, len(rows) + 1)
    for index, size in enumerate(sizes):
        assert np.abs(np.cumsum(corpus == index) - beginnings * size / len(rows)).max() <= 3
    assert np.concatenate(list(mixed_rows(corpora, dropped, 1))).tolist() == rows.tolist()
    if chunk_rows > 1:
        assert np.concatenate(list(mixed_rows(corpora, dropped, 2))).tolist() != rows.tolist()


def test_one_corpus_stays_in_its_order() -> None:
    rows = np.concatenate(list(mixed_rows([CorpusRows(3, 200_000, 1.0)], None, 1)))
    assert rows.tolist() == list(range(3, 200_000))


def test_temperature_gives_the_shares_of_the_formula() -> None:
    sizes = [1_000_000, 10_000, 100]
    weights = weights_of_temperature(sizes, 5.0)
    seen = np.array(sizes) * weights
    share = np.array(sizes) ** 0.2
    assert np.allclose(seen / seen.sum(), share / share.sum())
    assert min(weights) == 1
    assert weights_of_temperature(sizes, 1.0) == pytest.approx([1, 1, 1])
    assert weights_of_temperature([1000, 0], 0.5) == [1, 1]  # an empty corpus has no influence


def test_offsets_are_sums_of_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_bytes(np.array([3, 1, 4, 1, 5], np.int32).tobytes())
    write_offsets(tmp_path / "lengths", tmp_path / "offsets")
    assert np.fromfile(tmp_path / "offsets", np.int64).tolist() == [0, 3, 4, 8, 9]
