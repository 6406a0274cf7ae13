"""`nmtkit preprocess`: makes a binarized dataset from raw parallel text. The flags are fields of `PreprocessConfig`."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from nmtkit.cli.command import Command, is_quiet, print_line, show_next, stderr, tell
from nmtkit.cli.flags import flags, from_flags, given_flags
from nmtkit.config import check_flags
from nmtkit.config.tables import right_aligned
from nmtkit.data.dataset.config import PREPROCESS_RULES, PreprocessConfig
from nmtkit.demo import SHOWS_COMMANDS
from nmtkit.experiments.recipes import train_command
from nmtkit.jobs import progress

if TYPE_CHECKING:
    from nmtkit.data.dataset.report import DatasetReport


COMMON = {
    "-s, --source-lang LANG": "source language, such as en",
    "-t, --target-lang LANG": "target language, such as de",
    "--trainpref CORPUS,…": "training corpora: prefixes or files",
    "--validpref CORPUS,…": "valid sets",
    "--testpref CORPUS,…": "test sets",
    "--destdir PATH": "dataset folder to write",
    "--vocab-size N": "entries of the vocabulary (default: 37000)",
    "--[no-]separate-vocab": "one vocabulary for each side",
    "--tokenizer-from FILE|FOLDER": "use the tokenizer of a model or dataset",
    "--[no-]drop-duplicates": "drop pairs that occurred before",
    "--[no-]drop-overlap": "drop training pairs that are in a valid or test set",
    "--corpora FILE.toml": "many languages, instead of -s, -t and prefixes",
    "--report FILE.html": "page about the dataset",
    "--workers N": "processes; one per core is the default",
}


@click.command(cls=Command, common=COMMON)
def command(**settings: Any) -> None:
    """Make a dataset folder from parallel text: line i of PREFIX.en is the translation of line i of PREFIX.de.

    \b
    nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val \\
                      --testpref data/test --destdir data-bin
    \b
    On several machines, after a run on a sample has trained the tokenizer:
    nmtkit preprocess … --tokenizer-from sample-bin --destdir data-bin \\
                      --shard $SLURM_ARRAY_TASK_ID/64
    """
    from nmtkit.data.dataset.preprocess import preprocess

    started = time.monotonic()
    config: PreprocessConfig = from_flags(PreprocessConfig, settings)
    check_flags(PREPROCESS_RULES, given_flags(), given_flags())
    report = preprocess(config)
    progress.close()
    if not is_quiet():
        show(report, time.monotonic() - started)
        pairs = report.splits["train"].pairs if "train" in report.splits else 0
        show_next(train_command(config.destdir, pairs))


command.params[:0] = flags(PreprocessConfig)


def show(report: "DatasetReport", seconds: float) -> None:
    """Prints the report on stderr."""
    splits = [
        (name, f"{split.pairs:,}", f"{split.tokens['source']:,}", f"{split.tokens['target']:,}")
        for name, split in report.splits.items()
    ]
    sides = report.source_lang, report.target_lang
    if any("," in codes for codes in sides):  # many directions: a side has several languages
        sides = "source", "target"
    show_table(("", "pairs", *(f"{side} tokens" for side in sides)), splits)
    reasons = [(reason, f"{count:,}", fate) for reason, count, fate in report.reason_rows()]
    if reasons:
        show_table(("training pairs", "count", ""), reasons)
    show_pair(report, sides)
    read = sum(corpus.read for corpus in report.corpora)
    sizes = " and ".join(f"{size:,}" for size in dict.fromkeys(report.vocabulary.values()))
    tell(
        f"{read:,} training pairs read, {sum(report.cleaning().dropped.values()):,} dropped; vocabulary {sizes}; "
        f"{progress.pace(read, 'pairs', seconds)}"
    )


def show_pair(report: "DatasetReport", sides: tuple[str, str]) -> None:
    """Prints a training pair, so that the user notices exchanged languages. Prints nothing in the demo."""
    from nmtkit.pages.document import visible

    corpus = next((corpus for corpus in report.corpora if corpus.samples), None)
    if SHOWS_COMMANDS in os.environ or corpus is None:
        return
    line, *texts = corpus.samples[0]
    tell(f"line {line:,} of {corpus.source}:")
    width = max(map(len, sides))
    for side, text in zip(sides, texts, strict=True):
        row = Text(f"  {side:<{width}}  {visible(text)}", no_wrap=True, overflow="ellipsis")
        stderr.print(row, soft_wrap=not stderr.is_terminal)


def show_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    first, *lines = right_aligned([head, *rows])
    print_line(first, "bold")
    for line in lines:
        print_line(line)
