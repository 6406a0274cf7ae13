"""The scheduler, over each of its transports: forked and spawned processes, the store of torchrun, and this process."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from squares import LARGE, Squares
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nmtkit.config import plugins
from nmtkit.jobs.processes import restore_handlers
from nmtkit.jobs.ranks import Ranks, StoreChannel
from nmtkit.jobs.scheduler import Task, execute_tasks
from nmtkit.jobs.workers import RESULTS_AHEAD, Shared, Workers


def test_the_default_takes_the_place_of_a_signal_handler_of_c_code() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        restore_handlers({signal.SIGTERM: None})  # `signal.signal` returns None for such a handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def squares(numbers: Iterable[int]) -> Iterator[Task]:
    return ((Squares.square, number) for number in numbers)


@contextmanager
def ranks(count: int, timeout: float | None) -> Iterator[Workers]:
    """Workers over a store, as rank 0 has them. The other ranks are processes of this machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, store.port)) for rank in range(1, count + 1)]
    for process in processes:
        process.start()
    try:
        with Workers(count, None, timeout=timeout, transport=Ranks(store, count)) as workers:
            yield workers
        if timeout is None:
            assert [process.join(300) or process.exitcode for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_rank(rank: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    execute_tasks(StoreChannel(store, rank, at_rank_zero=False), Squares())


@contextmanager
def processes(count: int, timeout: float | None) -> Iterator[Workers]:
    with Workers(count, Squares, timeout=timeout) as workers:
        yield workers


def started(transport: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., "contextmanager[Workers]"]:
    """Returns a function that starts workers over this transport."""
    if transport == "spawn":
        monkeypatch.delattr(os, "fork")
        monkeypatch.setattr(plugins, "_names", [])  # plug-ins of other tests, whose files are gone
    function = {"this": processes, "fork": processes, "spawn": processes, "store": ranks}[transport]
    return lambda count=2, timeout=None: function(1 if transport == "this" else count, timeout)


Start = Callable[..., "contextmanager[Workers]"]


SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # each start takes a second


@pytest.fixture(params=["this", "fork", SPAWN, "store"])
def workers_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    return started(request.param, monkeypatch)


@pytest.fixture(params=["fork", SPAWN, "store"])
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    return started(request.param, monkeypatch)


def test_results_come_in_the_order_of_the_tasks(workers_of: Start) -> None:
    with workers_of(3) as workers:
        answers = []
        for worker, answer in workers.imap(squares(range(40))):
            workers.send(worker, (Squares.remember, answer))
            answers.append(answer)
        assert answers == [number * number for number in range(40)]
        told = workers.broadcast((Squares.remembered,))
        assert sorted(number for numbers in told for number in numbers) == answers
        assert all(numbers == sorted(numbers) for numbers in told)


def test_of_several_errors_that_of_the_first_task_is_raised(workers_of: Start) -> None:
    with workers_of(3) as workers, pytest.raises(ValueError, match="bad -5"):
        list(workers.imap(squares([5, 5, -5, -1, -2, -3])))


def test_an_error_of_the_iterable_comes_after_the_tasks_before_it(workers_of: Start) -> None:
    def numbers() -> Iterator[int]:
        yield from (5, -7, 1)
        raise ValueError("unequal")

    with workers_of() as workers, pytest.raises(ValueError, match="bad -7"):
        list(workers.imap(squares(numbers())))
    with workers_of() as workers, pytest.raises(ValueError, match="unequal"):
        list(workers.imap(squares(abs(number) for number in numbers())))


def test_tasks_are_taken_as_they_are_needed(workers_of: Start) -> None:
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    with workers_of() as workers:
        next(iter(workers.imap(squares(numbers()))))
        assert len(taken) <= (1 if workers.count == 1 else 2 * RESULTS_AHEAD + 1)


def test_a_slow_worker_gets_fewer_tasks(remote: Start, tmp_path: Path) -> None:
    ids: dict[int, int] = {}
    tasks = [(Squares.wait_for, tmp_path / "end"), *[(Squares.sleep, 0)] * 20]
    with remote() as workers:
        for number, process in workers.imap_unordered(tasks):
            ids[number] = process
            if len(ids) == 17:  # the first task still runs
                (tmp_path / "end").touch()
    assert list(ids.values()).count(ids[0]) <= 4


def test_a_task_that_was_sent_may_fail_later(workers_of: Start) -> None:
    with workers_of() as workers, pytest.raises(OSError, match="no room"):
        for worker, _ in workers.imap(squares(range(10))):
            workers.send(worker, (Squares.fail,))
        workers.broadcast((Squares.remembered,))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_process_is_reported(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = started(method, monkeypatch)
    with start() as workers, pytest.raises(ChildProcessError, match="SIGKILL"):
        list(workers.imap([(Squares.square, 1), (Squares.square, 2), (Squares.die,), (Squares.square, 3)]))


@pytest.mark.parametrize("task", [(Squares.hang,), (Squares.die,)])
def test_a_worker_without_an_answer_is_stopped_and_reported(
    task: Task, remote: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was killed cannot be told from a rank that hangs, but a process can."""
    monkeypatch.setattr("nmtkit.jobs.workers.CHECK_SECONDS", 0.05)
    start = time.monotonic()
    with remote(timeout=0.5) as workers, pytest.raises(ChildProcessError, match=r"hangs: it sent no result|SIGKILL"):
        list(workers.imap([(Squares.square, 1), task, *squares(range(30))]))
    assert time.monotonic() - start < 500  # the task hangs for 1,000 seconds


@pytest.mark.slow
def test_time_in_which_the_scheduler_does_not_wait_is_no_hang(remote: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept)
    monkeypatch.setattr("nmtkit.jobs.workers.time", clock)
    monkeypatch.setattr("nmtkit.jobs.workers.CHECK_SECONDS", 0.05)
    with remote(timeout=200.0) as workers:
        workers.broadcast((Squares.remembered,))
        for _, _ in workers.imap([(Squares.sleep, 0.15)] * 6):  # three checks for hanging workers in each task
            slept += 300


def test_messages_of_any_size_pass_while_both_ends_send(workers_of: Start) -> None:
    with workers_of() as workers:
        for _, data in workers.imap([(Squares.repeat, LARGE)] * 12):
            assert data == LARGE


def test_unordered_results_are_those_of_their_tasks(workers_of: Start) -> None:
    numbers = [5, *range(1, 40)]
    with workers_of(3) as workers:
        found = dict(workers.imap_unordered(squares(numbers)))
    assert found == {index: number * number for index, number in enumerate(numbers)}


def test_results_that_are_ready_come_while_tasks_are_awaited(workers_of: Start) -> None:
    answered: list[int] = []

    def tasks() -> Iterator[Task | None]:
        yield Squares.square, 3
        while not answered:  # as a reader of a stream that has nothing new
            yield None
        yield Squares.square, 4

    with workers_of() as workers:
        for _, result in workers.imap_unordered(tasks()):
            answered += [result] if result is not None else []
    assert answered == [9, 16]


def test_this_process_shares_the_work_with_its_workers(remote: Start) -> None:
    here = Squares()
    own: list[int] = []

    def execute(tasks: Iterable[Task]) -> Iterator[tuple[int, int]]:
        for index, (method, *arguments) in enumerate(tasks):
            own.append(index)
            yield index, method(here, *arguments)

    with remote() as workers:
        found = dict(workers.share(squares(range(1, 40)), execute))
    assert found == {index: (index + 1) ** 2 for index in range(39)}
    assert 0 < len(own) < 39


def test_an_error_of_any_kind_reaches_the_caller_with_its_traceback(remote: Start) -> None:
    with remote() as workers, pytest.raises(TypeError) as caught:
        list(workers.imap([(Squares.square, "3")]))
    assert "in square" in caught.value.__notes__[0]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_task(remote: Start) -> None:
    with remote() as workers, pytest.raises(Exception, match="pickle"):
        list(workers.imap([(Squares.unpicklable,)]))


@pytest.mark.slow
def test_forked_workers_share_an_object_and_spawned_workers_make_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Squares()
    mine.remember(7)
    with Workers(2, Shared(mine, Squares)) as workers:
        assert workers.broadcast((Squares.remembered,)) == [[7], [7]]
    monkeypatch.delattr(os, "fork")
    with Workers(2, Shared(mine, Squares)) as workers:
        assert workers.broadcast((Squares.remembered,)) == [[], []]


@pytest.mark.slow
def test_a_spawned_worker_has_the_plugins_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    (tmp_path / "mine.py").write_text("class Cubes:\n    def cube(self, number):\n        return number**3\n")
    name = str(tmp_path / "mine.py")
    plugins.load_plugin(name)
    module = sys.modules[plugins.plugin_module(name)]
    with Workers(2, module.Cubes) as workers:
        assert [result for _, result in workers.imap([(module.Cubes.cube, 3)])] == [27]
