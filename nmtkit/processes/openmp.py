"""Keeps OpenMP's threads from spinning while other processes want their cores. Linux and GNU's libgomp only.

Threads of a team wait for each other after every operation. By default libgomp's spin for milliseconds: on idle cores
that is fastest (transformer_tiny on two threads trains at half the speed when they sleep at once), on cores that other
processes need it is slowest (2.7 times slower in training, 3.4 in decoding, than after 1,000 turns;
benchmarks/busy.py). No number of turns serves both, and the number is read once, when torch is loaded.

But libgomp has two numbers, and takes the small one, 1,000, while it has more threads than there are cores. So while
others want the cores, a second team of threads is kept, which sleep. Results are the same to the bit: the number of
threads that compute does not change.
"""

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch

INTERVAL = 1.0  # seconds between two looks
CROWDED = 0.25  # cores that others use beyond those that this process leaves them
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "WORLD_SIZE")  # who sets one has chosen

_started = False


def start() -> None:
    """Watches the cores in the background from now on, unless the user has set how threads wait.

    Ranks of one run take the launcher's choice: they are each other's load. Call it when no process will be forked.
    """
    global _started
    if sys.platform == "linux" and not _started and not any(name in os.environ for name in VARIABLES):
        _started = True
        threading.Thread(target=watch, args=(SleepingTeam(),), name="busy cores", daemon=True).start()


def watch(team: "SleepingTeam") -> None:
    """Keeps the team while the cores are crowded. Returns where the kernel does not tell."""
    cores = os.sched_getaffinity(0)
    before = used_by_others(cores)
    while before is not None:
        time.sleep(INTERVAL)
        now = used_by_others(cores)
        if now is None:
            return
        others = (now[1] - before[1]) / max(now[0] - before[0], 0.001)
        before = now
        threads = torch.get_num_threads()
        if threads > 1 and others > len(cores) - threads + CROWDED:
            team.start(len(cores) - threads + 2)  # with those that compute, one more than there are cores
        else:
            team.end()


def used_by_others(cores: set[int], stat: Path = Path("/proc/stat")) -> tuple[float, float] | None:
    """Returns the time in seconds, and the seconds that other processes have spent on `cores`; None if not known."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    names = {f"cpu{core}" for core in cores}
    # user, nice, system, (idle, iowait,) irq, softirq, steal
    busy = sum(int(fields[index]) for fields in lines if fields[0] in names for index in (1, 2, 3, 6, 7, 8))
    own = os.times()
    return time.monotonic(), busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


class SleepingTeam:
    """A team of OpenMP threads that do nothing between `start` and `end`."""

    def __init__(self) -> None:
        self._end: threading.Event | None = None

    def start(self, threads: int) -> None:
        if self._end is None:
            self._end = threading.Event()
            arguments = (threads, self._end)
            threading.Thread(target=self._run, args=arguments, name="sleeping team", daemon=True).start()

    def end(self) -> None:
        if self._end is not None:
            self._end.set()  # libgomp ends a team with the thread that it belongs to
            self._end = None

    def _run(self, threads: int, end: threading.Event) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # what each thread calls, with a null pointer
        for path in libraries():
            ctypes.CDLL(path).GOMP_parallel(nothing, None, threads, 0)
        end.wait()


def libraries() -> list[str]:
    """Returns the paths of all copies of libgomp in this process: torch brings one, and sentencepiece another."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "libgomp" in line})
