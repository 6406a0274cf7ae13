"""Stops OpenMP threads from spinning while other processes need the cores. Only for Linux and GNU's libgomp.

OpenMP threads wait for each other after every operation. By default, libgomp threads spin for milliseconds while they
wait. On idle cores, spinning is fast: with threads that sleep immediately, transformer_tiny on two threads trains at
half the speed. On busy cores, spinning is slow: training takes 2.7 times and decoding 3.4 times as long as with a limit
of 1,000 spins (benchmarks/RESULTS.md). No fixed number of spins is good in both cases, and libgomp reads the setting
only once, when torch is loaded.

However, libgomp limits spinning to 1,000 spins while it has more threads than there are cores. Therefore, while other
processes need the cores, `watch_load` runs a team of additional threads that sleep. Results stay bit-identical, because
the number of computing threads does not change.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

import torch

INTERVAL = 1.0  # seconds between two measurements of the load
# the idle threads start if other processes use more cores than this process leaves free, plus this number
TOLERATED_LOAD = 0.25
# if one of these variables is set, the user or the launcher has decided how threads wait
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "WORLD_SIZE")

_started = False


def start() -> None:
    """Starts `watch_load` on a background thread, unless the user has configured how OpenMP threads wait.

    Ranks of one run compete with each other, so the launcher decides for them. Call this function after the last fork.
    """
    global _started
    if hasattr(os, "sched_getaffinity") and not _started and not any(name in os.environ for name in VARIABLES):
        _started = True
        threading.Thread(target=watch_load, args=(IdleThreads(),), name="openmp load", daemon=True).start()


def watch_load(team: "IdleThreads") -> None:
    """Runs the idle threads while other processes need the cores. Returns if the kernel does not report the load."""
    cores = os.sched_getaffinity(0)
    before = cpu_time_of_others(cores)
    while before is not None:
        time.sleep(INTERVAL)
        now = cpu_time_of_others(cores)
        if now is None:
            return
        load = (now[1] - before[1]) / max(now[0] - before[0], 0.001)  # number of cores that other processes use
        before = now
        threads = torch.get_num_threads()
        if threads > 1 and load > len(cores) - threads + TOLERATED_LOAD:
            # libgomp counts all threads except the first thread of this team: one thread more than there are cores
            team.start(len(cores) - threads + 2)
        else:
            team.stop()


def cpu_time_of_others(cores: set[int], stat: Path = Path("/proc/stat")) -> tuple[float, float] | None:
    """Returns the current time and the CPU time of other processes on `cores`, both in seconds.

    Returns None if the file `stat` cannot be read.
    """
    try:
        lines = [line.split() for line in stat.read_text().split("\n") if line.startswith("cpu")]
    except OSError:
        return None
    names = {f"cpu{core}" for core in cores}
    # columns: user, nice, system, (idle, iowait,) irq, softirq, steal
    ticks = sum(int(fields[index]) for fields in lines if fields[0] in names for index in (1, 2, 3, 6, 7, 8))
    usage = os.times()
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - usage.user - usage.system


class IdleThreads:
    """A team of OpenMP threads that sleep between `start` and `stop`."""

    def __init__(self) -> None:
        self._stopped: threading.Event | None = None

    def start(self, threads: int) -> None:
        if self._stopped is None:
            self._stopped = threading.Event()
            arguments = (threads, self._stopped)
            threading.Thread(target=self._run, args=arguments, name="openmp idle team", daemon=True).start()

    def stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()  # a team of libgomp ends when the thread that created the team ends
            self._stopped = None

    def _run(self, threads: int, stopped: threading.Event) -> None:
        no_op = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # every thread of the team calls free(NULL)
        for path in libgomp_copies():
            ctypes.CDLL(path).GOMP_parallel(no_op, None, threads, 0)
        stopped.wait()


def libgomp_copies(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Returns the paths of all copies of libgomp in this process. torch and sentencepiece each include a copy.

    Files that were deleted since the process loaded them, as in an upgrade of torch, are left out.
    """
    lines = [line for line in maps.read_text().split("\n") if "libgomp" in line and not line.endswith(" (deleted)")]
    return sorted({line.split(maxsplit=5)[5] for line in lines})  # a path may contain spaces
