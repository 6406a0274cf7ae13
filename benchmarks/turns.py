"""Fair timing on a busy machine: systems take turns, so that a disturbance slows all of them alike."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def in_turns(systems: Mapping[str, Callable[[], T]], rounds: int) -> tuple[dict[str, T], dict[str, list[float]]]:
    """Returns the result of each system, from a first call that warms it up, and the seconds of its later rounds."""
    outputs, seconds, _ = in_turns_by_core(systems, rounds)
    return outputs, seconds


def in_turns_by_core(
    systems: Mapping[str, Callable[[], T]], rounds: int
) -> tuple[dict[str, T], dict[str, list[float]], dict[str, list[float]]]:
    """Returns also the core-seconds of each round, over this process and its children, who must outlive the round."""
    outputs = {name: run() for name, run in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    core_seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            cores, start = cpu_seconds(os.getpid()), time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
            core_seconds[name].append(cpu_seconds(os.getpid()) - cores)
    return outputs, seconds, core_seconds


def cpu_seconds(process: int) -> float:
    """Returns the core-seconds of a process and its living descendants, in hundredths (Linux only)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        children = "".join(task.joinpath("children").read_text() for task in Path(f"/proc/{process}/task").iterdir())
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, map(int, children.split())))
