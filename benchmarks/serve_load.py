"""`nmtkit serve` under load and under faults, beside `nmtkit generate` on the same lines and workers.

    python benchmarks/serve_load.py CHECKPOINT TEXT [--part speed|faults|kills …] [--output results.json]

speed   lines a second of 64 clients, each of which sends the next request when it has its answer, of one line and of
        `--lines` lines; of `generate --workers`, start-up taken off; and the latency of one short line, alone and
        beside those clients, p50 and p95. The clients are one process beside the server's, on the same cores.
faults  `--requests` requests of 64 clients, of which one in ten is malformed, oversize, slow or cut off in the middle:
        every other answer must be what `generate` says, and the server's memory is read on the way.
kills   five workers are killed (SIGKILL) under load: every answer must be what `generate` says.

Needs nmtkit[serve].
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

CLIENTS = 64
HEAD = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Client:
    """One connection, kept open."""

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
    """Returns the lines a second that CLIENTS clients get translated, once all are at it: in the last two thirds."""
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
    """Returns p50 and p95, in milliseconds, of one line after the other."""
    client, times = Client(port), []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        start = time.monotonic()
        await client.translate(line, pair)
        times.append(1000 * (time.monotonic() - start))
    client.close()
    return [round(statistics.quantiles(times, n=100, method="inclusive")[index], 1) for index in (49, 94)]


async def speed(port: int, pair: tuple[str, str], lines: list[str], options: argparse.Namespace) -> dict[str, Any]:
    short = min(lines, key=len)
    await throughput(port, pair, lines, 1, 2)
    alone = await latency(port, pair, short, options.seconds / 3)
    results: dict[str, Any] = {"short line, alone, p50 and p95 ms": alone}
    for per_request in (1, options.lines):
        load = asyncio.create_task(throughput(port, pair, lines, per_request, options.seconds))
        await asyncio.sleep(1)
        results[f"beside {CLIENTS} clients, {per_request} lines a request"] = await latency(
            port, pair, short, options.seconds - 2
        )
        results[f"lines a second, {per_request} a request"] = round(await load, 1)
    return results


async def faults(port: int, pair: tuple[str, str], expected: dict[str, str], options: argparse.Namespace) -> Any:
    """Sends requests of which one in ten is a bad one; returns how many of each there were, and what became of them."""
    lines, left = list(expected), options.requests
    counts: Counter[str] = Counter()
    memory: dict[str, list[int]] = {"server": [], "workers and their parent": []}

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
            if left % 1000 == 0:
                server = own_memory(options.server)
                memory["server"].append(server)
                memory["workers and their parent"].append(memory_of(options.server) - server)
            if draw.random() < 0.1:
                await bad(connection, draw)
            else:
                line = draw.choice(lines)
                found = await connection.translate(line, pair)
                counts["right" if found == expected[line] else "wrong"] += 1
        connection.close()

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return {"requests": dict(counts), "MB of all processes, every 1,000": memory}


async def kills(port: int, pair: tuple[str, str], expected: dict[str, str], options: argparse.Namespace) -> Any:
    lines, counts = list(expected), Counter[str]()
    stop = False

    async def client(number: int) -> None:
        draw, connection = random.Random(number), Client(port)
        while not stop:
            chunk = draw.sample(lines, min(4, len(lines)))
            found = await connection.translate(chunk, pair)
            counts["right" if found == [expected[line] for line in chunk] else "wrong"] += 1

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    for number in range(5):
        await asyncio.sleep(1.5)
        (parent,) = children(options.server)
        os.kill(children(parent)[number % 2], signal.SIGKILL)
    await asyncio.sleep(1.5)
    stop = True
    await asyncio.gather(*clients)
    return {"killed": 5, "requests": dict(counts)}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def own_memory(pid: int) -> int:
    """Returns the memory in MB of a process, its share of what it shares with others; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) // 1024 if found else 0
    return 0


def memory_of(pid: int) -> int:
    """Returns the memory in MB of a process and all below it, what they share counted once."""
    return own_memory(pid) + sum(memory_of(child) for child in children(pid))


# --- beside generate --------------------------------------------------------------------------------------------------


def generate(checkpoint: Path, lines: list[str], options: argparse.Namespace) -> tuple[list[str], float]:
    """Returns the translations, and the lines a second: what twice the lines take longer than once."""

    def run(times: int) -> tuple[list[str], float]:
        start = time.monotonic()
        command = [sys.executable, "-m", "nmtkit", "generate", "--path", str(checkpoint), "-q"]
        text = ("\n".join(lines) + "\n") * times
        output = subprocess.run(
            [*command, "--workers", str(options.workers), *options.flags], input=text.encode(), capture_output=True,
            check=True,
        ).stdout  # fmt: skip
        return output.decode().split("\n")[: len(lines)], time.monotonic() - start

    found, once = run(1)
    repeats = 1 + options.repeats
    return found, options.repeats * len(lines) / (run(repeats)[1] - once)


@contextlib.contextmanager
def server(checkpoint: Path, pair: tuple[str, str], options: argparse.Namespace) -> Any:
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*(sys.executable, "-m", "nmtkit", "serve", "--port", "0", "--workers", str(options.workers)),
             *("--path", f"{'-'.join(pair)}={checkpoint}", *options.flags)], stderr=log,
        )  # fmt: skip
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--pair", default="en-de", help="languages")
    parser.add_argument("--part", action="append", choices=["speed", "faults", "kills"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lines", type=int, default=16, help="of a request of several")
    parser.add_argument("--seconds", type=float, default=12, help="of each measurement")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=4, help="times that generate goes over the text")
    parser.add_argument("--flags", default="", help="for both commands, as '--precision int8'")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.flags = options.flags.split()
    lines = [line for line in options.text.read_text(encoding="utf-8").split("\n") if line]
    source, _, target = options.pair.partition("-")
    pair = source, target
    parts = options.part or ["speed", "faults", "kills"]
    found, rate = generate(options.checkpoint, lines, options)
    expected = dict(zip(lines, found, strict=True))
    results: dict[str, Any] = {"generate, lines a second": round(rate, 1)}
    with server(options.checkpoint, pair, options) as port:
        for part in parts:
            if part == "speed":
                results[part] = asyncio.run(speed(port, pair, lines, options))
                for per_request in (1, options.lines):
                    found_rate = results[part][f"lines a second, {per_request} a request"]
                    results[part][f"share of generate, {per_request} a request"] = round(found_rate / rate, 3)
            else:
                run = faults if part == "faults" else kills
                results[part] = asyncio.run(run(port, pair, expected, options))
            print(json.dumps({part: results[part]}, indent=1), flush=True)
    print(json.dumps(results, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
