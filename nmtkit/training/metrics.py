"""Metrics of a validation by name (`--metrics a,b`): of its translations, or of sums over its tokens.

A registered factory is called as `factory(config)`, and loads nothing large: every run of the command makes its metrics
to check its settings. Whatever a validation logs, metrics and the criterion's counts alike, can be what
`--best-checkpoint-metric`, and with it patience and the plateau schedule, go by.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from nmtkit.architectures import Architecture
from nmtkit.architectures.contract import ContractError, described
from nmtkit.checkpoint import Objective
from nmtkit.config import Config, option
from nmtkit.layers.packed import Batch
from nmtkit.registry import Registry
from nmtkit.scoring.metrics import Settings, build_metrics, score

LOSSES = ("loss", "nll", "ppl")  # which every validation has; less is better
TOKENS_AT_ONCE = 1024  # whose logits are held


@dataclass(frozen=True, kw_only=True, eq=False)
class Outputs:
    """Results of a model on a split: sums over its target tokens and, if a metric asks, translations of its lines."""

    sums: Mapping[str, float]  # "loss", the criterion's counts as "nll", and what the metric itself counted
    tokens: int  # target tokens, eos included
    sources: Sequence[str] = ()  # raw lines, in the order of the split
    hypotheses: Sequence[str] = ()
    references: Sequence[str] = ()


class Metric(ABC):
    """A score of a validation, logged under the name it is registered by.

    `count` runs on every rank for its share of the batches, `score` on rank 0.
    """

    higher_is_better: bool = True
    translates: bool = False  # whether `score` reads translations

    def count(self, model: Architecture, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the tokens of a batch by name, which `score` finds in `Outputs.sums`. Has no gradient."""
        return {}

    @abstractmethod
    def score(self, outputs: Outputs) -> float:
        """Returns the score of the whole split."""


METRICS: Registry[Metric] = Registry("metric", "--metrics", several=True)


def counts_of(name: str, metric: Metric, model: Architecture, batch: Batch) -> dict[str, Tensor]:
    """Returns what a metric counts in a batch. Raises ContractError naming what it returned if these are no sums."""
    counts: object = metric.count(model, batch)
    if not isinstance(counts, dict):
        raise ContractError(f"metric {name}: count returned {described(counts)}; it must return a dict of sums by name")
    for key, value in counts.items():
        if not isinstance(value, Tensor) or value.dim():
            raise ContractError(
                f"metric {name}: count returned {described(value)} for {key!r}; it must be a tensor without "
                "dimensions, a sum"
            )
    return counts


def score_of(name: str, metric: Metric, outputs: Outputs) -> float:
    """Returns the score of a metric. Raises ContractError naming what it returned if that is no number."""
    score: object = metric.score(outputs)
    if isinstance(score, Tensor) and not score.dim():
        return score.item()
    if not isinstance(score, Real):
        raise ContractError(f"metric {name}: score returned {described(score)}; it must return a number")
    return float(score)


def objective(setting: str, metrics: Mapping[str, Metric], subsets: Sequence[str] = ()) -> Objective:
    """Returns what `--best-checkpoint-metric` names: "loss", a metric, or a count as "alignment:min".

    Of `subsets`, those validated beside the first, scores are called "loss@valid1". Raises ValueError for a metric or a
    subset that the run does not have, and where it is not known which way is better.
    """
    full_name, _, direction = setting.partition(":")
    name, _, subset = full_name.partition("@")
    known = dict.fromkeys(LOSSES, False) | {name: metric.higher_is_better for name, metric in metrics.items()}
    if direction not in ("", "min", "max"):
        raise ValueError(f"--best-checkpoint-metric {setting}: {direction!r} is neither min nor max")
    if full_name != name and subset not in subsets:
        others = ", ".join(f"{name}@{other}" for other in subsets) or "with --valid-subset valid,… each of the others'"
        raise ValueError(f"--best-checkpoint-metric {setting}: known are {name}, of the first --valid-subset; {others}")
    if name in METRICS and name not in metrics:
        raise ValueError(f"--best-checkpoint-metric {name} does nothing without --metrics {name}")
    if not direction and name not in known:
        raise ValueError(
            f"--best-checkpoint-metric {name}: say whether more is better, {full_name}:max, or less, {full_name}:min; "
            f"known: {', '.join(known)}"
        )
    return Objective(full_name, direction == "max" if direction else known[name])


# --- of translations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BleuConfig(Config):
    bleu_tokenize: str = option("13a", "sacreBLEU's tokenizer: 13a, intl, zh, ja-mecab, char, …")
    bleu_lowercase: bool = option(False, "Ignore case.")


@METRICS.register("bleu", BleuConfig())
class Bleu(Metric):
    """BLEU of sacreBLEU (Papineni et al. 2002; Post 2018), 0 to 100."""

    translates = True

    def __init__(self, config: BleuConfig) -> None:
        self.settings = Settings(tokenize=config.bleu_tokenize, lowercase=config.bleu_lowercase)
        build_metrics(("bleu",), self.settings)  # refuses an unknown tokenizer before the first update

    def score(self, outputs: Outputs) -> float:
        return score(outputs.hypotheses, [outputs.references], ("bleu",), self.settings)[0].value


@dataclass(frozen=True, kw_only=True)
class ChrfConfig(Config):
    chrf_words: bool = option(False, "chrF++: n-grams of words too, up to two.")


@METRICS.register("chrf", ChrfConfig())
class Chrf(Metric):
    """chrF2 of sacreBLEU (Popović 2015), or chrF2++ (2017), 0 to 100."""

    translates = True

    def __init__(self, config: ChrfConfig) -> None:
        self.name = "chrf++" if config.chrf_words else "chrf"

    def score(self, outputs: Outputs) -> float:
        return score(outputs.hypotheses, [outputs.references], (self.name,))[0].value


@dataclass(frozen=True, kw_only=True)
class CometConfig(Config):
    comet_model: str = option("Unbabel/wmt22-comet-da", "Model to score with; downloaded once.")


@METRICS.register("comet", CometConfig())
class Comet(Metric):
    """COMET, times 100: a learnt metric that reads the source too (Rei et al. 2020). Needs `nmtkit[comet]`."""

    translates = True

    def __init__(self, config: CometConfig) -> None:
        if importlib.util.find_spec("comet") is None:
            raise ImportError("--metrics comet needs COMET, which is not installed: pip install 'nmtkit[comet]'")
        self.model_name = config.comet_model
        self.scorer: Any = None

    def score(self, outputs: Outputs) -> float:
        if self.scorer is None:  # loaded once; the sources are those of every validation
            settings = Settings(sources=tuple(outputs.sources), comet_model=self.model_name)
            self.scorer = build_metrics(("comet",), settings)[0]
        return float(self.scorer.corpus_score(outputs.hypotheses, [outputs.references]).score)


# --- of sums over tokens ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig(Config):
    """No settings."""


@METRICS.register("accuracy", AccuracyConfig())
class Accuracy(Metric):
    """Percentage of target tokens, eos included, that have the highest probability given the true tokens before."""

    def __init__(self, config: AccuracyConfig) -> None:
        pass

    def count(self, model: Architecture, batch: Batch) -> dict[str, Tensor]:
        features = model(batch.source, batch.target_input)
        parts = zip(features.split(TOKENS_AT_ONCE), batch.target_output.split(TOKENS_AT_ONCE), strict=True)
        correct = [(model.output_projection(part).argmax(-1) == target).sum() for part, target in parts]
        return {"correct": torch.stack(correct).sum()}

    def score(self, outputs: Outputs) -> float:
        return 100 * outputs.sums["correct"] / outputs.tokens
