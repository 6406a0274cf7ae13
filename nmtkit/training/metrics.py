"""Metrics of a validation by name (`--metrics a,b`). A metric is computed from translations or from sums over tokens.

A registered factory is called as `factory(config)`. The factory must not load anything large, because every start of
the command creates the metrics to check their settings. `--best-checkpoint-metric`, patience and the plateau schedule
can follow any score that a validation logs: a metric, or a count of the criterion.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from nmtkit.config import Config, flag_words, option
from nmtkit.config.registry import Registry
from nmtkit.data.packed import Batch
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.contract import ContractError, check_sums, described
from nmtkit.scoring.metrics import MetricSettings, build_metrics, score
from nmtkit.scoring.segments import NEURAL_METRICS, MetricName, check_available

log = logging.getLogger("nmtkit")

RatedTranslation = tuple[str, str, str, float]  # source, translation, reference, chrF
LOSSES = ("loss", "nll", "ppl")  # scores of every validation; lower is better
# settings of criterions that change the loss of a validation
OF_VALID_LOSS = ("label_smoothing", "alignment_weight", "alignment_layer", "alignment_head")
TOKENS_AT_ONCE = 1024  # tokens whose logits are in memory at the same time


@dataclass(frozen=True, kw_only=True, eq=False)
class Outputs:
    """Results of a model on a split: sums over the target tokens and, if the metric needs texts, translations."""

    sums: Mapping[str, float]  # "loss", the counts of the criterion such as "nll", and the counts of the metric
    tokens: int  # target tokens, eos included
    sources: Sequence[str] = ()  # raw lines, in the order of the split
    hypotheses: Sequence[str] = ()
    references: Sequence[str] = ()
    target_lang: str | None = None  # code of the target language of the dataset


class Metric(ABC):
    """A score of a validation, logged under its registered name.

    Every rank calls `count` for its share of the batches. Only rank 0 calls `score`.
    """

    higher_is_better: bool = True
    translates: bool = False  # whether `score` reads sources, translations or references
    signature: str | None = None  # text with all settings of the last score, as in sacreBLEU; None: no signature

    def count(self, model: Architecture, batch: Batch) -> dict[str, Tensor]:
        """Returns sums over the tokens of a batch by name, without gradients. `Outputs.sums` has the totals."""
        return {}

    @abstractmethod
    def score(self, outputs: Outputs) -> float:
        """Returns the score of the whole split."""

    def _value(self, outputs: Outputs, name: str, settings: MetricSettings) -> float:
        """Returns a score that nmtkit/scoring computes, and stores its signature in `signature`."""
        (result,) = score(outputs.hypotheses, [outputs.references], (name,), settings)
        self.signature = result.signature
        return result.value


METRICS: Registry[Metric] = Registry("metric", "--metrics", several=True)


@dataclass
class _NoTexts(Sequence[str]):
    """A placeholder for the texts of a metric without `translates`. Reading the placeholder raises ContractError."""

    metric: str

    def __len__(self) -> int:
        raise ContractError(f"metric {self.metric}: score reads texts, so the metric must set translates = True")

    def __getitem__(self, index: Any) -> Any:
        return len(self)


def counts_of(name: str, metric: Metric, model: Architecture, batch: Batch) -> dict[str, Tensor]:
    """Returns the counts of a metric for a batch.

    Raises ContractError if the result is not a dict, or if a count is not a tensor without dimensions.
    """
    counts: object = metric.count(model, batch)
    if not isinstance(counts, dict):
        raise ContractError(f"metric {name}: count returned {described(counts)}; it must return a dict of sums by name")
    check_sums(f"metric {name}: count", counts)
    return counts


def score_of(name: str, metric: Metric, outputs: Outputs) -> float:
    """Returns the score of a metric, with a warning if it is not finite.

    Raises ContractError if the score is not a number, or if the metric reads texts without `translates`.
    """
    if not metric.translates:
        none = _NoTexts(name)
        outputs = replace(outputs, sources=none, hypotheses=none, references=none)
    score: object = metric.score(outputs)
    value = score.item() if isinstance(score, Tensor) and not score.dim() else score
    if not isinstance(value, Real):
        raise ContractError(f"metric {name}: score returned {described(score)}; it must return a number")
    if not math.isfinite(value):
        log.warning(f"metric {name}: score returned {value}, which is null in the log and never counts as the best")
    return float(value)


@dataclass(frozen=True)
class Objective:
    """The validation score that selects the best checkpoint, and whether higher is better.

    Scores are compared only under equal `conditions` (`conditions_of`).
    """

    name: str
    higher_is_better: bool = False
    conditions: tuple[str, ...] = ()

    def value(self, scores: Mapping[str, float]) -> float:
        """Returns the score with its sign changed if higher is better, so that lower is better."""
        return -scores[self.name] if self.higher_is_better else scores[self.name]


def conditions_of(name: str, settings: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the flags of a run, with their values, on which the validation score `name` depends.

    Two scores can be compared only if these flags are equal. `settings` are the tables of the run's configuration,
    which may be incomplete in old logs. A metric also depends on its settings and on the beam of the translations. The
    loss and the counts of a criterion also depend on the criterion, but nll and ppl do not.
    """
    run, criterion = settings.get("run", {}), settings.get("criterion", {})
    score, _, subset = name.partition("@")
    first: dict[str, Any] = {} if subset else {"valid_subset": next(iter(run.get("valid_subset", ())), None)}
    flags = first | {"valid_sentences": run.get("valid_sentences")}
    if score in run.get("metrics", ()):
        flags |= {"valid_beam": run.get("valid_beam"), **settings.get(f"metrics.{score}", {})}
    elif score not in ("nll", "ppl"):
        flags["criterion"] = criterion.get("name")
        flags |= {key: value for key, value in criterion.items() if key in OF_VALID_LOSS}
    return tuple(" ".join(flag_words(name, value)) for name, value in flags.items())


def objective(
    setting: str,
    metrics: Mapping[str, Metric],
    subsets: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Objective:
    """Returns the score that `--best-checkpoint-metric` names: "loss", a metric, or a count such as "alignment:min".

    `subsets` are the validated subsets except the first. A score of such a subset has a name like "loss@valid1".
    `settings` are the tables of the run; without them, the objective has no `conditions`. Raises ValueError for a
    metric or a subset that the run does not have, and for a count without ":min" or ":max".
    """
    full_name, _, direction = setting.partition(":")
    name, _, subset = full_name.partition("@")
    known = dict.fromkeys(LOSSES, False) | {name: metric.higher_is_better for name, metric in metrics.items()}
    if direction not in ("", "min", "max"):
        raise ValueError(f"--best-checkpoint-metric {setting}: {direction!r} is neither min nor max")
    if full_name != name and subset not in subsets:
        others = ", ".join(f"{name}@{other}" for other in subsets) or f"{name}@SUBSET with --valid-subset valid,SUBSET"
        raise ValueError(
            f"--best-checkpoint-metric {setting}: no score has this name; give {name} for the score of the first "
            f"--valid-subset, or {others}"
        )
    if name in METRICS and name not in metrics:
        raise ValueError(f"--best-checkpoint-metric {name} does nothing without --metrics {name}")
    if not direction and name not in known:
        raise ValueError(
            f"--best-checkpoint-metric {name}: give {full_name}:max if higher is better, or {full_name}:min if lower "
            f"is better; known: {', '.join(known)}"
        )
    conditions = () if settings is None else conditions_of(full_name, settings)
    return Objective(full_name, direction == "max" if direction else known[name], conditions)


def maximized_scores(goal: Objective, metrics: Mapping[str, Metric], subsets: Sequence[str] = ()) -> list[str]:
    """Returns the names of the scores for which higher is better, for validations of the first subset and `subsets`."""
    better = [name for name, metric in metrics.items() if metric.higher_is_better]
    names = {name + suffix for name in better for suffix in ("", *(f"@{subset}" for subset in subsets))}
    return sorted(names | ({goal.name} if goal.higher_is_better else set()))


# --- metrics of translations ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BleuConfig(Config):
    bleu_tokenize: str = option(
        "auto", "sacreBLEU's tokenizer: 13a, intl, zh, ja-mecab, char, …; auto chooses by the target language."
    )
    bleu_lowercase: bool = option(False, "Ignore case.")


@METRICS.register("bleu", BleuConfig())
class Bleu(Metric):
    """BLEU of sacreBLEU (Papineni et al. 2002; Post 2018), 0 to 100."""

    translates = True

    def __init__(self, config: BleuConfig) -> None:
        self.settings = MetricSettings(tokenize=config.bleu_tokenize, lowercase=config.bleu_lowercase)
        build_metrics(("bleu",), self.settings)  # raises an error for an unknown tokenizer before the first update

    def score(self, outputs: Outputs) -> float:
        return self._value(outputs, "bleu", replace(self.settings, target_lang=outputs.target_lang))


@dataclass(frozen=True, kw_only=True)
class ChrfConfig(Config):
    chrf_words: bool = option(False, "chrF++: also compare n-grams of one and two words.")


@METRICS.register("chrf", ChrfConfig())
class Chrf(Metric):
    """chrF2 of sacreBLEU (Popović 2015), or chrF2++ (2017), 0 to 100."""

    translates = True

    def __init__(self, config: ChrfConfig) -> None:
        self.name = "chrf++" if config.chrf_words else "chrf"

    def score(self, outputs: Outputs) -> float:
        return self._value(outputs, self.name, MetricSettings())


def model_option(metric: str) -> Any:
    return option(NEURAL_METRICS[metric][0], "Model: a folder, or hf:ORG/NAME[@REVISION].", metavar="MODEL")


@dataclass(frozen=True, kw_only=True)
class CometConfig(Config):
    comet_model: str = model_option("comet")


@dataclass(frozen=True, kw_only=True)
class CometKiwiConfig(Config):
    cometkiwi_model: str = model_option("cometkiwi")


@dataclass(frozen=True, kw_only=True)
class MetricXConfig(Config):
    metricx_model: str = model_option("metricx")


@dataclass(frozen=True, kw_only=True)
class MetricXQEConfig(Config):
    metricx_qe_model: str = model_option("metricx-qe")


@METRICS.register("metricx-qe", MetricXQEConfig())
@METRICS.register("metricx", MetricXConfig())
@METRICS.register("cometkiwi", CometKiwiConfig())
@METRICS.register("comet", CometConfig())
class NeuralScore(Metric):
    """A neural metric, which also reads the source. The model is loaded once. Needs `nmtkit[neural]`.

    Scores of COMET and CometKiwi are multiplied by 100 (Rei et al. 2022). Scores of MetricX are from 0 (perfect) to 25
    (Juraska et al. 2024). CometKiwi and "metricx-qe", a variant of MetricX, read no reference.
    """

    translates = True

    def __init__(self, config: Config) -> None:
        ((setting, model),) = vars(config).items()  # such as "comet_model"
        metric = MetricName(setting.removesuffix("_model").replace("_", "-"), model)
        check_available(f"--metrics {metric.name}", metric)
        self.higher_is_better = metric.higher_is_better
        self.name = f"{metric.name}={model}"

    def score(self, outputs: Outputs) -> float:
        return self._value(outputs, self.name, MetricSettings(sources=tuple(outputs.sources)))


# --- metrics of sums over tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AccuracyConfig(Config):
    """The metric has no settings."""


@METRICS.register("accuracy", AccuracyConfig())
class Accuracy(Metric):
    """Percentage of target tokens (eos included) that the model finds most probable, given the true target prefix."""

    def __init__(self, config: AccuracyConfig) -> None:
        pass

    def count(self, model: Architecture, batch: Batch) -> dict[str, Tensor]:
        features = model(batch.source, batch.target_input)
        parts = zip(features.split(TOKENS_AT_ONCE), batch.target_output.split(TOKENS_AT_ONCE), strict=True)
        correct = [(model.output_projection(part).argmax(-1) == target).sum() for part, target in parts]
        return {"correct": torch.stack(correct).sum()}

    def score(self, outputs: Outputs) -> float:
        return 100 * outputs.sums["correct"] / outputs.tokens
