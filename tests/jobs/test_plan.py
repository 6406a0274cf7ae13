"""The plan of a job in shards: borders, fingerprint, records, merging; workers and drivers that are killed."""

import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nmtkit.jobs.shard_options import ShardOptions
from nmtkit.jobs.shard_plan import Plan, Shard, described, divide, merge, open_plan, read_plan
from nmtkit.jobs.shard_processes import LocalProcesses

TEXTS = {
    "one line": "a\n",
    "no line feed at the end": "a\nb\nc",
    "an exact number of shards": "a\nb\nc\nd\n",
    "empty lines": "\n\n\n",
    "a line longer than a chunk": "é" * 3_000_000 + "\n\nb",
    "other line ends": "a\r\nb\u2028c\rd\ne\n",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_shards_cover_all_lines_once(tmp_path: Path, text: str, size: int) -> None:
    (tmp_path / "text").write_bytes(text.encode())
    data = text.encode()
    shards = divide([tmp_path / "text"], size)
    lines = data.split(b"\n")[: data.count(b"\n") + (not data.endswith(b"\n"))]
    for index, shard in enumerate(shards):
        assert (shard.index, shard.first) == (index, index * size)
        assert data[shard.starts[0] :].split(b"\n")[: shard.lines] == lines[shard.first : shard.first + shard.lines]
    assert sum(shard.lines for shard in shards) == len(lines)


def test_parallel_files_need_the_same_number_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n3\n")
    (tmp_path / "b").write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"a has 3 .*b has 2"):
        divide([tmp_path / "a", tmp_path / "b"], 2)


# --- a job with a worker that needs no model ------------------------------------------------------------------------


def job(folder: Path, size: int = 10, **settings: object) -> Plan:
    text = folder.parent / "text"
    if not text.exists():
        text.write_text("".join(f"line {number}\n" for number in range(95)))
    return open_plan(folder, settings, {"input": text}, ".txt", size, "nmtkit again", lambda: divide([text], size))


class Upper:
    """Writes the lines in capitals. Kills its own process in the middle of shard `fatal`, once."""

    def __init__(self, text: Path, fatal: int = -1) -> None:
        self.text, self.fatal = text, fatal

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        lines = self.text.read_bytes().splitlines()[shard.first : shard.first + shard.lines]
        for number, line in enumerate(lines):
            if number == 5 and shard.index == self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            counts["odd"] += number % 2
            yield line.upper() + b"\n"


WHOLE = "".join(f"LINE {number}\n" for number in range(95)).encode()


def run(plan: Plan, shards: Sequence[Shard], workers: int = 1, fatal: int = -1) -> None:
    for _ in LocalProcesses(workers).run(lambda threads: Upper(plan.folder.parent / "text", fatal), plan, shards):
        pass


def merged(plan: Plan) -> bytes:
    out = io.BytesIO()
    assert merge(plan, out)[0] == 95
    return out.getvalue()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_joined_shards_are_the_whole_output(tmp_path: Path, workers: int) -> None:
    plan = job(tmp_path / "shards")
    run(plan, plan.unfinished(), workers)
    assert merged(read_plan(tmp_path / "shards")) == WHOLE
    assert merge(plan, io.BytesIO())[1] == {"odd": 47}


def test_parts_of_a_job_array_are_disjoint_and_complete(tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    parts = [[shard.index for shard in plan.unfinished(part, 3)] for part in (1, 2, 3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    for part in (3, 1):
        run(plan, plan.unfinished(part, 3))
    with pytest.raises(ValueError, match=r"shards 2, 5, 8 of 10; .*: nmtkit again$"):
        merged(plan)
    run(plan, plan.unfinished(2, 3))
    assert merged(plan) == WHOLE


def test_consecutive_shards_are_named_as_a_range() -> None:
    shards = [Shard(number - 1, 0, 1, (0,)) for number in (3, 5, 6, 7, 9)]
    assert described(shards) == "shards 3, 5-7, 9"


def test_a_killed_worker_is_an_error_and_the_job_continues(tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        run(plan, plan.unfinished(), workers=2, fatal=4)
    assert any(".tmp" in name for name in os.listdir(plan.folder))
    left = job(tmp_path / "shards").unfinished()
    assert 0 < len(left) < 10
    run(plan, left)
    plan.remove_temporary_files(left)
    assert merged(plan) == WHOLE
    assert [name for name in os.listdir(plan.folder) if ".tmp" in name] == []


# The last six shards end only after the driver.
DRIVER = """
import sys, time
from pathlib import Path
from nmtkit.jobs.shard_processes import LocalProcesses
from nmtkit.jobs.shard_plan import read_plan

class Slow:
    def output(self, shard, counts):
        while shard.index > 3 and not Path(sys.argv[2]).exists():
            time.sleep(0.01)
        for number in range(shard.first, shard.first + shard.lines):
            time.sleep(0.01)
            yield b"LINE %d\\n" % number

plan = read_plan(Path(sys.argv[1]))
for shard, record in LocalProcesses(2).run(lambda threads: Slow(), plan, plan.shards):
    print(shard.index, flush=True)
"""


def test_workers_of_a_killed_driver_end_and_the_job_continues(tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    command = [sys.executable, "-c", DRIVER, str(plan.folder), str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()  # the first shard is done
        driver.kill()
        driver.wait()
        (tmp_path / "killed").touch()
        driver.stdout.read()  # ends when the workers, which have the same stdout, have ended
    left = plan.unfinished()
    assert 0 < len(left) < 10
    run(plan, left)
    plan.remove_temporary_files(left)
    assert merged(plan) == WHOLE
    assert [name for name in os.listdir(plan.folder) if ".tmp" in name] == []


def test_two_processes_may_make_the_same_shard(tmp_path: Path) -> None:
    """The slower process finds its temporary file removed, and accepts the record of the faster process."""
    plan = job(tmp_path / "shards")
    shard = plan.shards[0]

    def slow() -> Iterator[bytes]:
        yield from Upper(tmp_path / "text").output(shard, Counter())
        run(plan, [shard])
        plan.remove_temporary_files([])

    record = plan.write(shard, slow(), Counter())
    assert record == plan.record(shard) and plan.output(shard).read_bytes() == WHOLE[: record["bytes"]]


def test_the_record_of_a_shard_without_its_output_does_not_hide_an_error(tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    shard = plan.shards[0]
    run(plan, [shard])
    plan.output(shard).unlink()

    def unreadable() -> Iterator[bytes]:
        yield b"LINE 0\n"
        raise OSError("the input is gone")

    with pytest.raises(OSError, match="the input is gone"):
        plan.write(shard, unreadable(), Counter())
    assert shard in plan.unfinished()


def test_temporary_files_of_shards_that_others_make_are_kept(tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    other = plan.folder / ".shard-000002.txt.0123abcd.tmp"
    other.write_text("half")
    plan.remove_temporary_files([plan.shards[0]])
    assert other.exists()
    plan.remove_temporary_files([plan.shards[1]])
    assert not other.exists()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_other_settings_are_refused_with_a_table(tmp_path: Path) -> None:
    job(tmp_path / "shards", beam=4, format="text")
    with pytest.raises(ValueError) as caught:
        job(tmp_path / "shards", beam=5, format="text")
    _, heading, *rows, to_continue, to_begin = str(caught.value).splitlines()
    assert "folder" in heading and [row.split() for row in rows] == [["beam", "4", "5"]]
    assert to_continue.endswith(": nmtkit again") and "--output-dir" in to_begin


def test_a_changed_input_is_refused_and_a_touched_input_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    job(folder)
    os.utime(tmp_path / "text", (1, 1))
    assert job(folder) == read_plan(folder)
    text = (tmp_path / "text").read_text()
    (tmp_path / "text").write_text(text.replace("line 7", "Line 7"))
    with pytest.raises(ValueError, match=r"input .*SHA-256"):
        job(folder)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/model.pt").touch()
    with pytest.raises(ValueError, match=r"no plan\.json"):
        job(tmp_path / "shards")
    with pytest.raises(ValueError, match="--output-dir of a"):
        read_plan(tmp_path)


@pytest.mark.parametrize(("old", "new"), [(b"LINE 39\n", b""), (b"39", b"49")], ids=["a line less", "another digit"])
def test_a_damaged_shard_is_named(tmp_path: Path, old: bytes, new: bytes) -> None:
    plan = job(tmp_path / "shards")
    run(plan, plan.unfinished())
    path = plan.output(plan.shards[3])
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=r"shard-000004\.txt is damaged"):
        merged(plan)


def test_a_damaged_plan_and_a_damaged_record_are_named(tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    run(plan, plan.unfinished())
    plan.record_file(plan.shards[0]).write_text("{")
    with pytest.raises(ValueError, match=r"shard-000001\.done is damaged"):
        merged(plan)
    table = json.loads((plan.folder / "plan.json").read_text())
    (plan.folder / "plan.json").write_text(json.dumps(table | {"nmtkit_plan": 2}))
    with pytest.raises(ValueError, match=r"format is 2, .*format 1"):
        read_plan(plan.folder)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "-1/2"])
def test_a_wrong_shard_is_refused(shard: str) -> None:
    with pytest.raises(ValueError, match=r"I/N .*1 to N"):
        ShardOptions(shard=shard)


@pytest.mark.slow
def test_while_one_process_makes_the_plan_others_wait(tmp_path: Path) -> None:
    """Tasks of a job array begin at the same time: all of them get the same plan."""
    (tmp_path / "text").write_text("".join(f"line {number}\n" for number in range(95)))
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_plan import job
job(Path({str(tmp_path / "shards")!r}))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert read_plan(tmp_path / "shards").shards == divide([tmp_path / "text"], 10)
