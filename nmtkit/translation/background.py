"""The host's work beside a GPU, on threads of its own, so that the thread that launches kernels only launches."""

import contextlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SWITCH_INTERVAL = 2e-4  # seconds until a waiting thread gets Python's lock; by default 5 ms, which is several steps
POLL = 0.1  # seconds between two looks whether the reader is still there
MAX_CALLS = 64  # calls under way, after which results are waited for


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """The context in which a thread that waits for Python's lock soon gets it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(SWITCH_INTERVAL, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def prefetched(items: Iterable[T], size: int) -> Generator[T, None, None]:
    """Yields the items, of which a thread makes up to `size` ahead of time. Raises here what the thread raises.

    The thread ends with the items, or when this generator is closed and the next item comes.
    """
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(size)
    closed = threading.Event()

    def put(more: bool, item: Any) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put((more, item), timeout=POLL)

    def make() -> None:
        try:
            for item in items:
                put(True, item)
                if closed.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    threading.Thread(target=make, name="prefetch", daemon=True).start()
    try:
        while True:
            more, item = ready.get()
            if more:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        closed.set()


class OrderedCalls(Generic[T]):
    """Calls of functions on one thread, whose results come back in order. Use as a context manager."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "postprocess")
        self.calls: deque[Future[T]] = deque()

    def submit(self, function: Callable[..., T], *arguments: Any) -> None:
        self.calls.append(self.pool.submit(function, *arguments))

    def results(self, wait: bool) -> Iterator[T]:
        """Yields the results that are ready; with `wait` all of them. Raises what a call raised."""
        while self.calls and (wait or len(self.calls) > MAX_CALLS or self.calls[0].done()):
            yield self.calls.popleft().result()

    def __enter__(self) -> "OrderedCalls[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
