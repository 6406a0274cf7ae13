"""Scores pairs by a metric that reads no reference, such as CometKiwi, for `nmtkit clean --quality`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nmtkit.cleaning.filters.text_block import Scores
from nmtkit.config.files import HUB_PREFIX, is_hub_name
from nmtkit.jobs import progress
from nmtkit.jobs.distributed import rank_device
from nmtkit.scoring.segments import check_installed, check_segment_metric
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
        model = check_segment_metric(metric, "--quality", reference=False).model
        check_installed(f"--quality {metric}")
        if model is not None and not is_hub_name(model) and not Path(model).exists():
            raise FileNotFoundError(f"--quality {metric}: no such folder; models of the Hub are {HUB_PREFIX}ORG/NAME")
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
