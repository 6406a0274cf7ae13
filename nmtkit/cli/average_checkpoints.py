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
    type=click.Choice(["loss", "bleu"]),
    default="loss",
    help="The score that --best goes by.  [default: loss]",
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
    import logging

    from nmtkit import averaging, checkpoint

    if last is not None and best is not None:
        raise ValueError("--last and --best both choose the checkpoints; give one")
    selects = last is not None or best is not None
    if selects and len(inputs) > 1:
        raise ValueError(f"--last and --best choose among one folder's checkpoints; {len(inputs)} paths were given")
    if not selects and inputs[0].is_dir():
        raise ValueError(f"{inputs[0]} is a folder; say which of its checkpoints with --last N or --best N")
    if last is not None:
        paths = averaging.last_of(inputs[0], last)
    elif best is not None:
        paths = averaging.best_of(inputs[0], best, best_checkpoint_metric)
    else:
        paths = list(inputs)
    averaging.check_files(paths, output)
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such folder to write {output.name} into")
    checkpoint.save(output, averaging.average(paths))
    names = ", ".join(path.name for path in paths)
    logging.getLogger("nmtkit").info("averaged into %s: %s", output, names)
