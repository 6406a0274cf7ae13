"""Does `generate` in shards write the same bytes as `generate`, even if processes are killed? How much slower is it?

    python benchmarks/bulk.py --lines 1000000
    python benchmarks/bulk.py --lines 1000000 --parts pace ray      # needs nmtkit[ray]

pace    CPU time of `generate --workers 2` and of `generate --output-dir --workers 2`, in turns.
killed  Kills a worker in the middle of a job, then the main process of the repeated command. A third command completes
        the job.
ray     Starts a Ray cluster of two nodes on this machine, with an actor on each. Kills an actor, then the driver. A
        second command continues the job. Meanwhile, one node is removed, and the other node completes the job.

Each job must write the bytes of `generate`, and leave no temporary file. The text repeats the sentences of the training
set, and replaces one word of each sentence; `--words` shortens the sentences. A narrow Transformer with one layer is
trained briefly and searches greedily, so that the model takes less than half of the time.
"""

import argparse
import contextlib
import filecmp
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Report, Row, Workspace, children, cpu_seconds, nmtkit, own_cpu_seconds, parser, search_path

MODEL = (
    "--arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --d-model 32 --d-ff 32 --heads 2 --lr 0.005 "
    "--warmup-updates 50 --max-update 200 --batch-tokens 1500 --threads 1"
)
PORTS = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")


class Meter:
    """Counts the CPU time of a process and its descendants, including descendants that end. Samples it every 0.2 s."""

    def __init__(self, process: int) -> None:
        self._process, self._seconds, self._ended = process, {process: 0.0}, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.2):
            found = [self._process]
            for each in found:
                found += children(each)
                self._seconds[each] = max(self._seconds.get(each, 0), own_cpu_seconds(each))

    def stop(self) -> float:
        self._ended.set()
        self._thread.join()
        return sum(self._seconds.values())


class Job:
    """A job of `nmtkit generate` on one text, with or without shards."""

    def __init__(self, arguments: argparse.Namespace, workspace: Workspace) -> None:
        self.folder, self.lines = workspace.folder, 400 if arguments.quick else arguments.lines
        self.shard_lines = min(16_384, self.lines // 16)
        name = f"bulk-{self.lines}" + (f"-{arguments.words}" if arguments.words else "")
        model = workspace.trained("bulk-model", MODEL)
        text = write_text(workspace, self.folder / f"{name}.txt", self.lines, arguments.words)
        self.words = ["generate", "--path", str(model), "--input", str(text), "--beam", "1", "--workers", "2"]
        if arguments.words:
            self.words += ["--max-len-b", "2"]  # the model is trained briefly, and repeats pieces without end
        self.whole = self.folder / f"{name}.out"

    def plain(self) -> list[str]:
        return [*self.words, "--device", "cpu", "--output", str(self.whole)]

    def sharded(self, folder: Path, ray: bool = False, shard_lines: int | None = None) -> list[str]:
        executor = ["--executor", "ray"] if ray else ["--device", "cpu"]
        return [
            *self.words,
            *executor,
            "--shard-lines",
            str(shard_lines or self.shard_lines),
            "--output-dir",
            str(folder),
        ]

    def new(self, name: str) -> Path:
        """Removes the files of an earlier job from the folder `name`. Returns the folder."""
        folder = self.folder / name
        for path in folder.glob("*") if folder.exists() else []:
            path.unlink()
        return folder

    def check(self, folder: Path) -> str:
        """Joins the shards. Raises RuntimeError if the result differs from `whole`, or if a temporary file is left."""
        merged = self.folder / "merged.txt"
        nmtkit("merge", str(folder), "--output", str(merged))
        if not self.whole.exists():
            nmtkit(*self.plain())
        left = [path.name for path in folder.iterdir() if ".tmp" in path.name]
        if left or not filecmp.cmp(merged, self.whole, shallow=False):
            raise RuntimeError(f"{folder}: " + (f"temporary files {left}" if left else "the bytes differ"))
        return "identical"

    def finished(self, folder: Path) -> int:
        return len(list(folder.glob("*.done")))

    @property
    def shards(self) -> int:
        return -(-self.lines // self.shard_lines)

    def wait_for(self, process: "subprocess.Popen[bytes]", folder: Path, share: float) -> None:
        """Waits until the fraction `share` of the shards is finished."""
        while self.finished(folder) < share * self.shards:
            if process.poll() is not None:
                raise RuntimeError(f"{folder}: the command ended with {process.returncode}, too early")
            time.sleep(0.05)


def write_text(workspace: Workspace, path: Path, count: int, most_words: int | None) -> Path:
    """Writes `count` sentences of at most `most_words` words. In each sentence, replaces one word by a random word."""
    if not path.exists():
        generator, sentences = random.Random(1), [line.split() for line in workspace.lines("train", 0)]
        with path.open("w", encoding="utf-8") as file:
            for number in range(count):
                words = sentences[number % len(sentences)][:most_words]
                words[generator.randrange(len(words))] = generator.choice(generator.choice(sentences))
                file.write(" ".join(words) + "\n")
    return path


def start(words: list[str]) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "nmtkit", *words], env=environment, stderr=subprocess.DEVNULL)


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


# --- pace -------------------------------------------------------------------------------------------------------------


def pace(arguments: argparse.Namespace, job: Job, report: Report) -> None:
    rows: list[Row] = []
    shard_lines = min(16_384, job.lines // 2)  # the default size, or less, so that both workers have a shard
    for _ in range(arguments.rounds):
        seconds = {}
        for name in ("generate", "in shards"):
            folder = job.new("pace-shards")
            words = job.plain() if name == "generate" else job.sharded(folder, shard_lines=shard_lines)
            seconds[name] = nmtkit(*words, OMP_NUM_THREADS="1").core_seconds
            same = job.check(folder) if name == "in shards" else ""
            row = {"system": name, "core-s": seconds[name], "lines/core-s": job.lines / seconds[name], "bytes": same}
            rows.append(row | {"pace / generate's": seconds["generate"] / seconds[name]})
    report.table(f"{job.lines:,} lines, 2 workers, shards of {shard_lines:,} lines", rows)


# --- killed -----------------------------------------------------------------------------------------------------------


def killed(arguments: argparse.Namespace, job: Job, report: Report) -> None:
    folder = job.new("killed-shards")
    rows: list[Row] = []
    for name, share in (("a worker", 0.25), ("the main process", 0.5)):
        process = start(job.sharded(folder))
        job.wait_for(process, folder, share)
        if name == "a worker":
            workers = sorted(children(process.pid), key=lambda each: -cpu_seconds(each))
            os.kill(workers[0], signal.SIGKILL)
            status = process.wait()
        else:
            kill(process)
            status = process.returncode
        rows.append({"killed": name, "status": status, "finished shards": job.finished(folder), "bytes": ""})
    done = nmtkit(*job.sharded(folder), OMP_NUM_THREADS="1")
    rows.append({"killed": "nothing", "status": 0, "finished shards": job.finished(folder), "bytes": job.check(folder)})
    report.table(f"{job.lines:,} lines, {job.shards} shards; last command {done.core_seconds:.0f} core-s", rows)


# --- ray --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """Starts a Ray cluster of two nodes with one CPU each. Yields the cluster and the second node."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine starts slowly
    from ray.cluster_utils import Cluster

    def ports() -> dict[str, int]:
        import socket

        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in PORTS]
            return {name: each.getsockname()[1] for name, each in zip(PORTS, sockets, strict=True)}

    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = search_path(), "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **ports()})
    node = cluster.add_node(num_cpus=1, **ports())
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster, node
    finally:
        cluster.shutdown()


def actors() -> list[int]:
    """Returns the processes of this user that run an actor of nmtkit and descend from this process."""
    found, result = [os.getpid()], []
    for each in found:
        found += children(each)
        with contextlib.suppress(OSError):
            if b"ShardActor" in Path(f"/proc/{each}/cmdline").read_bytes():
                result.append(each)
    return result


def ray(arguments: argparse.Namespace, job: Job, report: Report) -> None:
    rows: list[Row] = []
    with two_nodes() as (cluster, node):
        folder = job.new("ray-shards")
        meter = Meter(os.getpid())
        process = start(job.sharded(folder, ray=True))
        status = process.wait()
        row = {"killed": "nothing", "status": status, "core-s": meter.stop(), "finished shards": job.finished(folder)}
        rows.append(row | {"bytes": job.check(folder)})
        folder = job.new("ray-killed-shards")
        process = start(job.sharded(folder, ray=True))
        job.wait_for(process, folder, 0.15)
        os.kill(actors()[0], signal.SIGKILL)
        job.wait_for(process, folder, 0.4)
        kill(process)
        row = {"killed": "an actor, then the driver", "status": process.returncode, "core-s": None}
        rows.append(row | {"finished shards": job.finished(folder), "bytes": ""})
        process = start(job.sharded(folder, ray=True))
        job.wait_for(process, folder, 0.6)
        cluster.remove_node(node, allow_graceful=False)
        row = {"killed": "a node", "status": process.wait(), "core-s": None, "finished shards": job.finished(folder)}
        rows.append(row | {"bytes": job.check(folder)})
    report.table(f"{job.lines:,} lines on two Ray nodes, {job.shards} shards", rows)


def main() -> None:
    parts = {"pace": pace, "killed": killed, "ray": ray}
    flags = parser(__doc__ or "", list(parts), rounds=1)
    flags.set_defaults(parts=["pace", "killed"])
    flags.add_argument("--lines", type=int, default=20_000)
    flags.add_argument("--words", type=int, help="keep only this many words of each sentence, for shorter runs")
    arguments = flags.parse_args()
    report, job = Report(arguments), Job(arguments, Workspace(arguments))
    for name in arguments.parts:
        parts[name](arguments, job, report)


if __name__ == "__main__":
    main()
