"""Joins the outputs of all shards in order, and checks the outputs against their records."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO

from nmtkit.bulk.plan import CHUNK, Plan, Shard


def merge(plan: Plan, out: BinaryIO) -> tuple[int, Counter[str]]:
    """Writes the outputs of all shards to `out`. Returns the number of lines and the sums of the counts.

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
        written, size, digest = _copy(plan, shard, out)
        if (written, size, digest) != (shard.lines, record["bytes"], record["sha256"]):
            raise ValueError(
                f"{plan.output(shard)} is damaged: it has {written:,} lines and {size:,} bytes, but {shard.name}.done "
                f"names {record['lines']:,} lines, {record['bytes']:,} bytes and a different checksum; remove both "
                f"files and repeat the command: {plan.command}"
            )
        lines += written
        counts.update(record["counts"])
    return lines, counts


def _copy(plan: Plan, shard: Shard, out: BinaryIO) -> tuple[int, int, str]:
    """Copies the output of a shard. Returns its number of lines, number of bytes, and SHA-256."""
    digest, lines, size = hashlib.sha256(), 0, 0
    with plan.output(shard).open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            lines += chunk.count(b"\n")
            size += len(chunk)
            out.write(chunk)
    return lines, size, digest.hexdigest()


def described(shards: Sequence[Shard]) -> str:
    """Returns a text with the numbers of the shards, such as "shards 3, 5-9". The first shard has the number 1."""
    ranges: list[list[int]] = []
    for number in (shard.index + 1 for shard in shards):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f"shard{'s' * (len(shards) > 1)} " + ", ".join("-".join(map(str, ends)) for ends in ranges)
