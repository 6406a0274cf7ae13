"""`nmtkit rerank`: chooses translations from n-best lists with a backward model and a language model."""

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from nmtkit.cli.command import Command, echo, end_progress, print_line, program, standard_input
from nmtkit.cli.flags import INPUT, flags, from_flags, given_flags, plugin_option
from nmtkit.config import Config, FlagRule, check_flags, option
from nmtkit.config.plugins import load_plugins
from nmtkit.scoring.metrics import check_names
from nmtkit.scoring.segments import MetricName, check_available, check_segment_metric

RERANK_RULES = (
    FlagRule("--trials", needs=("--tune",)),
    FlagRule("--seed", needs=("--tune",)),
    FlagRule("--metric", needs=("--tune",)),
    FlagRule("--source-lang", needs=("--backward",)),
    FlagRule("--target-lang", needs=("--backward", "--lm", "--tune")),
    FlagRule("--plugin", needs=("--backward", "--lm")),
    FlagRule("--estimate", needs=("--feature", "--format jsonl")),
)


@dataclass(frozen=True, kw_only=True)
class RerankConfig(Config):
    """Settings of `nmtkit rerank`."""

    backward: Path | None = option(
        None, "checkpoint of a model that translates from target to source", metavar="RUN|FILE", checkpoint=True
    )
    lm: Path | None = option(
        None, "checkpoint of a language model of the target language", metavar="RUN|FILE", checkpoint=True
    )
    weight_backward: float = option(1.0, "weight of log p(source | translation), from --backward", min=0, max=100)
    weight_lm: float = option(0.3, "weight of log p(translation), from --lm", min=0, max=100)
    feature: tuple[str, ...] = option(
        (),
        "numeric fields of the hypotheses in FILE, such as the estimate of a quality model, with a weight for each "
        "field; the weighted numbers are added after the length penalty",
        metavar="NAME=WEIGHT,…",
    )
    estimate: tuple[str, ...] = option(
        (),
        "metrics that need no reference: cometkiwi, or metricx-qe (lower is better). The scores become fields of each "
        "hypothesis, which --feature can use. cometkiwi=MODEL uses the model in the folder MODEL, or "
        "hf:ORG/NAME[@REVISION]",
        metavar="METRIC[=MODEL],…",
    )
    lenpen: float = option(0.6, "length penalty of the weighted sum, as in generate", min=-10, max=10)
    tune: Path | None = option(
        None,
        "reference translations, or a corpus such as a .tsv, whose target side is taken; a random search finds the "
        "weights and the length penalty with the best --metric",
        metavar="FILE",
        access="read",
    )
    metric: str = option(
        "bleu", "metric that --tune optimises: a metric of nmtkit score, such as comet", metavar="NAME[=MODEL]"
    )
    trials: int = option(
        300, "number of random combinations of weights and length penalty that --tune tries", min=1, max=1_000_000
    )
    seed: int = option(1, "seed of --tune", min=0, max=2**63 - 1)
    source_lang: str | None = option(
        None, "language of the sources, for a multilingual backward model", flag="-s/--source-lang", metavar="CODE"
    )
    target_lang: str | None = option(
        None, "language of the translations, for multilingual models and for the tokenizer of BLEU",
        flag="-t/--target-lang", metavar="CODE",
    )  # fmt: skip
    format: Literal["text", "jsonl"] = option(
        "text", "text: the best translation of each line; jsonl: all translations with their log probabilities"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names((self.metric,))
        names = [check_segment_metric(metric, "--estimate", reference=False).name for metric in self.estimate]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"--estimate has two models of {name}, but the field {name} can hold only one score")


COMMON = {
    "--backward RUN|FILE": "model that translates back",
    "--lm RUN|FILE": "language model of the target language",
    "--tune FILE": "references; chooses the weights with the best score",
    "--weight-backward X": "weight of --backward (default: 1.0)",
    "--weight-lm X": "weight of --lm (default: 0.3)",
    "--lenpen X": "length penalty (default: 0.6)",
    "--format text|jsonl": "output format (default: text)",
}


@click.command(cls=Command, common=COMMON)
@click.argument("path", type=INPUT, required=False, metavar="[FILE]")
@plugin_option
def command(path: Path | None, plugins: tuple[str, ...], **flags: Any) -> None:
    """Choose the best translations of n-best lists by noisy-channel reranking. FILE is the output of generate.

    \b
    nmtkit generate data-bin --gen-subset valid --path averaged.pt \\
                    --beam 20 --nbest 20 --format jsonl > valid.jsonl
    nmtkit rerank valid.jsonl --backward back.pt --lm lm.pt --tune valid.de
    nmtkit rerank test.jsonl --backward back.pt --lm lm.pt > test.de

    The score of a translation y of x is log p(y | x) + b log p(x | y) + l log p(y), divided by the length penalty,
    plus the weighted features. b is --weight-backward, and l is --weight-lm. The output of --format jsonl contains all
    log probabilities, so it can be reranked again without the models.
    """
    config: RerankConfig = from_flags(RerankConfig, flags)
    check_flags(RERANK_RULES, given_flags(), given_flags() | {f"--format {config.format}"})
    load_plugins(plugins)
    from nmtkit.jobs import progress
    from nmtkit.scoring.metrics import MetricSettings, score
    from nmtkit.scoring.texts import check_equal_counts, lines_of, read_lines, read_side
    from nmtkit.translation.reranking import (
        FIELDS,
        ChannelModels,
        RerankingWeights,
        add_estimates,
        check_one_direction,
        known_features,
        read_nbest,
        tune,
    )

    for metric in (config.metric, *config.estimate):
        check_available(f"metric {metric}", MetricName.parse(metric))
    name = str(path or "standard input")
    lines = read_lines(path) if path else lines_of(standard_input().read(), Path(name))
    lists = read_nbest(lines, name)
    if config.backward is not None or config.lm is not None:
        check_one_direction(lists, name)
    models = ChannelModels(config.backward, config.lm, source_lang=config.source_lang, target_lang=config.target_lang)
    languages = config.source_lang, config.target_lang
    references = None if config.tune is None else read_side(config.tune, 1, languages)
    if references is not None:
        check_equal_counts({name: lines, str(config.tune): references})
    models.add_features(lists)
    for metric in config.estimate:
        add_estimates(lists, metric)
    known = known_features(lists, name)
    for flag, field in FIELDS.items():
        if flag not in known and f"--weight-{flag}" in given_flags():
            raise ValueError(f"--weight-{flag} has no effect, because {name} has no {field}; give --{flag} FILE")
    features = feature_weights(config.feature)
    for number, nbest in enumerate(lists, 1):
        nbest.check_features(features, f"{name}:{number}")
    weights = RerankingWeights(config.weight_backward, config.weight_lm, config.lenpen, features)
    if references is not None:
        sources = tuple(each.source for each in lists)
        settings = MetricSettings(target_lang=config.target_lang, sources=sources)
        sign = 1 if MetricName.parse(config.metric).higher_is_better else -1

        def value(texts: list[str]) -> float:
            with progress.muted():  # `tune` counts the trials
                return sign * score(texts, [references], [config.metric], settings)[0].value

        weights, highest, first = tune(lists, value, weights, config.trials, config.seed)
        words = [*program(), "rerank", "test.jsonl"]
        words += [word for flag in FIELDS if (file := getattr(config, flag)) for word in (f"--{flag}", str(file))]
        words += ["--estimate", ",".join(config.estimate)] if config.estimate else []
        words += ["--format", "jsonl"] if config.format == "jsonl" else []
        words += [word for each in plugins for word in ("--plugin", each)]
        reads_target = config.backward is not None or config.lm is not None  # else only --tune needs --target-lang
        codes = {"--source-lang": config.source_lang, "--target-lang": config.target_lang if reads_target else None}
        words += [word for flag, code in codes.items() if code for word in (flag, code)]
        words += [word for flag in known for word in (f"--weight-{flag}", f"{getattr(weights, flag):g}")]
        words += ["--lenpen", f"{weights.lenpen:g}"]
        if features:
            words += ["--feature", ",".join(f"{name}={weight:g}" for name, weight in weights.features.items())]
        end_progress(click.get_current_context())
        print_line(f"{config.metric} {sign * first:.2f} with the given weights, {sign * highest:.2f} with the best")
        print_line(f"next: {shlex.join(words)} > test.out")  # also with --quiet, because only this line has the weights
    for nbest in lists:
        record = nbest.reranked(weights)
        as_json = config.format == "jsonl"
        echo(json.dumps(record, ensure_ascii=False) if as_json else record["hypotheses"][0]["text"])


command.params += flags(RerankConfig)


def feature_weights(items: tuple[str, ...]) -> dict[str, float]:
    """Parses items such as estimate=0.5. Raises ValueError for a repeated name, and for a weight that is not finite."""
    weights: dict[str, float] = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight):
            raise ValueError(f"--feature {item!r} must be a field of the hypotheses and a weight, such as estimate=0.5")
        if name in weights:
            raise ValueError(f"--feature has two weights of {name}; give one of them")
        weights[name] = weight
    return weights
