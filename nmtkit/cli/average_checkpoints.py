"""`nmtkit average-checkpoints`: writes a checkpoint with the mean of the weights of several checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nmtkit.cli.command import Command
from nmtkit.cli.flags import CHECKPOINT, flags, from_flags, given_flags
from nmtkit.config import Config, FlagRule, check_flags, option

AVERAGE_RULES = (FlagRule("--best-checkpoint-metric", needs=("--best",)),)


@dataclass(frozen=True, kw_only=True)
class AverageConfig(Config):
    """Settings of `nmtkit average-checkpoints`."""

    last: int | None = option(None, "average the newest N checkpoints of FOLDER", min=1, max=10_000)
    best: int | None = option(None, "average the N best checkpoints of FOLDER", min=1, max=10_000)
    best_checkpoint_metric: str = option(
        "loss", "validation score that --best compares: loss, bleu or another score of the log", metavar="NAME"
    )
    output: Path = option(..., "checkpoint to write", metavar="FILE", access="write")


@click.command(cls=Command)
@click.argument("inputs", type=CHECKPOINT, nargs=-1, required=True, metavar="FOLDER | FILE…")
def command(inputs: tuple[Path, ...], **settings: Any) -> None:
    """Average the weights of several checkpoints into one.

    \b
    nmtkit average-checkpoints checkpoints --last 5 --output averaged.pt
    nmtkit average-checkpoints checkpoints --best 3 --output averaged.pt
    nmtkit average-checkpoints one.pt two.pt --output averaged.pt
    """
    from nmtkit.training import averaging

    config: AverageConfig = from_flags(AverageConfig, settings)
    check_flags(AVERAGE_RULES, given_flags(), given_flags())
    metric = config.best_checkpoint_metric
    averaging.write(averaging.choose(inputs, last=config.last, best=config.best, metric=metric), config.output)


command.params += flags(AverageConfig)
