"""Workers: they translate the tasks that the server sends, batch by batch, or on a GPU as they come."""

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nmtkit.search.options import SearchOptions
from nmtkit.search.segments import BatchDecoder, SegmentBatch
from nmtkit.serving.fair_queue import Found
from nmtkit.serving.loading import Models, Pair, Prepare, ServedModel
from nmtkit.serving.messages import receive, send
from nmtkit.translation.lines import LineProcessor
from nmtkit.translation.requests import Line, Output, Postprocessor, Preprocessor, Request
from nmtkit.translation.translator import Translator

FAILED = "a line of this text cannot be translated"

Task = Mapping[str, Any]

logger = logging.getLogger("nmtkit")


def work(connection: socket.socket, models: Models, prepare: Prepare) -> None:
    """Translates task after task until the server closes the connection."""
    prepare()
    with contextlib.suppress(ConnectionError):
        while (task := receive(connection)) is not None:
            send(connection, answer_to(models, task))


def answer_to(models: Models, task: Task) -> dict[str, Any]:
    """Returns the answer to a task: for each of its lines the translations, best first."""
    model = models.get(tuple(task["pair"]))
    if model is None:
        return {"id": task["id"], "error": "this language pair is no longer served"}
    try:
        return {"id": task["id"], "lines": translate(model, task)}
    except Exception:
        logger.error("a batch failed:\n%s", traceback.format_exc())
        return {"id": task["id"], "error": FAILED}


def translate(model: ServedModel, task: Task) -> list[list[Found]]:
    """Returns the translations of each line of a task, as `generate` finds them."""
    translator = model.translator
    processor = line_processor(model, task)
    options = processor.search_options(with_alternatives(model.search, task["alternatives"]))
    options = dataclasses.replace(options, quality=task["quality"])
    # CTranslate2 has no n-best lists here, and the slots of a GPU are busy with what needs neither these nor alignments
    own = task["alternatives"] or translator.device.type != "cpu"
    decoder = in_turn(translator, options) if own else translator.batch_decoder(options)
    found = processor.translations(translator.run(processor.requests(windows(task)), options, decoder))
    return [[found_of(output) for output in line.hypotheses] for line in found]


def line_processor(model: ServedModel, task: Task) -> LineProcessor:
    """Returns the treatment of a task's lines: that of the model's pair, with markup where they are HTML."""
    options = model.text
    if task["html"]:
        options = dataclasses.replace(options, markup="html", protect_spans=options.protect_spans or task["protect"])
    return LineProcessor(model.translator.tokenizer, options, task["alignment"] and model.aligns)


def windows(task: Task) -> list[list[Request]]:
    return [[Request(text) for text in task["texts"]]]


def with_alternatives(search: SearchOptions, alternatives: int) -> SearchOptions:
    """Returns the search that finds `alternatives` translations beside the best."""
    if not alternatives:
        return search
    beam = -(-max(search.beam, alternatives + 1) // search.diverse_groups) * search.diverse_groups
    return dataclasses.replace(search, nbest=alternatives + 1, beam=beam)


def needs_own_search(task: Task) -> bool:
    """Returns whether a task needs what the search of all others does not find."""
    return bool(task["alternatives"] or task["html"] or task["alignment"] or task["quality"])


def found_of(output: Output) -> Found:
    """Returns a translation as the server takes it."""
    found: Found = {"text": output.text}
    if output.alignment is not None:
        found["alignment"] = output.alignment
    if output.quality is not None:
        found["quality"] = dataclasses.asdict(output.quality)
    return found


def in_turn(translator: Translator, options: SearchOptions) -> BatchDecoder:
    """Returns the plain decoder: one batch after the other, by PyTorch."""
    return lambda batches: ((number, translator.decode(batch, options)) for number, batch in enumerate(batches))


# --- a GPU ------------------------------------------------------------------------------------------------------------


def work_on_gpu(connection: socket.socket, models: Models) -> None:
    """Translates tasks as they come, each model on a thread of its own, which keeps the slots of its search full."""
    sending = threading.Lock()

    def answer(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(ConnectionError):
            send(connection, message)

    inboxes: dict[Pair, queue.SimpleQueue[Any]] = {}
    threads = []
    for pair, model in models.items():
        inboxes[pair] = queue.SimpleQueue()
        slots = SlotWorker(model, inboxes[pair], answer)
        threads.append(threading.Thread(target=slots.run_or_end_the_process, name="-".join(pair)))
        threads[-1].start()
    while (task := receive(connection)) is not None:
        if tuple(task["pair"]) not in inboxes:
            answer(answer_to(models, task))
        else:
            inboxes[tuple(task["pair"])].put(task)
    for inbox in inboxes.values():
        inbox.put(None)
    for thread in threads:
        thread.join()


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A task whose lines are in the search."""

    id: int
    processor: LineProcessor
    lines: list[Line]


class SlotWorker:
    """Feeds the decoder of a model with the lines of tasks as they come, and answers each task when it is complete."""

    def __init__(
        self, model: ServedModel, inbox: "queue.SimpleQueue[Any]", answer: Callable[[dict[str, Any]], None]
    ) -> None:
        self.model, self.inbox, self.answer = model, inbox, answer
        translator = model.translator
        self.search = LineProcessor(translator.tokenizer, model.text).search_options(model.search)
        self.preprocessor = Preprocessor(
            translator.tokenizer, self.search, translator.max_source_len, translator.options.long_lines
        )
        self.postprocessor = Postprocessor(translator.tokenizer, self.search)
        self.under_way: dict[int, _UnderWay] = {}  # by number of the batch

    def run_or_end_the_process(self) -> None:
        try:
            self.run(self.model.translator.batch_decoder(self.search))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the server starts this process anew, and its lines are translated again

    def run(self, decoder: BatchDecoder) -> None:
        """Translates until None comes in."""
        if self.model.translator.continuous is not None:
            self.model.translator.continuous.asks_between_steps = True
        for number, found in decoder(self.batches()):
            if number not in self.under_way:
                continue
            task = self.under_way.pop(number)
            parts = iter(found)
            for line in task.lines:
                line.hypotheses = [next(parts) for _ in line.parts]
            complete = task.processor.translations(map(self.postprocessor.translation, task.lines))
            self.answer({"id": task.id, "lines": [list(map(found_of, line.hypotheses)) for line in complete]})

    def batches(self) -> Iterator[SegmentBatch]:
        """Yields a batch for each task; an empty one where none has come in and some are under way."""
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
            if needs_own_search(task):
                self.answer(answer_to({pair: self.model}, task))
                continue
            try:
                processor = line_processor(self.model, task)
                (requests,) = processor.requests(windows(task))
                lines = self.preprocessor.lines(requests, 0)
            except Exception:
                logger.error("a batch failed:\n%s", traceback.format_exc())
                self.answer({"id": task["id"], "error": FAILED})
                continue
            self.under_way[number] = _UnderWay(task["id"], processor, lines)
            yield [part for line in lines for part in line.parts]
            number += 1
