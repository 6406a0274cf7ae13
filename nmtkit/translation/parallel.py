"""Decodes in several processes: forked workers with one thread each, or ranks of torchrun with one GPU each."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is documented

from nmtkit.jobs import distributed
from nmtkit.jobs.workers import Workers
from nmtkit.translation.search.constraints import Constraints, RequiredPhrase
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.segments import BatchDecoder, BatchHypotheses, Hypothesis, Segment, SegmentBatch
from nmtkit.translation.translator import Translator

PREFETCH = 2  # maximum batches at a rank: the batch that the rank decodes, and the next batch
POLL = 0.005  # seconds between two checks of an empty message queue
TIMEOUT_MINUTES = 30  # a process without a heartbeat for this long counts as hanging


# --- workers of this machine ----------------------------------------------------------------------------------------


@contextmanager
def worker_processes(translator: Translator, options: SearchOptions, count: int) -> Iterator[BatchDecoder]:
    """Starts `count` processes with one thread each and shared weights. Yields a decoder that uses the processes.

    Call this function before other threads start. The decoder yields results when they are ready. It raises the errors
    of the workers, and raises ChildProcessError if a worker was killed.
    """

    def of_one_thread() -> Translator:
        torch.set_num_threads(1)
        return translator

    def decode(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        tasks = ((Translator.decode, batch, options) if batch else None for batch in batches)
        return ((number, hypotheses or []) for number, hypotheses in workers.imap_unordered(tasks))

    with Workers(count, of_one_thread) as workers:
        yield decode


# --- ranks of torchrun ----------------------------------------------------------------------------------------------


def rank_device(device: str, workers: int) -> str:
    """Returns the device of this process. Under torchrun each process has its own GPU.

    Raises ValueError if there is no GPU for this process.
    """
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
    """Joins the processes of torchrun, if any, and yields the size of the group. An error ends all processes."""
    # only text is exchanged, so NCCL is not needed
    distributed.init_process_group(torch.device("cpu"), TIMEOUT_MINUTES)
    try:
        yield distributed.world_size()
    except BaseException as error:
        distributed.abort(f"rank {distributed.rank()}: {error}")
        raise
    distributed.destroy_process_group()


def distribute(decoder: BatchDecoder) -> BatchDecoder | None:
    """Returns, on rank 0, a decoder that distributes batches over all ranks.

    On any other rank, decodes batches until rank 0 has finished, and returns None.
    """
    if distributed.world_size() == 1:
        return decoder
    messages = MessageQueue()
    if distributed.is_rank_zero():
        return RankDispatcher(decoder, messages).decode
    serve(decoder, messages)
    return None


class MessageQueue:
    """JSON messages between ranks, received in the order in which they were sent. Every rank must create a queue."""

    def __init__(self) -> None:
        first = distributed.is_rank_zero()
        port = 0 if first else distributed.broadcast(None)
        self.store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=first, wait_for_workers=False)
        if first:
            distributed.broadcast(self.store.port)
        self.count: dict[str, int] = {}  # number of messages sent or received, by channel

    def send(self, channel: str, message: Any) -> None:
        self.store.set(self._next(channel), json.dumps(message))
        self.count[channel] += 1

    def receive(self, channel: str) -> Any:
        """Returns the next message, or None if no message has arrived."""
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
    """The dispatcher of batches on rank 0. `decode` is a `BatchDecoder` that sends most batches to other ranks."""

    def __init__(self, decoder: BatchDecoder, messages: MessageQueue) -> None:
        self.decoder, self.messages = decoder, messages
        self.others = range(1, distributed.world_size())
        self.in_hand = dict.fromkeys((0, *self.others), 0)  # rank -> number of unfinished batches
        self.local: list[int] = []  # numbers of the batches that this rank decodes

    def decode(self, batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        for index, hypotheses in self.decoder(self.local_batches(batches)):
            self.in_hand[0] -= 1
            yield self.local[index], hypotheses
            yield from self.received()
        while any(self.in_hand.values()):
            time.sleep(POLL)
            distributed.heartbeat()
            yield from self.received()
        for other in self.others:
            self.messages.send(f"to {other}", "end")

    def local_batches(self, batches: Iterable[SegmentBatch]) -> Iterator[SegmentBatch]:
        """Yields the batches that this rank decodes, and sends the other batches to the ranks with the least work."""
        for number, batch in enumerate(batches):
            distributed.heartbeat()
            load = {rank: in_hand - (PREFETCH if rank else 0) for rank, in_hand in self.in_hand.items()}
            # an empty batch stays here: it only asks for results that are ready
            rank = min(load, key=load.__getitem__) if batch else 0
            self.in_hand[rank] += 1
            if rank:
                self.messages.send(f"to {rank}", [number, [asdict(sentence) for sentence in batch]])
            else:
                self.local.append(number)
                yield batch

    def received(self) -> Iterator[tuple[int, BatchHypotheses]]:
        for other in self.others:
            while (result := self.messages.receive(f"from {other}")) is not None:
                self.in_hand[other] -= 1
                number, batch_hypotheses = result
                yield number, [[Hypothesis(**fields) for fields in hypotheses] for hypotheses in batch_hypotheses]


def serve(decoder: BatchDecoder, messages: MessageQueue) -> None:
    """Decodes batches that rank 0 sends to this rank, until rank 0 sends "end"."""
    rank = distributed.rank()
    numbers: dict[int, int] = {}  # index of a batch on this rank -> number of the batch on rank 0

    def batches() -> Iterator[SegmentBatch]:
        index = 0
        while (message := messages.receive(f"to {rank}")) != "end":
            distributed.heartbeat()
            if message is None:  # no batch has arrived, so the decoder can finish its batches
                time.sleep(POLL)
                yield []
            else:
                numbers[index], batch = message
                yield [segment_from(fields) for fields in batch]
            index += 1

    for index, batch_hypotheses in decoder(batches()):
        if index in numbers:
            results = [[asdict(hypothesis) for hypothesis in hypotheses] for hypotheses in batch_hypotheses]
            messages.send(f"from {rank}", [numbers.pop(index), results])


def segment_from(fields: dict[str, Any]) -> Segment:
    """Returns a segment from its JSON fields. JSON has no tuples, so lists are converted back to tuples."""
    constraints = fields["constraints"]
    required = tuple(
        RequiredPhrase(tuple(map(tuple, phrase["alternatives"])), phrase["whole_words"])
        for phrase in constraints["required"]
    )
    avoided = tuple(map(tuple, constraints["avoided"]))
    prefix, language_tokens = tuple(constraints["prefix"]), constraints["language_tokens"]
    return Segment(**{**fields, "constraints": Constraints(prefix, language_tokens, required, avoided)})
