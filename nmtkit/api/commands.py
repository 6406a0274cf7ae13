"""Python functions for the commands `nmtkit preprocess`, `nmtkit average-checkpoints` and `nmtkit score`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nmtkit.api.settings import PathLike, configs, items, named_arguments, paths, texts
from nmtkit.config import changed_flags, check_flags
from nmtkit.data.dataset.config import PREPROCESS_RULES, PreprocessConfig
from nmtkit.data.dataset.preprocess import preprocess as make_dataset
from nmtkit.data.dataset.report import DatasetReport
from nmtkit.scoring import metrics
from nmtkit.scoring.metrics import DEFAULT_METRICS, Score
from nmtkit.scoring.segments import METRIC_RULES, MetricName
from nmtkit.training import averaging


def preprocess(**settings: Any) -> DatasetReport:
    """Makes a dataset from parallel text, like `nmtkit preprocess`. `settings` are the flags of this command.

    >>> report = nmtkit.preprocess(
    ...     source_lang="en", target_lang="de", trainpref="data/train", validpref="data/val", destdir="data-bin"
    ... )
    >>> report.splits["train"].pairs
    29000

    Raises OSError or ValueError.
    """
    (config,) = configs("nmtkit.preprocess", settings, PreprocessConfig)
    check_flags(PREPROCESS_RULES, changed_flags(config), changed_flags(config))
    return make_dataset(config)


@named_arguments
def average(
    inputs: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    last: int | None = None,
    best: int | None = None,
    best_checkpoint_metric: str | None = None,
) -> Path:
    """Writes the average of checkpoints to `output` and returns this path, like `nmtkit average-checkpoints`.

    >>> nmtkit.average("checkpoints", "averaged.pt", last=5)

    `inputs` are checkpoint files, or the folder of a run if `last` or `best` is given. `best_checkpoint_metric` is the
    score that `best` compares; None means the loss. Raises OSError or ValueError.
    """
    if best is None and best_checkpoint_metric is not None:
        raise ValueError("best_checkpoint_metric does nothing without best")
    metric = best_checkpoint_metric or "loss"
    averaging.write(averaging.choose(list(map(Path, paths(inputs))), last=last, best=best, metric=metric), Path(output))
    return Path(output)


def score(
    hypotheses: Iterable[str],
    references: Iterable[str] | Iterable[Iterable[str]],
    metric: Sequence[str] = DEFAULT_METRICS,
    *,
    bootstrap: int = 0,
    **settings: Any,
) -> dict[str, Score]:
    """Scores a corpus, like `nmtkit score`. Returns a `Score` with its sacreBLEU signature for each metric.

    >>> nmtkit.score(["Ein Hund rennt."], ["Ein Hund läuft."], ["bleu"])["bleu"].value

    `references` are the lines of one reference text, or a list with the lines of each text, or empty if no metric needs
    a reference. If `bootstrap`, the number of resamples, is above 0, each score has a 95 % confidence interval.
    `settings` are `tokenize`, `lowercase`, `target_lang`, `languages`, `sources` and `device`. Raises ValueError for an
    unknown metric, for a setting that no metric reads and for unequal numbers of lines, and ImportError for a metric
    that is not installed.
    """
    names = (metric,) if isinstance(metric, str) else tuple(metric)
    (chosen,) = configs("nmtkit.score", settings, metrics.MetricSettings)
    check_flags(METRIC_RULES, changed_flags(chosen), {f"--metric {MetricName.parse(name).name}" for name in names})
    listed = list(items(references, "references"))
    several = [listed] if listed and isinstance(listed[0], str) else listed
    lines, of_references = texts(hypotheses, "hypotheses"), [texts(text, "a reference") for text in several]
    scores = metrics.score(lines, of_references, names, chosen, bootstrap=bootstrap)
    return dict(zip(names, scores, strict=True))
