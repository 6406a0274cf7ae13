"""nmtkit preprocess: raw parallel text to a binarized dataset."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.status import Status
from rich.table import Table

from nmtkit.cli.command import Command, stderr

if TYPE_CHECKING:
    from nmtkit.data.report import Report

FILES, VOCABULARY, CLEANING, MIXING, RUN = "Files", "Vocabulary", "Cleaning", "Several corpora", "Running"


def option(section: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    """A click option listed under `section` of the help page."""

    def decorate(function: Any) -> Any:
        decorated = click.option(*names, **settings)(function)
        decorated.__click_params__[-1].section = section
        return decorated

    return decorate


class CommaList(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on, to type checkers only
    """`a,b,c` as a tuple of `kind`; with `empty`, items may be empty."""

    name = "list"

    def __init__(self, kind: Callable[[str], Any] = str, empty: bool = False) -> None:
        self.kind = kind
        self.empty = empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        items = [item.strip() for item in value.split(",")]
        try:
            return tuple(self.kind(item) for item in items if item or self.empty)
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 1,2.5", param, ctx)


class PartOf(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on, to type checkers only
    """`i/n` as (i, n), counted from 1."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        part, _, parts = str(value).partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            self.fail(f"{value!r} is not i/n with i from 1 to n, such as 3/8", param, ctx)
        return int(part), int(parts)


@click.command(cls=Command, short_help="Raw parallel text to a binarized dataset.")
@option(FILES, "-s", "--source-lang", required=True, metavar="LANG", help="Source language: files end in .LANG.")
@option(FILES, "-t", "--target-lang", required=True, metavar="LANG", help="Target language.")
@option(
    FILES,
    "--trainpref",
    "train",
    type=CommaList(),
    default=(),
    metavar="PREFIX,…",
    help="Training corpora: PREFIX.LANG, or PREFIX.LANG.gz, .bz2, .xz, .zst.",
)
@option(
    FILES,
    "--validpref",
    "valid",
    type=CommaList(),
    default=(),
    metavar="PREFIX,…",
    help="Valid sets, called valid, valid1, … in the dataset; never filtered.",
)
@option(
    FILES,
    "--testpref",
    "test",
    type=CommaList(),
    default=(),
    metavar="PREFIX,…",
    help="Test sets, called test, test1, …; never filtered.",
)
@option(FILES, "--destdir", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@option(FILES, "--overwrite", is_flag=True, help="Replace --destdir if it is a dataset.")
@option(
    VOCABULARY,
    "--vocab-size",
    default=37_000,
    show_default=True,
    metavar="N",
    help="Entries of the vocabulary, or of each of the two.",
)
@option(
    VOCABULARY,
    "--model-type",
    type=click.Choice(["bpe", "unigram", "word", "char"]),
    default="bpe",
    show_default=True,
    help="Kind of SentencePiece model; a word vocabulary has unknown words, and one of characters at most N entries.",
)
@option(VOCABULARY, "--separate-vocab", is_flag=True, help="A vocabulary for each side.")
@option(
    VOCABULARY,
    "--spm-model",
    type=CommaList(Path),
    default=(),
    metavar="PATH,…",
    help="Train no tokenizer but take this: a .model file, a dataset, or two .model files for source and target.",
)
@option(
    VOCABULARY,
    "--spm-sample",
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="Lines of each side, at most, that the tokenizer is trained on.",
)
@option(
    CLEANING, "--min-len", default=1, show_default=True, metavar="N", help="Drop pairs with a side of fewer pieces."
)
@option(
    CLEANING, "--max-len", default=256, show_default=True, metavar="N", help="Drop pairs with a side of more pieces."
)
@option(
    CLEANING,
    "--max-ratio",
    default=9.0,
    show_default=True,
    metavar="X",
    help="Drop pairs with one side more than X times the pieces of the other.",
)
@option(
    CLEANING,
    "--max-line-bytes",
    default=16_384,
    show_default=True,
    metavar="N",
    help="Drop pairs with a line of more bytes.",
)
@option(
    CLEANING,
    "--drop-duplicates",
    is_flag=True,
    help="Drop pairs that came before (in the same part); otherwise they are counted.",
)
@option(
    CLEANING,
    "--drop-leaked",
    is_flag=True,
    help="Drop training pairs that also stand in a valid or test set; otherwise they are counted.",
)
@option(CLEANING, "--drop-equal", is_flag=True, help="Drop pairs whose sides are equal; otherwise they are counted.")
@option(
    CLEANING,
    "--drop-control",
    is_flag=True,
    help="Drop pairs with control characters (tab and carriage return are none); otherwise they are counted.",
)
@option(CLEANING, "--strict", is_flag=True, help="Stop at the first pair that would be dropped, naming it.")
@option(
    CLEANING,
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write a page of counts, lengths, pieces, and examples of what was dropped.",
)
@option(
    MIXING,
    "--weights",
    type=CommaList(float),
    default=(),
    metavar="X,…",
    help="How many times an epoch sees the pairs of each training corpus, at least 1.",
)
@option(
    MIXING,
    "--temperature",
    type=float,
    metavar="X",
    help="Weights from sizes: shares in proportion to size^(1/X); 1 keeps them, 5 is usual for many languages.",
)
@option(
    MIXING,
    "--tag",
    "tags",
    type=CommaList(empty=True),
    default=(),
    metavar="TAG,…",
    help="For each training corpus a token before its source lines, such as <2de>; empty for none.",
)
@option(
    MIXING,
    "--valid-tag",
    "valid_tags",
    type=CommaList(empty=True),
    default=(),
    metavar="TAG,…",
    help="The same for each valid set.",
)
@option(
    MIXING,
    "--test-tag",
    "test_tags",
    type=CommaList(empty=True),
    default=(),
    metavar="TAG,…",
    help="The same for each test set.",
)
@option(RUN, "--workers", type=click.IntRange(min=1), metavar="N", help="Processes that encode.  [default: one a core]")
@option(
    RUN,
    "--shard",
    "part",
    type=PartOf(),
    metavar="I/N",
    help="Write part I of N into --destdir, for a job array; needs --spm-model. Train on the folder of all parts.",
)
@option(RUN, "--seed", default=1, show_default=True, metavar="N", help="Of the tokenizer's sample and of mixing.")
def command(report_file: Path | None, workers: int | None, **settings: Any) -> None:
    """Makes a dataset folder from parallel text: line i of PREFIX.en is the translation of line i of PREFIX.de.

    \b
    nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val \\
                      --testpref data/test --destdir data-bin
    \b
    On several machines, once a run on a sample has made the tokenizer:
    nmtkit preprocess … --spm-model sample-bin --destdir data-bin \\
                      --shard $SLURM_ARRAY_TASK_ID/64
    """
    from nmtkit.data.cleaning import Rules
    from nmtkit.data.preparation import Options, prepare

    started = time.monotonic()
    check_no_idle_flags(settings["spm_model"])
    rules = Rules(**{name: settings.pop(name) for name in Rules.__dataclass_fields__})
    options = Options(rules=rules, workers=workers or usable_cores(), count_pieces=report_file is not None, **settings)
    if stderr.is_terminal:
        with stderr.status("preprocess") as status:
            report = prepare(options, lambda pairs: show_progress(status, pairs, started))
    else:
        report = prepare(options)
    if report_file is not None:
        from nmtkit.data.report_page import page

        report_file.write_text(page(report), encoding="utf-8")
    if not click.get_current_context().meta.get("quiet"):
        show(report, time.monotonic() - started)
        stderr.print(f"next: nmtkit train {options.destdir} --save-dir checkpoints", soft_wrap=True, markup=False)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_no_idle_flags(spm_model: tuple[Path, ...]) -> None:
    """Raises ValueError when flags for a new tokenizer are given although none is to be trained."""
    context = click.get_current_context()
    for name in ("vocab_size", "model_type", "separate_vocab", "spm_sample"):
        if spm_model and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is for a new tokenizer, and --spm-model takes one that is there; leave one out")


def show_progress(status: Status, pairs: int, started: float) -> None:
    status.update(f"{pairs:,} pairs, {pairs / (time.monotonic() - started):,.0f}/s")


def show(report: "Report", seconds: float) -> None:
    """The report, on stderr: tables in a terminal, plain lines elsewhere."""
    from nmtkit.data.report import in_order

    splits = [
        (name, f"{split.pairs:,}", f"{split.tokens['source']:,}", f"{split.tokens['target']:,}")
        for name, split in report.splits.items()
    ]
    show_table(("", "pairs", f"{report.source_lang} tokens", f"{report.target_lang} tokens"), splits)
    findings = report.findings()
    reasons = [(reason, f"{count:,}", "dropped") for reason, count in in_order(findings.dropped).items()]
    reasons += [(reason, f"{count:,}", "kept") for reason, count in in_order(findings.counted).items()]
    if reasons:
        show_table(("training pairs", "count", ""), reasons)
    read = sum(corpus.read for corpus in report.corpora)
    sizes = (
        "" if report.vocabulary["source"] == report.vocabulary["target"] else f" and {report.vocabulary['target']:,}"
    )
    stderr.print(
        f"{read:,} training pairs read, {sum(findings.dropped.values()):,} dropped; "
        f"vocabulary {report.vocabulary['source']:,}{sizes}; {seconds:.1f} s",
        soft_wrap=True,
    )


def show_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if not stderr.is_terminal:
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        for row in (head, *rows):
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            stderr.print("  ".join(cells).rstrip(), soft_wrap=True, markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, title in enumerate(head):
        table.add_column(title, justify="left" if column == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    stderr.print(table)
