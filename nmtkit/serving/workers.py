"""Translates the tasks of the server in a worker process: on a CPU batch by batch, on a GPU several tasks at a time.

A very long line does not block a CPU worker. The pipeline splits the line into many segments, which are decoded in
batches of at most `max_tokens`. After each batch, the worker answers a short task that has arrived meanwhile. All
segments stay in one process, because markup, word links and quality of the line depend on all segments.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import select
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nmtkit.serving.config import WEBLATE_PLACEHOLDER
from nmtkit.serving.fair_queue import Result
from nmtkit.serving.loading import Models, Pair, Prepare, ServedModel
from nmtkit.serving.messages import receive, send
from nmtkit.translation.pipeline import Pipeline
from nmtkit.translation.requests import Request
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.segments import BatchDecoder, BatchHypotheses, Hypothesis, SegmentBatch
from nmtkit.translation.steps import TextSegment
from nmtkit.translation.translator import Translator

FAILED = "a line of this text cannot be translated"

Task = Mapping[str, Any]

logger = logging.getLogger("nmtkit")


def work(connection: socket.socket, models: Models, prepare: Prepare) -> None:
    """Translates task after task until the server closes the connection.

    Between the batches of a task, answers a task that has arrived meanwhile. The server sends a second task only if
    the second task is short and the first task is one long line.
    """
    prepare()

    def answer_waiting() -> None:
        if select.select([connection], [], [], 0)[0]:
            if (task := receive(connection)) is None:
                raise ConnectionResetError
            send(connection, answer_to(models, task))

    with contextlib.suppress(ConnectionError):
        while (task := receive(connection)) is not None:
            send(connection, answer_to(models, task, answer_waiting))


def answer_to(models: Models, task: Task, between_batches: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Returns the answer to a task: the translations of each line, best first, or an error."""
    model = models.get(tuple(task["pair"]))
    if model is None:
        return {"id": task["id"], "error": "this language pair is no longer served"}
    try:
        return {"id": task["id"], "lines": translate(model, task, between_batches)}
    except ConnectionError:
        raise
    except Exception:
        logger.error("a batch failed:\n%s", traceback.format_exc())
        return {"id": task["id"], "error": FAILED}


def translate(model: ServedModel, task: Task, between_batches: Callable[[], None]) -> list[list[Result]]:
    """Returns the translations of each line of a task. The translations are the same as in `nmtkit generate`."""
    if model.first is not None:
        task = through_pivot(model.first, task, between_batches)
    translator = model.translator
    pipeline = pipeline_of(model, task)
    # PyTorch, not CTranslate2, searches for alternatives. On a GPU, `batch_decoder` is busy with other tasks.
    separate = task["alternatives"] or translator.device.type != "cpu"
    decoder = in_turn(translator, pipeline.search) if separate else translator.batch_decoder(pipeline.search)
    decoder = with_pauses(decoder, between_batches)
    return [list(map(result_of, line.hypotheses)) for line in translator.run([requests_of(task)], pipeline, decoder)]


def through_pivot(first: ServedModel, task: Task, between_batches: Callable[[], None]) -> Task:
    """Returns the task with its texts translated into the pivot language.

    The returned task requests no word links, because they would refer to the pivot text, not to the original text.
    """
    own_results = {"alternatives": 0, "alignment": False, "quality": False}
    lines = translate(first, {**task, **own_results}, between_batches)
    return {**task, "alignment": False, "texts": [line[0]["text"] for line in lines]}


def pipeline_of(model: ServedModel, task: Task) -> Pipeline:
    """Returns the text pipeline for a task: the pipeline of the language pair, with markup if the lines are HTML."""
    text = model.text
    if task["placeholders"] and model.aligns:
        text = dataclasses.replace(text, protect=(*text.protect, WEBLATE_PLACEHOLDER.pattern))
    if task["html"]:
        text = dataclasses.replace(text, markup="html", protect_spans=text.protect_spans or task["protect"])
    search = dataclasses.replace(with_alternatives(model.search, task["alternatives"]), quality=task["quality"])
    return model.translator.pipeline(search, text, links=task["alignment"] and model.aligns)


def requests_of(task: Task) -> list[Request]:
    return [Request(text) for text in task["texts"]]


def with_alternatives(search: SearchOptions, alternatives: int) -> SearchOptions:
    """Returns options for a search that finds the best translation and `alternatives` other translations."""
    if not alternatives:
        return search
    beam = -(-max(search.beam, alternatives + 1) // search.diverse_groups) * search.diverse_groups
    return dataclasses.replace(search, nbest=alternatives + 1, beam=beam)


def needs_own_search(task: Task) -> bool:
    """Returns whether a task needs results that the shared search does not compute."""
    return any(task[name] for name in ("alternatives", "html", "alignment", "quality", "placeholders"))


def result_of(hypothesis: Hypothesis) -> Result:
    """Returns a translation in the format that the server expects."""
    result: Result = {"text": hypothesis.text}
    if hypothesis.alignment is not None:
        result["alignment"] = hypothesis.alignment
    if hypothesis.quality is not None:
        result["quality"] = dataclasses.asdict(hypothesis.quality)
    return result


def with_pauses(decoder: BatchDecoder, between_batches: Callable[[], None]) -> BatchDecoder:
    """Returns a decoder that calls `between_batches` after each batch."""

    def decode(batches: Iterable[SegmentBatch]) -> Iterator[tuple[int, BatchHypotheses]]:
        for result in decoder(batches):
            between_batches()
            yield result

    return decode


def in_turn(translator: Translator, options: SearchOptions) -> BatchDecoder:
    """Returns a decoder that searches one batch after another with PyTorch."""
    return lambda batches: ((number, translator.decode(batch, options)) for number, batch in enumerate(batches))


# --- a GPU ------------------------------------------------------------------------------------------------------------


def work_on_gpu(connection: socket.socket, models: Models) -> None:
    """Translates tasks as they arrive. Each model has a thread. All language pairs of a model share search slots."""
    sending = threading.Lock()

    def answer(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(ConnectionError):
            send(connection, message)

    inboxes: dict[Pair, queue.SimpleQueue[Any]] = {}
    threads = []
    for translator in {id(model.translator): model.translator for model in models.values()}.values():
        group = {pair: model for pair, model in models.items() if model.translator is translator}
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        inboxes |= dict.fromkeys(group, inbox)
        slots = SlotWorker(group, inbox, answer)
        threads.append(threading.Thread(target=slots.run_or_end_the_process, name="-".join(next(iter(group)))))
        threads[-1].start()
    while (task := receive(connection)) is not None:
        if tuple(task["pair"]) not in inboxes:
            answer(answer_to(models, task))
        else:
            inboxes[tuple(task["pair"])].put(task)
    for inbox in {id(inbox): inbox for inbox in inboxes.values()}.values():
        inbox.put(None)
    for thread in threads:
        thread.join()


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A task whose segments are in the search, and the text pipeline of its language pair."""

    id: int
    segments: list[TextSegment]
    pipeline: Pipeline


class SlotWorker:
    """Gives the segments of arriving tasks to the decoder of a model, and answers each task when it is complete.

    `models` holds all language pairs of one translator. All pairs share the slots of its search.
    """

    def __init__(
        self, models: Models, inbox: "queue.SimpleQueue[Any]", answer: Callable[[dict[str, Any]], None]
    ) -> None:
        self.models, self.inbox, self.answer = models, inbox, answer
        self.translator = next(iter(models.values())).translator
        self.pipelines: dict[Pair, Pipeline] = {}  # created when the first task of a pair arrives
        self.pipeline = self.pipeline_of(next(iter(models)))
        self.under_way: dict[int, _UnderWay] = {}  # batch number -> task

    def pipeline_of(self, pair: Pair) -> Pipeline:
        if pair not in self.pipelines:
            model = self.models[pair]
            self.pipelines[pair] = self.translator.pipeline(model.search, model.text)
        return self.pipelines[pair]

    def run_or_end_the_process(self) -> None:
        try:
            self.run(self.translator.batch_decoder(self.pipeline.search))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the server then starts a new process and translates the lines again

    def run(self, decoder: BatchDecoder) -> None:
        """Translates tasks until the inbox contains None."""
        if self.translator.continuous is not None:
            self.translator.continuous.asks_between_steps = True
        for number, results in decoder(self.batches()):
            if number not in self.under_way:
                continue
            task = self.under_way.pop(number)
            leaves = (leaf for segment in task.segments for leaf in segment.leaves())
            for leaf, hypotheses in zip(leaves, results, strict=True):
                leaf.hypotheses = hypotheses
            lines = map(task.pipeline.translation, task.segments)
            self.answer({"id": task.id, "lines": [list(map(result_of, line.hypotheses)) for line in lines]})

    def batches(self) -> Iterator[SegmentBatch]:
        """Yields a batch for each task. Yields empty batches while there are unfinished tasks but no new task."""
        number = 0
        while True:
            try:
                task = self.inbox.get(block=not self.under_way)
            except queue.Empty:
                yield []
                number += 1
                continue
            if task is None:
                return
            pair = tuple(task["pair"])
            if needs_own_search(task) or self.models[pair].first is not None:
                self.answer(answer_to(self.models, task))
                continue
            pipeline = self.pipeline_of(pair)
            try:
                segments = pipeline.segments(requests_of(task))
            except Exception:
                logger.error("a batch failed:\n%s", traceback.format_exc())
                self.answer({"id": task["id"], "error": FAILED})
                continue
            self.under_way[number] = _UnderWay(task["id"], segments, pipeline)
            yield [leaf.input for segment in segments for leaf in segment.leaves()]
            number += 1
