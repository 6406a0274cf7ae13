"""Decoders over the ranks of torchrun and over worker processes."""

import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import save_transformer

from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.jobs.ranks import StoreChannel
from nmtkit.translation import parallel
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchHypotheses, Hypothesis, Segment, SegmentBatch
from nmtkit.translation.translator import Translator


class Store:
    """The store of torchrun, for two threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.set, self.get, self.delete_key = self.values.__setitem__, self.values.__getitem__, self.values.pop

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def echo(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
    for number, batch in enumerate(batches):
        yield number, [[Hypothesis(segment.ids, 0.0, 0.0)] for segment in batch]


def test_the_other_ranks_decode_until_the_last_of_several_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    store, decoded = Store(), []

    def counted(batches: Iterable[SegmentBatch]) -> Iterator[Any]:
        for number, hypotheses in echo(batches):
            decoded.extend(hypotheses)
            yield number, hypotheses

    monkeypatch.setattr(parallel, "open_store", lambda: store)
    monkeypatch.setattr(parallel.distributed, "world_size", lambda: 2)
    channel = StoreChannel(store, 1, at_rank_zero=False)
    other = threading.Thread(target=parallel.decode_for, args=(channel, counted), daemon=True)
    other.start()
    with parallel.distribute(echo) as decoder:
        assert decoder is not None
        for text in range(3):
            before = len(decoded)
            found = dict(decoder([Segment([text, number])] for number in range(5)))
            assert found == {number: [[Hypothesis([text, number], 0.0, 0.0)]] for number in range(5)}
            assert len(decoded) > before
    other.join(20)
    assert not other.is_alive()


def test_the_log_names_the_engine_of_several_workers_once(tmp_path: Path) -> None:
    translator = Translator.load(save_transformer(tmp_path / "model.pt"), engine="slots")
    handler, logger = (
        logging.FileHandler(tmp_path / "log"),
        logging.getLogger("nmtkit"),
    )  # workers write to the file, too
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with parallel.worker_processes(translator, SearchOptions(max_len_b=2), 2, pytest.fail) as decoder:
            found = dict(decoder([Segment([5, EOS])] for _ in range(6)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert [len(hypotheses) for hypotheses in found.values()] == [1] * 6
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("engine: torch,")  # the slots are shared by all calls of a process
