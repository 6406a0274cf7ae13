"""`nmtkit average-checkpoints`: writes a checkpoint with the mean of the weights of several checkpoints."""

from pathlib import Path

import click

from nmtkit.cli.command import Command
from nmtkit.cli.flags import CHECKPOINT, PATH


@click.command(cls=Command)
@click.argument("inputs", type=CHECKPOINT, nargs=-1, required=True, metavar="FOLDER | FILE…")
@click.option("--last", type=click.IntRange(1, 10_000), metavar="N", help="Average the newest N checkpoints of FOLDER.")
@click.option(
    "--best",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Average the N best checkpoints of FOLDER.",
)
@click.option(
    "--best-checkpoint-metric",
    default="loss",
    metavar="NAME",
    help="Validation score that --best compares: loss, bleu or another score of the log.  [default: loss]",
)
@click.option("--output", type=PATH, required=True, metavar="FILE", help="Checkpoint to write.")
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
