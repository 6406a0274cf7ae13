"""The process that loads the models, and its workers, which translate the lines of requests.

On a CPU, the process forks the workers. Workers share the weights in memory, and a new worker starts in milliseconds.
The process has one thread, unlike the server, so that it can fork at any time. A worker ends when the server closes its
channel, or when the server itself ends. On a GPU, and on systems that cannot fork, the process is the only worker.

A worker on a CPU translates batch by batch. Large requests go to workers with a low priority, which the operating
system interrupts whenever small requests arrive. A very long line does not block a worker: the pipeline splits the line
into many segments, which are decoded in batches of at most `max_tokens`. After each batch, the worker translates a
batch of shorter lines that has arrived meanwhile. All segments stay in one process, because markup, word links and
quality of the line depend on all segments. On a GPU, the lines of several batches are in the search at the same time.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from nmtkit.jobs import openmp
from nmtkit.jobs.processes import SocketChannel
from nmtkit.models.layers.shape_padding import limit_product_caches
from nmtkit.serving.config import WEBLATE_PLACEHOLDER, ModelFacts
from nmtkit.serving.fair_queue import FAILED, BatchKey, LineBatch, LineResult, Pair
from nmtkit.serving.loading import GUESS, ServedModel, ServedModels, load_models, translators_of
from nmtkit.serving.refusal import Refusal
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.search.types import BatchDecoder, BatchHypotheses, Hypothesis, Request, SegmentBatch
from nmtkit.translation.steps import SegmentNode

Inbox = queue.SimpleQueue[tuple[int, LineBatch] | None]  # (number of a batch, batch); None ends the reading thread

logger = logging.getLogger("nmtkit")


def main(control: socket.socket) -> None:
    """Receives a job, loads its models, sends facts about the models, and starts a worker for each order of the server.

    An order contains the niceness of the worker and the socket of its channel.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the server handles these signals
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    channel = SocketChannel(control, buffers=False)
    try:
        job, log_level = channel.receive(wait=True)
    except EOFError:
        return
    logging.basicConfig(level=log_level, format="%(levelname)s: %(message)s")
    torch.set_num_threads(1)
    limit_product_caches()  # saves half a gigabyte of memory in each worker
    try:
        models = load_models(job)
    except (ValueError, OSError, ImportError) as error:
        channel.send(ValueError(str(error)))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # prevents zombie processes
    device = next(iter(models.values())).translator.device
    streams = device.type != "cpu"
    forks = hasattr(os, "fork") and not streams
    if not forks and (job.config.workers or 1) > 1:
        channel.send(ValueError("this system cannot fork, so the server has one worker; leave out --workers"))
        return
    max_tokens = max(model.translator.max_tokens for model in models.values()) // (1 if streams else GUESS)
    workers = job.worker_count if forks else 1
    engines = {"-".join(pair): model.engine for pair, model in models.items()}
    waits = any(model.translator.decoder.waits for model in models.values())
    channel.send(ModelFacts(
        list(models), str(device), workers, forks=forks, streams=streams, max_tokens=max_tokens, engines=engines,
        waits=waits,
        with_formality=[pair for pair, model in models.items() if model.has_formality],
        with_glossary=[pair for pair, model in models.items() if model.takes_glossary],
    ))  # fmt: skip
    while (order := _next_order(control)) is not None:
        niceness, connection = order
        worker = SocketChannel(connection, buffers=False)
        threads = job.devices.threads or 1
        run = partial(work_on_gpu, worker, models) if streams else partial(work, worker, models, threads)
        if not forks:
            channel.send(os.getpid())
            run()
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.nice(niceness)
            gc.freeze()  # a collection would write to all shared objects, and so copy their memory
            _run_and_exit(run)
        connection.close()
        channel.send(pid)


def _run_and_exit(run: Callable[[], None]) -> None:
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _next_order(control: socket.socket) -> tuple[int, socket.socket] | None:
    """Returns the niceness and the socket of the next worker, or None if the server has ended."""
    try:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except ConnectionError:
        return None
    return (data[0], socket.socket(fileno=descriptors[0])) if data and descriptors else None


# --- a worker on a CPU ------------------------------------------------------------------------------------------------


def work(channel: SocketChannel, models: ServedModels, threads: int = 1) -> None:
    """Translates batch after batch until the server closes the channel.

    Between the parts of a batch, translates a batch that has arrived meanwhile. The server sends a second batch only if
    its lines are shorter and the first batch is one very long line.
    """
    if threads > 1:
        torch.set_num_threads(threads)
        openmp.start()
    for translator in translators_of(models):
        translator.decoder.engine.start()  # not before the fork, because an engine with threads cannot be forked

    def answer_waiting() -> None:
        if (message := channel.receive(wait=False)) is not None:
            answer(message, lambda: None)

    def answer(message: tuple[int, LineBatch], between_parts: Callable[[], None]) -> None:
        number, batch = message
        channel.send((number, translate_or_fail(models, batch, between_parts)))

    with contextlib.suppress(EOFError):
        while True:
            answer(channel.receive(wait=True), answer_waiting)


def translate_or_fail(
    models: ServedModels, batch: LineBatch, between_parts: Callable[[], None] = lambda: None
) -> list[list[LineResult] | int] | Refusal:
    """Returns the translations of each line, best first, or the error for the clients. Logs the cause of the error.

    A line that does not fit into the batch has its number of tokens instead of translations.
    """
    model = models.get(batch.key.pair)
    if model is None:
        return Refusal(400, "this language pair is no longer served")
    if batch.key.html and not all(each.aligns for each in (model, model.first or model)):
        message = "a model of this language pair has no cross-attention, so it cannot translate markup"
        return Refusal(400, message)
    try:
        tokenizer = (model.first or model).translator.tokenizer
        encoded = tokenizer.encode_source([text.replace("\n", " ") for text in batch.texts])
        tokens = [len(ids) for ids in encoded.split()]  # including eos
        chosen = batch.fitting(tokens)
        texts = [batch.texts[index] for index in chosen]
        translations = translate(model, dataclasses.replace(batch, texts=texts), between_parts) if texts else []
        translated = dict(zip(chosen, translations, strict=True))
        return [translated.get(index, count) for index, count in enumerate(tokens)]
    except EOFError:  # the server has ended
        raise
    except Exception:
        if batch.key.glossary is not None and not batch.key.glossary.exists():
            return Refusal(404, "this glossary was deleted before the translation")
        logger.error("a batch failed:\n%s", traceback.format_exc())
        return Refusal(500, FAILED)


def translate(model: ServedModel, batch: LineBatch, between_parts: Callable[[], None]) -> list[list[LineResult]]:
    """Returns the translations of each line of a batch. The translations are the same as in `nmtkit generate`."""
    pivots: list[list[LineResult]] = []  # translations into the pivot language
    if model.first is not None:
        key = dataclasses.replace(batch.key, alternatives=0, alignment=False, quality=False, tag=None)
        pivots = translate(model.first, LineBatch(key, batch.texts), between_parts)
        # word links would refer to the pivot text, not to the original text
        key = dataclasses.replace(batch.key, alignment=False)
        batch = LineBatch(key, [line[0]["text"] for line in pivots])
    translator = model.translator
    pipeline = pipeline_of(model, batch.key)

    def in_turn(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        return ((number, translator.decode(segments, pipeline.search)) for number, segments in enumerate(batches))

    # CTranslate2 does not find alternatives, and the slots of a search on a GPU hold segments of other batches
    separate = batch.key.alternatives or translator.device.type != "cpu"
    decoder: BatchDecoder = in_turn if separate else translator.batch_decoder(pipeline.search)

    def decode(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        for result in decoder(batches):
            between_parts()
            yield result

    max_tokens = translator.max_tokens // batch.key.weight
    translations = translator.run([list(map(Request, batch.texts))], pipeline, decode, max_tokens=max_tokens)
    results = [list(map(result_of, line.hypotheses)) for line in translations]
    for pivot, line in zip(pivots, results, strict=False):
        if "decoded_again" in pivot[0]:
            for result in line:
                result["decoded_again"] = True
    return results


def pipeline_of(model: ServedModel, key: BatchKey) -> Pipeline:
    """Returns the text pipeline of a batch: the pipeline of the language pair, with markup if the lines are HTML."""
    text = model.text
    if key.placeholders and model.aligns:
        text = dataclasses.replace(text, protect=(*text.protect, WEBLATE_PLACEHOLDER.pattern))
    if key.html:
        text = dataclasses.replace(text, markup="html", protect_spans=text.protect_spans or key.protect)
    if key.whole:
        text = dataclasses.replace(text, split_sentences=None)
    if key.glossary is not None:
        text = dataclasses.replace(text, glossary=key.glossary)
    search = dataclasses.replace(model.search, quality=key.quality)
    if key.alternatives:
        beam = -(-max(search.beam, key.alternatives + 1) // search.diverse_groups) * search.diverse_groups
        search = dataclasses.replace(search, nbest=key.alternatives + 1, beam=beam)
    terms = model.terms if key.glossary is None else None
    return model.translator.pipeline(search, text, key.tag, key.alignment and model.aligns, terms)


def result_of(hypothesis: Hypothesis) -> LineResult:
    """Returns a translation in the format that the server expects."""
    result: LineResult = {"text": hypothesis.text}
    if hypothesis.alignment is not None:
        result["alignment"] = hypothesis.alignment
    if hypothesis.no_repeat_ngram is not None:
        result["decoded_again"] = True
    if hypothesis.quality is not None:
        result["quality"] = dataclasses.asdict(hypothesis.quality)
    return result


# --- the worker on a GPU ----------------------------------------------------------------------------------------------


def work_on_gpu(channel: SocketChannel, models: ServedModels) -> None:
    """Translates batches as they arrive. Each translator has a thread.

    All language pairs of a model share the slots of its search. A slot translates one segment at a time.
    """
    sending = threading.Lock()

    def answer(number: int, result: Any) -> None:
        with sending:
            channel.send((number, result))

    inboxes: dict[Pair, Inbox] = {}
    threads = []
    for translator in translators_of(models):
        group = {pair: model for pair, model in models.items() if model.translator is translator}
        inbox: Inbox = queue.SimpleQueue()
        inboxes |= dict.fromkeys(group, inbox)
        slots = SlotWorker(group, inbox, answer)
        threads.append(threading.Thread(target=slots.run_or_end_the_process, name="-".join(next(iter(group)))))
        threads[-1].start()
    with contextlib.suppress(EOFError):
        while True:
            number, batch = channel.receive(wait=True)
            if batch.key.pair in inboxes:
                inboxes[batch.key.pair].put((number, batch))
            else:
                answer(number, translate_or_fail(models, batch))
    for inbox in {id(inbox): inbox for inbox in inboxes.values()}.values():
        inbox.put(None)
    for thread in threads:
        thread.join()


class SlotWorker:
    """Translates batches with the translator that all `models` share.

    Gives the segments of each batch to the decoder of the translator, and answers the batch when it is complete.
    """

    def __init__(self, models: ServedModels, inbox: Inbox, answer: Callable[[int, Any], None]) -> None:
        self.models, self.inbox, self.answer = models, inbox, answer
        first = next(iter(models.values()))
        self.translator, self.pipeline = first.translator, first.pipeline
        # number of a batch of segments in the search -> number of the batch of lines, its segments, its text pipeline
        self.under_way: dict[int, tuple[int, list[SegmentNode], Pipeline]] = {}

    def run_or_end_the_process(self) -> None:
        try:
            self.run(self.translator.batch_decoder(self.pipeline.search, polled=True))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the server then starts a new process and translates the lines again

    def run(self, decoder: BatchDecoder) -> None:
        """Translates batches until the inbox contains None."""
        for number, results in decoder(self.batches()):
            if number not in self.under_way:
                continue
            task, segments, pipeline = self.under_way.pop(number)
            leaves = (leaf for segment in segments for leaf in segment.leaves())
            for leaf, hypotheses in zip(leaves, results, strict=True):
                leaf.hypotheses = hypotheses
            lines = map(pipeline.translation, segments)
            self.answer(task, [list(map(result_of, line.hypotheses)) for line in lines])

    def batches(self) -> Iterator[SegmentBatch]:
        """Yields the segments of each batch of lines. Yields empty lists while no further batch arrives."""
        index = 0
        while True:
            try:
                message = self.inbox.get(block=not self.under_way)
            except queue.Empty:
                yield []
                index += 1
                continue
            if message is None:
                return
            number, batch = message
            model = self.models[batch.key.pair]
            # the search that several batches share supports neither settings of a request nor a pivot language
            if dataclasses.replace(batch.key, protect=False) != BatchKey(batch.key.pair) or model.first is not None:
                self.answer(number, translate_or_fail(self.models, batch))
                continue
            try:
                segments = model.pipeline.segments(list(map(Request, batch.texts)))
            except Exception:
                logger.error("a batch failed:\n%s", traceback.format_exc())
                self.answer(number, Refusal(500, FAILED))
                continue
            self.under_way[index] = number, segments, model.pipeline
            yield [leaf.input for segment in segments for leaf in segment.leaves()]
            index += 1


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
