"""Joins the outputs of all shards in order, and checks the outputs against their records."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from nmtkit.jobs.shard_plan import CHUNK, Plan, Shard


def merge(plan: Plan, out: BinaryIO) -> tuple[int, Counter[str]]:
    """Writes the outputs of all shards to `out`. Returns the number of input lines, and the sum of each recorded count.

    Raises ValueError if shards are missing, or if the output of a shard differs from its record.
    """
    if missing := plan.unfinished():
        raise ValueError(
            f"{plan.folder} lacks {described(missing)} of {len(plan.shards)}; to make them, repeat the command: "
            f"{plan.command}"
        )
    lines = 0
    counts: Counter[str] = Counter()
    for shard in plan.shards:
        record = plan.record(shard)
        assert record is not None
        size, digest = _copy(plan.output(shard), out)
        if (size, digest) != (record["bytes"], record["sha256"]):
            raise ValueError(
                f"{plan.output(shard)} is damaged: it has {size:,} bytes, and {shard.name}.done says "
                f"{record['bytes']:,}, with another checksum; remove both files and repeat the command: {plan.command}"
            )
        lines += shard.lines
        counts.update(record["counts"])
    return lines, counts


def _copy(path: Path, out: BinaryIO) -> tuple[int, str]:
    """Copies a file. Returns its number of bytes and its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
            out.write(chunk)
    return size, digest.hexdigest()


def described(shards: Sequence[Shard]) -> str:
    """Returns a text with the numbers of the shards, such as "shards 3, 5-9". The first shard has the number 1."""
    ranges: list[list[int]] = []
    for number in (shard.index + 1 for shard in shards):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f"shard{'s' * (len(shards) > 1)} " + ", ".join("-".join(map(str, ends)) for ends in ranges)
