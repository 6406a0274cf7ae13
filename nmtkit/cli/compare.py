"""`nmtkit compare`: compares runs in a table or on an HTML page, and the sentences of two systems on an HTML page."""

from pathlib import Path
from typing import Any

import click

from nmtkit.cli import score
from nmtkit.cli.command import Command, echo, stderr
from nmtkit.cli.flags import PATH, given_flags, on_command_line
from nmtkit.cli.score import ScoreConfig
from nmtkit.config import COMMAND_LINE, FlagRule, check_flags, derive
from nmtkit.config.files import atomic_write, check_outputs

FORMATS = ("text", "tsv", "csv", "latex", "json")


# flags of `nmtkit score` that `compare --sys` has too
SHARED = (
    "--ref", "--data", "--gen-subset", "--src", "--columns", "--target-lang", "--metric", "--tokenize", "--lowercase",
    "--comet-model", "--test", "--samples",
)  # fmt: skip
PAGE = Path("comparison.html")
METRICS = ("chrf", "bleu")  # the first sorts the sentences; BLEU of single sentences is not reliable
OF_SCORE = ("--data", "--gen-subset", "--tokenize", "--lowercase", "--comet-model")
COMPARE_RULES = (
    FlagRule("RUN", excludes=("--sys",), reason="compare either runs or systems"),
    FlagRule("--sys", excludes=("--mean-over-seeds", "--format", "--curves"), reason="these flags are for runs"),
    *(FlagRule(flag, needs=("--sys",)) for flag in SHARED),
    *(rule for rule in score.SCORE_RULES if rule.flag in OF_SCORE),
)


COMMON = {
    "--mean-over-seeds": "one row for runs that differ only in the seed",
    "--format [text|tsv|csv|latex|json]": "of the table (default: text)",
    "--report FILE": "HTML page of the comparison",
    "--curves FILE": "curves of all runs: .csv, .pdf, .svg or .png",
    "--sys FILE": "translations of a system; repeat it",
    "--ref FILE": "references; repeatable",
    "--src PATH": "source text",
    "--metric NAME,…": "scores of sentences",
}


@click.command(cls=Command, common=COMMON)
@click.argument("runs", type=PATH, nargs=-1, metavar="[RUN…]")
@click.option("--mean-over-seeds", is_flag=True, help="Show one row for runs that differ only in the seed.")
@click.option("--format", type=click.Choice(FORMATS), default="text", help="Output format.  [default: text]")
@click.option(
    "--report",
    type=PATH,
    metavar="FILE",
    help=f"Also write an HTML page with the curves of all runs.  [default with --sys: {PAGE}]",
)
@click.option(
    "--curves", type=PATH, metavar="FILE", help="Also write the curves of all runs to FILE: .csv, .pdf, .svg or .png."
)
def command(
    runs: tuple[Path, ...],
    mean_over_seeds: bool,
    format: str,
    report: Path | None,
    curves: Path | None,
    systems: tuple[Path, ...],
    references: tuple[Path, ...],
    **settings: Any,
) -> None:
    """Compare training runs, or the translations of two systems.

    RUN is the folder of a run, which may still be training, or a folder of runs, such as the folder of a sweep. The
    table has the settings that differ, best scores, speed, time and state.

    With --sys A --sys B, the page shows both translations of each sentence side by side, with the differences marked,
    sorted by the difference of a score, by length, or by names and numbers.

    \b
    nmtkit compare runs/one runs/two
    nmtkit compare runs/lr --mean-over-seeds
    nmtkit compare runs/lr --format tsv --report lr.html
    nmtkit compare runs/lr --mean-over-seeds --format latex --curves lr.pdf
    nmtkit compare --sys baseline.de --sys better.de --ref test.de --src test.en
    """
    given = given_flags() | ({"RUN"} if runs else set())
    config: ScoreConfig = derive(ScoreConfig, {"metric": METRICS} | on_command_line(settings), COMMAND_LINE)
    check_flags(COMPARE_RULES, given, given | {f"--metric {name}" for name in config.metric})
    if systems:
        compare_systems(systems, references, config, report)
        return
    if not runs:
        raise ValueError("give the folders of runs, or two systems with --sys A --sys B --ref FILE")
    from nmtkit.experiments import comparison, comparison_output

    if curves and not curves.parent.is_dir():
        raise FileNotFoundError(f"--curves {curves}: the folder {curves.parent} does not exist")
    folders = comparison.folders_of(runs)
    inputs = [folder / name for folder in folders for name in ("log.jsonl", "config.toml")]
    check_outputs({"--report": report, "--curves": curves}, inputs)
    summaries = [comparison.summarize(folder) for folder in folders]
    rows = comparison.means_over_seeds(summaries) if mean_over_seeds else summaries
    echo(comparison_output.formatted(rows, format), nl=False)
    if report:
        comparison_output.write_page(report, summaries, rows)
    if curves:
        comparison_output.write_curves(curves, summaries)


# the same flags with the same help
command.params += [each for each in score.command.params if {*each.opts} & {"--sys", *SHARED}]


def compare_systems(
    systems: tuple[Path, ...], references: tuple[Path, ...], config: ScoreConfig, report: Path | None
) -> None:
    """Prints the scores of two systems, and writes the page with all sentences."""
    from nmtkit.scoring import side_by_side, significance
    from nmtkit.scoring.report import comparison_report

    if len(systems) != 2:
        raise ValueError(f"compare shows two systems side by side; --sys is given {len(systems)} times")
    path = report or PAGE
    check_outputs({"--report": path}, [*systems, *references, config.src])
    texts, settings = score.read(references, systems, config)
    if texts.directions:
        score.check_one_direction(texts, config)
    samples = config.samples or significance.SAMPLES[config.test]
    comparison = significance.compare(
        texts.systems, texts.references, config.metric, settings, test=config.test, samples=samples
    )
    compared = side_by_side.sentences(texts, config.metric, settings)
    with atomic_write(path) as file:
        file.write(side_by_side.page(texts, compared, comparison, config.metric, settings).encode())
    echo("\n".join(comparison_report(comparison, config.test, samples, config.width).lines))
    stderr.print(f"{len(compared):,} sentences side by side: {path}", markup=False, highlight=False, soft_wrap=True)
