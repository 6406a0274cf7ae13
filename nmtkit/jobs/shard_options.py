"""The flags of commands that work in shards."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmtkit.config import Config, FlagRule, option

_SHARD_FLAGS = ("--shard-lines", "--shard", "--executor")
SHARD_RULES = (
    *(FlagRule(flag, needs=("--output-dir",)) for flag in _SHARD_FLAGS),
    *(FlagRule(flag, needs=("--executor ray",)) for flag in ("--actor-cpus", "--actor-gpus")),
    FlagRule("--output-dir", excludes=("--output",), reason="nmtkit merge joins the shards"),
    FlagRule("--executor ray", excludes=("--shard",), reason="Ray distributes the shards over the cluster"),
)
TRANSLATION_RULES = (
    FlagRule("--output-dir", needs=("--input", "--test-set")),
    FlagRule("--output-dir", excludes=("DATA", "a document"), reason="give the lines of a text file with --input"),
    FlagRule(
        "--output-dir",
        excludes=("--glossary-report", "--quality-report"),
        reason="the shards have no common report; --format jsonl writes the terms and the quality of each line",
    ),
    FlagRule("--output-dir", excludes=("--pivot",), reason="translate in two jobs, first to the pivot language"),
    FlagRule("--executor ray", excludes=("--device", "--threads"), reason="see --actor-cpus and --actor-gpus"),
)


@dataclass(frozen=True, kw_only=True)
class ShardOptions(Config):
    """Settings of a job in shards."""

    output_dir: Path | None = option(
        None,
        "work in shards: write a file for each shard to this folder; if you repeat the command, it makes the missing "
        "shards; nmtkit merge joins the shards",
        metavar="DIR", section="Shards",
    )  # fmt: skip
    shard_lines: int = option(16_384, "number of lines in a shard", min=1, max=1 << 40)
    shard: str | None = option(
        None, "process only every N-th shard, beginning with shard I: part I of N of a job array",
        metavar="I/N",
    )  # fmt: skip
    executor: Literal["local", "ray"] = option(
        "local", "local: processes of this machine; ray: actors of a Ray cluster; --workers sets their number"
    )
    actor_cpus: float = option(1, "CPUs that a Ray actor reserves", above=0, max=4096)
    actor_gpus: float = option(0, "GPUs that a Ray actor reserves; with 0, the actor uses the CPU", min=0, max=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        part_of(self.shard)


def part_of(shard: str | None, most: int = 10**9 - 1) -> tuple[int, int]:
    """Returns the value of --shard as two numbers (i, n), with 1 <= i <= n <= most, or (1, 1) for None.

    Raises ValueError if `shard` does not have the form I/N, or if I or N is out of range.
    """
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= most:
        raise ValueError(f"--shard {shard!r} is not I/N with I from 1 to N, such as 3/8, and N at most {most:,}")
    return int(match[1]), int(match[2])
