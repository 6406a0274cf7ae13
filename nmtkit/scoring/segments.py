"""The interface of metrics that score single translations, for every command that compares or chooses candidates.

A metric is named as `NAME` or `NAME=MODEL`. MODEL is a local folder, or `hf:ORG/NAME[@REVISION]` of the Hugging Face
Hub; only neural metrics have a model.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from nmtkit.config import FlagRule, suggestion
from nmtkit.config.files import HUB_PREFIX, is_hub_name
from nmtkit.jobs import progress

STRING_METRICS = ("bleu", "chrf", "chrf++", "ter", "gleu")  # compare a translation with a reference as strings
# the default model of each neural metric, and whether the metric reads a reference; all of them read the source
NEURAL_METRICS = {
    "comet": ("hf:Unbabel/wmt22-comet-da", True),
    "cometkiwi": ("hf:Unbabel/wmt22-cometkiwi-da", False),
    "metricx": ("hf:google/metricx-24-hybrid-large-v2p6", True),
    "metricx-qe": ("hf:google/metricx-24-hybrid-large-v2p6", False),
}
LOWER_IS_BETTER = ("ter", "off-target", "metricx", "metricx-qe")
METRIC_RULES = (  # settings that only some metrics read
    FlagRule("--tokenize", needs=("--metric bleu",)),
    FlagRule("--lowercase", needs=("--metric bleu", "--metric chrf", "--metric chrf++")),
    FlagRule("--languages", needs=("--metric off-target",)),
    FlagRule("--device", needs=tuple(f"--metric {name}" for name in NEURAL_METRICS)),
)
TextLines = Sequence[str]
QUALITY_ESTIMATES = tuple(name for name, (_, reads_reference) in NEURAL_METRICS.items() if not reads_reference)


@dataclass(frozen=True)
class MetricName:
    """The name of a metric, and the model of a neural metric. Other metrics have no model."""

    name: str
    model: str | None

    @classmethod
    def parse(cls, text: str) -> "MetricName":
        """Parses NAME or NAME=MODEL. Raises ValueError if MODEL is empty, or if the metric has no model."""
        name, sign, model = text.partition("=")
        if name in NEURAL_METRICS:
            if sign and not model:
                raise ValueError(f"metric {text}: give a folder or hf:ORG/NAME after {name}=")
            return cls(name, model or NEURAL_METRICS[name][0])
        if sign:
            raise ValueError(f"metric {text}: only {', '.join(NEURAL_METRICS)} have a model")
        return cls(name, None)

    @property
    def reads_reference(self) -> bool:
        return self.name not in QUALITY_ESTIMATES

    @property
    def higher_is_better(self) -> bool:
        return self.name not in LOWER_IS_BETTER


def check_segment_metric(text: str, flag: str, *, reference: bool = True) -> MetricName:
    """Returns the parsed name of a metric for single translations, without loading a model.

    `reference` says whether the command has a reference. Raises ValueError, with the name of the flag, for an unknown
    metric, and for a metric that needs a reference if there is none.
    """
    try:
        parsed = MetricName.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    known = (*STRING_METRICS, *NEURAL_METRICS) if reference else QUALITY_ESTIMATES
    if parsed.name not in known:
        if parsed.name in (*STRING_METRICS, *NEURAL_METRICS):
            raise ValueError(
                f"{flag} {text} compares a translation with a reference, but there is none; give "
                f"{' or '.join(QUALITY_ESTIMATES)}"
            )
        raise ValueError(f"{flag}: unknown metric {parsed.name!r}; {suggestion(parsed.name, known)}")
    return parsed


def check_available(use: str, metric: MetricName) -> None:
    """Checks a neural metric before a command does its work. Does nothing for other metrics.

    Raises ImportError, with the install command, if a package is missing or too old. Raises FileNotFoundError if the
    model is a missing folder; models of the Hub are not checked, because a check needs the network. Messages begin with
    `use`, the name of the metric with its flag, such as "--metrics comet".
    """
    if metric.model is None:
        return
    missing = [package for package in ("transformers", "tokenizers", "yaml", "safetensors") if not find_spec(package)]
    if missing:
        raise ImportError(f"{use} needs {', '.join(missing)}: pip install 'nmtkit[neural]'")
    version = metadata.version("transformers")
    if int(version.split(".")[0]) < 5:
        raise ImportError(
            f"{use} needs transformers 5 or later, but {version} is installed: pip install 'nmtkit[neural]'"
        )
    if not is_hub_name(metric.model) and not Path(metric.model).exists():
        on_hub = metric.model if re.fullmatch(r"[\w.-]+/[\w.@-]+", metric.model) else "ORG/NAME"
        raise FileNotFoundError(
            f"{use}: {metric.model} is not a folder; for a model of the Hub, give {HUB_PREFIX}{on_hub}"
        )


class SegmentMetric(ABC):
    """Scores single translations. `label` is the name in outputs, and `worst` and `best` are the limits of the scores.

    A translation beyond the limits, such as a TER above 100, has a quality below 0 or above 100.
    """

    label: str
    worst: float = 0.0
    best: float = 100.0
    reads_source: bool = False
    reads_reference: bool = True

    def signature(self) -> dict[str, str]:
        """Returns the settings of the metric for the signature of a score."""
        return {}

    @abstractmethod
    def scores(
        self, hypotheses: TextLines, *, sources: TextLines | None = None, references: TextLines | None = None
    ) -> list[float]:
        """Returns the score of each translation, in the unit of the metric.

        `references` has one reference for each translation. Texts that the metric does not read may be None. Raises
        ValueError if a text that the metric reads is None.
        """

    def qualities(
        self, hypotheses: TextLines, *, sources: TextLines | None = None, references: TextLines | None = None
    ) -> list[float]:
        """Returns the scores on a scale from 0 (worst) to 100 (best). Does not report progress."""
        with progress.muted():
            scores = self.scores(hypotheses, sources=sources, references=references)
        return [100 * (score - self.worst) / (self.best - self.worst) for score in scores]

    def utilities(self, candidates: Sequence[str], source: str) -> list[float]:
        """Returns the utility of each candidate translation of `source`, on the scale of `qualities`.

        The utility is the mean quality of a candidate, where each of the other candidates in turn is the reference. The
        candidate with the largest utility has the minimum Bayes risk (Eikema and Aziz 2020, "Is MAP Decoding All You
        Need?"). A text that occurs n times counts n times as a reference. A single candidate has the utility 0. If the
        metric reads no reference, the utility of a candidate is its quality.
        """
        counts = Counter(candidates)
        if not self.reads_reference:
            values = dict(zip(counts, self.qualities([*counts], sources=[source] * len(counts)), strict=True))
            return [values[text] for text in candidates]
        if len(candidates) < 2:  # there are no pairs, but neural metrics need at least one pair
            return [0.0] * len(candidates)
        pairs = [(text, other) for text in counts for other in counts if text != other or counts[text] > 1]
        qualities = self.qualities(
            [text for text, _ in pairs], sources=[source] * len(pairs), references=[other for _, other in pairs]
        )
        total = dict.fromkeys(counts, 0.0)
        for (text, other), quality in zip(pairs, qualities, strict=True):
            total[text] += quality * (counts[other] - (text == other))
        return [total[text] / (len(candidates) - 1) for text in candidates]
