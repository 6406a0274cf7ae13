"""`nmtkit rerank`: chooses translations from n-best lists with a backward model and a language model."""

import json
import math
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from nmtkit.cli.command import Command, standard_input, stderr
from nmtkit.cli.flags import flags, given_flags, on_command_line, plugin_option
from nmtkit.config import COMMAND_LINE, Config, FlagRule, check_flags, derive, option
from nmtkit.config.plugins import load_plugins

RERANK_RULES = (
    FlagRule("--trials", needs=("--tune",)),
    FlagRule("--seed", needs=("--tune",)),
    FlagRule("--metric", needs=("--tune",)),
    FlagRule("--source-lang", needs=("--backward",)),
)


@dataclass(frozen=True, kw_only=True)
class RerankConfig(Config):
    """Settings of `nmtkit rerank`."""

    backward: Path | None = option(None, "checkpoint of a model that translates back, into the source", metavar="FILE")
    lm: Path | None = option(None, "checkpoint of a language model of the target language", metavar="FILE")
    weight_backward: float = option(1.0, "weight of log p(x | y) of --backward", min=0, max=100)
    weight_lm: float = option(0.3, "weight of log p(y) of --lm", min=0, max=100)
    feature: tuple[str, ...] = option(
        (),
        "numeric fields of the hypotheses in FILE, such as the estimate of a quality model, with a weight for each "
        "field; the weighted numbers are added after the length penalty",
        metavar="NAME=WEIGHT,…",
    )
    lenpen: float = option(0.6, "length penalty of the sum, as in generate", min=-10, max=10)
    tune: Path | None = option(
        None,
        "reference translations, for which a random search chooses all weights and the length penalty",
        metavar="FILE",
    )
    metric: Literal["bleu", "chrf"] = option("bleu", "metric that --tune maximises")
    trials: int = option(
        300, "number of random combinations of the weights and the length penalty that --tune tries",
        min=1, max=1_000_000,
    )  # fmt: skip
    seed: int = option(1, "seed of --tune", min=0, max=2**63 - 1)
    source_lang: str | None = option(
        None, "language of the sources, for a multilingual backward model", flag="-s/--source-lang", metavar="CODE"
    )
    target_lang: str | None = option(
        None, "language of the translations, for a multilingual backward model and for the tokenizer of BLEU",
        flag="-t/--target-lang", metavar="CODE",
    )  # fmt: skip
    format: Literal["text", "jsonl"] = option(
        "text", "text: the best translation of each line; jsonl: all translations with their log probabilities"
    )


@click.command(cls=Command)
@click.argument("nbest", type=Path, required=False, metavar="[FILE]")
@plugin_option
def command(nbest: Path | None, plugins: tuple[str, ...], **flags: Any) -> None:
    """Choose the best translations of n-best lists by noisy-channel reranking. FILE is the output of generate.

    \b
    nmtkit generate data-bin --gen-subset valid --path averaged.pt \\
                    --beam 20 --nbest 20 --format jsonl > valid.jsonl
    nmtkit rerank valid.jsonl --backward back.pt --lm lm.pt --tune valid.de
    nmtkit rerank test.jsonl --backward back.pt --lm lm.pt > test.de

    The score of a translation y of x is log p(y | x) + b log p(x | y) + l log p(y), divided by the length penalty,
    plus the weighted features. The output of --format jsonl contains all log probabilities, so it can be reranked
    again without the models.
    """
    config: RerankConfig = derive(RerankConfig, on_command_line(flags), COMMAND_LINE)
    check_flags(RERANK_RULES, given_flags(), given_flags())
    load_plugins(plugins)
    rerank(nbest, config, plugins, given_flags())


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


def checked_languages(config: RerankConfig, backward: Path) -> tuple[None, None] | None:
    """Checks the direction of a backward model without language tokens. Returns the language tokens that it needs.

    The sources have the language --source-lang. The translations have the language --target-lang, or the language of
    --lm. Returns None, without a check, if the checkpoint does not name its languages. Raises ValueError for a model of
    another direction.
    """
    from nmtkit.models.building import languages_of
    from nmtkit.text.languages import subtags

    pair = languages_of(backward)
    if pair is None:
        return None
    of_lm = None if config.lm is None else (languages_of(config.lm) or (None, None))[1]
    wanted = config.target_lang or of_lm, config.source_lang
    if any(code and subtags(code)[0] != subtags(own)[0] for code, own in zip(wanted, pair, strict=True)):
        origins = [f"--lm {config.lm}"] if of_lm and not config.target_lang else []
        origins += ["--target-lang"] if config.target_lang else []
        origins += ["--source-lang"] if config.source_lang else []
        source, target = wanted[0] or "the language of the translations", wanted[1] or "the language of the sources"
        raise ValueError(
            f"--backward {backward} translates from {pair[0]} into {pair[1]}, but a backward model must translate from "
            f"{source} into {target} ({', '.join(origins)})"
        )
    return None, None


def rerank(path: Path | None, config: RerankConfig, plugins: tuple[str, ...], given: Collection[str]) -> None:
    from nmtkit.jobs.distributed import rank_device
    from nmtkit.models.building import check_language_model
    from nmtkit.scoring.metrics import Settings, score
    from nmtkit.scoring.texts import check_equal_counts, lines_of, read_lines
    from nmtkit.translation.likelihood import is_language_model
    from nmtkit.translation.options import DeviceOptions
    from nmtkit.translation.reranking import BACKWARD, LM, Weights, add_features, read_nbest, tune
    from nmtkit.translation.translator import Translator

    name = str(path or "standard input")
    lines = read_lines(path) if path else lines_of(standard_input().read(), Path(name))
    lists = read_nbest(lines, name)
    device = rank_device(DeviceOptions().named_device, 1)
    backward, lm = (None if file is None else Translator.load(file, device) for file in (config.backward, config.lm))
    if config.lm is not None and lm is not None:
        check_language_model(config.lm, lm.models[0])
    if backward is not None and is_language_model(backward):
        raise ValueError(f"--backward {config.backward} is a language model; give it as --lm")
    references = None if config.tune is None else read_lines(config.tune)
    if references is not None:
        check_equal_counts({name: lines, str(config.tune): references})
    languages: tuple[str | None, str | None] = config.source_lang, config.target_lang
    if backward is not None and config.backward is not None and not backward.tokenizer.languages:
        languages = checked_languages(config, config.backward) or languages
    add_features(lists, backward, lm, languages)
    known = set()  # flags of the models whose log probabilities the hypotheses have
    for field, flag in ((BACKWARD, "backward"), (LM, "lm")):
        present = {field in each for nbest in lists for each in nbest.hypotheses}
        if len(present) > 1:
            raise ValueError(f"{name}: some hypotheses have no {field}; give the model to compute it")
        known |= {flag} if True in present else set()
        if present == {False} and f"--weight-{flag}" in given:
            raise ValueError(f"--weight-{flag} has no effect, because {name} has no {field}; give --{flag} FILE")
    features = feature_weights(config.feature)
    for number, nbest in enumerate(lists, 1):
        nbest.check_features(features, f"{name}:{number}")
    weights = Weights(config.weight_backward, config.weight_lm, config.lenpen, features)
    if references is not None:
        settings = Settings(target_lang=config.target_lang)
        weights, highest, first = tune(
            lists,
            lambda texts: score(texts, [references], [config.metric], settings)[0].value,
            weights,
            config.trials,
            config.seed,
        )
        models = [
            word for flag in ("backward", "lm") if (file := getattr(config, flag)) for word in (f"--{flag}", file)
        ]
        words = ["nmtkit", "rerank", "test.jsonl", *models, *(word for each in plugins for word in ("--plugin", each))]
        values = {"backward": weights.backward, "lm": weights.lm}
        words += [word for flag in values if flag in known for word in (f"--weight-{flag}", f"{values[flag]:g}")]
        words += ["--lenpen", f"{weights.lenpen:g}"]
        if features:
            words += ["--feature", ",".join(f"{name}={weight:g}" for name, weight in weights.features.items())]
        stderr.print(f"{config.metric} {first:.2f} with the given weights, {highest:.2f} with the best", markup=False)
        stderr.print(f"next: {shlex.join(map(str, words))} > test.out", markup=False, highlight=False, soft_wrap=True)
    for nbest in lists:
        record = nbest.reranked(weights)
        as_json = config.format == "jsonl"
        click.echo(json.dumps(record, ensure_ascii=False) if as_json else record["hypotheses"][0]["text"])
