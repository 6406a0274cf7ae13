"""Noisy-channel reranking of n-best lists, with a backward model and a language model.

A translation y of a source x gets the score (log p(y | x) + b log p(x | y) + l log p(y)) / penalty(length of y), with
the weights b and l, plus the weighted sum of other features of y, such as the estimate of a quality model.

Sources: Yee et al. 2019, "Simple and Effective Noisy Channel Modeling for Neural Machine Translation"; Ng et al. 2019,
"Facebook FAIR's WMT19 News Translation Task Submission"; Fernandes et al. 2022, "Quality-Aware Decoding for Neural
Machine Translation".
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nmtkit.config.files import parse_json
from nmtkit.jobs import progress
from nmtkit.jobs.distributed import rank_device
from nmtkit.models.building import check_language_model, languages_of
from nmtkit.scoring.segments import MetricName
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.text.languages import same_language
from nmtkit.translation.languages import Codes, codes_for
from nmtkit.translation.likelihood import Likelihood, is_language_model, likelihoods_of_readable
from nmtkit.translation.options import DeviceOptions
from nmtkit.translation.search.rules import length_penalty
from nmtkit.translation.translator import Translator

BACKWARD, LM = "backward_log_probability", "lm_log_probability"  # fields that reranking adds to a hypothesis
FIELDS = {"backward": BACKWARD, "lm": LM}  # the name of a model -> the field with its log probability
LARGEST = 2.0  # weights and length penalties are drawn from 0 to this number

log = logging.getLogger("nmtkit")


@dataclass(frozen=True)
class RerankingWeights:
    """The weights of log p(x | y) and log p(y), and the exponent of the length penalty. log p(y | x) has weight 1.

    `features` maps the names of other fields of a hypothesis to the weights of these fields.
    """

    backward: float
    lm: float
    lenpen: float
    features: Mapping[str, float] = field(default_factory=dict)


class NBest:
    """The n-best list of a source. `record` is the JSON object that `nmtkit generate --format jsonl` wrote."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        # the text that the forward model read, without tags; with --pivot, in the pivot language
        self.source = str(record.get("pivot", record.get("untagged", record["source"])))
        self.hypotheses: list[dict[str, Any]] = record["hypotheses"]

    def score(self, hypothesis: dict[str, Any], weights: RerankingWeights) -> float:
        """Returns the score of a hypothesis. The score is -inf if a value that has a weight other than 0 is None."""

        def weighted(parts: Mapping[str, float]) -> float:
            values = ((weight, hypothesis.get(name, 0.0)) for name, weight in parts.items() if weight)
            return sum((-math.inf if value is None else weight * value for weight, value in values), 0.0)

        total = weighted({"log_probability": 1.0, BACKWARD: weights.backward, LM: weights.lm})
        penalty = length_penalty(len(hypothesis["pieces"]) + 1, weights.lenpen, language_tokens=0)
        return total / penalty + weighted(weights.features)

    def check_features(self, names: Iterable[str], position: str) -> None:
        """Raises ValueError if a hypothesis lacks a feature, or if the feature is neither a finite number nor None.

        `position` is the file and line of the list, for the message.
        """
        for name in names:
            for number, hypothesis in enumerate(self.hypotheses, 1):
                value = hypothesis.get(name)
                if name in hypothesis and value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    fields = ", ".join(key for key, value in hypothesis.items() if isinstance(value, int | float))
                    fault = f"has {value!r} as" if name in hypothesis else "lacks"
                    raise ValueError(
                        f"{position}: hypothesis {number} {fault} --feature {name}, which must be a number; numeric "
                        f"fields of this hypothesis: {fields}"
                    )

    def best(self, weights: RerankingWeights) -> int:
        """Returns the index of the first hypothesis with the highest score."""
        scores = [self.score(hypothesis, weights) for hypothesis in self.hypotheses]
        return scores.index(max(scores))

    def reranked(self, weights: RerankingWeights) -> dict[str, Any]:
        """Returns the record with the new scores, best hypothesis first."""
        scored = [each | {"score": self.score(each, weights)} for each in self.hypotheses]
        scored.sort(key=lambda each: -each["score"])
        for each in scored:
            each["score"] = each["score"] if math.isfinite(each["score"]) else None
        return self.record | {"hypotheses": scored}


def read_nbest(lines: Iterable[str], name: str) -> list[NBest]:
    """Reads n-best lists of `nmtkit generate`. Raises ValueError for empty input and for a line in another format."""
    lists = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            for each in record["hypotheses"]:
                _ = each["text"] + "", each["log_probability"], len(each["pieces"])
                numbers = [each.get(field) for field in ("log_probability", BACKWARD, LM)]
                if not all(number is None or number < math.inf for number in numbers):  # false for NaN
                    raise ValueError(numbers)
            _ = record["source"] + "", record["hypotheses"][0]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{name}:{number} is not an n-best list; write it with nmtkit generate --nbest N --format jsonl"
            ) from error
        lists.append(NBest(record))
    if not lists:
        raise ValueError(f"{name} is empty")
    return lists


def check_one_direction(lists: Sequence[NBest], name: str) -> None:
    """Raises ValueError if the lists of the file `name` have several directions: a model is used in one direction."""
    if len(directions := {str(each.record.get("direction")) for each in lists}) > 1:
        raise ValueError(
            f"{name} has several directions ({', '.join(sorted(directions))}), but --backward and --lm need "
            "lists of a single direction; write a file for each direction"
        )


def known_features(lists: Sequence[NBest], name: str) -> list[str]:
    """Returns the models (keys of `FIELDS`) whose log probabilities are in every hypothesis.

    Raises ValueError if only some hypotheses have the log probability of a model. `name` is the file of the lists.
    """
    known = []
    for model, key in FIELDS.items():
        present = {key in each for nbest in lists for each in nbest.hypotheses}
        if len(present) > 1:
            raise ValueError(f"{name}: some hypotheses have no {key}; give the model to compute it")
        known += [model] if True in present else []
    return known


class ChannelModels:
    """The models that score hypotheses: a backward model for log p(x | y), and a language model for log p(y).

    Each model may be None. The models may have different vocabularies, because each model encodes the texts with its
    own tokenizer.
    """

    def __init__(
        self, backward: Path | None, lm: Path | None, *, source_lang: str | None, target_lang: str | None
    ) -> None:
        """Loads the checkpoints. `source_lang` is the language of the sources x, `target_lang` of the translations y.

        Raises ValueError for a model of the wrong kind or direction, and if the language that a model needs is missing.
        """
        device = rank_device(DeviceOptions().named_device, 1)
        self.backward, self.lm = (
            None if file is None else Translator.load(file, device, engine="torch") for file in (backward, lm)
        )
        self.languages: Codes = target_lang, source_lang  # languages of the backward model, which reads y
        self.lm_language: str | None = None
        if lm is not None and self.lm is not None:
            check_language_model(lm, self.lm.models[0])
            self.lm_language = language_for_lm(lm, self.lm, target_lang)
        if backward is None or self.backward is None:
            return
        if is_language_model(self.backward):
            raise ValueError(f"--backward {backward} is a language model; give it as --lm")
        self.languages = codes_for(self.backward.tokenizer, *self.languages)
        if not self.backward.tokenizer.languages:
            if (pair := languages_of(backward)) is not None:
                check_backward_direction(backward, pair, lm, source_lang, target_lang)
            return
        check_language(backward, self.backward, "--source-lang", source_lang)
        if not self.backward.tokenizer.has_target_languages_only:
            check_language(backward, self.backward, "--target-lang", target_lang)

    def add_features(self, lists: Sequence[NBest]) -> None:
        """Adds log p(x | y) and log p(y) to all hypotheses."""
        pairs = [(each.source, hypothesis) for each in lists for hypothesis in each.hypotheses]
        texts = [hypothesis["text"] for _, hypothesis in pairs]
        if self.backward is not None:
            # tags are only for models that read the source, but the backward model writes the source
            sources = [self.backward.tokenizer.without_tags(source) for source, _ in pairs]
            progress.begin("Backward model", "hypotheses", len(texts))
            _add(pairs, BACKWARD, likelihoods_of_readable(self.backward, texts, sources, languages=self.languages))
        if self.lm is not None:
            progress.begin("Language model", "hypotheses", len(texts))
            _add(pairs, LM, likelihoods_of_readable(self.lm, None, texts, languages=(None, self.lm_language)))


def add_estimates(lists: Sequence[NBest], text: str) -> None:
    """Scores all hypotheses with a metric that needs no references.

    `text` is the metric, as NAME or NAME=MODEL. The field NAME of each hypothesis gets the score.
    """
    metric = segment_metric(text, rank_device("auto", 1))
    hypotheses = [hypothesis for each in lists for hypothesis in each.hypotheses]
    sources = [each.source for each in lists for _ in each.hypotheses]
    scores = metric.scores([hypothesis["text"] for hypothesis in hypotheses], sources=sources)
    for hypothesis, score in zip(hypotheses, scores, strict=True):
        hypothesis[MetricName.parse(text).name] = score


def _add(pairs: Sequence[tuple[str, dict[str, Any]]], field: str, scored: Sequence[Likelihood | None]) -> None:
    """Adds log probabilities to hypotheses: None for -inf, and for a hypothesis that is too long for the model."""
    for (_, hypothesis), each in zip(pairs, scored, strict=True):
        hypothesis[field] = None if each is None or not math.isfinite(each.log_probability) else each.log_probability
    if too_long := scored.count(None):
        log.warning("%s: %d hypotheses are too long for the model, so they come last", field, too_long)


def language_for_lm(path: Path, model: Translator, target_lang: str | None) -> str | None:
    """Returns the language code that a language model needs. Raises ValueError for a model of a different language."""
    if model.tokenizer.languages:
        if model.tokenizer.has_target_languages_only:
            return None  # the tokens are in the source, which a language model does not read
        check_language(path, model, "--target-lang", target_lang)
        return target_lang
    own = (languages_of(path) or (None, None))[1]
    if own and target_lang and not same_language(own, target_lang):
        raise ValueError(f"--lm {path} is a model of {own}, but --target-lang is {target_lang}")
    return None


def check_language(path: Path, model: Translator, flag: str, code: str | None) -> None:
    """Raises ValueError, with the known codes, if `code` is not a language of a model of several languages."""
    if code not in model.tokenizer.languages:
        known = ", ".join(sorted(model.tokenizer.languages))
        raise ValueError(f"{path} is a model of several languages; give {flag}, one of {known}")


def check_backward_direction(
    backward: Path, pair: tuple[str, str], lm: Path | None, source_lang: str | None, target_lang: str | None
) -> None:
    """Raises ValueError unless the model `backward` translates from the target language into the source language.

    `pair` is the direction of the model `backward`. Without `target_lang`, the target language is the language of the
    language model `lm`.
    """
    of_lm = None if lm is None else (languages_of(lm) or (None, None))[1]
    wanted = target_lang or of_lm, source_lang
    if any(code and not same_language(code, own) for code, own in zip(wanted, pair, strict=True)):
        origins = [f"--lm {lm}"] if of_lm and not target_lang else []
        origins += [flag for flag, code in (("--target-lang", target_lang), ("--source-lang", source_lang)) if code]
        source, target = wanted[0] or "the language of the translations", wanted[1] or "the language of the sources"
        raise ValueError(
            f"--backward {backward} translates from {pair[0]} into {pair[1]}, but a backward model must translate from "
            f"{source} into {target} ({', '.join(origins)})"
        )


def tune(
    lists: Sequence[NBest], score: Callable[[list[str]], float], start: RerankingWeights, trials: int, seed: int
) -> tuple[RerankingWeights, float, float]:
    """Returns the weights with the highest score, this score, and the score of `start`.

    The score of a set of weights is `score(texts)`, where `texts` are the best hypotheses of all lists under these
    weights. The search is random, as in Yee et al. 2019: each trial draws all weights and the length penalty from 0 to
    LARGEST. A feature with a negative weight in `start` gets negative weights. If no hypothesis has the log probability
    of a model, the weight of this model is 0. `start` is tried first. If several trials reach the highest score, the
    weights of the first of these trials are returned.
    """
    generator = np.random.default_rng(seed)
    used = [any(field in each for nbest in lists for each in nbest.hypotheses) for field in (BACKWARD, LM)]
    known: dict[tuple[int, ...], float] = {}

    def value(weights: RerankingWeights) -> float:
        chosen = tuple(each.best(weights) for each in lists)
        if chosen not in known:
            known[chosen] = score([each.hypotheses[i]["text"] for each, i in zip(lists, chosen, strict=True)])
        return known[chosen]

    progress.begin("Tuning", "trials", trials)
    best, first = start, value(start)
    highest = first
    for drawn in generator.uniform(0, LARGEST, (trials, 3 + len(start.features))).round(3).tolist():
        features = {
            name: math.copysign(x, start.features[name]) for name, x in zip(start.features, drawn[3:], strict=True)
        }
        weights = RerankingWeights(drawn[0] * used[0], drawn[1] * used[1], drawn[2], features)
        if value(weights) > highest:
            best, highest = weights, value(weights)
        progress.advance()
    return best, highest, first
