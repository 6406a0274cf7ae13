"""Runs CPU work on separate threads, next to the thread that runs the model or launches GPU kernels."""

import contextlib
import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Seconds until a waiting thread gets the global interpreter lock (GIL). The default, 5 ms, is as long as several search
# steps.
SWITCH_INTERVAL = 2e-4
POLL = 0.1  # while the queue is full, seconds between two checks whether `close` was called
MAX_CALLS = 64  # `results` waits while more calls than this number are unfinished


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Inside this context, a thread that waits for the GIL gets the GIL soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(SWITCH_INTERVAL, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def without_messages(logger: logging.Logger) -> Iterator[None]:
    """A context manager: inside the block, `logger` drops messages of this thread, but not of other threads."""
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


class Prefetched(Iterator[T]):
    """Iterates over `items`. A thread prepares up to `size` items in advance; `next` raises the errors of the thread.

    The thread ends after the last item. After `close`, the thread ends when its current item is ready.
    """

    def __init__(self, items: Iterable[T], size: int, name: str = "prefetch") -> None:
        self._items = items
        self._ready: queue.Queue[tuple[bool, Any]] = queue.Queue(size)
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._make, name=name, daemon=True)
        self.thread.start()

    def __iter__(self) -> "Prefetched[T]":
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        has_item, item = self._ready.get()
        if has_item:
            return item
        self._closed.set()
        raise item or StopIteration

    def close(self) -> None:
        self._closed.set()

    def _make(self) -> None:
        end: BaseException | None = None
        try:
            for item in self._items:
                self._put(True, item)
                if self._closed.is_set():
                    return
        except BaseException as error:
            end = error
        self._put(False, end)

    def _put(self, has_item: bool, item: Any) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                return self._ready.put((has_item, item), timeout=POLL)


class OrderedCalls(Generic[T]):
    """A context manager that runs calls on one thread and returns their results in order."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "postprocess")
        self.calls: deque[Future[T]] = deque()

    def submit(self, function: Callable[..., T], *arguments: Any) -> None:
        self.calls.append(self.pool.submit(function, *arguments))

    def results(self, wait: bool) -> Iterator[T]:
        """Yields the results that are ready, or all results if `wait` is true. Raises the error of a failed call.

        Also waits while more than `MAX_CALLS` calls are unfinished.
        """
        while self.calls and (wait or len(self.calls) > MAX_CALLS or self.calls[0].done()):
            yield self.calls.popleft().result()

    def __enter__(self) -> "OrderedCalls[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
