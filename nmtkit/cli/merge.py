"""`nmtkit merge`: joins the shards that `generate`, `clean` or `distill` has written to its --output-dir."""

import dataclasses
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import nmtkit
from nmtkit.cli.clean import show_run
from nmtkit.cli.command import Command, tell
from nmtkit.cli.flags import PATH, flags, from_flags, given_flags
from nmtkit.config import Config, option
from nmtkit.config.files import atomic_write
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs.progress import quantity
from nmtkit.jobs.shard_plan import Plan, merge, read_plan


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """Settings of `nmtkit merge`."""

    output: str | None = option(
        None,
        "file to write (default: standard output); the file appears when all lines are written; for shards of clean, "
        "this flag is required and names the corpus of the kept pairs, as clean --output does",
        metavar="FILE|CORPUS",
    )
    dropped: str | None = option(
        None, "for shards of clean: write the dropped pairs, as clean --dropped does", metavar="CORPUS"
    )
    scores: Path | None = option(
        None, "for shards of clean: write all scores, as clean --scores does", metavar="FILE", access="write"
    )
    report: Path | None = option(
        None, "for shards of clean: write the page of clean --report", metavar="FILE.html", access="write"
    )
    plugin: tuple[str, ...] = option(
        (), "for shards of clean: import this plug-in of a filter; repeatable", metavar="FILE|MODULE", repeatable=True
    )


@click.command(cls=Command)
@click.argument("folder", type=PATH, metavar="DIR")
def command(folder: Path, **settings: Any) -> None:
    """Join the shards in DIR, the --output-dir of another command, in order of the input.

    If shards are missing or damaged, the command fails and names these shards.

    \b
    nmtkit generate --path averaged.pt --input mono.de --output-dir shards
    nmtkit merge shards --output mono.en
    nmtkit clean -s en -t it crawl.tsv.gz --output-dir cleaned
    nmtkit merge cleaned --output data/train --report page.html
    """
    config: MergeConfig = from_flags(MergeConfig, settings)
    plan = read_plan(folder)
    for path in (config.output, config.dropped, config.scores, config.report):
        if path is not None and Path(path).absolute().parent.resolve() == folder.resolve():
            raise ValueError(f"{path} is inside {folder}; give a file outside the folder of the shards")
    if plan.fingerprint.get("command") == "clean":
        if config.output is None:
            raise ValueError(f"{folder} has shards of nmtkit clean; give --output CORPUS")
        merge_clean(plan, config)
        return
    for flag in given_flags() & {"--dropped", "--scores", "--report", "--plugin"}:
        raise ValueError(f"{flag} does nothing for {folder}, which has no shards of nmtkit clean")
    with nullcontext(sys.stdout.buffer) if config.output is None else atomic_write(Path(config.output)) as out:
        lines, _ = merge(plan, out)
    tell(f"{quantity(lines, 'lines')} of {quantity(len(plan.shards), 'shards')}")


command.params += flags(MergeConfig)


def merge_clean(plan: Plan, config: MergeConfig) -> None:
    """Decides which pairs of the shards of `nmtkit clean` to keep. Writes the kept pairs and the other files."""
    from nmtkit.cleaning.shards import merge_cleaned, read_job

    if (version := plan.fingerprint.get("version of nmtkit")) != nmtkit.__version__:
        raise ValueError(
            f"{plan.folder} was written by nmtkit {version}, and this is nmtkit {nmtkit.__version__}; merge with the "
            "version that wrote the shards"
        )
    load_plugins(config.plugin)
    job = read_job(plan.folder)
    cleaning = dataclasses.replace(
        job.config, output=config.output, dropped=config.dropped, scores=config.scores, report=config.report
    )
    show_run(cleaning, lambda: merge_cleaned(plan, job, cleaning))
