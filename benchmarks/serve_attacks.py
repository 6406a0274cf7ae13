"""Attacks on the service: how long does a normal request wait while one attacker sends the most expensive requests?

    python benchmarks/serve_attacks.py --text m30k --checkpoint averaged.pt         # needs nmtkit[serve]

One attacker has `--connections` connections, and each sends its next request when it has the answer. In attacks whose
names end with "leaves", the attacker closes the connection shortly after each request instead. Meanwhile, one normal
client translates sentences of the test set, one after the other. It translates each sentence twice: like a program, and
like the translator page, with alignment and quality. A row has p50, p95 and the maximum of the latency of this client,
and p95 divided by p95 without an attacker.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from harness import Report, Row, Workspace, parser
from serve import Client, server

PAUSE = 0.05  # seconds between two requests of the normal client
STAY = 0.3  # seconds until an attacker that leaves closes its connection
UNFINISHED = 1000  # connections of the attack with unfinished bodies


def post(path: str, body: bytes, media_type: str = "application/json", version: str = "1.1", size: int = 0) -> bytes:
    lines = [f"POST {path} HTTP/{version}", f"Content-Type: {media_type}", f"Content-Length: {size or len(body)}"]
    lines += ["Host: localhost"] if version == "1.1" else ["Connection: keep-alive"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def translate(pair: tuple[str, str], q: str | list[str], **fields: object) -> bytes:
    return post("/translate", json.dumps({"q": q, "source": pair[0], "target": pair[1], **fields}).encode())


def form(path: str, pair: tuple[str, str], field: str, value: str, charset: str = "utf-8") -> bytes:
    parts = {'name="source"': pair[0], 'name="target"': pair[1], field: value}.items()
    body = "".join(f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n{text}\r\n" for head, text in parts)
    return post(path, f"{body}--x--\r\n".encode(), f"multipart/form-data; boundary=x; charset={charset}")


def upload(pair: tuple[str, str], extension: str, text: str) -> bytes:
    return form("/translate_file", pair, f'name="file"; filename="a.{extension}"', text)


def for_deepl(path: str, pair: tuple[str, str], **fields: object) -> bytes:
    languages = {"source_lang": pair[0], "target_lang": pair[1]}
    return post(path, json.dumps({**languages, **fields}).encode())


def document(pair: tuple[str, str], text: str) -> bytes:
    parts = {'name="source_lang"': pair[0], 'name="target_lang"': pair[1], 'name="file"; filename="a.srt"': text}
    body = "".join(f"--x\r\nContent-Disposition: form-data; {head}\r\n\r\n{part}\r\n" for head, part in parts.items())
    return post("/v2/document", f"{body}--x--\r\n".encode(), "multipart/form-data; boundary=x")


def terms_of(lines: list[str]) -> str:
    """Returns a glossary of at most 99,000 characters. Words of the lines are its terms, with wrong translations."""
    words = dict.fromkeys(word.strip(".,") for line in lines for word in line.split())
    terms = "".join(f"{word}\t{word[::-1]}x|{word[::-1]}y\n" for word in words if word)
    return terms[:99_000].rpartition("\n")[0]


def attacks(pair: tuple[str, str], lines: list[str], glossary: str) -> dict[str, bytes]:
    """Returns the request of each attack. Requests have the largest size that the default limits of the service accept.

    `glossary` is the id of a glossary of `terms_of`.
    """
    words = " ".join(itertools.islice(itertools.cycle(" ".join(lines).split()), 40_000))
    everything = {"alternatives": 10, "alignment": True, "quality": True}
    short, long = ([words[n * (size + 1) :][:size] for n in range(count)] for size, count in ((95, 1000), (4080, 24)))
    cues = "".join(
        f"{n}\n00:00:{n % 60:02},000 --> 00:00:{n % 60:02},500\n{words[n * 70 :][:60]}\n\n" for n in range(900)
    )
    with_glossary = {"glossary_id": glossary}
    catalogue = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8"\n\n'
    catalogue += "".join(f'msgid "{n} [X1X]_ %s {{name}}"\nmsgstr ""\n\n' for n in range(900))
    return {
        "a form with charset=punycode": form("/translate", pair, 'name="q"', "a" * 1_200_000, "punycode"),
        "420,000 empty texts": translate(pair, [""] * 420_000),
        "a target of 600,000 letters": translate((pair[0], "a" * 600_000), "a"),
        "1,000 texts with [X1X]_": translate(pair, ["A dog [X1X]_"] * 1000),
        "a catalogue with placeholders": upload(pair, "po", catalogue),
        "a line of 99,000 letters": translate(pair, words[:99_000]),
        "the same with 10 alternatives and alignment": translate(pair, words[:99_000], alternatives=10, alignment=True),
        "the same with quality": translate(pair, words[:99_000], **everything),
        "the same without spaces": translate(pair, words.replace(" ", "")[:99_000], **everything),
        "24 lines of 4,080 letters": translate(pair, long),
        "24 lines of 4,080 letters with everything": translate(pair, long, **everything),
        "19 lines of 95 letters": translate(pair, short[:19]),
        "4 lines of 500 digits": translate(pair, ["1234567890" * 50] * 4),
        "19 lines of 95 digits": translate(pair, ["12345678901234567890" * 5] * 19),
        "1,000 lines of 95 letters": translate(pair, short),
        "1,000 lines of 95 letters with everything": translate(pair, short, **everything),
        "19,000 tags": translate(pair, "a<br>" * 19_000, format="html"),
        "19,000 tags with 10 alternatives": translate(pair, "a<b>a" * 19_000, format="html", alternatives=10),
        "numbers of characters with 5,000 digits": translate(pair, f"&#{'9' * 5000};" * 19, format="html"),
        "subtitles": upload(pair, "srt", cues),
        "DeepL: subtitles": document(pair, cues),
        "DeepL: 19,000 tags of XML": for_deepl("/v2/translate", pair, text="a<b>a" * 19_000, tag_handling="xml"),
        "DeepL: 24,000 ignored elements": for_deepl(
            "/v2/translate", pair, text="a<b>" * 24_000, tag_handling="xml", ignore_tags=["b"] * 1000
        ),
        "DeepL: a list of 300,000 tags": for_deepl("/v2/translate", pair, text="a", ignore_tags=[""] * 300_000),
        "DeepL: a new glossary": for_deepl("/v2/glossaries", pair, name="x", entries=terms_of(lines)),
        "DeepL: 1,000 lines of terms": for_deepl("/v2/translate", pair, text=short, **with_glossary),
        "DeepL: 24 lines of 4,080 letters of terms": for_deepl("/v2/translate", pair, text=long, **with_glossary),
        "DeepL: a line of 99,000 letters of terms": for_deepl(
            "/v2/translate", pair, text=words[:99_000], **with_glossary
        ),
        "1,000 lines in a language to detect": translate(("auto", pair[1]), short),
        "HTTP/1.0 without a Host": post("/translate", b"{}", version="1.0"),
        "a line of 99,000 letters, leaves": translate(pair, words[:99_000]),
        "the same with everything, leaves": translate(pair, words[:99_000], **everything),
        "19,000 tags, leaves": translate(pair, "a<b>a" * 19_000, format="html"),
        f"unfinished bodies of {UNFINISHED:,} connections": post("/translate", b"[" * 1_200_000, size=1_200_001),
    }  # fmt: skip


class Attacker(Client):
    """A connection that counts answers by status. It does not parse answers, which would delay other connections."""

    async def attack(self, name: str, data: bytes, statuses: Counter[int]) -> None:
        while True:
            try:
                await self.send(data)
                if name.endswith("leaves"):
                    await asyncio.sleep(STAY)
                    self.close()
                    continue
                statuses[await self.status()] += 1
                if name.startswith("unfinished"):
                    return
            except (OSError, EOFError):
                self.close()
                if name.startswith("unfinished"):
                    return
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                self.close()
                raise

    async def status(self) -> int:
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        left = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        while left:
            part = await self.reader.read(min(left, 2**20))
            if not part:
                raise EOFError
            left -= len(part)
        if b"connection: close" in head or head.startswith(b"http/1.0"):
            self.close()
        return int(head.split(b" ", 2)[1])


def attack(pipe: Connection, port: int, name: str, data: bytes, connections: int) -> None:
    """Attacks until the pipe has a message, and then sends the number of answers with each status."""
    statuses: Counter[int] = Counter()

    async def run() -> None:
        clients = [asyncio.create_task(Attacker(port).attack(name, data, statuses)) for _ in range(connections)]
        await asyncio.to_thread(pipe.recv)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(run())
    pipe.send(statuses)


@contextlib.contextmanager
def attacked(port: int, name: str, data: bytes, connections: int) -> Iterator[dict[int, int]]:
    """Attacks the service from another process. Yields a dict that gets the number of answers with each status."""
    ours, theirs = multiprocessing.Pipe()
    count = UNFINISHED if name.startswith("unfinished") else connections
    process = multiprocessing.Process(target=attack, args=(theirs, port, name, data, count))
    process.start()
    time.sleep(1)
    statuses: dict[int, int] = {}
    try:
        yield statuses
    finally:
        ours.send("stop")
        statuses.update(ours.recv())
        process.join()


async def latencies(port: int, requests: Iterator[bytes], seconds: float) -> list[float]:
    """Returns the seconds of normal requests, sent one after the other for some seconds; at least five requests."""
    client, times = Client(port), []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        start = time.monotonic()
        await client.send(next(requests))
        status, answer = await client.answer()
        assert status == 200, (status, answer)
        times.append(time.monotonic() - start)
        await asyncio.sleep(PAUSE)
    client.close()
    return times


async def recovered(port: int, requests: Iterator[bytes], limit: float) -> float:
    """Waits until five requests in a row take less than `limit` seconds. Returns the seconds of waiting, at most 60."""
    start = time.monotonic()
    while max(await latencies(port, requests, 0)) > limit and time.monotonic() < start + 60:
        pass
    return time.monotonic() - start


def row(name: str, times: list[float], alone: list[float]) -> Row:
    p50, p95 = (statistics.quantiles(times, n=100, method="inclusive")[index] for index in (49, 94))
    usual = statistics.quantiles(alone, n=100, method="inclusive")[94]
    figures = {"p50 s": p50, "p95 s": p95, "most s": max(times), "of p95 alone": p95 / usual}
    return {"attack": name, "requests": len(times), **figures, "load": os.getloadavg()[0]}


def new_glossary(port: int, pair: tuple[str, str], lines: list[str]) -> str:
    """Creates the glossary of `terms_of`. Returns its id."""
    fields = {"name": "x", "source_lang": pair[0], "target_lang": pair[1], "entries": terms_of(lines)}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/glossaries", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["glossary_id"]


async def measure(port: int, pair: tuple[str, str], lines: list[str], options: argparse.Namespace) -> list[Row]:
    wanted: list[dict[str, object]] = [{}, {"alignment": True, "quality": True}]
    normal = itertools.cycle(translate(pair, line, **fields) for line in lines for fields in wanted)
    await latencies(port, normal, 2)
    alone = await latencies(port, normal, options.seconds)
    rows = [row("none", alone, alone) | {"answers to the attacker": ""}]
    names = options.only.split(",") if options.only else [""]
    for name, data in attacks(pair, lines, new_glossary(port, pair, lines)).items():
        if any(part in name for part in names):
            with attacked(port, name, data, options.connections) as statuses:
                times = await latencies(port, normal, options.seconds)
            answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
            rows.append(row(name, times, alone) | {"answers to the attacker": answers})
            await recovered(port, normal, 3 * max(alone))
    return rows


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--checkpoint", type=Path, help="default: a transformer_tiny is trained")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--connections", type=int, default=4, help="connections of the attacker")
    flags.add_argument("--seconds", type=float, default=12, help="seconds of each attack")
    flags.add_argument("--flags", default="", help="flags of the server, such as '--engine numba'")
    options = flags.parse_args()
    options.flags = options.flags.split()
    if options.quick:
        options.seconds, options.flags = 1, ["--max-len-b", "5"]
    workspace, report = Workspace(options), Report(options)
    training = f"--arch transformer_tiny --max-update {2 if options.quick else 900} --threads 2"
    path = options.checkpoint or workspace.trained("tiny", training)
    lines = list(dict.fromkeys(line for line in workspace.lines("test", 0) if line))
    with server(path, workspace.pair, options) as port:
        report.table("a normal request beside an attacker", asyncio.run(measure(port, workspace.pair, lines, options)))


if __name__ == "__main__":
    main()
