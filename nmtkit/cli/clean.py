"""`nmtkit clean`: mends parallel text, drops bad pairs, and reports the reason for each dropped pair."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from nmtkit.cleaning.config import CLEAN_RULES, DEFAULT_FILTERS, CleanConfig, filter_configs
from nmtkit.cli.command import is_quiet, tell
from nmtkit.cli.components import ComponentCommand
from nmtkit.cli.flags import flags, from_flags, given_flags, plugin_option
from nmtkit.cli.preprocess import show_table
from nmtkit.config import check_flags
from nmtkit.config.files import write_atomically
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs import progress
from nmtkit.jobs.shard_options import SHARD_RULES, ShardOptions

if TYPE_CHECKING:
    from nmtkit.cleaning.decision import CleanReport
    from nmtkit.cleaning.filters import Filter
    from nmtkit.config.registry import Registry


class CleanCommand(ComponentCommand):
    """The clean command. Its flags include the settings of the filters that --filters names."""

    def components(self, known: click.Context) -> dict[str, Any]:
        load_plugins(known.params["plugins"])
        names = known.params["filters"] or DEFAULT_FILTERS
        presets = filter_configs(names, known.params["preset"] or "curated")
        return {f"Filter {name}": preset for name, preset in presets.items()}

    def registries(self) -> "list[Registry[Filter]]":
        from nmtkit.cleaning.filters import FILTERS

        return [FILTERS]


COMMON = {
    "-s, --source-lang LANG": "source language, such as en",
    "-t, --target-lang LANG": "target language, such as de",
    "--output CORPUS": "corpus to write: a prefix, .tsv, .jsonl or .parquet",
    "--dropped CORPUS": "also write the dropped pairs, with their reasons",
    "--report FILE.html": "page with counts and examples of each filter",
    "--exclude CORPUS,…": "test sets, whose sentences are dropped",
    "--preset curated|crawl": "strictness of the filters (default: curated)",
    "--[no-]self-train": "also score pairs with models that are trained on them",
    "--scores FILE": "write all scores, for --from-scores",
    "--from-scores FILE": "apply other limits to saved scores",
    "--workers N": "processes; one per core is the default",
    "--output-dir DIR": "work in shards, for many machines",
}


@click.command(cls=CleanCommand, common=COMMON)
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS…")
@plugin_option
def command(corpora: tuple[str, ...], plugins: tuple[str, ...], **settings: Any) -> None:
    """Mend parallel text, and drop pairs that are not translations. Each dropped pair has one reason.

    A corpus is a prefix of two files, or a .tsv, .tmx, .jsonl, .parquet, .zip, .xlf or .po file.

    \b
    nmtkit clean -s en -t it OpenSubtitles.zip crawl.tsv.gz --output data/train \\
                 --exclude data/test --scores scores.parquet --report page.html
    nmtkit clean -s en -t it OpenSubtitles.zip crawl.tsv.gz --output data/train \\
                 --from-scores scores.parquet --preset crawl
    nmtkit clean -s en -t it crawl.tsv.gz --output-dir shards
    nmtkit merge shards --output data/train
    """
    from nmtkit.cleaning.clean import clean, scorer_of

    config: CleanConfig = from_flags(CleanConfig, settings)
    presets = filter_configs(config.filters, config.preset)
    configs = {name: from_flags(preset, settings) for name, preset in presets.items()}
    shards: ShardOptions = from_flags(ShardOptions, settings)
    check_flags((*CLEAN_RULES, *SHARD_RULES), given_flags(), given_flags() | {f"--executor {shards.executor}"})
    if shards.output_dir is not None:
        from nmtkit.cleaning.shards import sharded_cleaning
        from nmtkit.cli.shards import run_shards, this_command

        plan, run = sharded_cleaning(shards, config, configs, corpora, scorer_of(config), plugins, this_command())
        run_shards(shards, plan, run)
        return
    if config.output is None:
        raise ValueError("give --output CORPUS, or --output-dir DIR to work in shards")
    scorer = scorer_of(config)
    show_run(config, lambda: clean(config, corpora, configs, scorer))


command.params += flags(CleanConfig)
command.params += flags(ShardOptions)


def show_run(config: CleanConfig, run: "Callable[[], CleanReport]") -> None:
    """Calls `run`, which writes the kept pairs. Writes the page of --report, and prints the counts."""
    from nmtkit.cleaning.report import page

    started = time.monotonic()
    report = run()
    progress.close()
    if config.report is not None:
        write_atomically(config.report, page(report, config.source_lang, config.target_lang))
    if not is_quiet():
        show(report, time.monotonic() - started)


def show(report: "CleanReport", seconds: float) -> None:
    """Prints the counts on stderr."""
    rows = [(item.name, f"{item.dropped:,}", f"{item.matching:,}") for item in report.filters if item.matching]
    if rows:
        show_table(("reason", "dropped", "beyond the limit"), rows)
    mended = ", ".join(f"{name} {count:,}" for name, count in report.mended.items() if count)
    if mended:
        tell(f"mended lines: {mended}")
    tell(
        f"{report.read:,} pairs read, {report.read - report.kept:,} dropped, {report.kept:,} kept; "
        f"{progress.pace(report.read, 'pairs', seconds)}"
    )
