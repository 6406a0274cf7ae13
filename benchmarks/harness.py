"""The harness of the benchmarks: text and models to measure, systems in turns, tables, and a report in JSON.

Scripts that call `parser` share its flags. `--text` is a folder with train, valid and test files of both languages
(`train.en`, or `train.en.gz`); without it, the corpus of `nmtkit demo` is used. Data and models are made in `--folder`,
and reused by the next run. `--quick` runs everything very small, to test a script. `--output` writes the figures to a
JSON file.
"""

import argparse
import contextlib
import gzip
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("torch", "ctranslate2", "transformers", "sentencepiece", "sacrebleu")
Row = dict[str, Any]


def parser(description: str, parts: Sequence[str] = (), **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with the flags of all benchmarks."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--text", type=Path, help="folder of train, valid and test; default: the corpus of the demo")
    flags.add_argument("-s", "--source-lang", default="en")
    flags.add_argument("-t", "--target-lang", default="de")
    flags.add_argument("--vocab-size", type=int, default=10_000)
    flags.add_argument("--folder", type=Path, default=Path("benchmark-runs"), help="data and models, kept for reuse")
    flags.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="default: all")
    flags.add_argument("--only", help="run only systems whose names contain one of these texts, separated by commas")
    flags.add_argument("--rounds", type=int, default=3, help="measured rounds; the median counts")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--busy", action="store_true", help="keep every core busy with another process")
    flags.add_argument("--quick", action="store_true", help="very small sizes, to test the script")
    flags.add_argument("--output", type=Path, help="JSON file for the report of this run")
    flags.set_defaults(**defaults)
    return flags


# --- text and models --------------------------------------------------------------------------------------------------


class Workspace:
    """The text, the dataset and the models of a benchmark. Files that exist already are not made again."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = (arguments.folder / ("quick" if arguments.quick else "")).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pair = arguments.source_lang, arguments.target_lang
        self.vocab_size = 400 if arguments.quick else arguments.vocab_size
        self.text = arguments.text.resolve() if arguments.text and not arguments.quick else self.demo(arguments.quick)

    def demo(self, quick: bool) -> Path:
        """Writes the corpus of the demo (English and German), or a small part of it. Returns the folder."""
        from nmtkit.demo.run import read_corpus, write_corpus

        text, self.vocab_size = self.folder / "text", min(self.vocab_size, 1000)
        text.mkdir(exist_ok=True)
        sizes = {"train": 400, "valid": 12, "test": 12} if quick else {}
        write_corpus({split: pairs[: sizes.get(split)] for split, pairs in read_corpus().items()}, text)
        return text

    def prefix(self, split: str) -> str:
        return str(self.text / split)

    def file(self, split: str, side: int) -> Path:
        """Returns the uncompressed file of a side (0: source, 1: target). If there is only a .gz file, unpacks it."""
        path = Path(f"{self.prefix(split)}.{self.pair[side]}")
        if path.exists():
            return path
        plain = self.folder / path.name
        plain.write_bytes(gzip.decompress(path.with_name(path.name + ".gz").read_bytes()))
        return plain

    def lines(self, split: str, side: int) -> list[str]:
        return self.file(split, side).read_text(encoding="utf-8").split("\n")[:-1]

    @cached_property
    def data(self) -> Path:
        """Returns the dataset with one joint BPE vocabulary."""
        return self.preprocess("data-bin", "--vocab-size", str(self.vocab_size))

    def preprocess(self, name: str, *flags: str) -> Path:
        destination = self.folder / name
        if not destination.exists():
            pair = ["-s", self.pair[0], "-t", self.pair[1]]
            files = [f"--{split}pref={self.prefix(split)}" for split in ("train", "valid", "test")]
            nmtkit("preprocess", *pair, *files, "--destdir", str(destination), *flags)
        return destination

    def trained(self, name: str, flags: str) -> Path:
        """Returns the checkpoint of a training with `flags`."""
        path = self.folder / name / "last.pt"
        if not path.exists():
            nmtkit("train", str(self.data), "--save-dir", str(path.parent), "--metrics", "none", *flags.split())
        return path


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """The rounds of one system, and the output of its first call, which is not timed."""

    output: Any = None
    seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)


def in_turns(systems: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Times the systems in turns, so that other load on the machine slows all systems alike.

    Core-seconds count this process and its living children.
    """
    timings = {name: Timing(run()) for name, run in systems.items()}
    for _ in range(rounds):
        for name, run in systems.items():
            cores, start = cpu_seconds(os.getpid()), time.perf_counter()
            run()
            timings[name].seconds.append(time.perf_counter() - start)
            timings[name].core_seconds.append(cpu_seconds(os.getpid()) - cores)
    return timings


def cpu_seconds(process: int) -> float:
    """Returns the core-seconds of a process and of its living descendants (Linux only)."""
    return own_cpu_seconds(process) + sum(map(cpu_seconds, children(process)))


def own_cpu_seconds(process: int) -> float:
    """Returns the core-seconds of a process without its descendants, or 0 if the process has ended."""
    try:
        return time.clock_gettime((~process << 3) | 2)  # Linux: clock_getcpuclockid(3)
    except OSError:
        return 0.0


def children(process: int) -> list[int]:
    """Returns the ids of the child processes of all threads of a process, or an empty list if the process has ended."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        return [int(child) for task in tasks for child in task.joinpath("children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def busy_cores(busy: bool) -> Iterator[None]:
    """Keeps each core busy with a process that counts, for at most an hour."""
    code = "import time\nend = time.monotonic() + 3600\nwhile time.monotonic() < end: pass"
    count = len(os.sched_getaffinity(0)) if busy else 0
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A whole command: its seconds, its core-seconds, its largest resident memory and its messages."""

    seconds: float
    core_seconds: float
    peak_mb: float
    log: str


def command(
    words: Sequence[str], stdin: Path | None = None, stdout: Path | None = None, limit: float | None = None,
    **environment: str,
) -> Finished:  # fmt: skip
    """Runs a command. After `limit` seconds, kills the command without an error.

    Raises RuntimeError if the command fails.
    """
    start, killed = time.perf_counter(), threading.Event()
    with tempfile.TemporaryFile("w+") as log, open(stdin or os.devnull) as lines, contextlib.ExitStack() as stack:
        output = stack.enter_context(stdout.open("w")) if stdout else log
        process = subprocess.Popen(words, env=os.environ | environment, stdin=lines, stdout=output, stderr=log)
        timer = threading.Timer(limit or 1e6, lambda: (killed.set(), process.kill()))
        timer.daemon = True
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        messages = log.read()
    if process.returncode and not killed.is_set():
        raise RuntimeError(f"{' '.join(words)} ended with status {process.returncode}:\n{messages[-3000:]}")
    return Finished(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, messages)


def nmtkit(*arguments: str, checkout: Path = ROOT, **options: Any) -> Finished:
    """Runs a command of nmtkit with the code of a checkout."""
    return command([sys.executable, "-m", "nmtkit", *arguments], **code_of(checkout), **options)


def code_of(checkout: Path = ROOT) -> dict[str, str]:
    """Returns the environment of a command that runs the code of a checkout, in any folder.

    Without PYTHONSAFEPATH, `python -m nmtkit` prefers a folder `nmtkit` of the current folder to PYTHONPATH.
    """
    return {"PYTHONPATH": search_path(checkout), "PYTHONSAFEPATH": "1"}


def search_path(checkout: Path = ROOT) -> str:
    """Returns the PYTHONPATH of a process that runs the code of a checkout."""
    return os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])


class Server:
    """A process that runs a script with `--child`. It answers each line of JSON with a line of JSON."""

    def __init__(
        self, script: str, settings: Any, checkout: Path = ROOT, threads: int = 1, python: Path | str = sys.executable
    ) -> None:
        environment = os.environ | {"PYTHONPATH": search_path(checkout), "OMP_NUM_THREADS": str(threads)}
        words = [str(python), "-W", "ignore", script, "--child", json.dumps(settings)]
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ask(None)  # waits until the process is ready

    def ask(self, message: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def answer(handle: Callable[[Any], Any]) -> None:
    """Answers the messages of a `Server`. Runs in the process of the server."""
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps(None if message is None else handle(message)), flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def speeds(timings: Mapping[str, Timing], tokens: float, ours: str = "nmtkit") -> list[Row]:
    """Returns a row for each system. The last word of a name is a precision.

    `tokens` is the number of tokens of a round. The ratio of a system is relative to `ours` in the same precision.
    """
    median = {name: statistics.median(timing.seconds) for name, timing in timings.items()}
    rows = []
    for name, timing in timings.items():
        row: Row = {"system": name, "seconds": median[name], "tok/s": tokens / median[name]}
        row["tok/core-s"] = tokens / max(0.01, statistics.median(timing.core_seconds))
        base = median.get(f"{ours} {name.split()[-1]}")
        row[f"{ours}'s speed / this"] = None if base is None else median[name] / base
        rows.append(row | {"rounds": timing.seconds})
    return rows


def shown(value: Any) -> str:
    """Returns the text of a value: three digits of a float below 1,000, and all digits before the point of others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def chosen(systems: Mapping[str, Any], only: str | None) -> dict[str, Any]:
    """Returns the systems whose names contain a text of `--only`, or all systems without `--only`."""
    return {name: run for name, run in systems.items() if not only or any(word in name for word in only.split(","))}


class Report:
    """Prints tables. Writes machine, versions, flags and tables to the JSON file of `--output`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.output = arguments.output
        versions = {name: importlib.metadata.version(name) for name in PEERS if installed(name)}
        commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
        machine = {"processor": processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        flags = {name: str(value) for name, value in vars(arguments).items()}
        self.contents: Row = machine | {"commit": commit.stdout.strip(), "versions": versions, "flags": flags}
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        print(f"{machine['processor']}, {machine['cores']} cores, nmtkit at {self.contents['commit']}, {named}")

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Prints rows that have the same keys; lists are left out. Saves the report."""
        print(f"\n{title}")
        names = [name for name, value in rows[0].items() if not isinstance(value, list)]
        cells = [names, *([shown(row[name]) for name in names] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(["  " + first, *(cell.strip().rjust(len(cell)) for cell in others)]), flush=True)
        self.contents.setdefault("tables", {})[title] = list(rows)
        if self.output:
            self.output.write_text(json.dumps(self.contents, indent=1, default=str) + "\n")


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor()
