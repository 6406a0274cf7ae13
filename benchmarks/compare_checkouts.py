"""Two checkouts: how much speed does a change cost or gain, and does the change keep the outputs?

    git worktree add /tmp/before COMMIT
    python benchmarks/compare_checkouts.py --before /tmp/before --text m30k
    python benchmarks/compare_checkouts.py --before /tmp/before --text m30k --parts generate serve --checkpoint best.pt

The script runs the commands of each checkout, and imports nothing from nmtkit, so modules may move between the two
checkouts. `--text` is a folder with train, valid and test files of both languages. Both checkouts get the same text,
dataset and checkpoint; `before` makes the dataset, and also the checkpoint if `--checkpoint` is not given.

preprocess  Pairs per second of the whole command. The outputs are the files of the dataset.
clean       Pairs per second of the whole command. The outputs are the files of the corpus.
train       fp32 and bf16, one process and two gloo processes, with the same seed. Target tokens per second (the median
            of the second half of the log), and the loss of the last update. The outputs are the losses of all updates.
generate    Each engine that is installed and that both checkouts know, greedy and with beam 4. The text is the test
            set, `--repeats` times. "lines/s" does not count the seconds of a command that translates a single line;
            "starts/s" is the number of such commands per second. The outputs are the translations.
serve       The servers of both checkouts run all the time. One client, and `--clients` concurrent clients, post the
            lines of the test set, one line in a request. Lines per second, and the median milliseconds of a request;
            for milliseconds, a ratio below 1 is a gain. The outputs are the translations.

The checkouts take turns, A B, B A, …, so that a slow phase of the machine affects both. Each round has two neighbouring
turns and one ratio, after / before. The table has the median and the quartiles of these ratios. On a busy machine,
compare the core-seconds of whole commands. The last column compares the outputs of the checkouts; "varies" means that
the outputs of one checkout differ between rounds.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from alternation import CHECKOUTS, Measure, Turn, compare
from harness import ROOT, Finished, Report, Workspace, busy_cores, chosen, code_of, command, nmtkit, parser
from serve import Client, server

SYSTEMS = ("auto fp32", "auto int8", "torch fp32", "torch int8", "numba int8", "ctranslate2 fp32")  # engine, precision
SEARCH = ["--lenpen", "0", "--max-len-a", "1", "--max-len-b", "5"]  # CTranslate2 has a different length penalty
CORES = "core-seconds"

# --- inputs -----------------------------------------------------------------------------------------------------------


class Bench:
    """The two checkouts, their common inputs, and a folder for their outputs."""

    def __init__(self, arguments: argparse.Namespace, workspace: Workspace, folder: Path) -> None:
        self.folder, self.arguments, self.languages = folder, arguments, workspace.pair
        self.pair = ["-s", workspace.pair[0], "-t", workspace.pair[1]]
        self.checkouts = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
        for split, limit in {"train": arguments.pairs, "valid": arguments.lines, "test": arguments.lines}.items():
            for side, language in enumerate(workspace.pair):
                write(self.folder / f"{split}.{language}", workspace.lines(split, side)[:limit])
        self.lines = workspace.lines("test", 0)[: arguments.lines]
        self.line = self.folder / "line.txt"
        write(self.line, self.lines[:1])
        self.pairs = len(workspace.lines("train", 0)[: arguments.pairs])

    def run(self, name: str, *words: str, stdin: Path | None = None, stdout: Path | None = None) -> Finished:
        """Runs a command of a checkout."""
        return nmtkit(*words, checkout=self.checkouts[name], stdin=stdin, stdout=stdout)

    def output(self, name: str) -> Path:
        """Returns a path for a new output, after removing the previous output. Both checkouts get the same path."""
        path = self.folder / "output"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path / name

    def preprocess(self, name: str, destination: Path) -> Finished:
        corpora = [f"--{split}pref={self.folder / split}" for split in ("train", "valid", "test")]
        flags = [*self.pair, *corpora, "--vocab-size", str(self.arguments.vocab_size)]
        return self.run(name, "preprocess", *flags, "--destdir", str(destination))

    def train(self, name: str, save_dir: Path, updates: int, precision: str, processes: int) -> Finished:
        options = self.arguments
        flags = {
            "arch": options.arch, "batch-tokens": options.batch_tokens, "max-tokens": options.batch_tokens // processes,
            "nproc-per-node": processes, "threads": max(1, options.threads // processes), "device": "cpu",
            "precision": precision, "save-dir": save_dir, "max-update": updates, "log-interval": 1,
            "validate-interval": "none",
        }  # fmt: skip
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return self.run(name, "train", str(self.dataset()), *words)

    def dataset(self) -> Path:
        path = self.folder / "dataset"
        if not path.exists():
            self.preprocess("before", path)
        return path

    def checkpoint(self, name: str) -> Path:
        """Returns a copy of the common checkpoint for a checkout, which writes a CTranslate2 model next to the copy."""
        copy = self.folder / name / "model.pt"
        if not copy.exists():
            copy.parent.mkdir()
            shutil.copyfile(self.arguments.checkpoint or self.trained(), copy)
        return copy

    def trained(self) -> Path:
        save_dir = self.folder / "model"
        if not save_dir.exists():
            self.train("before", save_dir, self.arguments.model_updates, "auto", 1)
        return save_dir / "last.pt"


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def digests(folder: Path) -> dict[str, object]:
    """Returns the SHA-256 of each file under a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def numbered(lines: list[str]) -> dict[str, object]:
    return {f"line {number}": line for number, line in enumerate(lines, 1)}


# --- parts ------------------------------------------------------------------------------------------------------------


def preprocess(bench: Bench, name: str) -> Turn:
    output = bench.output("dataset")
    done = bench.preprocess(name, output)
    return Turn({"pairs/s": bench.pairs / done.seconds, CORES: done.core_seconds}, digests(output))


def clean(bench: Bench, name: str) -> Turn:
    output = bench.output("clean")
    words = ["clean", *bench.pair, str(bench.folder / "train"), "--output", str(output)]
    done = bench.run(name, *words)
    return Turn({"pairs/s": bench.pairs / done.seconds, CORES: done.core_seconds}, digests(output.parent))


def train(bench: Bench, precision: str, processes: int, name: str) -> Turn:
    output = bench.output("run")
    done = bench.train(name, output, bench.arguments.updates, precision, processes)
    records = [json.loads(line) for line in (output / "log.jsonl").read_text("utf-8").splitlines()]
    updates = [record for record in records if record["kind"] == "train"]
    speed = statistics.median(record["tokens_per_second"] for record in updates[len(updates) // 2 :])
    losses: dict[str, object] = {f"update {record['update']}": record["loss"] for record in updates}
    figures = {"target tokens/s": speed, CORES: done.core_seconds, "last loss": updates[-1]["loss"]}
    return Turn(figures, losses)


def generate_flags(bench: Bench, system: str, name: str) -> list[str]:
    engine, precision = system.split()
    flags = ["--path", str(bench.checkpoint(name)), "--engine", engine, "--precision", precision, *SEARCH]
    return [*flags, "--device", "cpu", "--threads", str(bench.arguments.threads)]


def generate(bench: Bench, system: str, beam: int, name: str) -> Turn:
    flags = [*generate_flags(bench, system, name), "--beam", str(beam)]
    line, text = bench.line, bench.folder / "lines.txt"
    lines = bench.lines * bench.arguments.repeats
    write(text, lines)
    output = bench.output("translations.txt")
    start = bench.run(name, "generate", *flags, stdin=line, stdout=output)
    done = bench.run(name, "generate", *flags, stdin=text, stdout=output)
    speed = (len(lines) - 1) / max(0.01, done.seconds - start.seconds)
    figures = {"lines/s": speed, "starts/s": 1 / start.seconds, CORES: done.core_seconds}
    return Turn(figures, numbered(output.read_bytes().decode().split("\n")[:-1]))


def serve(bench: Bench, ports: Mapping[str, int], clients: int, name: str) -> Turn:
    return asyncio.run(post(ports[name], bench.languages, [line for line in bench.lines if line], clients))


async def post(port: int, languages: tuple[str, str], lines: list[str], clients: int) -> Turn:
    """Posts the lines from several clients. Each client waits for the answer before it sends the next line."""
    waiting, translations, latencies = iter(enumerate(lines)), [""] * len(lines), []

    async def client() -> None:
        connection = Client(port)
        for number, line in waiting:
            sent = time.perf_counter()
            translations[number] = await connection.translate(line, languages)
            latencies.append(time.perf_counter() - sent)
        connection.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    figures = {"lines/s": len(lines) / (time.perf_counter() - start), "p50 ms": 1000 * statistics.median(latencies)}
    return Turn(figures, numbered(translations))


# --- systems of each part ---------------------------------------------------------------------------------------------


def systems(part: str, bench: Bench, stack: contextlib.ExitStack) -> dict[str, Measure]:
    """Returns the systems that a part compares. Servers run until `stack` is closed."""
    if part == "train":
        runs = [(precision, processes) for precision in ("fp32", "bf16") for processes in (1, 2)]
        names = {1: "one process", 2: "two gloo processes"}
        return {f"{run[0]}, {names[run[1]]}": partial(train, bench, *run) for run in runs}
    if part == "generate":
        every = {f"{system}, beam {beam}": (system, beam) for beam in bench.arguments.beams for system in SYSTEMS}
        searches = chosen(every, bench.arguments.only)
        known = {
            system for system in dict.fromkeys(system for system, _ in searches.values()) if translates(bench, system)
        }
        return {name: partial(generate, bench, *each) for name, each in searches.items() if each[0] in known}
    if part == "serve":
        ports = {name: stack.enter_context(running(bench, name)) for name in CHECKOUTS}
        clients = {"one client": 1, f"{bench.arguments.clients} clients": bench.arguments.clients}
        return {name: partial(serve, bench, ports, number) for name, number in clients.items()}
    return {part: partial({"preprocess": preprocess, "clean": clean}[part], bench)}


def translates(bench: Bench, system: str) -> bool:
    """Returns whether both checkouts can translate with a system. Here, the slow first command is not measured."""
    for name in CHECKOUTS:
        try:
            bench.run(name, "generate", *generate_flags(bench, system, name), stdin=bench.line)
        except RuntimeError as error:
            print(f"{system} is left out, because {name} says: {str(error).splitlines()[-1]}")
            return False
    return True


def running(bench: Bench, name: str) -> contextlib.AbstractContextManager[int]:
    """Runs the server of a checkout and returns its port."""
    options = argparse.Namespace(workers=bench.arguments.threads, flags=[*SEARCH, "--device", "cpu"])
    return server(bench.checkpoint(name), bench.languages, options, bench.checkouts[name])


def code(checkout: Path) -> str:
    """Returns the commit of a checkout, after a check that the commands run the code of this checkout."""
    where = f"import nmtkit; assert nmtkit.__path__ == [{str(checkout / 'nmtkit')!r}], nmtkit.__path__"
    command([sys.executable, "-c", where], **code_of(checkout))
    return command(["git", "-C", str(checkout), "describe", "--always", "--dirty"]).log.strip()


def run_parts(bench: Bench, report: Report) -> None:
    arguments = bench.arguments
    for name in CHECKOUTS if {"generate", "serve"} & set(arguments.parts) else ():
        with contextlib.suppress(RuntimeError):  # an older checkout has no such command, or numba is missing
            bench.run(name, "precompile")
    commits = ", ".join(f"{name} {code(checkout)}" for name, checkout in bench.checkouts.items())
    for part in arguments.parts:
        with busy_cores(arguments.busy), contextlib.ExitStack() as stack:
            compared = chosen(systems(part, bench, stack), arguments.only)
            if part in ("generate", "serve") and not arguments.quick:
                compare(compared, 1)  # a warm-up
            if compared:
                report.table(f"{part}: {commits}", compare(compared, arguments.rounds))


def main() -> None:
    parts = ("preprocess", "clean", "train", "generate", "serve")
    flags = parser(__doc__, parts, rounds=5)
    flags.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    flags.add_argument("--after", type=Path, default=ROOT, help="default: this checkout")
    flags.add_argument("--arch", default="transformer_tiny")
    flags.add_argument("--pairs", type=int, help="number of training pairs; default: all")
    flags.add_argument("--lines", type=int, help="lines of the valid and the test set; default: all")
    flags.add_argument("--batch-tokens", type=int, default=4096)
    flags.add_argument("--updates", type=int, default=40, help="updates of each training")
    flags.add_argument("--checkpoint", type=Path, help="for generate and serve; default: `before` trains a model")
    flags.add_argument("--model-updates", type=int, default=300, help="updates of the model of `before`")
    flags.add_argument("--repeats", type=int, default=3, help="copies of the test set in the text of generate")
    flags.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    flags.add_argument("--clients", type=int, default=16, help="concurrent clients of serve")
    arguments = flags.parse_args()
    if not arguments.text:
        flags.error("--text is missing: a folder with train, valid and test files of both languages")
    if arguments.quick:
        quick = {"rounds": 1, "pairs": 400, "lines": 12, "vocab_size": 400, "batch_tokens": 400, "updates": 4}
        vars(arguments).update(quick, model_updates=4, repeats=1, beams=[4], clients=4)
    # A quick workspace would import the text of the demo from nmtkit, so this workspace is not quick.
    workspace = Workspace(argparse.Namespace(**vars(arguments) | {"quick": False}))
    with tempfile.TemporaryDirectory(dir=workspace.folder) as folder:
        run_parts(Bench(arguments, workspace, Path(folder)), Report(arguments))


if __name__ == "__main__":
    main()
