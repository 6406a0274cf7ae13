"""`nmtkit compare`: compares runs in a table or on an HTML page, and the sentences of two systems on an HTML page."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from nmtkit.cli import score
from nmtkit.cli.command import Command, echo, tell
from nmtkit.cli.flags import PATH, flags, from_flags, given_flags
from nmtkit.cli.score import ScoreConfig
from nmtkit.config import Config, FlagRule, check_flags, option
from nmtkit.config.files import check_outputs, write_atomically
from nmtkit.scoring.segments import MetricName

if TYPE_CHECKING:
    from nmtkit.experiments.comparison import RunSummary

# flags of `nmtkit score` that `compare --sys` has too
SHARED = (
    "--ref", "--data", "--gen-subset", "--test-set", "--language-pair", "--origlang", "--subset", "--src", "--columns",
    "--target-lang", "--metric", "--tokenize", "--lowercase", "--device", "--test", "--samples",
)  # fmt: skip
# flags whose rules in `nmtkit score` do not hold in `nmtkit compare`
OTHER_RULES = ("--src", "--target-lang", "--test", "--samples")
OF_ROWS = ("--metric", "--tokenize", "--lowercase", "--device", "--samples")  # of SHARED; need --sys or --base
PAGE = Path("comparison.html")
METRICS_OF_ROWS = ("bleu", "chrf")
METRICS = ("chrf", "bleu")  # chrF sorts the sentences, because BLEU of single sentences is not reliable
COMPARE_RULES = (
    FlagRule("RUN", excludes=("--sys",), reason="compare either runs or systems"),
    FlagRule(
        "--sys",
        excludes=("--mean-over-seeds", "--base", "--plot", "--format", "--curves"),
        reason="the second flag works only with runs",
    ),
    FlagRule("--base", excludes=("--mean-over-seeds",), reason="--base always shows means over seeds"),
    FlagRule("--plot", needs=("--base",)),
    *(FlagRule(flag, needs=("--sys", "--base") if flag in OF_ROWS else ("--sys",)) for flag in SHARED),
    *(rule for rule in score.SCORE_RULES if rule.flag in SHARED and rule.flag not in OTHER_RULES),
)


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Config):
    """Settings of a table of runs, which `nmtkit compare` and `nmtkit sweep` print."""

    format: Literal["text", "tsv", "csv", "latex", "markdown", "json"] = option("text", "output format")
    report: Path | None = option(
        None,
        "HTML page to write: the curves of all runs, or with compare --sys, the sentences side by side",
        metavar="FILE",
        access="write",
    )
    plot: Path | None = option(
        None, "draw the differences to the base row, with intervals: .svg, .png, .pdf", metavar="FILE", access="write"
    )


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RowsConfig):
    """Settings of `nmtkit compare`, without the settings of the scores."""

    mean_over_seeds: bool = option(False, "show one row for runs that differ only in the seed")
    base: str | None = option(
        None,
        "compare the translations of all rows with the translations of ROW, the name of a run folder without its seed",
        metavar="ROW",
    )
    curves: Path | None = option(
        None, "also write the curves of all runs to FILE: .csv, .pdf, .svg or .png", metavar="FILE", access="write"
    )


COMMON = {
    "--[no-]mean-over-seeds": "one row for runs that differ only in the seed",
    "--base ROW": "differences to this row, with intervals",
    "--plot FILE": "figure of the differences: .svg, .png or .pdf",
    "--format text|tsv|csv|latex|markdown|json": "output format (default: text)",
    "--report FILE": "HTML page of the comparison",
    "--curves FILE": "curves of all runs: .csv, .pdf, .svg or .png",
    "--sys FILE": "translations of a system; give the flag for each system",
    "--ref FILE": "references; repeatable",
    "--test-set NAME,…": "published test sets, with -l en-de",
    "--src PATH": "source text",
    "--metric NAME[=MODEL],…": "scores to compare",
}


@click.command(cls=Command, common=COMMON)
@click.argument("runs", type=PATH, nargs=-1, metavar="[RUN…]")
def command(runs: tuple[Path, ...], **settings: Any) -> None:
    """Compare training runs, or the translations of two systems.

    RUN is the folder of a run, which may still be training, or a folder of runs, such as the folder of a sweep. The
    table has the settings that differ, best scores, speed, time and state.

    With --base, the table has the mean scores of each row over its seeds, and the differences to the row --base, with
    confidence intervals and p-values over sentences and seeds.

    With --sys A --sys B, the page (--report, by default comparison.html) shows both translations of each sentence side
    by side and marks the differences. The sentences are sorted by the difference of a score, by length, or by the
    number of wrong names and numbers.

    \b
    nmtkit compare runs/one runs/two
    nmtkit compare runs/lr --mean-over-seeds
    nmtkit compare runs/lr --format tsv --report lr.html
    nmtkit compare runs/table3 --base base --plot table3.svg
    nmtkit compare runs/lr --mean-over-seeds --format latex --curves lr.pdf
    nmtkit compare --sys baseline.de --sys better.de --ref test.de --src test.en
    """
    given = given_flags() | ({"RUN"} if runs else set())
    config: CompareConfig = from_flags(CompareConfig, settings)
    metrics = ScoreConfig(metric=METRICS_OF_ROWS if config.base else METRICS)
    scoring: ScoreConfig = from_flags(metrics, {name: settings[name] for name in settings if name != "format"})
    facts = score.facts_of(scoring) | {f"--metric {MetricName.parse(name).name}" for name in scoring.metric}
    check_flags(COMPARE_RULES, given, given | facts)
    if scoring.sys:
        compare_systems(scoring, config.report or PAGE)
        return
    if not runs:
        raise ValueError("give the folders of runs, or two systems with --sys A --sys B --ref FILE")
    from nmtkit.experiments import comparison, comparison_output

    comparison_output.check_figure(config.plot, "--plot")
    comparison_output.check_figure(config.curves, "--curves", comparison_output.CURVE_FILES)
    folders = comparison.folders_of(runs)
    inputs = [folder / name for folder in folders for name in ("log.jsonl", "config.toml")]
    check_outputs({"--report": config.report, "--curves": config.curves, "--plot": config.plot}, inputs)
    summaries = [comparison.summarize(folder) for folder in folders]
    rows = comparison.means_over_seeds(summaries) if config.mean_over_seeds or config.base else summaries
    if config.base:
        show_differences(summaries, rows, config.base, scoring, config)
    else:
        show_rows(summaries, rows, config)
    if config.curves:
        comparison_output.write_curves(config.curves, summaries)


command.params += flags(CompareConfig)
# flags of `nmtkit score`, with the same help texts but without the defaults that are different here
DEFAULTS = {"metric": f"{','.join(METRICS)}; with --base {','.join(METRICS_OF_ROWS)}"}
for each in score.command.params:
    if {*each.opts} & {"--sys", *SHARED}:
        shared = copy.copy(each)
        assert isinstance(shared, click.Option) and shared.help is not None
        shared.show_default = DEFAULTS.get(str(shared.name), shared.show_default)
        shared.help = shared.help.partition("  [default:")[0]
        command.params.append(shared)


def show_rows(runs: "Sequence[RunSummary]", rows: "Sequence[RunSummary]", config: RowsConfig) -> None:
    """Prints the rows, and writes the page of --report."""
    from nmtkit.experiments import comparison_output

    echo(comparison_output.formatted(rows, config.format), nl=False)
    if config.report:
        comparison_output.write_page(config.report, runs, rows)


def show_differences(
    runs: "Sequence[RunSummary]",
    means: "Sequence[RunSummary]",
    base: str | None,
    scoring: ScoreConfig,
    config: RowsConfig,
) -> None:
    """Prints the differences of rows to the row `base`, and writes the page and the figure."""
    from nmtkit.experiments import comparison_output, differences_output
    from nmtkit.experiments.differences import compare_rows
    from nmtkit.scoring.metrics import MetricSettings
    from nmtkit.scoring.significance import SAMPLES

    settings = MetricSettings(tokenize=scoring.tokenize, lowercase=scoring.lowercase, device=scoring.device)
    samples = scoring.samples or SAMPLES["bootstrap"]
    compared = compare_rows(runs, base, scoring.metric, settings, samples=samples)
    echo(differences_output.formatted(compared, config.format), nl=False)
    if config.report:
        comparison_output.write_page(config.report, runs, means, differences_output.for_page(compared))
    if config.plot:
        differences_output.write_figure(config.plot, compared)


def compare_systems(config: ScoreConfig, path: Path) -> None:
    """Prints the scores of two systems, and writes the page with all sentences to `path`."""
    from nmtkit.scoring import side_by_side, significance
    from nmtkit.scoring.report import comparison_report

    if len(config.sys) != 2:
        raise ValueError(f"compare shows two systems side by side; --sys is given {len(config.sys)} times")
    check_outputs({"--report": path}, [*config.sys, *config.ref, config.src])
    if not (config.ref or config.data or config.test_set):
        raise ValueError("compare --sys needs references; give --ref FILE, --data FOLDER or --test-set NAME")
    texts, settings = score.read(config)
    if texts.directions:
        score.check_one_direction(texts)
    samples = config.samples or significance.SAMPLES[config.test]
    comparison = significance.compare(
        texts.systems, texts.references, config.metric, settings, test=config.test, samples=samples
    )
    compared = side_by_side.sentences(texts, config.metric, settings)
    write_atomically(path, side_by_side.page(texts, compared, comparison, config.metric, settings))
    echo("\n".join(comparison_report(comparison, config.test, samples, config.width).lines))
    tell(f"{len(compared):,} sentences side by side: {path}")
