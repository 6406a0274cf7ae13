import os
import signal
import time
from collections.abc import Iterable, Iterator

import pytest

from nmtkit.jobs.workers import RESULTS_AHEAD, Task, Workers


class Squares:
    """Squares numbers, some more slowly than others, and remembers what it is told to."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def square(self, number: int) -> int:
        if number < 0:
            raise ValueError(f"bad {number}")
        time.sleep(0.02 if number % 5 == 0 else 0)
        return number * number

    def remember(self, number: int) -> None:
        self._numbers.append(number)

    def remembered(self) -> list[int]:
        return self._numbers

    def fail(self) -> None:
        raise OSError("no room")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def squares(numbers: Iterable[int]) -> Iterator[Task]:
    return ((Squares.square, number) for number in numbers)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_the_order_of_the_tasks(count: int) -> None:
    with Workers(count, Squares) as workers:
        answers = []
        for worker, answer in workers.imap(squares(range(40))):
            workers.send(worker, (Squares.remember, answer))
            answers.append(answer)
        assert answers == [number * number for number in range(40)]
        told = workers.broadcast((Squares.remembered,))
        assert sorted(number for numbers in told for number in numbers) == answers
        assert all(numbers == sorted(numbers) for numbers in told)


@pytest.mark.parametrize("count", [1, 3])
def test_of_several_errors_that_of_the_first_task_is_raised(count: int) -> None:
    for _ in range(3):
        with Workers(count, Squares) as workers, pytest.raises(ValueError, match="bad -5"):
            list(workers.imap(squares([5, 5, -5, -1, -2, -3])))


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_iterable_comes_after_the_tasks_before_it(count: int) -> None:
    def numbers() -> Iterator[int]:
        yield from (5, -7, 1)
        raise ValueError("unequal")

    with Workers(count, Squares) as workers, pytest.raises(ValueError, match="bad -7"):
        list(workers.imap(squares(numbers())))


def test_tasks_are_taken_as_they_are_needed() -> None:
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    with Workers(2, Squares) as workers:
        next(iter(workers.imap(squares(numbers()))))
        assert len(taken) <= 2 * RESULTS_AHEAD + 1


def test_a_task_that_was_sent_may_fail_later() -> None:
    with Workers(2, Squares) as workers, pytest.raises(OSError, match="no room"):
        for worker, _ in workers.imap(squares(range(10))):
            workers.send(worker, (Squares.fail,))
        workers.broadcast((Squares.remembered,))


def test_a_killed_worker_is_reported() -> None:
    with Workers(2, Squares) as workers, pytest.raises(ChildProcessError, match="SIGKILL"):
        list(workers.imap([(Squares.square, 1), (Squares.square, 2), (Squares.die,), (Squares.square, 3)]))


@pytest.mark.parametrize("count", [1, 3])
def test_unordered_results_are_those_of_their_tasks(count: int) -> None:
    numbers = [5, *range(1, 40)]
    with Workers(count, Squares) as workers:
        found = dict(workers.imap_unordered(squares(numbers)))
    assert found == {index: number * number for index, number in enumerate(numbers)}


def test_what_is_ready_comes_while_tasks_are_awaited() -> None:
    answered: list[int] = []

    def tasks() -> Iterator[Task | None]:
        yield Squares.square, 3
        while not answered:  # as a reader of a stream that has nothing new
            yield None
        yield Squares.square, 4

    with Workers(2, Squares) as workers:
        for _, result in workers.imap_unordered(tasks()):
            answered += [result] if result is not None else []
    assert answered == [9, 16]


def test_an_error_of_any_kind_reaches_the_caller_with_its_traceback() -> None:
    with Workers(2, Squares) as workers, pytest.raises(TypeError) as caught:
        list(workers.imap([(Squares.square, "3")]))
    assert "in square" in caught.value.__notes__[0]
