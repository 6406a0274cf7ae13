"""Decodes in several processes: workers with one thread each, or ranks of torchrun with one GPU each."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from nmtkit.jobs import distributed
from nmtkit.jobs.ranks import POLL, Ranks, StoreChannel, open_store, poll
from nmtkit.jobs.scheduler import Channel, Task
from nmtkit.jobs.workers import Shared, Workers
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import BatchDecoder, BatchHypotheses, SegmentBatch
from nmtkit.translation.translator import Translator

HANG_SECONDS = 3600.0  # a worker process that decodes a single batch for this long counts as hanging


@contextmanager
def worker_processes(
    translator: Translator, options: SearchOptions, count: int, load: Callable[[], Translator]
) -> Iterator[BatchDecoder]:
    """Starts `count` processes with one thread each. Yields a decoder that uses the processes.

    Forked processes share the weights of `translator`; without fork, each process calls `load`. Call this
    function before other threads start. The decoder yields results when they are ready. It raises the errors of the
    workers, and raises ChildProcessError if a worker was killed or hangs.
    """

    def tasks(batches: Iterable[SegmentBatch]) -> Iterator[Task | None]:
        for batch in batches:
            if batch:
                translator.decoder.tell(options, reason, searched=not all(map(engine.refuses, batch)))
            yield (_decode, batch, options) if batch else None

    def decode(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        return ((number, hypotheses or []) for number, hypotheses in workers.imap_unordered(tasks(batches)))

    translator.batch_decoder(options)  # chooses and prepares the engine, whose memory forked processes share
    # the same engine as in the worker processes
    engine, reason = translator.decoder.engine_for(options, alone=False)
    with Workers(count, Shared(translator, load), timeout=HANG_SECONDS) as workers:
        yield decode


def _decode(translator: Translator, batch: SegmentBatch, options: SearchOptions) -> BatchHypotheses:
    torch.set_num_threads(1)
    return translator.decode(batch, options, tell=False)


@contextmanager
def distribute(decoder: BatchDecoder) -> Iterator[BatchDecoder | None]:
    """Yields, on rank 0, a decoder that distributes batches over all ranks until the context ends.

    On any other rank, decodes batches until rank 0 has finished, and yields None.
    """
    if distributed.world_size() == 1:
        yield decoder
        return
    store = open_store()
    if not distributed.is_rank_zero():
        decode_for(StoreChannel(store, distributed.rank(), at_rank_zero=False), decoder)
        yield None
        return
    others = distributed.world_size() - 1
    with Workers(others, None, transport=Ranks(store, others)) as workers:
        yield lambda batches: workers.share(batches, decoder)


def decode_for(channel: Channel, decoder: BatchDecoder) -> None:
    """Decodes the batches that arrive in a channel, perhaps several at a time, until the channel is closed."""
    numbers: dict[int, int] = {}  # index of a batch in this process -> number of the batch in the scheduler

    def batches() -> Iterator[SegmentBatch]:
        index = 0
        while True:
            try:
                message = channel.receive(wait=False)
            except EOFError:
                return
            distributed.heartbeat()
            if message is None:  # no batch has arrived, so the decoder can finish its batches
                poll(POLL)
                yield []
            else:
                numbers[index], batch = message
                yield batch
            index += 1

    for index, hypotheses in decoder(batches()):
        if index in numbers:
            channel.send((numbers.pop(index), hypotheses))
