"""`nmtkit merge`: joins the shards that `generate --output-dir` or `clean --output-dir` has written."""

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path

import click

import nmtkit
from nmtkit.cli.clean import show_run
from nmtkit.cli.command import Command, stderr
from nmtkit.cli.flags import PATH
from nmtkit.config.files import atomic_write
from nmtkit.config.plugins import load_plugins
from nmtkit.jobs.shard_plan import Plan, merge, read_plan


@click.command(cls=Command)
@click.argument("folder", type=PATH, metavar="DIR")
@click.option(
    "--output",
    metavar="FILE|CORPUS",
    help="File to write; it appears when all lines are written. For shards of clean, this flag is required, and writes "
    "the kept pairs, as clean --output does.  [default: standard output]",
)
@click.option(
    "--dropped", metavar="CORPUS", help="For shards of clean: write the dropped pairs, as clean --dropped does."
)
@click.option(
    "--scores", type=PATH, metavar="FILE", help="For shards of clean: write all scores, as clean --scores does."
)
@click.option("--report", type=PATH, metavar="FILE.html", help="For shards of clean: write the page of clean --report.")
@click.option(
    "--plugin", "plugins", multiple=True, metavar="FILE|MODULE",
    help="For shards of clean: import the plug-in of a filter first; repeatable.",
)  # fmt: skip
def command(
    folder: Path,
    output: str | None,
    dropped: str | None,
    scores: Path | None,
    report: Path | None,
    plugins: tuple[str, ...],
) -> None:
    """Join the shards in DIR, the --output-dir of another command, in order of the input.

    If shards are missing or damaged, the command fails and names these shards.

    \b
    nmtkit generate --path averaged.pt --input mono.de --output-dir shards
    nmtkit merge shards --output mono.en
    nmtkit clean -s en -t it crawl.tsv.gz --output-dir cleaned
    nmtkit merge cleaned --output data/train --report page.html
    """
    plan = read_plan(folder)
    for path in (output, dropped, scores, report):
        if path is not None and Path(path).absolute().parent.resolve() == folder.resolve():
            raise ValueError(f"{path} is inside {folder}; give a file outside the folder of the shards")
    if plan.fingerprint.get("command") == "clean":
        if output is None:
            raise ValueError(f"{folder} has shards of nmtkit clean; give --output CORPUS")
        merge_clean(plan, output, dropped, scores, report, plugins)
        return
    clean_flags = {"--dropped": dropped, "--scores": scores, "--report": report, "--plugin": plugins}
    for flag, value in clean_flags.items():
        if value:
            raise ValueError(f"{flag} does nothing for {folder}, which has no shards of nmtkit clean")
    with nullcontext(sys.stdout.buffer) if output is None else atomic_write(Path(output)) as out:
        lines, _ = merge(plan, out)
    if not click.get_current_context().meta.get("quiet"):
        stderr.print(f"{lines:,} lines of {len(plan.shards):,} shards", markup=False, highlight=False)


def merge_clean(
    plan: Plan, output: str, dropped: str | None, scores: Path | None, report: Path | None, plugins: tuple[str, ...]
) -> None:
    """Decides which pairs of the shards of `nmtkit clean` to keep. Writes the kept pairs and the other files."""
    from nmtkit.cleaning.shards import merge_cleaned, read_job

    if (version := plan.fingerprint.get("version of nmtkit")) != nmtkit.__version__:
        raise ValueError(
            f"{plan.folder} was written by nmtkit {version}, and this is nmtkit {nmtkit.__version__}; merge with the "
            "version that wrote the shards"
        )
    load_plugins(plugins)
    job = read_job(plan.folder)
    config = dataclasses.replace(job.config, output=output, dropped=dropped, scores=scores, report=report)
    show_run(config, lambda: merge_cleaned(plan, job, config))
