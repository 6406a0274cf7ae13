"""Decodes in several processes: forked workers of one thread each, or the ranks that torchrun started, one per GPU."""

import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is documented

from nmtkit import distributed
from nmtkit.generation.beam_search import Hypothesis
from nmtkit.generation.constraints import Constraints
from nmtkit.generation.decoding import BatchDecoder, BatchHypotheses, Sentence, SentenceBatch
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.translator import Translator
from nmtkit.plugins import PluginError, plugin_message

PREFETCH = 2  # batches a process has in hand: one under way, one to go on with
POLL = 0.005  # seconds between two looks into an empty message queue
TIMEOUT_MINUTES = 30  # without a sign of life, after which a process is taken to hang


# --- workers of this machine ----------------------------------------------------------------------------------------


class Workers:
    """`number` forked copies of a translator. Use as a context manager; `decode` is a `BatchDecoder`.

    Forked, so that they share the weights in memory and have every plug-in. Create them before other threads.
    """

    def __init__(self, translator: Translator, options: SearchOptions, number: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            arguments = (translator, options, theirs, [*self.connections, ours])
            process = context.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def decode(self, batches: Iterable[SentenceBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        """Yields results as they come. Raises ChildProcessError when a worker dies, and any error of a worker."""
        queue = enumerate(batches)
        in_hand: list[deque[int]] = [deque() for _ in self.connections]
        exhausted = False
        while not exhausted or any(in_hand):
            free = min(range(len(in_hand)), key=lambda index: len(in_hand[index]))
            if not exhausted and len(in_hand[free]) < PREFETCH:
                number, batch = next(queue, (-1, None))
                if batch is None:
                    exhausted = True
                elif not batch:
                    yield number, []
                else:
                    self.send(free, batch)
                    in_hand[free].append(number)
                    if any(len(numbers) < PREFETCH for numbers in in_hand):
                        continue
            timeout = None if exhausted or min(map(len, in_hand)) == PREFETCH else 0
            for ready in wait(self.connections, timeout):
                worker = self.connections.index(ready)  # type: ignore[arg-type]
                found = self.receive(worker)
                yield in_hand[worker].popleft(), found

    def send(self, worker: int, batch: SentenceBatch) -> None:
        try:
            self.connections[worker].send(batch)
        except OSError:
            self.raise_death(worker)

    def receive(self, worker: int) -> BatchHypotheses:
        try:
            result = self.connections[worker].recv()
        except (EOFError, OSError):
            self.raise_death(worker)
        if isinstance(result, BaseException):
            raise result
        return result

    def raise_death(self, worker: int) -> NoReturn:
        self.processes[worker].join(1)
        code = self.processes[worker].exitcode
        cause = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        raise ChildProcessError(
            f"a worker process died ({cause}; out of memory?); the output is not complete"
        ) from None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
            process.join()


def _worker(translator: Translator, options: SearchOptions, queue: Connection, others: list[Connection]) -> None:
    """Decodes batches from `queue` until the parent closes it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    for connection in others:
        connection.close()
    torch.set_num_threads(1)
    while True:
        try:
            batch = queue.recv()
        except (EOFError, OSError):
            return
        try:
            result: BatchHypotheses | Exception = translator.decode(batch, options)
        except Exception as error:
            message = plugin_message(error)  # its traceback stays here
            result = error if message is None else PluginError(message)
        try:
            queue.send(result)
        except OSError:
            return


# --- ranks of torchrun ----------------------------------------------------------------------------------------------


def rank_device(device: str, workers: int) -> str:
    """Returns the device of this process: under torchrun each has its own GPU. Raises ValueError if it has none."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and workers == 1 else "cpu"
    if not distributed.launched():
        return device
    if workers > 1:
        raise ValueError("--workers and torchrun cannot be combined: torchrun has started the processes")
    if device != "cuda":
        return device
    rank, gpus = distributed.local_rank(), torch.cuda.device_count()
    if rank >= gpus:
        raise ValueError(f"process {rank} of this machine has no GPU of its own: start {gpus} processes, one per GPU")
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


@contextmanager
def process_group() -> Iterator[int]:
    """Joins the processes that torchrun started, if any; yields their number. An error in one ends all."""
    distributed.init_process_group(torch.device("cpu"), TIMEOUT_MINUTES)  # tensors stay where they are: no NCCL
    try:
        yield distributed.world_size()
    except BaseException as error:
        distributed.abort(f"rank {distributed.rank()}: {error}")
        raise
    distributed.destroy_process_group()


def distribute(decoder: BatchDecoder) -> BatchDecoder | None:
    """Returns a decoder that has all ranks decode; on ranks other than 0 it works until all is done, returning None."""
    if distributed.world_size() == 1:
        return decoder
    messages = MessageQueue()
    if distributed.is_rank_zero():
        return RankDispatcher(decoder, messages).decode
    serve(decoder, messages)
    return None


class MessageQueue:
    """JSON messages between ranks, received in the order they were sent. Every rank must create one."""

    def __init__(self) -> None:
        first = distributed.is_rank_zero()
        port = 0 if first else distributed.broadcast(None)
        self.store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=first, wait_for_workers=False)
        if first:
            distributed.broadcast(self.store.port)
        self.count: dict[str, int] = {}  # messages sent or received, by channel

    def send(self, channel: str, message: Any) -> None:
        self.store.set(self._next(channel), json.dumps(message))
        self.count[channel] += 1

    def receive(self, channel: str) -> Any:
        """Returns the next message; None while there is none."""
        name = self._next(channel)
        if not self.store.check([name]):
            return None
        message = json.loads(self.store.get(name))
        self.store.delete_key(name)
        self.count[channel] += 1
        return message

    def _next(self, channel: str) -> str:
        return f"{channel} {self.count.setdefault(channel, 0)}"


class RankDispatcher:
    """Rank 0: `decode` is a `BatchDecoder` that keeps some batches for its own decoder and sends out the others."""

    def __init__(self, decoder: BatchDecoder, messages: MessageQueue) -> None:
        self.decoder, self.messages = decoder, messages
        self.others = range(1, distributed.world_size())
        self.in_hand = dict.fromkeys((0, *self.others), 0)  # batches given to each rank and not come back
        self.own: list[int] = []  # numbers of the batches that this rank's decoder got

    def decode(self, batches: Iterable[SentenceBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        for index, found in self.decoder(self.own_batches(batches)):
            self.in_hand[0] -= 1
            yield self.own[index], found
            yield from self.received()
        while any(self.in_hand.values()):
            time.sleep(POLL)
            distributed.heartbeat()
            yield from self.received()
        for other in self.others:
            self.messages.send(f"to {other}", "end")

    def own_batches(self, batches: Iterable[SentenceBatch]) -> Iterator[SentenceBatch]:
        for number, batch in enumerate(batches):
            distributed.heartbeat()
            load = {rank: in_hand - (PREFETCH if rank else 0) for rank, in_hand in self.in_hand.items()}
            rank = min(load, key=load.__getitem__) if batch else 0  # an empty batch asks for what is ready
            self.in_hand[rank] += 1
            if rank:
                self.messages.send(f"to {rank}", [number, [asdict(sentence) for sentence in batch]])
            else:
                self.own.append(number)
                yield batch

    def received(self) -> Iterator[tuple[int, BatchHypotheses]]:
        for other in self.others:
            while (result := self.messages.receive(f"from {other}")) is not None:
                self.in_hand[other] -= 1
                number, found = result
                yield number, [[Hypothesis(**fields) for fields in hypotheses] for hypotheses in found]


def serve(decoder: BatchDecoder, messages: MessageQueue) -> None:
    """Other ranks: decodes what rank 0 sends, until it says that this is all."""
    rank = distributed.rank()
    numbers: dict[int, int] = {}  # index of a batch here -> its number

    def batches() -> Iterator[SentenceBatch]:
        index = 0
        while (message := messages.receive(f"to {rank}")) != "end":
            distributed.heartbeat()
            if message is None:  # nothing has come: what is in hand may be finished
                time.sleep(POLL)
                yield []
            else:
                numbers[index], batch = message
                yield [sentence_from(fields) for fields in batch]
            index += 1

    for index, found in decoder(batches()):
        if index in numbers:
            results = [[asdict(hypothesis) for hypothesis in hypotheses] for hypotheses in found]
            messages.send(f"from {rank}", [numbers.pop(index), results])


def sentence_from(fields: dict[str, Any]) -> Sentence:
    """Returns the sentence of which `fields` are `dataclasses.asdict` after a journey through JSON."""
    constraints = fields["constraints"]
    phrases = {name: tuple(map(tuple, constraints[name])) for name in ("required", "avoided")}
    prefix, given = tuple(constraints["prefix"]), constraints["given"]
    return Sentence(**{**fields, "constraints": Constraints(prefix=prefix, given=given, **phrases)})
