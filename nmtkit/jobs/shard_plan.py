"""The plan of a job in shards, and the merge of its outputs.

A shard is a range of whole lines of one text file, or of several parallel text files. A command may also divide
its input into other units, such as pairs: `Shard.lines` is then the number of pairs.

    plan.json          the fingerprint of the job, facts about its files, the borders of the shards
    input.txt          the lines of the input, if the input is not a single uncompressed text file
    shard-000007.txt   the output of a shard (.jsonl: JSON objects)
    shard-000007.done  the record of this output: its lines, bytes, checksum and counts; written after the output

The output of a shard depends only on the fingerprint and the shard, so two processes may make the same shard. The
fingerprint contains the settings and the checksums of files, but not their paths.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nmtkit.config.files import atomic_write, parse_json, sha256_of, write_atomically
from nmtkit.config.tables import settings_table
from nmtkit.jobs import progress
from nmtkit.jobs.folder_lock import lock

FORMAT = 1
PLAN = "plan.json"
CHUNK = 1 << 22
LINE_FEED = ord("\n")
PREPARED = (".txt", ".pairs", ".pickle")  # suffixes of the files that a command writes before the plan
TEMPORARY = re.compile(r"\.(shard-\d{6,}|[a-z]+)\.[a-z]+\.[0-9a-f]{8}\.tmp")  # temporary files of `atomic_write`

FileFacts = dict[str, Any]  # "bytes", "modified" (nanoseconds), "sha256"


@dataclass(frozen=True)
class Shard:
    """A range of lines. `first` is the index of the first line in the whole input, counted from 0.

    `starts` has the byte position of the first line in each text file.
    """

    index: int
    first: int
    lines: int
    starts: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"shard-{self.index + 1:06}"


@dataclass(frozen=True)
class Plan:
    """The plan of a job in `folder`. `suffix` is the file extension of outputs. `command` is the command of the job.

    The plan does not contain the paths of the text files, because the files can move between two runs of a job.
    """

    folder: Path
    suffix: str
    shards: tuple[Shard, ...]
    fingerprint: Mapping[str, Any]
    files: Mapping[str, FileFacts]
    command: str

    def output(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}{self.suffix}"

    def record_file(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}.done"

    def record(self, shard: Shard) -> dict[str, Any] | None:
        """Returns the record of a finished shard, or None. Raises ValueError if the record is damaged."""
        path = self.record_file(shard)
        try:
            record: dict[str, Any] = parse_json(path.read_bytes())
            return {name: record[name] for name in ("lines", "bytes", "sha256", "counts")}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged; remove it, and repeat the command: {self.command}") from None

    def unfinished(self, part: int = 1, parts: int = 1) -> list[Shard]:
        """Returns the shards of this process that lack an output or a record.

        In a job array, `parts` is the number of processes, and `part` is the number of this process, counted from 1.
        Process i has the shards i, i + `parts`, i + 2 x `parts`, …
        """
        names = set(os.listdir(self.folder))
        return [
            shard for shard in self.shards[part - 1 :: parts]
            if not {self.output(shard).name, self.record_file(shard).name} <= names
        ]  # fmt: skip

    def write(self, shard: Shard, parts: Iterable[bytes], counts: Counter[str]) -> dict[str, Any]:
        """Writes the output of a shard, then its record, and returns the record.

        `parts` are the consecutive parts of the output. Reading the parts may update `counts`, which the record
        contains. Both files are written atomically.
        """
        digest, size = hashlib.sha256(), 0
        try:
            with atomic_write(self.output(shard)) as file:
                for part in parts:
                    file.write(part)
                    digest.update(part)
                    size += len(part)
            record = {"lines": shard.lines, "bytes": size, "sha256": digest.hexdigest(), "counts": dict(+counts)}
            write_atomically(self.record_file(shard), json.dumps(record))
        except OSError:
            # Another process may have finished the shard and removed the temporary file of this process.
            finished = self.record(shard)
            if finished is None or not self.output(shard).exists():
                raise
            return finished
        return record

    def counts(self) -> Counter[str]:
        """Returns the sum of each recorded count over all finished shards, and the sum of their lines as "lines"."""
        records = [record for shard in self.shards if (record := self.record(shard)) is not None]
        return sum((Counter(record["counts"], lines=record["lines"]) for record in records), Counter())

    def remove_temporary_files(self, abandoned: Sequence[Shard]) -> None:
        """Removes temporary files that killed processes have left for finished shards and for `abandoned` shards."""
        names = os.listdir(self.folder)
        removable = {shard.name for shard in abandoned} | {name[:-5] for name in names if name.endswith(".done")}
        for name in names:
            match = TEMPORARY.fullmatch(name)
            if match and match[1] in removable:
                (self.folder / name).unlink(missing_ok=True)


# --- merging the outputs of a plan ------------------------------------------------------------------------------------


def merge(plan: Plan, out: BinaryIO) -> tuple[int, Counter[str]]:
    """Writes the outputs of all shards to `out`. Returns the number of input lines, and the sum of each recorded count.

    Raises ValueError if shards are missing, or if the output of a shard differs from its record.
    """
    repeat = f"repeat the command: {plan.command}"
    if missing := plan.unfinished():
        raise ValueError(f"{plan.folder} lacks {described(missing)} of {len(plan.shards)}; to make them, {repeat}")
    lines = sum(shard.lines for shard in plan.shards)
    counts: Counter[str] = Counter()
    progress.begin("Joining", "lines", lines)
    for shard in plan.shards:
        record = plan.record(shard)
        assert record is not None
        size, digest = _copy(plan.output(shard), out)
        if (size, digest) != (record["bytes"], record["sha256"]):
            raise ValueError(
                f"{plan.output(shard)} is damaged: it has {size:,} bytes, and {shard.name}.done says "
                f"{record['bytes']:,}, with a different checksum; remove both files and {repeat}"
            )
        progress.advance(shard.lines)
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


# --- making and reading a plan --------------------------------------------------------------------------------------


def open_plan(
    folder: Path, settings: Mapping[str, Any], files: Mapping[str, Path], suffix: str, shard_lines: int, command: str,
    shards: Callable[[], Sequence[Shard]],
) -> Plan:  # fmt: skip
    """Returns the plan in `folder`, or makes a plan for a new job.

    The fingerprint consists of `settings`, `shard_lines` and the checksums of `files`. `shards` is called for a new
    job. It writes the files that belong in the folder, such as input.txt, and returns the shards.

    Raises ValueError, with a table of differences, if the folder belongs to a job with a different fingerprint. Raises
    ValueError if the folder has other files and no plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _planning(folder):
        plan = read_plan(folder) if (folder / PLAN).exists() else None
        known = {} if plan is None else plan.files
        facts = {os.path.abspath(path): file_facts(path, known) for path in files.values()}
        fingerprint = json.loads(json.dumps(dict(settings) | {"lines of a shard": shard_lines}, default=str))
        fingerprint |= {name: f"SHA-256 {facts[os.path.abspath(path)]['sha256'][:16]}" for name, path in files.items()}
        if plan is not None:
            if plan.fingerprint != fingerprint:
                table = differences(plan.fingerprint, fingerprint)
                raise ValueError(
                    f"{folder} holds a job with other settings or files:\n{table}\n"
                    f"To continue that job: {plan.command}\nTo begin another job, give another --output-dir"
                )
            return plan
        foreign = [path for path in folder.iterdir() if not (path.name.startswith(".") or path.suffix in PREPARED)]
        if foreign or any(folder.glob("shard-*")):
            raise ValueError(f"{folder} is not empty and has no {PLAN}; give another --output-dir")
        plan = Plan(folder, suffix, tuple(shards()), fingerprint, facts, command)
        write_atomically(folder / PLAN, _as_json(plan))
        return plan


@contextmanager
def _planning(folder: Path) -> Iterator[None]:
    """Lets only one process at a time make the plan. Removes temporary files that killed processes have left."""
    with (folder / ".lock").open("ab") as file:
        with suppress(OSError):  # on a file system without locks, several processes may write the same plan
            lock(file, wait=True)
            for path in folder.iterdir():
                match = TEMPORARY.fullmatch(path.name)
                if match and not match[1].startswith("shard-"):
                    path.unlink(missing_ok=True)
        yield


def _as_json(plan: Plan) -> str:
    head = {
        "nmtkit_plan": FORMAT, "command": plan.command, "suffix": plan.suffix, "fingerprint": plan.fingerprint,
        "files": plan.files,
    }  # fmt: skip
    rows = ",\n  ".join(json.dumps([shard.first, shard.lines, *shard.starts]) for shard in plan.shards)
    return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "shards": [\n  {rows}\n ]\n}}\n'


def read_plan(folder: Path) -> Plan:
    """Returns the plan of a folder. Raises ValueError if the folder has no plan that this version can read."""
    path = folder / PLAN
    if not path.is_file():
        raise ValueError(f"{folder} is not the --output-dir of a command: it has no {PLAN}")
    try:
        table = parse_json(path.read_bytes())
        if table["nmtkit_plan"] != FORMAT:
            raise ValueError(f"its format is {table['nmtkit_plan']}, and this nmtkit reads format {FORMAT}")
        rows = enumerate(table["shards"])
        shards = tuple(Shard(index, first, lines, tuple(starts)) for index, (first, lines, *starts) in rows)
        return Plan(folder, table["suffix"], shards, table["fingerprint"], table["files"], table["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; remove the folder and begin again") from None


def file_facts(path: Path, known: Mapping[str, FileFacts]) -> FileFacts:
    """Returns the facts about a file. Reads the file only if its size or modification time differs from `known`."""
    status = path.stat()
    earlier = known.get(os.path.abspath(path))
    if earlier is not None and (earlier["bytes"], earlier["modified"]) == (status.st_size, status.st_mtime_ns):
        return earlier
    return {"bytes": status.st_size, "modified": status.st_mtime_ns, "sha256": sha256_of(path)}


def check_regular(paths: Iterable[Path]) -> None:
    """Raises ValueError if a path is a pipe, a device or a folder."""
    for path in paths:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file; a job with --output-dir may have to read its input again")


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Returns a table of the settings that differ between the job in a folder and a command."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    cells = [[name, *(json.dumps(table.get(name), ensure_ascii=False) for table in (first, second))] for name in names]
    return settings_table(["", "in the folder", "this command"], cells)


def divide(paths: Sequence[Path], shard_lines: int) -> tuple[Shard, ...]:
    """Divides parallel text files into shards of `shard_lines` lines; the last shard may be shorter.

    Raises ValueError if a file is empty or the files have different numbers of lines.
    """
    borders = [line_borders(path, shard_lines) for path in paths]
    total = borders[0][1]
    for path, (_, count) in zip(paths, borders, strict=True):
        if count != total:
            raise ValueError(
                f"{paths[0]} has {total:,} lines, but {path} has {count:,}: line i of both must belong together"
            )
    columns = zip(*(starts for starts, _ in borders), strict=True)
    return tuple(
        Shard(index, index * shard_lines, min(shard_lines, total - index * shard_lines), starts)
        for index, starts in enumerate(columns)
    )


def line_borders(path: Path, interval: int) -> tuple[list[int], int]:
    """Returns the byte positions at which shards of `interval` lines begin, and the number of lines of the file.

    Raises ValueError if the file is empty.
    """
    starts, count, position, last = [0], 0, 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == LINE_FEED)
            starts += (ends[-(count + 1) % interval :: interval] + (position + 1)).tolist()
            count, position, last = count + len(ends), position + len(chunk), chunk[-1]
    if position == 0:
        raise ValueError(f"{path} is empty")
    if starts[-1] == position:
        starts.pop()
    return starts, count + (last != LINE_FEED)
