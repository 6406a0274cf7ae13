"""Serving: how fast and reliable is `nmtkit serve` under load and faults? `nmtkit generate` is the comparison.

    python benchmarks/serve.py --text m30k --checkpoint averaged.pt         # needs nmtkit[serve]

speed   Lines per second of 64 clients, relative to `generate` with as many workers, without its start. Each client
        sends the next request when it has its answer, with one line or with `--lines` lines in a request. Also p50 and
        p95 of the latency of one short line, alone and while these clients send requests. All clients are in one
        process on the same cores.
peers   p50 and p95 of a request with one line, and lines per second, of one client and of 32 clients. The systems are
        nmtkit with its default engine, nmtkit with CTranslate2, and LibreTranslate, if `--libretranslate` is the path
        of its command in its environment (`pip install libretranslate`). LibreTranslate has its default threads, a
        package of the same model, and `--workers` translations at a time, and every line is one sentence. Every system
        searches with a beam of 4 and has 8-bit weights. The servers run all the time and take turns, and the median of
        each figure counts. The memory of all processes of a server is measured at the end.
faults  `--requests` requests of 64 clients. One request in ten is malformed, oversize, slow or cut off in the middle.
        Every other answer must be the translation of `generate`. The table has the memory of all processes during the
        run.
kills   Five workers are killed (SIGKILL) under load. Every answer must be the translation of `generate`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import ROOT, Report, Row, Workspace, busy_cores, children, code_of, nmtkit, parser
from start import argos_environment

CLIENTS = 64
# LibreTranslate downloads a model that splits text into sentences. To avoid the download, a line is one sentence here.
LIBRETRANSLATE = """
from argostranslate.sbd import MiniSBDSentencizer
MiniSBDSentencizer.split_sentences = lambda self, text: [text]
from libretranslate.main import main
main()
"""
HEAD = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Client:
    """A client whose connection stays open between requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def send(self, data: bytes) -> None:
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, Any]:
        assert self.reader is not None
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        body = await self.reader.readexactly(int(length[1]))
        if b"connection: close" in head.lower():
            self.close()
        return int(head.split(b" ", 2)[1]), json.loads(body)

    async def translate(self, q: str | list[str], pair: tuple[str, str]) -> Any:
        await self.send(request(q, pair))
        status, answer = await self.answer()
        assert status == 200, (status, answer)
        return answer["translatedText"]

    def close(self) -> None:
        if self.reader is not None:
            self.writer.transport.abort()
        self.reader = None


def request(q: Any, pair: tuple[str, str]) -> bytes:
    body = json.dumps({"q": q, "source": pair[0], "target": pair[1]}).encode()
    return HEAD.format(len(body)).encode() + body


# --- parts ------------------------------------------------------------------------------------------------------------


async def throughput(port: int, pair: tuple[str, str], lines: list[str], per_request: int, seconds: float) -> float:
    """Returns the lines per second of CLIENTS clients in the last two thirds of the time, when all clients are busy."""
    chunks = itertools.cycle([lines[start : start + per_request] for start in range(0, len(lines), per_request)])
    start = time.monotonic()
    done = 0

    async def client() -> None:
        nonlocal done
        connection = Client(port)
        while time.monotonic() < start + seconds:
            chunk = next(chunks)
            try:
                await connection.translate(chunk if per_request > 1 else chunk[0], pair)
            except asyncio.CancelledError:
                connection.close()
                raise
            done += len(chunk) * (start + seconds / 3 < time.monotonic() < start + seconds)
        connection.close()

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.wait(clients, timeout=seconds)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return done / (seconds * 2 / 3)


async def latency(port: int, pair: tuple[str, str], line: str, seconds: float) -> list[float]:
    """Sends a line again and again. Returns p50 and p95 of the latency in milliseconds."""
    client, times = Client(port), []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        start = time.monotonic()
        await client.translate(line, pair)
        times.append(1000 * (time.monotonic() - start))
    client.close()
    return [round(statistics.quantiles(times, n=100, method="inclusive")[index], 1) for index in (49, 94)]


async def load(port: int, pair: tuple[str, str], lines: list[str], clients: int, seconds: float) -> Row:
    """Returns the latency in milliseconds and the lines per second of clients that send one line in a request."""
    waiting, start = itertools.cycle(lines), time.monotonic()
    times: list[float] = []

    async def client() -> None:
        connection = Client(port)
        while (sent := time.monotonic()) < start + seconds or len(times) < 2:
            await connection.translate(next(waiting), pair)
            if sent > start + seconds / 4:  # by now, all clients are busy and caches are filled
                times.append(1000 * (time.monotonic() - sent))
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    p50, p95 = (statistics.quantiles(times, n=20, method="inclusive")[index] for index in (9, 18))
    return {"p50 ms": p50, "p95 ms": p95, "lines/s": len(times) / (time.monotonic() - start - seconds / 4)}


def peers(path: Path, pair: tuple[str, str], lines: list[str], options: argparse.Namespace) -> list[Row]:
    """Measures nmtkit, nmtkit with CTranslate2 and LibreTranslate in turns."""
    nmtkit("precompile")
    ports, processes, rounds = dict[str, int](), dict[str, int](), dict[tuple[str, int], list[Row]]()
    with contextlib.ExitStack() as stack:
        for name, engine in (("nmtkit", "auto"), ("nmtkit, CTranslate2", "ctranslate2")):
            own = argparse.Namespace(**vars(options))
            own.flags = ["--engine", engine, "--precision", "int8", "--lenpen", "0", *options.flags]
            ports[name] = stack.enter_context(server(path, pair, own))
            processes[name] = own.server
        if options.libretranslate is not None:
            own = argparse.Namespace(**vars(options) | {"checkpoint": path})
            ports["LibreTranslate"] = stack.enter_context(libretranslate(own, pair))
            processes["LibreTranslate"] = own.server
        for _ in range(options.rounds):
            for clients, (name, port) in itertools.product((1, 32), ports.items()):
                row = asyncio.run(load(port, pair, lines, clients, options.seconds / 2))
                rounds.setdefault((name, clients), []).append(row)
        memory = {name: tree_memory(process) for name, process in processes.items()}
    return [
        {"system": name, "clients": clients}
        | {column: statistics.median(each[column] for each in rows) for column in rows[0]}
        | {"memory MB": memory[name]}
        for (name, clients), rows in sorted(rounds.items(), key=lambda item: item[0][1])
    ]


@contextlib.contextmanager
def libretranslate(options: argparse.Namespace, pair: tuple[str, str]) -> Iterator[int]:
    """Runs LibreTranslate with a package of the model. Yields its port."""
    python, environment = argos_environment(options, options.libretranslate, "int8")
    environment |= {"ARGOS_INTER_THREADS": str(options.workers), "ARGOS_COMPUTE_TYPE": "int8"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [python, "-c", LIBRETRANSLATE, "--host", "127.0.0.1", "--port", str(port), "--load-only", ",".join(pair)]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | environment)
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.5)
            options.server = process.pid
            yield port
        finally:
            process.kill()
            process.wait()


async def speed(port: int, pair: tuple[str, str], expected: dict[str, str], options: argparse.Namespace) -> list[Row]:
    lines = list(expected)
    short = min(lines, key=len)
    await throughput(port, pair, lines, 1, 2)
    p50, p95 = await latency(port, pair, short, options.seconds / 3)
    rows: list[Row] = [{"clients": "one, a short line", "lines/s": 1000 / p50, "p50 ms": p50, "p95 ms": p95}]
    for per_request in (1, options.lines):
        load = asyncio.create_task(throughput(port, pair, lines, per_request, options.seconds))
        await asyncio.sleep(1)
        p50, p95 = await latency(port, pair, short, options.seconds - 2)
        name = f"{CLIENTS}, {per_request} lines a request; a short line beside them"
        rows.append({"clients": name, "lines/s": await load, "p50 ms": p50, "p95 ms": p95})
    return [row | {"of generate": row["lines/s"] / options.rate} for row in rows]


async def faults(port: int, pair: tuple[str, str], expected: dict[str, str], options: argparse.Namespace) -> list[Row]:
    """Sends requests, of which one in ten is bad. Returns the memory in ten stages, and the count of each kind."""
    lines, left = list(expected), options.requests
    counts: Counter[str] = Counter()
    stages: list[Row] = []

    async def bad(client: Client, draw: random.Random) -> None:
        kind = draw.choice(["malformed", "oversize", "slow", "cut off"])
        whole = request(draw.choice(lines), pair)
        if kind == "malformed":
            await client.send(draw.choice([
                HEAD.format(7).encode() + b'{"q": [', HEAD.format(2).encode() + b"[]",
                HEAD.format(1).encode() + b"\xff",
                request({"a": 1}, pair), request("x", ("xx", "yy")), HEAD.format(50_000).encode() + b"[" * 50_000,
            ]))  # fmt: skip
            status, _ = await client.answer()
            assert status == 400, status
        elif kind == "oversize":
            await client.send(HEAD.format(10**9).encode())
            status, _ = await client.answer()
            assert status == 413, status
        elif kind == "slow":
            for start in range(0, len(whole), 40):
                await client.send(whole[start : start + 40])
                await asyncio.sleep(0.02)
            status, _ = await client.answer()
            assert status == 200, status
        else:
            await client.send(whole[: draw.randrange(1, len(whole))])
            client.close()
        counts[kind] += 1

    async def client(number: int) -> None:
        nonlocal left
        draw, connection = random.Random(number), Client(port)
        while left > 0:
            left -= 1
            if left % max(1, options.requests // 10) == 0:
                server, others = memory_of(options.server), sum(map(tree_memory, children(options.server)))
                stages.append({"requests left": left, "server MB": server, "workers and parent MB": others})
            if draw.random() < 0.1:
                await bad(connection, draw)
            else:
                line = draw.choice(lines)
                answered = await connection.translate(line, pair)
                counts["right" if answered == expected[line] else "wrong"] += 1
        connection.close()

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    names = ("right", "wrong", "malformed", "oversize", "slow", "cut off")
    return [stage | {name: counts[name] for name in names} for stage in stages]


async def kills(port: int, pair: tuple[str, str], expected: dict[str, str], options: argparse.Namespace) -> list[Row]:
    lines, counts = list(expected), Counter[str]()
    stop = False

    async def client(number: int) -> None:
        draw, connection = random.Random(number), Client(port)
        while not stop:
            chunk = draw.sample(lines, min(4, len(lines)))
            answered = await connection.translate(chunk, pair)
            counts["right" if answered == [expected[line] for line in chunk] else "wrong"] += 1

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    for number in range(5):
        await asyncio.sleep(1.5)
        (parent,) = children(options.server)
        workers = children(parent)
        os.kill(workers[number % len(workers)], signal.SIGKILL)
    await asyncio.sleep(1.5)
    stop = True
    await asyncio.gather(*clients)
    return [{"killed workers": 5, "right": counts["right"], "wrong": counts["wrong"]}]


def memory_of(pid: int) -> int:
    """Returns the memory of a process in MB, with a proportional part of shared pages; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        pss = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(pss[1]) // 1024 if pss else 0
    return 0


def tree_memory(pid: int) -> int:
    return memory_of(pid) + sum(map(tree_memory, children(pid)))


# --- processes --------------------------------------------------------------------------------------------------------


def generate(
    workspace: Workspace, path: Path, lines: list[str], options: argparse.Namespace
) -> tuple[list[str], float]:
    """Returns the translations and the lines per second.

    The seconds of a command with one pass are subtracted from the seconds of a command with several passes, so that
    the start does not count.
    """
    flags = ["--path", str(path), "-q", "--workers", str(options.workers), *options.flags]
    seconds = {}
    source, output = workspace.folder / "serve.txt", workspace.folder / "serve.out"
    for repeats in (1 + options.repeats, 1):
        source.write_text("".join(f"{line}\n" for line in lines * repeats), encoding="utf-8")
        seconds[repeats] = nmtkit("generate", *flags, stdin=source, stdout=output).seconds
    steady = max(0.01, seconds[1 + options.repeats] - seconds[1])
    return output.read_bytes().decode().split("\n")[:-1], options.repeats * len(lines) / steady


@contextlib.contextmanager
def server(path: Path, pair: tuple[str, str], options: argparse.Namespace, checkout: Path = ROOT) -> Iterator[int]:
    """Runs the service with the code of a checkout. Yields its port. Sets `options.server` to the process id."""
    words = [sys.executable, "-m", "nmtkit", "serve", "--port", "0", "--workers", str(options.workers)]
    words += ["--path", f"{'-'.join(pair)}={path}", *options.flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(words, stderr=log, env=os.environ | code_of(checkout))
        try:
            while not (port := re.search(r"at http://\S+:(\d+) ", Path(log.name).read_text())):
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
            options.server = process.pid
            yield int(port[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def main() -> None:
    parts = {"speed": speed, "faults": faults, "kills": kills}
    flags = parser(__doc__, [*parts, "peers"])
    flags.add_argument("--checkpoint", type=Path, help="default: a transformer_tiny is trained")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--lines", type=int, default=16, help="lines of a request with several lines")
    flags.add_argument("--seconds", type=float, default=12, help="seconds of each measurement")
    flags.add_argument("--requests", type=int, default=10_000)
    flags.add_argument("--repeats", type=int, default=4, help="further passes of generate over the text")
    flags.add_argument("--libretranslate", type=Path, metavar="PROGRAM", help="path of its command in its environment")
    flags.add_argument("--flags", default="", help="flags for both commands, such as '--precision int8'")
    options = flags.parse_args()
    options.flags = options.flags.split()
    if options.quick:
        options.seconds, options.requests, options.repeats, options.flags = 3, 100, 1, ["--max-len-b", "5"]
    workspace, report = Workspace(options), Report(options)
    training = f"--arch transformer_tiny --max-update {2 if options.quick else 900} --threads 2"
    path = options.checkpoint or workspace.trained("tiny", training)
    lines = list(dict.fromkeys(line for line in workspace.lines("test", 0) if line))
    if "peers" in options.parts:
        with busy_cores(options.busy):
            rows = peers(path, workspace.pair, lines, options)
        report.table(f"peers, {options.workers} workers, one line in a request", rows)
        options.parts = [part for part in options.parts if part != "peers"]
    if not options.parts:
        return
    texts, options.rate = generate(workspace, path, lines, options)
    expected = dict(zip(lines, texts, strict=True))
    with busy_cores(options.busy), server(path, workspace.pair, options) as port:
        for part in options.parts:
            rows = asyncio.run(parts[part](port, workspace.pair, expected, options))
            report.table(f"{part}; generate makes {options.rate:,.0f} lines/s", rows)


if __name__ == "__main__":
    main()
