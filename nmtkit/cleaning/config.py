"""The settings of `nmtkit clean`, and its presets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nmtkit.config import Config, FlagRule, check_no_collisions, derive, option, split_settings
from nmtkit.data.corpora.corpus import as_columns
from nmtkit.jobs.shard_options import ShardOptions

DEFAULT_FILTERS = (
    *("empty", "length", "overlap", "copy", "boilerplate", "repetition", "script", "swapped", "language"),
    *("length_ratio", "numbers", "urls", "currencies", "alignment", "word_order", "domain"),
)
# flag of a file -> the filters that read the file
FILE_FILTERS = {"--exclude": ("overlap",), "--domain": ("domain",), "--lid-model": ("language", "swapped")}
MODEL_PROBABILITY = 0.03  # default of --min-probability if models score the pairs
# Name of a preset -> settings of filters that the preset changes.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "curated": {},
    "crawl": {
        "max_characters": 1000, "max_length_z": 2.6, "max_copied": 0.6, "max_repetition": 0.15, "min_language": -0.2,
        "min_script": 0.7, "min_alignment": 0.25, "min_word_order": -1.5,
    },
}  # fmt: skip

FLAGS_OF_SCORING = (
    "--sample", "--seed", "--exclude", "--domain", "--lid-model", "--alignment-iterations",
    "--forward", "--backward", "--self-train", "--self-train-updates", "--quality",
)  # fmt: skip
CLEAN_RULES = (
    FlagRule("--from-scores", excludes=FLAGS_OF_SCORING, reason="the file has the scores"),
    FlagRule("--self-train", excludes=("--forward", "--backward"), reason="--self-train makes both models"),
    FlagRule("--quality", excludes=("--self-train", "--forward", "--backward"), reason="each pair has one model score"),
    FlagRule("--min-domain", needs=("--domain", "--from-scores")),
    FlagRule("--forward", needs=("--backward",)),
    FlagRule("--backward", needs=("--forward",)),
    FlagRule("--self-train-updates", needs=("--self-train",)),
    FlagRule("--min-model", needs=("--forward", "--self-train", "--quality", "--from-scores")),
    FlagRule("--from-scores", excludes=("--scores",), reason="both files would have the same scores"),
    FlagRule(
        "--output-dir",
        excludes=("--dropped", "--scores", "--report"),
        reason="give the second flag to nmtkit merge, which writes the file from all shards",
    ),
    FlagRule("--output-dir", excludes=("--from-scores",), reason="reading scores is fast and needs no shards"),
    FlagRule(
        "--output-dir",
        excludes=("--self-train", "--self-train-updates"),
        reason="the models learn from the pairs that all shards keep; train them with clean --self-train on a part of "
        "the corpus, and give them with --forward and --backward",
    ),
)


@dataclass(frozen=True, kw_only=True)
class CleanConfig(Config):
    """Settings of `nmtkit clean`, except the settings of the filters."""

    source_lang: str = option(
        ..., "source language: LANG in the file name PREFIX.LANG, or the name of a column", flag="-s/--source-lang",
        metavar="LANG", section="Files",
    )  # fmt: skip
    target_lang: str = option(..., "target language, like --source-lang", flag="-t/--target-lang", metavar="LANG")
    output: str | None = option(
        None,
        "corpus to write: a prefix, .tsv, .tmx, .jsonl, .parquet or .zip; text files may end in .gz, .zst, …; required "
        "without --output-dir",
        metavar="CORPUS",
    )
    dropped: str | None = option(
        None, "write the dropped pairs to this corpus, with a column named reason", metavar="CORPUS"
    )
    columns: tuple[str, ...] = option(
        (), "source and target column of .tsv, .jsonl and .parquet files: names, or numbers from 1",
        metavar="SOURCE,TARGET",
    )  # fmt: skip
    exclude: tuple[str, ...] = option(
        (), "drop pairs whose source or target is in one of these corpora, such as test sets", metavar="CORPUS,…"
    )
    domain: tuple[str, ...] = option(
        (), "corpora of the domain of your texts, with at least 1,000 pairs; the filter named domain then drops pairs "
        "that are more probable in the cleaned corpus than in these corpora", metavar="CORPUS,…",
    )  # fmt: skip
    scores: Path | None = option(
        None,
        "write the scores and the reason of each pair to this .parquet or .tsv file",
        metavar="FILE",
        access="write",
    )
    from_scores: Path | None = option(
        None,
        "apply the limits to the scores in this file, without scoring the pairs again",
        metavar="FILE",
        access="read",
    )
    report: Path | None = option(
        None,
        "write an HTML page with counts, examples and histograms of the scores",
        metavar="FILE.html",
        access="write",
    )

    filters: tuple[str, ...] = option(
        DEFAULT_FILTERS, "filters to apply, in this order; the first filter that drops a pair is given as the reason",
        metavar="NAME,…", section="Cleaning",
    )  # fmt: skip
    preset: Literal["curated", "crawl"] = option(
        "curated",
        "limits of the filters: curated keeps nearly all good pairs; crawl drops more bad and more good pairs",
    )
    mend: bool = option(
        True, "mend wrong encodings, HTML entities, white space, invisible characters and Unicode normalization"
    )
    forward: Path | None = option(
        None,
        "checkpoint of a model from source to target; pairs are scored with this model and with --backward",
        metavar="RUN|FILE",
        checkpoint=True,
    )
    backward: Path | None = option(
        None, "checkpoint of a model from target to source", metavar="RUN|FILE", checkpoint=True
    )
    self_train: bool = option(
        False, "train two small models on the best pairs, in the folder OUTPUT.models, and score pairs with both models"
    )
    self_train_updates: int = option(1000, "updates of each model of --self-train", min=1, max=1_000_000)
    quality: str | None = option(
        None,
        "score pairs with a metric that reads no reference, cometkiwi or metricx-qe, on a scale from 0 to 1 (best); "
        "in cometkiwi=MODEL, MODEL is a folder or hf:ORG/NAME[@REVISION]",
        metavar="METRIC[=MODEL]",
    )
    min_model: float = option(
        0.0, "drop pairs whose score is below X; the score is exp(-dual cross-entropy) of the two models, or the score "
        "of --quality", min=0, max=1,
    )  # fmt: skip
    min_probability: float | None = option(
        None, "drop pairs whose probability of being good, computed from the scores of alignment, word_order and "
        "models, is below X; none means 0.03 with models, and no limit without models", min=0, max=1,
    )  # fmt: skip
    duplicates: Literal["pair", "source", "target", "none"] = option(
        "pair",
        "drop duplicates: pairs with equal source and target (pair), pairs with equal source (source), or pairs with "
        "equal target (target); case, spaces and punctuation are ignored; with pair, the first of equal pairs stays; "
        "with source or target, the pair with the highest probability stays, or without probabilities the pair with "
        "the highest model score, or else the highest alignment score",
    )
    duplicate_similarity: float | None = option(
        None,
        "keep only the best of several similar pairs: the pair with the highest probability, or else the highest model "
        "score, or else the highest alignment score, or else the first pair; two pairs are similar if "
        "the number of their common character 5-grams, divided by the number of all their 5-grams, is at least X "
        "(Jaccard index, estimated by MinHash); with --duplicates source or target, only this side is compared",
        min=0.5, max=1,
    )  # fmt: skip
    lid_model: Path | None = option(
        None, "fastText model such as lid.176.ftz, for the filters named language and swapped; none means py3langid",
        metavar="FILE", access="read",
    )  # fmt: skip
    sample: int = option(100_000, "number of pairs from which the filters learn statistics", min=100, max=100_000_000)
    seed: int = option(1, "seed of --sample and of the examples for models and probabilities", min=0, max=(1 << 63) - 1)
    workers: int | None = option(
        None, "number of scoring processes; none means one per core", min=1, max=1024, section="Running"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        as_columns(self.columns)
        if self.duplicate_similarity is not None and self.duplicates == "none":
            raise ValueError("--duplicate-similarity does nothing with --duplicates none")
        repeated = [name for name in self.filters if self.filters.count(name) > 1]
        if repeated:
            raise ValueError(f"--filters repeats {repeated[0]}")
        has_plugin = not set(self.filters) <= set(DEFAULT_FILTERS)  # filters of plug-ins may read all these files
        for (flag, names), value in zip(FILE_FILTERS.items(), (self.exclude, self.domain, self.lid_model), strict=True):
            if value and not has_plugin and not set(names) & set(self.filters):
                raise ValueError(f"{flag} does nothing without the filter {' or '.join(names)}; add it to --filters")

    @property
    def uses_models(self) -> bool:
        return self.self_train or self.forward is not None or self.quality is not None

    def probability_limit(self) -> float | None:
        """Returns the minimum probability of being good that a kept pair must have, or None without a minimum."""
        return MODEL_PROBABILITY if self.min_probability is None and self.uses_models else self.min_probability


def filter_configs(names: Sequence[str], preset: str) -> dict[str, Any]:
    """Returns the config of each named filter, with the limits of the preset. Raises ValueError for an unknown name."""
    from nmtkit.cleaning.filters import FILTERS

    configs: dict[str, Any] = {}
    for name in names:
        config = FILTERS[name].preset
        configs[name] = derive(config, split_settings(PRESETS[preset], type(config))[0], f"preset {preset}")
    own = {"nmtkit clean": CleanConfig(source_lang="", target_lang=""), "nmtkit clean --output-dir": ShardOptions()}
    check_no_collisions(own | {f"filter {name}": config for name, config in configs.items()})
    return configs
