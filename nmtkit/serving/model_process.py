"""The process that loads the models, and the workers that it forks; on a GPU it translates itself.

A fresh process, so that it can fork whenever a worker is to be replaced: it has one thread, whatever the server has.
Workers share the weights in memory and end when the server closes their connection, or is gone.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nmtkit import busy_cores, checkpoint
from nmtkit.data.dataset_files import MANIFEST
from nmtkit.data.tokenizer import BOS, EOS
from nmtkit.generation import ctranslate2
from nmtkit.generation.decoding import BatchDecoder, SentenceBatch
from nmtkit.generation.lines import LineProcessor
from nmtkit.generation.options import DeviceOptions, SearchOptions, TextOptions, TranslatorOptions
from nmtkit.generation.parallel import rank_device
from nmtkit.generation.requests import Line, Output, Postprocessor, Preprocessor, Request
from nmtkit.generation.translator import Translator, ctranslate2_engine
from nmtkit.packed import Packed
from nmtkit.plugins import load_plugins
from nmtkit.serving.fair_queue import Found
from nmtkit.serving.messages import receive, send

Pair = tuple[str, str]
Models = dict[Pair, Translator]
Prepare = Callable[[Translator], None]  # what a worker does with a model of its own

CPU_MAX_TOKENS = 1024  # source tokens of a batch: a request that comes meanwhile waits for no more

logger = logging.getLogger("nmtkit")


@dataclasses.dataclass(frozen=True)
class Job:
    """The models to load and how to search with them, as the server sends it to the process of the models."""

    paths: list[tuple[Pair | None, str]]
    plugins: list[str]
    search: SearchOptions
    devices: DeviceOptions
    translator: TranslatorOptions
    workers: int | None

    @staticmethod
    def from_message(message: Mapping[str, Any]) -> "Job":
        return Job(
            paths=[(None if pair is None else (pair[0], pair[1]), path) for pair, path in message["paths"]],
            plugins=message["plugins"],
            search=SearchOptions(**message["search"]),
            devices=DeviceOptions(**message["devices"]),
            translator=TranslatorOptions(**message["translator"]),
            workers=message["workers"],
        )

    @property
    def device(self) -> str:
        return rank_device(self.devices.named_device, workers=self.workers or 1)

    @property
    def worker_count(self) -> int:
        """Workers to fork: as many as were asked for, else one per core."""
        if self.workers is not None or self.devices.threads is not None:
            return self.workers or 1
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- models ---------------------------------------------------------------------------------------------------------


def grouped(paths: list[tuple[Pair | None, str]]) -> dict[Pair, list[Path]]:
    """Returns the checkpoints of each language pair: several are an ensemble."""
    result: dict[Pair, list[Path]] = {}
    for pair, path in paths:
        result.setdefault(pair or languages_of(Path(path)), []).append(Path(path))
    return result


def languages_of(path: Path) -> Pair:
    """Returns the languages that a checkpoint was trained for, from its facts or else from its dataset.

    Raises ValueError, saying how to give them, where neither says so.
    """
    run = checkpoint.load(path, mmap=True).get("run", {})
    languages = run.get("languages")
    if languages is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = json.loads((Path(run["data"]) / MANIFEST).read_bytes())
            languages = manifest["source_lang"], manifest["target_lang"]
    if languages is None:
        raise ValueError(f"{path} does not say which languages it translates; give them: --path en-de={path}")
    return languages[0], languages[1]


def load_models(job: Job) -> tuple[Models, Prepare]:
    """Loads all models. What is no good to fork, as an engine with threads, is left to the workers.

    Raises OSError or ValueError, naming the file.
    """
    load_plugins(job.plugins)
    device, options = job.device, dataclasses.asdict(job.translator)
    if device == "cpu" and options["max_tokens"] is None:
        options["max_tokens"] = CPU_MAX_TOKENS
    groups = grouped(job.paths)
    if job.devices.engine == "torch":
        return {pair: Translator.load(paths, device, job.devices.precision, **options)
                for pair, paths in groups.items()}, lambda translator: None  # fmt: skip
    ctranslate2.check_options(job.search)
    for paths in groups.values():
        ctranslate2.exported(paths[0], "int8" if job.devices.precision == "int8" else "fp32")
    models = {pair: Translator.load(paths, device, "fp32", **options) for pair, paths in groups.items()}
    files = {id(models[pair]): paths for pair, paths in groups.items()}

    def prepare(translator: Translator) -> None:
        paths = files[id(translator)]
        translator.engine = ctranslate2_engine(paths, translator.tokenizer, device, job.devices.precision, 1)

    return models, prepare


def with_alternatives(search: SearchOptions, alternatives: int) -> SearchOptions:
    """Returns the search that finds `alternatives` translations beside the best."""
    if not alternatives:
        return search
    beam = -(-max(search.beam, alternatives + 1) // search.diverse_groups) * search.diverse_groups
    return dataclasses.replace(search, nbest=alternatives + 1, beam=beam)


# --- workers --------------------------------------------------------------------------------------------------------


def translate(models: Models, search: SearchOptions, task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to a task: for each of its lines the translations, best first."""
    translator = models.get(tuple(task["pair"]))
    if translator is None:
        return {"id": task["id"], "error": "this language pair is no longer served"}
    links = task["alignment"] and aligns(translator)
    processor = LineProcessor(translator.tokenizer, TextOptions(markup="html" if task["html"] else None), links)
    options = processor.search_options(with_alternatives(search, task["alternatives"]))
    # CTranslate2 has no n-best lists here, and the slots of a GPU are busy with what needs neither these nor alignments
    own = task["alternatives"] or translator.device.type != "cpu"
    decoder = in_turn(translator, options) if own else translator.batch_decoder(options)
    try:
        requests = processor.requests([[Request(text) for text in task["texts"]]])
        found = processor.translations(translator.run(requests, options, decoder))
        return {"id": task["id"], "lines": [[found_of(output) for output in line.hypotheses] for line in found]}
    except Exception:
        logger.error("a batch failed:\n%s", traceback.format_exc())
        return {"id": task["id"], "error": "a line of this text cannot be translated"}


def needs_own_search(task: Mapping[str, Any]) -> bool:
    """Returns whether a task needs what the search of all others does not find."""
    return bool(task["alternatives"] or task["html"] or task["alignment"])


def found_of(output: Output) -> Found:
    """Returns a translation as the server takes it."""
    return {"text": output.text, **({} if output.alignment is None else {"alignment": output.alignment})}


@functools.lru_cache(maxsize=1024)
def aligns(translator: Translator) -> bool:
    """Returns whether its models have cross-attention, by which words are aligned."""
    source, begin = (Packed.from_lists([[id]], translator.device) for id in (EOS, BOS))
    try:
        return all(model.attention_weights(source, begin).get("cross") for model in translator.models)
    except ValueError:
        return False


def in_turn(translator: Translator, options: SearchOptions) -> BatchDecoder:
    """Returns the plain decoder: one batch after the other, by PyTorch."""
    return lambda batches: ((number, translator.decode(batch, options)) for number, batch in enumerate(batches))


def work(connection: socket.socket, models: Models, prepare: Prepare, search: SearchOptions) -> None:
    """Translates task after task until the server closes the connection."""
    for translator in models.values():
        prepare(translator)
    with contextlib.suppress(ConnectionError):
        while (task := receive(connection)) is not None:
            send(connection, translate(models, search, task))


def work_on_gpu(connection: socket.socket, models: Models, search: SearchOptions) -> None:
    """Translates tasks as they come, each model on a thread of its own, which keeps the slots of its search full."""
    sending = threading.Lock()

    def answer(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(ConnectionError):
            send(connection, message)

    inboxes: dict[Pair, queue.SimpleQueue[Any]] = {}
    threads = []
    for pair, translator in models.items():
        inboxes[pair] = queue.SimpleQueue()
        slots = SlotWorker(translator, search, inboxes[pair], answer)
        threads.append(threading.Thread(target=slots.run, name=f"{'-'.join(pair)}"))
        threads[-1].start()
    while (task := receive(connection)) is not None:
        if tuple(task["pair"]) not in inboxes:
            answer(translate(models, search, task))
        else:
            inboxes[tuple(task["pair"])].put(task)
    for inbox in inboxes.values():
        inbox.put(None)
    for thread in threads:
        thread.join()


class SlotWorker:
    """Feeds the decoder of a model with the lines of tasks as they come, and answers each task when it is complete."""

    def __init__(
        self,
        translator: Translator,
        search: SearchOptions,
        inbox: "queue.SimpleQueue[Any]",
        answer: Callable[[dict[str, Any]], None],
    ) -> None:
        self.translator, self.search, self.inbox, self.answer = translator, search, inbox, answer
        self.preprocessor = Preprocessor(
            translator.tokenizer, search, translator.max_source_len, translator.options.long_lines
        )
        self.postprocessor = Postprocessor(translator.tokenizer, search)
        self.under_way: dict[int, tuple[Any, list[Line]]] = {}  # by number of the batch: the task's id, its lines

    def run(self) -> None:
        try:
            decoder = self.translator.batch_decoder(self.search)
            if self.translator.continuous is not None:
                self.translator.continuous.asks_between_steps = True
            for number, found in decoder(self.batches()):
                if number not in self.under_way:
                    continue
                id, lines = self.under_way.pop(number)
                parts = iter(found)
                for line in lines:
                    line.hypotheses = [next(parts) for _ in line.parts]
                answers = [list(map(found_of, self.postprocessor.translation(line).hypotheses)) for line in lines]
                self.answer({"id": id, "lines": answers})
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the server starts this process anew, and its lines are translated again

    def batches(self) -> Iterator[SentenceBatch]:
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
            if needs_own_search(task):
                self.answer(translate({tuple(task["pair"]): self.translator}, self.search, task))
                continue
            lines = self.preprocessor.lines([Request(text) for text in task["texts"]], 0)
            self.under_way[number] = (task["id"], lines)
            yield [part for line in lines for part in line.parts]
            number += 1


# --- this process ---------------------------------------------------------------------------------------------------


def main(control: socket.socket) -> None:
    """Loads what the server asks for, says so, and then starts a worker for each connection that comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they reach the whole group; the server decides
        signal.signal(number, signal.SIG_IGN)
    message = receive(control)
    if message is None:
        return
    logging.basicConfig(level=message["log_level"], format="%(levelname)s: %(message)s")
    torch.set_num_threads(1)
    try:
        job = Job.from_message(message)
        models, prepare = load_models(job)
    except (ValueError, OSError, ImportError) as error:
        send(control, {"error": str(error)})
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave nothing behind
    device = next(iter(models.values())).device
    forks, threads = device.type == "cpu", job.devices.threads
    send(
        control,
        {
            "pairs": list(models),
            "device": str(device),
            "workers": job.worker_count if forks else 1,
            "streams": not forks,
            "max_tokens": max(translator.max_tokens for translator in models.values()),
        },
    )
    if forks and job.worker_count == 1 and threads is None:
        threads = 1
    while (given := _receive_connection(control)) is not None:
        if not forks:
            send(control, {"pid": os.getpid()})
            work_on_gpu(given, models, job.search)
            return
        pid = os.fork()
        if pid == 0:
            _run_worker(control, given, threads, lambda connection: work(connection, models, prepare, job.search))
        given.close()
        send(control, {"pid": pid})


def _run_worker(
    control: socket.socket, connection: socket.socket, threads: int | None, run: Callable[[socket.socket], None]
) -> None:
    """Runs a forked worker; never returns."""
    status = 1
    try:
        control.close()
        if threads is not None and threads > 1:
            torch.set_num_threads(threads)
            busy_cores.start()
        run(connection)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _receive_connection(control: socket.socket) -> socket.socket | None:
    """Returns the connection of the next worker, None when the server has gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except ConnectionError:
        return None
    return socket.socket(fileno=descriptors[0]) if data and descriptors else None


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
