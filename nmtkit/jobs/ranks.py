"""Uses the ranks of torchrun as workers of rank 0.

Ranks may run on several machines, so they exchange messages through a store of torch. The messages are pickles, because
the processes of a run trust each other. The watchdog of `distributed.py` ends all ranks if one rank fails or hangs.
"""

import os
import pickle
import time
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents TCPStore

from nmtkit.jobs import distributed
from nmtkit.jobs.scheduler import RemoteWorker

POLL = 0.005  # seconds between two checks for a message


class StoreChannel:
    """A channel between rank 0 and the rank `rank`. Message N has the key `to RANK N` or `from RANK N`."""

    def __init__(self, store: Any, rank: int, at_rank_zero: bool) -> None:
        self.store = store
        names = f"to {rank}", f"from {rank}"
        self.outgoing, self.incoming = names if at_rank_zero else names[::-1]
        self.sent = self.received = 0

    def send(self, message: Any) -> None:
        self.store.set(f"{self.outgoing} {self.sent}", pickle.dumps(message))
        self.sent += 1

    def receive(self, wait: bool) -> Any:
        key = f"{self.incoming} {self.received}"
        while not self.store.check([key]):
            if not wait:
                return None
            poll(POLL)
        message = pickle.loads(self.store.get(key))
        if message is None:
            raise EOFError
        self.store.delete_key(key)
        self.received += 1
        return message

    def close(self) -> None:
        self.send(None)


def poll(seconds: float) -> None:
    """Sleeps for `seconds`, but at most POLL seconds, and tells the watchdog that this process is alive."""
    distributed.heartbeat()
    time.sleep(min(POLL, seconds))


class Ranks:
    """Sends tasks from rank 0 to the ranks 1 to `count` through a store of torch, and receives the results."""

    def __init__(self, store: Any, count: int) -> None:
        channels = (StoreChannel(store, rank, at_rank_zero=True) for rank in range(1, count + 1))
        self.workers = [RemoteWorker(f"rank {rank}", channel) for rank, channel in enumerate(channels, 1)]

    def wait(self, seconds: float) -> None:
        poll(seconds)

    def stop(self, worker: RemoteWorker, seconds: float) -> str:
        return "see the output of this rank"

    def close(self) -> None:
        for worker in self.workers:
            worker.channel.close()


def open_store() -> Any:
    """Returns a store that all ranks share. Every rank must call this function."""
    first = distributed.is_rank_zero()
    port = 0 if first else distributed.broadcast(None)
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=first, wait_for_workers=False)
    if first:
        distributed.broadcast(store.port)
    return store
