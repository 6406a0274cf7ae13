"""A server with a tiny model in a separate process."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer; `body` is sent as JSON unless it is bytes.

        Raises TimeoutError if the server has sent nothing for `timeout` seconds.
        """
        kinds = {"Content-Type": "application/json"} if body is not None and not isinstance(body, bytes) else {}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {**kinds, **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def translate(self, q: Any, **fields: Any) -> Any:
        status, answer = self.ask("/translate", {"q": q, "source": "en", "target": "de", **fields})
        assert status == 200, answer
        return answer["translatedText"]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics") as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the process that reads requests and writes answers."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(300)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    """Runs `nmtkit serve` with these arguments on a free port. The engine is torch unless the arguments name one."""
    arguments = arguments if "--engine" in arguments else (*arguments, "--engine", "torch")
    log = folder / "serve.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "nmtkit", "serve", "--port", "0", *arguments], stderr=stderr, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        port = None
        while port is None and process.poll() is None:
            time.sleep(0.05)  # reading without a pause would take the core that the server needs to start
            port = re.search(r"at http://\S+:(\d+) ", log.read_text())
        assert port, log.read_text()
        yield Server(process, int(port[1]), log)
    finally:
        process.kill()
        process.wait()
