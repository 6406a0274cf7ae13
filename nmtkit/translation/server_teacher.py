"""Translates a corpus with a server, as training data for sequence-level distillation (Kim and Rush 2016).

The server speaks the protocol of OpenAI (`/v1/chat/completions`, which vLLM, llama.cpp and others offer) or of DeepL
(`/v2/translate`). The job works in shards, so a stopped job continues after its last complete shard.
"""

import http.client
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmtkit.config.files import parse_json
from nmtkit.data.corpora.lines import LineDecoder
from nmtkit.data.retries import asked_wait, may_pass, wait_after
from nmtkit.jobs.distributed import rank_device
from nmtkit.jobs.shard_plan import Plan, Shard, check_regular, divide, open_plan
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.text.languages import name_of, subtags
from nmtkit.translation.server_config import ServerConfig
from nmtkit.translation.shards import windows_of_shard

logger = logging.getLogger("nmtkit")


class PermanentError(ValueError):
    """The server refuses a request for a permanent reason, such as a wrong key."""


@dataclass
class RequestLimit:
    """Lets at most `per_minute` requests begin in a minute, evenly spaced. None: no limit."""

    per_minute: float | None
    sleep: Callable[[float], None] = time.sleep
    next_start: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        if self.per_minute is None:
            return
        with self.lock:
            start = max(self.next_start, time.monotonic())
            self.next_start = start + 60 / self.per_minute
        self.sleep(max(0.0, start - time.monotonic()))


class TranslationServer:
    """A server that translates one text at a time. Threads may share this object."""

    def __init__(
        self, config: ServerConfig, languages: tuple[str, str], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        assert config.from_server is not None
        self.config, self.languages, self.sleep = config, languages, sleep
        self.limit = RequestLimit(config.requests_per_minute, sleep)
        self.warned = False
        address = config.from_server.rstrip("/")
        path = {"openai": "/chat/completions", "deepl": "/v2/translate"}[config.server_api]
        self.url = address if address.endswith(path) else address + path
        self.headers = {"Content-Type": "application/json", "User-Agent": "nmtkit"}
        key = os.environ.get(config.api_key_variable)
        if key:
            scheme = "Bearer" if config.server_api == "openai" else "DeepL-Auth-Key"
            self.headers["Authorization"] = f"{scheme} {key}"

    def candidates(self, text: str) -> list[str]:
        """Returns different translations of a text, at least one, each as a single line.

        A translation that the server has cut off is empty. Sends further requests while candidates are missing, at most
        `config.candidates` requests in total. Raises PermanentError, or OSError after the last attempt.
        """
        found: list[str] = []
        for _ in range(self.config.candidates):
            found += self._ask(text, self.config.candidates - len(found))
            if len(found) >= self.config.candidates:
                break
        return list(dict.fromkeys(" ".join(candidate.split()) for candidate in found))

    def _ask(self, text: str, count: int) -> list[str]:
        source, target = self.languages
        if self.config.server_api == "deepl":
            # DeepL refuses the code of a source language with a region, such as en-GB
            codes = subtags(source)[0].upper(), "-".join(subtags(target)).upper()
            body: dict[str, Any] = {"text": [text], "source_lang": codes[0], "target_lang": codes[1]}
            return self._answer(body, lambda answer: [str(each["text"]) for each in answer["translations"]])
        prompt = self.config.prompt.replace("{source}", name_of(source)).replace("{target}", name_of(target))
        body = {
            "model": self.config.server_model,
            "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": text}],
            "temperature": self.config.candidate_temperature if self.config.candidates > 1 else 0,
            **({"n": count} if count > 1 else {}),
        }
        return self._answer(body, lambda answer: list(map(complete_text, answer["choices"])))

    def _answer(self, body: Mapping[str, Any], texts_of: Callable[[Any], list[str]]) -> list[str]:
        """Sends a request and returns the texts of the answer. Tries again if a failure may be temporary."""
        data = json.dumps(body).encode()
        for attempt in range(1, self.config.attempts + 1):
            self.limit.wait()
            asked = 0.0
            try:
                request = urllib.request.Request(self.url, data, self.headers)
                with urllib.request.urlopen(request, timeout=self.config.request_timeout) as response:
                    answer = parse_json(response.read())
                try:
                    if texts := texts_of(answer):
                        return texts
                except (LookupError, TypeError):
                    pass
                reason = f"an answer without translations: {json.dumps(answer)[:200]}"
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {error.read(200).decode(errors='replace')}"
                if not may_pass(error.code):
                    advice = f"; set {self.config.api_key_variable} to the key" if error.code in (401, 403) else ""
                    raise PermanentError(f"{self.url}: {reason}{advice}") from None
                asked = asked_wait(error.headers.get("Retry-After"))
            except http.client.InvalidURL as error:
                raise PermanentError(f"{self.url}: {error}") from None
            except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: the answer is not JSON
                reason = f"{getattr(error, 'reason', None) or error}"
            if attempt < self.config.attempts:
                if not self.warned:
                    self.warned = True
                    logger.warning("%s: %s; failed requests are repeated (--attempts)", self.url, reason)
                self.sleep(wait_after(attempt, asked=asked))
        raise OSError(f"{self.url}: {self.config.attempts} attempts failed, the last with {reason}")


def complete_text(choice: Mapping[str, Any]) -> str:
    """Returns the text of a choice in OpenAI's protocol, or "" if a limit or a filter has cut the text off."""
    text = choice["message"]["content"]
    return "" if choice.get("finish_reason") in ("length", "content_filter") else str(text or "")


# --- the choice of a candidate ----------------------------------------------------------------------------------------


def best(
    candidates: Sequence[str], *, choose: str, metric: str, source: str, device: str, reference: str | None = None
) -> str:
    """Returns the chosen candidate translation of `source`. Of equally good candidates, the first is returned.

    If `choose` is "first", returns the first candidate. Otherwise, `metric` chooses. With a reference, returns the
    candidate with the highest quality. Without a reference, returns the candidate with the highest utility
    (`SegmentMetric.utilities`).
    """
    if choose == "first" or len(candidates) == 1:
        return candidates[0]
    scorer = segment_metric(metric, device)
    if reference is None:
        values = scorer.utilities(candidates, source)
    else:
        count = len(candidates)
        values = scorer.qualities(candidates, sources=[source] * count, references=[reference] * count)
    return candidates[values.index(max(values))]


# --- the job ----------------------------------------------------------------------------------------------------------


class ServerWorker:
    """Translates the lines of shards. Each output line is a JSON object with a pair of the corpus."""

    def __init__(self, server: TranslationServer, texts: Sequence[Path]) -> None:
        self.server, self.texts = server, texts

    def output(self, shard: Shard, counts: Counter[str]) -> Iterator[bytes]:
        """Yields the pairs of a shard. Empty lines, and lines whose translations are all empty, give no pair."""
        config, (source, target) = self.server.config, self.server.languages
        device = rank_device("auto", 1)  # device for the metric of --choose-by
        windows = windows_of_shard(shard, [LineDecoder(path, shard.first + 1) for path in self.texts])
        with ThreadPoolExecutor(config.parallel_requests) as pool:
            try:
                for columns in windows:
                    rows = [row for row in zip(*columns, strict=True) if row[0].strip()]
                    counts["empty lines"] += len(columns[0]) - len(rows)
                    answers = pool.map(self.server.candidates, [line for line, *_ in rows])
                    for (line, *references), found in zip(rows, answers, strict=True):
                        usable = [candidate for candidate in found if candidate]
                        if not usable:
                            counts["lines without a translation"] += 1
                            continue
                        reference = next(iter(references), None)
                        chosen = best(
                            usable, choose=config.choose, metric=config.choose_by, source=line, device=device,
                            reference=reference,
                        )  # fmt: skip
                        pair = {source: line, target: chosen}
                        more = {"candidates": usable} if len(usable) > 1 else {}
                        yield json.dumps(pair | more, ensure_ascii=False).encode() + b"\n"
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def open_job(
    config: ServerConfig, text: Path, languages: tuple[str, str], folder: Path, shard_lines: int, command: str
) -> Plan:
    """Returns the plan of the job in `folder`, or makes the plan of a new job.

    Settings that do not change translations, such as limits and attempts, may differ between the runs of a job.
    """
    files = {"input": text} | ({} if config.references is None else {"references": config.references})
    check_regular(files.values())
    names = ("server_api", "server_model", "prompt", "candidates", "candidate_temperature", "choose", "choose_by")
    settings = {name: getattr(config, name) for name in names} | {"languages": list(languages), "command": "distill"}
    paths = list(files.values())
    return open_plan(folder, settings, files, ".jsonl", shard_lines, command, lambda: divide(paths, shard_lines))


def write_shards(plan: Plan, worker: ServerWorker, shards: Sequence[Shard]) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Writes shards one after another, because the server limits the speed. Yields each shard with its record."""
    for shard in shards:
        counts: Counter[str] = Counter()
        yield shard, plan.write(shard, worker.output(shard, counts), counts)
