"""Threads of OpenMP: additional idle threads while other processes need the cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmtkit.jobs import openmp

# Two threads compute. Then a Python thread starts one sleeping team for each copy of libgomp, and ends them.
TEAM = """
import os, sentencepiece, time, torch
from nmtkit.jobs import openmp
torch.set_num_threads(2)
weights = torch.ones(512, 512)
first = weights @ weights + torch.zeros(1 << 20)[:1]
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
team = openmp.IdleThreads()
copies = len(openmp.libgomp_copies())
assert any("torch" in path for path in openmp.libgomp_copies())
for act, more in ((lambda: team.start(4), 1 + 3 * copies), (lambda: team.start(4), 1 + 3 * copies), (team.stop, 0),
                  (team.stop, 0)):
    act()
    end = time.monotonic() + 300
    while threads() != before + more and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == before + more
    assert torch.equal(first, weights @ weights + torch.zeros(1 << 20)[:1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_idle_threads_exist_from_start_to_stop() -> None:
    subprocess.run([sys.executable, "-c", TEAM], check=True)


class Team(openmp.IdleThreads):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def start(self, threads: int) -> None:
        self.calls.append(threads)

    def stop(self) -> None:
        self.calls.append(0)


@pytest.mark.parametrize(("threads", "calls"), [(1, [0, 0, 0, 0]), (3, [0, 0, 3, 0]), (4, [0, 2, 2, 0])])
def test_idle_threads_exist_while_other_processes_need_the_cores(
    threads: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    team = Team()
    measured = iter([(0.0, 5.0), (1.0, 5.1), (3.0, 6.5), (4.0, 9.0), (5.0, 9.2), None])  # load 0.1, 0.7, 2.5, 0.2
    monkeypatch.setattr(openmp, "INTERVAL", 0)
    monkeypatch.setattr(openmp, "cpu_time_of_others", lambda cores: next(measured))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(openmp.torch, "get_num_threads", lambda: threads)
    openmp.watch_load(team)
    assert team.calls == calls


def test_load_counts_the_cores_of_this_process_and_the_time_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(
        "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 100 200 300 1 1 400 500 600 0 0\ncpu1 7 7 7 7 7 7 7 7 7 7\n"
        "cpu10 100 0 0 1 1 0 0 0 0 0\nprocs_running 3\n"
    )
    monkeypatch.setattr(os, "times", lambda: os.times_result((1.5, 0.5, 9, 9, 9)))
    ticks = os.sysconf("SC_CLK_TCK")
    measured = openmp.cpu_time_of_others({0, 10}, tmp_path / "stat")
    assert measured is not None
    assert measured[1] == pytest.approx(2200 / ticks - 2)
    assert openmp.cpu_time_of_others({0}, tmp_path / "none") is None  # not Linux


@pytest.mark.parametrize("name", [None, *openmp.VARIABLES])
def test_nothing_is_started_where_the_user_sets_how_threads_wait(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(openmp.threading.Thread, "start", lambda thread: started.append(thread.name))
    monkeypatch.setattr(openmp, "_started", False)
    for variable in openmp.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "2")
    openmp.start()
    openmp.start()
    assert started == (["openmp load"] if name is None and sys.platform == "linux" else [])


def test_the_path_of_a_library_may_contain_spaces_and_the_library_may_be_deleted(tmp_path: Path) -> None:
    lines = [f"7f0{part}-7f1 r-xp 0 08:01 42    /home/a b/torch/lib/libgomp.so.1" for part in range(2)]
    lines.append("7f02-7f1 r-xp 0 08:01 43    /home/old/libgomp.so.1 (deleted)")
    (tmp_path / "maps").write_text("\n".join(["7f3-7f4 rw-p 0 00:00 0", *lines, ""]))
    assert openmp.libgomp_copies(tmp_path / "maps") == ["/home/a b/torch/lib/libgomp.so.1"]
