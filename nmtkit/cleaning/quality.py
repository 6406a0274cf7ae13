"""Scores pairs by a metric that reads no reference, such as CometKiwi, for `nmtkit clean --quality`."""

from collections.abc import Sequence

import numpy as np

from nmtkit.cleaning.filters.text_block import Scores
from nmtkit.jobs import progress
from nmtkit.jobs.distributed import rank_device
from nmtkit.scoring.segments import check_available, check_segment_metric
from nmtkit.scoring.sentence_metrics import segment_metric

PAIRS = 1024  # number of pairs between two updates of the progress


class EstimatedQuality:
    """The quality of each pair under the metric NAME or NAME=MODEL, from 0 to 1 (best)."""

    unit = "quality"
    passes = 1

    def __init__(self, metric: str) -> None:
        """Raises ValueError for an unknown metric and a metric that reads a reference.

        Raises OSError for a missing folder, and ImportError for a missing package. These checks come first, because
        `fit` loads the model only after the filters have scored all pairs.
        """
        check_available(f"--quality {metric}", check_segment_metric(metric, "--quality", reference=False))
        self._metric = metric

    def fit(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Loads the model. The pairs are not used, because the model is already trained."""
        segment_metric(self._metric, rank_device("auto", 1))

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> Scores:
        metric = segment_metric(self._metric, rank_device("auto", 1))
        qualities: list[float] = []
        for start in range(0, len(sources), PAIRS):
            part = slice(start, start + PAIRS)
            qualities += metric.qualities(targets[part], sources=sources[part])
            progress.advance(len(sources[part]))
        return np.clip(np.array(qualities, np.float32) / 100, 0, 1)
