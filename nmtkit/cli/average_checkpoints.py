"""`nmtkit average-checkpoints`: several checkpoints in, one with the mean of their weights out."""

from pathlib import Path

import click

from nmtkit.cli.command import Command


@click.command(cls=Command)
@click.argument("inputs", type=Path, nargs=-1, required=True, metavar="FOLDER | FILE…")
@click.option("--last", type=click.IntRange(1, 10_000), metavar="N", help="The newest N checkpoints of the folder.")
@click.option("--best", type=click.IntRange(1, 10_000), metavar="N", help="The N with the best validation score.")
@click.option(
    "--best-checkpoint-metric",
    default="loss",
    metavar="NAME",
    help="The score that --best goes by: loss, bleu, or another that validations had.  [default: loss]",
)
@click.option("--output", type=Path, required=True, metavar="FILE", help="The checkpoint to write.")
def command(
    inputs: tuple[Path, ...], last: int | None, best: int | None, best_checkpoint_metric: str, output: Path
) -> None:
    """Average the weights of several checkpoints into one.

    \b
    nmtkit average-checkpoints checkpoints --last 5 --output averaged.pt
    nmtkit average-checkpoints checkpoints --best 3 --output averaged.pt
    nmtkit average-checkpoints one.pt two.pt --output averaged.pt
    """
    from nmtkit.training import averaging

    averaging.write(averaging.choose(inputs, last, best, best_checkpoint_metric), output)
