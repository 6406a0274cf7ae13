import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmtkit.processes import openmp as busy_cores

# two threads compute; then teams sleep beside them, a thread of Python one of each; then no more
TEAM = """
import os, sentencepiece, time, torch
from nmtkit import busy_cores
torch.set_num_threads(2)
weights = torch.ones(512, 512)
first = weights @ weights + torch.zeros(1 << 20)[:1]
counts = [len(os.listdir("/proc/self/task"))]
team = busy_cores.SleepingTeam()
copies = len(busy_cores.libraries())
assert any("torch" in path for path in busy_cores.libraries())
for act in (lambda: team.start(4), lambda: team.start(4), team.end, team.end):
    act()
    time.sleep(0.5)
    counts.append(len(os.listdir("/proc/self/task")))
    assert torch.equal(first, weights @ weights + torch.zeros(1 << 20)[:1])
counts = [count - counts[0] for count in counts]
assert counts == [0, 1 + 3 * copies, 1 + 3 * copies, 0, 0], counts
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_sleeping_team_is_there_until_its_end() -> None:
    subprocess.run([sys.executable, "-c", TEAM], check=True)


class Team(busy_cores.SleepingTeam):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def start(self, threads: int) -> None:
        self.calls.append(threads)

    def end(self) -> None:
        self.calls.append(0)


@pytest.mark.parametrize(("threads", "calls"), [(1, [0, 0, 0, 0]), (3, [0, 0, 3, 0]), (4, [0, 2, 2, 0])])
def test_a_team_sleeps_while_others_want_the_cores_of_this_process(
    threads: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    team = Team()
    looks = iter([(0.0, 5.0), (1.0, 5.1), (3.0, 6.5), (4.0, 9.0), (5.0, 9.2), None])  # others use 0.1, 0.7, 2.5, 0.2
    monkeypatch.setattr(busy_cores, "INTERVAL", 0)
    monkeypatch.setattr(busy_cores, "used_by_others", lambda cores: next(looks))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(busy_cores.torch, "get_num_threads", lambda: threads)
    busy_cores.watch(team)
    assert team.calls == calls


def test_only_the_cores_of_this_process_and_the_time_of_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(
        "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 100 200 300 1 1 400 500 600 0 0\ncpu1 7 7 7 7 7 7 7 7 7 7\n"
        "cpu10 100 0 0 1 1 0 0 0 0 0\nprocs_running 3\n"
    )
    monkeypatch.setattr(os, "times", lambda: os.times_result((1.5, 0.5, 9, 9, 9)))
    ticks = os.sysconf("SC_CLK_TCK")
    found = busy_cores.used_by_others({0, 10}, tmp_path / "stat")
    assert found is not None
    assert found[1] == pytest.approx(2200 / ticks - 2)
    assert busy_cores.used_by_others({0}, tmp_path / "none") is None  # no Linux


@pytest.mark.parametrize("name", [None, *busy_cores.VARIABLES])
def test_who_sets_how_threads_wait_is_left_alone(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(busy_cores.threading.Thread, "start", lambda thread: started.append(thread.name))
    monkeypatch.setattr(busy_cores, "_started", False)
    for variable in busy_cores.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "2")
    busy_cores.start()
    busy_cores.start()
    assert started == (["busy cores"] if name is None and sys.platform == "linux" else [])
