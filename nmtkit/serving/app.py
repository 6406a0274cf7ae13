"""The HTTP interface: LibreTranslate's, with /health, /metrics and /openapi.json beside it."""

import asyncio
import hmac
import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unicodedata import normalize

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from nmtkit.pages.document import asset
from nmtkit.serving import contents, detection, openapi, reading, web
from nmtkit.serving.config import ServeConfig
from nmtkit.serving.contents import Content, Text
from nmtkit.serving.detection import Detector
from nmtkit.serving.fair_queue import Found, Kind, Pair, QueueFull, TranslationError
from nmtkit.serving.languages import name_of
from nmtkit.serving.metrics import Metrics
from nmtkit.serving.pool import Pool
from nmtkit.serving.protocol import UnambiguousRequests
from nmtkit.serving.reading import Refusal

MAX_ALTERNATIVES = 10
RETRY_SECONDS = 2  # after which a client that was answered 429 may try again
FILE_SECONDS = 600  # that a translated file can be fetched
FILES_BYTES = 64 * 2**20  # of translated files that wait to be fetched
NO_STORE = {"Cache-Control": "no-store"}
CLOSED = 499  # status, in metrics only, of a request whose client has gone; nginx counts it so

Handler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger("nmtkit")


class Service:
    """Answers requests with the translations of a pool."""

    def __init__(self, config: ServeConfig, pool: Pool, keys: Sequence[bytes]) -> None:
        self.config, self.pool, self.keys = config, pool, list(keys)
        self.metrics = Metrics()
        self.files: dict[str, tuple[float, str, bytes]] = {}  # translated ones by token: until when, extension, bytes

    def application(self) -> Starlette:
        routes = [
            ("/translate", "POST", self.translate),
            ("/translate_file", "POST", self.translate_file),
            ("/download_file/{token}", "GET", self.download_file),
            ("/detect", "POST", self.detect),
            ("/languages", "GET", self.languages),
            ("/health", "GET", self.health),
            ("/metrics", "GET", self.show_metrics),
            ("/openapi.json", "GET", self.openapi),
            ("/docs", "GET", self.docs),
            ("/static/{name}", "GET", self.static),
        ]
        if not self.config.disable_web_ui:
            routes += [("/", "GET", self.index), ("/frontend/settings", "GET", self.settings)]
        middleware = [Middleware(UnambiguousRequests)]
        if self.config.cors_origin:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.config.cors_origin),
                    allow_methods=["GET", "POST"],
                    allow_headers=["Content-Type"],
                )
            )
        return Starlette(
            routes=[
                Route(path, self.handled(path, handler), methods=[method], name=handler.__name__)
                for path, method, handler in routes
            ],
            middleware=middleware,
            exception_handlers={HTTPException: http_error},
        )

    def handled(self, path: str, handler: Handler) -> Handler:
        """Returns the handler with a time limit, an answer to every error, and its share in the metrics."""

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            response = await self.bounded(request, handler)
            self.metrics.observe(path, response.status_code, time.monotonic() - start)
            response.headers["X-Content-Type-Options"] = "nosniff"
            return response

        return answer

    async def bounded(self, request: Request, handler: Handler) -> Response:
        try:
            async with asyncio.timeout(self.config.timeout):
                return await handler(request)
        except Refusal as refusal:
            return error_response(refusal.status, refusal.message, refusal.headers)
        except TimeoutError:
            seconds = f"{self.config.timeout:g}"
            return error_response(504, f"the request took longer than {seconds} seconds", {"Connection": "close"})
        except ClientDisconnect:
            return Response(status_code=CLOSED)
        except QueueFull:
            return error_response(429, "too many texts wait; try again later", {"Retry-After": str(RETRY_SECONDS)})
        except TranslationError as error:
            return error_response(500, str(error))
        except Exception:
            logger.error("a request failed:\n%s", traceback.format_exc())
            return error_response(500, "internal error")

    # --- translation --------------------------------------------------------------------------------------------------

    async def translate(self, request: Request) -> Response:
        fields = await self.fields(request)
        texts, is_list = reading.texts_of(fields)
        source, target = reading.string(fields, "source"), reading.string(fields, "target")
        format = reading.string(fields, "format", "text")
        if format not in ("text", "html"):
            raise Refusal(400, "Invalid request: format parameter is neither text nor html")
        alternatives = reading.whole_number(fields, "alternatives", MAX_ALTERNATIVES)
        alignment = reading.truth(fields, "alignment")
        if alignment and format == "html":
            raise Refusal(400, "Invalid request: alignment is of plain text; leave it out with format html")
        quality = reading.truth(fields, "quality")
        detected = None
        if source == "auto":
            self.check_characters(sum(map(len, texts)))
            detected = self.source_of(texts, target)
            source = detected[0]
        kind = Kind((source, target), alternatives, format == "html", alignment, quality=quality)
        found = await self.unless_gone(request, self.translations(await self.contents_of(texts, kind), kind))
        answer: dict[str, Any] = {"translatedText": [text[0]["text"] for text in found]}
        if detected is not None:
            answer["detectedLanguage"] = [{"confidence": detected[1], "language": source}] * len(texts)
        if alternatives:
            answer["alternatives"] = [[rank["text"] for rank in text[1:]] for text in found]
        if all("alignment" in rank for text in found for rank in text) and alignment:
            answer["alignment"] = [text[0]["alignment"] for text in found]
            if alternatives:
                answer["alternativesAlignment"] = [[rank["alignment"] for rank in text[1:]] for text in found]
        if quality:
            answer["quality"] = [text[0]["quality"] for text in found]
        return JSONResponse(answer if is_list else {name: values[0] for name, values in answer.items()})

    async def contents_of(self, texts: Sequence[str], kind: Kind) -> list[Content]:
        """Returns what `texts` hold. Raises Refusal for too much, before it is read."""
        self.check_characters(sum(map(len, texts)))
        if kind.html:
            return await asyncio.to_thread(lambda: [contents.web_page(text, kind.pair[1]) for text in texts])
        return [Text(normalize("NFC", text) if kind.alignment else text) for text in texts]

    async def translate_file(self, request: Request) -> Response:
        fields = await self.fields(request)
        extension, data = await contents.upload(fields, self.config.char_limit)
        pair = reading.string(fields, "source"), reading.string(fields, "target")
        content = await asyncio.to_thread(contents.content_of, extension, data, pair[1])
        if pair[0] == "auto":
            pair = self.source_of(content.segments, pair[1])[0], pair[1]
        kind = Kind(pair, 0, html=not isinstance(content, Text), protect=content.protects)
        ((translated, *_),) = await self.unless_gone(request, self.translations([content], kind))
        token = self.keep_file(extension, content.encoded(translated["text"]))
        return JSONResponse({"translatedFileUrl": self.link(request, "download_file", token=token)}, headers=NO_STORE)

    def link(self, request: Request, name: str, **parameters: str) -> str:
        """Returns the address of a route for this client: under --public-url, or else under the Host it asked for."""
        if self.config.public_url is None:
            return str(request.url_for(name, **parameters))
        return self.config.public_url.rstrip("/") + str(request.app.url_path_for(name, **parameters))

    async def download_file(self, request: Request) -> Response:
        """Answers with a file that no browser shows as a page of this server's, whatever is in it."""
        until, extension, file = self.files.get(request.path_params["token"], (0.0, "", b""))
        if until < time.monotonic():
            raise Refusal(404, "no such file; it may have been removed")
        headers = {
            "Content-Disposition": f'attachment; filename="translated{extension}"',
            "Content-Security-Policy": "sandbox",
        }
        kind = "text/plain; charset=utf-8" if extension == ".txt" else "application/octet-stream"
        return Response(file, media_type=kind, headers=headers)

    def keep_file(self, extension: str, contents: bytes) -> str:
        """Keeps a file in memory for a while; returns its token. The oldest ones make room for it."""
        now = time.monotonic()
        self.files = {token: file for token, file in self.files.items() if file[0] > now}
        while self.files and sum(len(file) for _, _, file in self.files.values()) + len(contents) > FILES_BYTES:
            del self.files[next(iter(self.files))]
        token = secrets.token_urlsafe(24)
        self.files[token] = now + FILE_SECONDS, extension, contents
        return token

    async def translations(self, pieces: Sequence[Content], kind: Kind) -> list[list[Found]]:
        """Returns the translation of each piece, and then its alternatives. Raises Refusal for what is too much."""
        pair = kind.pair
        self.check_pair(pair)
        characters = self.check_characters(sum(len(piece.text) for piece in pieces))
        lines = [line for piece in pieces for line in piece.segments]
        if max(len(lines), len(pieces)) > self.config.batch_limit:
            count, limit = max(len(lines), len(pieces)), self.config.batch_limit
            raise Refusal(413, f"Invalid request: request ({count}) exceeds batch limit ({limit})")
        found = iter(await self.pool.translate(kind, lines))
        self.metrics.lines[pair] += len(lines)
        self.metrics.characters[pair] += characters
        result = []
        for piece in pieces:
            of_lines = [next(found) for _ in piece.segments]
            ranks = min(map(len, of_lines), default=1)
            by_rank = [[line[rank] for line in of_lines] for rank in range(ranks)]
            if isinstance(piece, Text):
                result.append([piece.translated(lines) for lines in by_rank])
            else:  # a long one takes its time
                result.append([await asyncio.to_thread(contents.rendered, piece, lines) for lines in by_rank])
            if kind.quality:
                result[-1][0]["quality"] = [line[0]["quality"] for line in of_lines]
        return result

    def check_characters(self, characters: int) -> int:
        """Returns the number. Raises Refusal where it is too large."""
        if characters > self.config.char_limit:
            limit = self.config.char_limit
            raise Refusal(413, f"Invalid request: request ({characters}) exceeds text limit ({limit})")
        return characters

    def check_pair(self, pair: Pair) -> None:
        """Raises Refusal for languages that no model here translates."""
        pairs = self.pool.pairs
        if pair in pairs:
            return
        known = ", ".join(f"{source} to {target}" for source, target in pairs)
        if pair[0] == "auto" and self.detector is None:
            raise Refusal(400, f"source auto needs a language detector, and there is none; known: {known}")
        for code, side in zip(pair, (0, 1), strict=True):
            if code != "auto" and code not in {languages[side] for languages in pairs}:
                raise Refusal(400, f"{code[:40]} is not supported; known: {known}")
        raise Refusal(400, f"{pair[1]} is not available as a target language from {pair[0]}; known: {known}")

    async def fields(self, request: Request) -> dict[str, Any]:
        """Returns the fields of a request. Raises Refusal for one without a key, where keys are asked for."""
        fields = await reading.fields_of(request, self.config.char_limit)
        if self.keys:
            key = fields.get("api_key")
            given = key.encode("utf-8", "replace") if isinstance(key, str) else b""
            if not any([hmac.compare_digest(given, known) for known in self.keys]):
                raise Refusal(403, "Invalid API key" if given else "this server asks for an API key: api_key")
        return fields

    async def unless_gone(self, request: Request, work: Awaitable[Any]) -> Any:
        """Returns the result of `work`, which is cancelled when the client goes. Raises ClientDisconnect then."""

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ClientDisconnect
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    # --- facts --------------------------------------------------------------------------------------------------------

    async def detect(self, request: Request) -> Response:
        fields = await self.fields(request)
        texts, _ = reading.texts_of(fields)
        self.check_characters(sum(map(len, texts)))
        found = self.detected(texts)
        return JSONResponse([{"confidence": confidence, "language": code} for code, confidence in found])

    def detected(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Returns the languages, of those served, that the texts may be in, with the confidence in each in percent.

        Nothing to go by is, as in LibreTranslate, the first language with a confidence of 0. Raises Refusal 501.
        """
        detector = self.detector
        if detector is None:
            raise Refusal(501, "no language detector is installed: pip install 'nmtkit[detect]'")
        return detector.detect(texts) or [(self.pool.pairs[0][0], 0.0)]

    @property
    def detector(self) -> Detector | None:
        return detection.detector(frozenset(code for pair in self.pool.pairs for code in pair))

    def source_of(self, texts: Sequence[str], target: str) -> tuple[str, float]:
        """Returns the language that the texts are most likely in, of those translated to `target`, and the confidence.

        Raises Refusal.
        """
        sources = [source for source, other in self.pool.pairs if other == target]
        if self.detector is None or not sources:
            self.check_pair(("auto", target))
        return next((found for found in self.detected(texts) if found[0] in sources), (sources[0], 0.0))

    async def languages(self, request: Request) -> Response:
        sources: dict[str, list[str]] = {}
        for source, target in self.pool.pairs:
            sources.setdefault(source, []).append(target)
            sources.setdefault(target, [])
        return JSONResponse(
            [{"code": code, "name": name_of(code), "targets": targets} for code, targets in sorted(sources.items())]
        )

    async def health(self, request: Request) -> Response:
        ready = self.pool.ready
        return JSONResponse({"status": "ok" if ready else "no worker"}, 200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        pool = self.pool
        busy = sum(bool(worker.in_hand) for worker in pool.workers)
        gauges: dict[str, tuple[str, float]] = {
            "nmtkit_queue_sentences": ("Lines that wait.", pool.queue.size + sum(map(len, pool.queue.again))),
            "nmtkit_workers": ("Worker processes.", len(pool.workers)),
            "nmtkit_workers_busy": ("Worker processes that translate.", busy),
        }
        counters: dict[str, tuple[str, float]] = {
            "nmtkit_batches_total": ("Batches given to workers.", pool.batches),
            "nmtkit_worker_deaths_total": ("Workers that ended unexpectedly and were replaced.", pool.deaths),
            "nmtkit_reloads_total": ("Times that the models were loaded anew.", pool.reloads),
        }
        text = self.metrics.text(gauges, counters)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self.document())

    def document(self) -> dict[str, Any]:
        return openapi.document(self.pool.pairs, needs_key=bool(self.keys), detects=self.detector is not None)

    async def docs(self, request: Request) -> Response:
        return web.page(request, openapi.page(self.document()))

    async def index(self, request: Request) -> Response:
        return web.page(request, asset(web.TRANSLATOR))

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in web.FILES:
            raise Refusal(404, "Not Found")
        return web.file(request, name)

    async def settings(self, request: Request) -> Response:
        """Answers with what the page must know, under LibreTranslate's names."""
        source, target = next(iter(self.pool.pairs), ("", ""))
        return JSONResponse(
            {
                "apiKeys": bool(self.keys),
                "keyRequired": bool(self.keys),
                "charLimit": self.config.char_limit,
                "filesTranslation": True,
                "supportedFilesFormat": list(contents.FILES),
                "suggestions": False,
                "language": {
                    "source": {"code": source, "name": name_of(source)},
                    "target": {"code": target, "name": name_of(target)},
                },
            }
        )


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def http_error(request: Request, error: Exception) -> Response:
    """Answers what no route takes as LibreTranslate does."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, dict(error.headers or {}))
