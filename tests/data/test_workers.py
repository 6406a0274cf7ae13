import os
import signal
import time
from collections.abc import Iterator

import pytest

from nmtkit.data.workers import ANSWERS_AHEAD, Workers


class Echo:
    """Squares numbers; some take longer, some fail, and some words have a meaning."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def __call__(self, message: object) -> object:
        if message == "told":
            return self.told
        if message == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(message, tuple):
            if message[1] == "bad":
                raise OSError("no room")
            self.told.append(message[1])
            return None
        assert isinstance(message, int)
        if message < 0:
            raise ValueError(f"bad {message}")
        time.sleep(0.02 if message % 5 == 0 else 0)
        return message * message


@pytest.mark.parametrize("count", [1, 2, 3])
def test_answers_come_in_the_order_of_the_messages(count: int) -> None:
    with Workers(count, Echo) as workers:
        answers = []
        for worker, answer in workers.each(range(40)):
            workers.tell(worker, ("told", answer))
            answers.append(answer)
        assert answers == [number * number for number in range(40)]
        told = workers.finish("told")
        assert sorted(number for numbers in told for number in numbers) == answers
        assert all(numbers == sorted(numbers) for numbers in told)


@pytest.mark.parametrize("count", [1, 3])
def test_of_several_errors_the_first_message_wins(count: int) -> None:
    for _ in range(3):
        with Workers(count, Echo) as workers, pytest.raises(ValueError, match="bad -5"):
            list(workers.each([5, 5, -5, -1, -2, -3]))


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_messages_comes_after_those_before_it(count: int) -> None:
    def messages() -> Iterator[int]:
        yield from (5, -7, 1)
        raise ValueError("unequal")

    with Workers(count, Echo) as workers, pytest.raises(ValueError, match="bad -7"):
        list(workers.each(messages()))


def test_messages_are_taken_as_they_are_needed() -> None:
    taken = []

    def messages() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    with Workers(2, Echo) as workers:
        next(iter(workers.each(messages())))
        assert len(taken) <= 2 * ANSWERS_AHEAD + 1


def test_what_was_told_may_fail_later() -> None:
    with Workers(2, Echo) as workers, pytest.raises(OSError, match="no room"):
        for worker, _ in workers.each(range(10)):
            workers.tell(worker, ("told", "bad"))
        workers.finish("told")


def test_a_killed_worker_is_reported() -> None:
    with Workers(2, Echo) as workers, pytest.raises(ChildProcessError, match="SIGKILL"):
        list(workers.each([1, 2, "die", 3]))
