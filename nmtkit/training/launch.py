"""Several processes on this machine: start them, pass signals on, end all when one fails."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

POLL = 0.1  # seconds
GRACE = 5.0  # seconds that the others get to say why, and end, when one has failed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(arguments: Sequence[str], processes: int) -> int:
    """Runs `python -m nmtkit ARGUMENTS` in `processes` ranks of one group and gives the exit code of the first to fail,
    0 when none does.

    SIGTERM and SIGUSR1 go on to all ranks; Ctrl-C reaches them from the terminal.
    """
    port = free_port()
    children = []
    for rank in range(processes):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        children.append(subprocess.Popen([sys.executable, "-m", "nmtkit", *arguments], env=environment))

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _wait(children)
    finally:
        for child in children:
            child.kill()
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first child to fail; the rest get a few seconds."""
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            end = time.monotonic() + GRACE
            while time.monotonic() < end and any(child.poll() is None for child in children):
                time.sleep(POLL)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL)
