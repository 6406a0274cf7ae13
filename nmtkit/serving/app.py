"""The HTTP application: LibreTranslate's routes, the pages, /health and /metrics."""

import asyncio
import functools
import hmac
import logging
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from nmtkit.serving import reading, web
from nmtkit.serving.config import WEBLATE_PLACEHOLDER, ServeConfig
from nmtkit.serving.fair_queue import BatchKey, LineResult, Pair, QueueFull, TranslationError
from nmtkit.serving.interface import (
    ENDPOINTS,
    DetectedLanguage,
    DetectFields,
    Fields,
    Language,
    RequestFields,
    TranslateFields,
    TranslateFileFields,
    openapi_document,
    validated,
)
from nmtkit.serving.languages import Detector, described, detector_of, served_code
from nmtkit.serving.metrics import Metrics
from nmtkit.serving.pool import Pool
from nmtkit.serving.protocol import UnambiguousRequests
from nmtkit.serving.reading import Content, PlainText, Refusal
from nmtkit.text.languages import name_of
from nmtkit.text.normalization import normalized

FILE_SECONDS = 600  # lifetime of a translated file
FILES_BYTES = 64 * 2**20  # limit for all translated files together
NO_STORE = {"Cache-Control": "no-store"}
SAME_LANGUAGE = 90.0  # confidence in percent from which a text in the target language is not translated
CLIENT_CLOSED = 499  # status in the metrics if the client has disconnected; the same number as in nginx

Handler = Callable[[Request], Awaitable[Response]]
FieldsHandler = Callable[[Request, Any], Awaitable[Response]]  # the second argument: validated fields

logger = logging.getLogger("nmtkit")


class Service:
    """The handlers of all routes. The workers of `pool` translate, and `keys` are the valid API keys."""

    def __init__(self, config: ServeConfig, pool: Pool, keys: Sequence[bytes]) -> None:
        self.config, self.pool, self.keys = config, pool, list(keys)
        self.metrics = Metrics(pool)
        self.memory, self.threads = reading.BodyMemory(), reading.TextThreads()
        # token of a translated file -> time of expiry, extension, content
        self.files: dict[str, tuple[float, str, bytes]] = {}

    def application(self) -> Starlette:
        with_fields: dict[str, FieldsHandler] = {
            "/translate": self.translate,
            "/translate_file": self.translate_file,
            "/detect": self.detect,
        }
        handlers: dict[str, Handler] = {
            **{
                endpoint.path: self.with_fields(endpoint.fields, with_fields[endpoint.path])
                for endpoint in ENDPOINTS
                if endpoint.fields is not None
            },
            "/languages": self.languages,
            "/health": self.health,
            "/metrics": self.show_metrics,
        }
        routes = [
            Route(path, self.answering(endpoint.path, handlers[endpoint.path]), methods=endpoint.methods)
            for endpoint in ENDPOINTS
            # The path with a slash is a route, not a redirect: a redirect would lose the path prefix of a proxy.
            for path in (endpoint.path, f"{endpoint.path}/")
        ]
        others: dict[str, Handler] = {
            "/download_file/{token}": self.download_file,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
            "/static/{name}": self.static,
        }
        if not self.config.disable_web_ui:
            others |= {"/": self.index, "/frontend/settings": self.settings}
        routes += [
            Route(path, self.answering(path, handler), name=handler.__name__) for path, handler in others.items()
        ]
        routes.append(Route("/docs/", lambda request: RedirectResponse("../docs")))
        middleware = [Middleware(UnambiguousRequests)]
        if self.config.cors_origin:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self.config.cors_origin),
                    allow_methods=["GET", "POST"],
                    allow_headers=["Authorization", "Content-Type"],
                )
            )
        application = Starlette(
            routes=routes, middleware=middleware, exception_handlers={HTTPException: answer_http_exception}
        )
        application.router.redirect_slashes = False
        return application

    def answering(self, path: str, handler: Handler) -> Handler:
        """Returns `handler` with a time limit and metrics. Every error becomes an answer."""

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            response = await self.answer_or_error(request, handler)
            self.metrics.observe(path, response.status_code, time.monotonic() - start)
            return response

        return answer

    async def answer_or_error(self, request: Request, handler: Handler) -> Response:
        try:
            async with asyncio.timeout(self.config.timeout):
                return await handler(request)
        except Refusal as refusal:
            return error_response(refusal.status, refusal.message, refusal.headers)
        except TimeoutError:
            seconds = f"{self.config.timeout:g}"
            return error_response(504, f"the request took longer than {seconds} seconds", {"Connection": "close"})
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except QueueFull:
            return error_response(
                429, "too many texts are waiting; try again later", {"Retry-After": str(reading.RETRY_SECONDS)}
            )
        except TranslationError as error:
            return error_response(500, str(error))
        except Exception:
            logger.error("a request failed:\n%s", traceback.format_exc())
            return error_response(500, "internal error")

    def with_fields(self, model: type[RequestFields], handler: FieldsHandler) -> Handler:
        """Returns a handler that reads the fields of a request for `handler`.

        A key in a header or in the query string is checked before the body is read. If the client disconnects, all work
        for the request ends, also the work that waits for a thread.
        """

        async def handle(request: Request) -> Response:
            fields = reading.query_fields(request)
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() == "bearer":
                fields["api_key"] = token.strip()
            if has_key := "api_key" in fields:
                self.check_key(fields["api_key"])

            async def work(body: bytes) -> Response:
                body_fields = await self.threads.run(len(body), reading.body_fields, request.headers, body)
                if not has_key:
                    self.check_key(body_fields.get("api_key"))
                sent = {**fields, **body_fields}
                return await handler(request, await self.threads.run(len(body), self.fields, model, sent))

            with self.memory.body() as hold:
                body = await reading.body(request, self.config.char_limit, hold)
                return await reading.unless_disconnected(request, work(body))

        return handle

    def fields(self, model: type[Fields], sent: dict[str, Any]) -> Fields:
        """Returns validated fields. Raises Refusal for invalid fields, and for texts that exceed a limit.

        The limits are checked first, because the validation of a list makes objects of all its elements.
        """
        texts = sent.get("q")
        if isinstance(texts, list):
            self.check_lines(len(texts))
        self.check_characters(sum(len(text) for text in reading.listed(texts) if isinstance(text, str)))
        return validated(model, sent)

    def check_key(self, key: Any) -> None:
        """Raises Refusal if the server needs a key and `key` is not valid."""
        sent = key.encode("utf-8", "replace") if isinstance(key, str) else b""
        if self.keys and not any([hmac.compare_digest(sent, known) for known in self.keys]):
            raise Refusal(403, "Invalid API key" if sent else "this server needs an API key (api_key)")

    # --- translation --------------------------------------------------------------------------------------------------

    async def translate(self, request: Request, fields: TranslateFields) -> Response:
        is_html = fields.format == "html"
        if fields.alignment and is_html:
            raise Refusal(400, "Invalid request: alignment is not available with format html")
        texts = reading.listed(fields.q)
        pairs, detected = await self.pairs_of(fields.source, fields.target, texts)

        def read() -> tuple[list[Content], bool]:
            """Returns the contents of a request, and whether a text has placeholders of Weblate.

            Runs in a thread, because a long text takes time.
            """
            if is_html:
                pages: list[Content] = [
                    reading.web_page(text, target) for text, (_, target) in zip(texts, pairs, strict=True)
                ]
                return pages, any(map(WEBLATE_PLACEHOLDER.search, texts))
            read_texts = [normalized(text) for text in texts] if fields.alignment else texts
            return [PlainText(text) for text in read_texts], any(map(WEBLATE_PLACEHOLDER.search, texts))

        pieces, has_placeholders = await self.threads.run(sum(map(len, texts)), read)
        key_of = functools.partial(
            BatchKey,
            alternatives=fields.alternatives,
            html=is_html,
            alignment=fields.alignment,
            quality=fields.quality,
            placeholders=has_placeholders,
        )
        results = await self.translations(pieces, pairs, key_of)
        best = [ranks[0] for ranks in results]
        answer: dict[str, list[Any]] = {"translatedText": [result["text"] for result in best]}
        if detected is not None:
            answer["detectedLanguage"] = detected
        if fields.alternatives:
            answer["alternatives"] = [[result["text"] for result in ranks[1:]] for ranks in results]
        if fields.alignment and all("alignment" in result for ranks in results for result in ranks):
            answer["alignment"] = [result["alignment"] for result in best]
            if fields.alternatives:
                answer["alternativesAlignment"] = [[result["alignment"] for result in ranks[1:]] for ranks in results]
        if fields.quality:
            answer["quality"] = [result["quality"] for result in best]
        return JSONResponse(answer if isinstance(fields.q, list) else only_elements(answer))

    async def translate_file(self, request: Request, fields: TranslateFileFields) -> Response:
        extension, data = await reading.upload(fields.file, self.config.char_limit)
        content = await self.threads.run(len(data), reading.content_of, extension, data, fields.target)
        pairs, _ = await self.pairs_of(fields.source, fields.target, ["\n".join(content.segments)])
        key_of = functools.partial(BatchKey, html=not isinstance(content, PlainText), protect=content.protects)
        ((result, *_),) = await self.translations([content], pairs, key_of)
        token = self.keep_file(extension, await self.threads.run(len(data), content.encoded, result["text"]))
        return JSONResponse({"translatedFileUrl": f"{self.base_url(request)}/download_file/{token}"}, headers=NO_STORE)

    async def translations(
        self, pieces: Sequence[Content], pairs: Sequence[Pair], key_of: Callable[[Pair], BatchKey]
    ) -> list[list[LineResult]]:
        """Returns a list of results for each piece: first the translation, then the alternatives.

        `pairs` has the language pair of each piece. A piece with two equal languages stays as it is.

        Raises Refusal if the pieces together exceed --char-limit or --batch-limit.
        """
        self.check_characters(sum(len(piece.text) for piece in pieces))
        self.check_lines(sum(len(piece.segments) for piece in pieces))
        translated: dict[Pair, Iterator[list[LineResult]]] = {}
        for pair in dict.fromkeys(pairs):
            of_pair = [piece for piece, other in zip(pieces, pairs, strict=True) if other == pair]
            lines = [line for piece in of_pair for line in piece.segments]
            if pair[0] == pair[1]:
                translated[pair] = iter([[reading.unchanged(line)] for line in lines])
                continue
            translated[pair] = iter(await self.pool.translate(key_of(pair), lines))
            self.metrics.count(pair, len(lines), sum(len(piece.text) for piece in of_pair))
        results = []
        for piece, pair in zip(pieces, pairs, strict=True):
            of_lines = [next(translated[pair]) for _ in piece.segments]
            ranks = range(min(map(len, of_lines), default=1))
            by_rank = [[line[rank] for line in of_lines] for rank in ranks]
            length = len(piece.text)
            results.append([await self.threads.run(length, reading.rendered, piece, lines) for lines in by_rank])
            results[-1][0]["quality"] = [line[0]["quality"] for line in of_lines if "quality" in line[0]]
        return results

    def check_characters(self, characters: int) -> None:
        """Raises Refusal if a number of characters exceeds --char-limit."""
        if characters > self.config.char_limit:
            limit = self.config.char_limit
            raise Refusal(413, f"Invalid request: request ({characters}) exceeds text limit ({limit})")

    def check_lines(self, count: int) -> None:
        """Raises Refusal if a number of lines or texts exceeds --batch-limit."""
        if count > self.config.batch_limit:
            raise Refusal(413, f"Invalid request: request ({count}) exceeds batch limit ({self.config.batch_limit})")

    # --- files --------------------------------------------------------------------------------------------------------

    def base_url(self, request: Request) -> str:
        """Returns the public address of this server: --public-url, or else the scheme and the Host of the request."""
        return (self.config.public_url or f"{request.url.scheme}://{request.url.netloc}").rstrip("/")

    async def download_file(self, request: Request) -> Response:
        """Answers with a translated file. The file is an attachment, so browsers do not show it as a page."""
        expiry, extension, data = self.files.get(request.path_params["token"], (0.0, "", b""))
        if expiry < time.monotonic():
            raise Refusal(404, "this file does not exist or has expired")
        headers = {
            "Content-Disposition": f'attachment; filename="translated{extension}"',
            "Content-Security-Policy": "sandbox",
        }
        media_type = "text/plain; charset=utf-8" if extension == ".txt" else "application/octet-stream"
        return Response(data, media_type=media_type, headers=headers)

    def keep_file(self, extension: str, data: bytes) -> str:
        """Keeps a file in memory and returns its token.

        Removes expired files first, and then the oldest files if all files together exceed FILES_BYTES.
        """
        now = time.monotonic()
        self.files = {token: file for token, file in self.files.items() if file[0] > now}
        while self.files and sum(len(file) for _, _, file in self.files.values()) + len(data) > FILES_BYTES:
            del self.files[next(iter(self.files))]
        token = secrets.token_urlsafe(24)
        self.files[token] = now + FILE_SECONDS, extension, data
        return token

    # --- languages ----------------------------------------------------------------------------------------------------

    async def pairs_of(
        self, source: str, target: str, texts: Sequence[str]
    ) -> tuple[list[Pair], list[DetectedLanguage] | None]:
        """Returns the language pair of each text, and if the source is `auto`, the detected language of each text.

        The languages of a pair are equal if the text is in the target language with at least SAME_LANGUAGE percent.

        Codes may differ from the served codes in case, and in `-` or `_`. For example, pt-BR from Weblate selects
        pt_BR. Raises Refusal for languages that are not served.
        """
        target = served_code(target, (target for _, target in self.pool.pairs))
        if source.lower() != "auto":
            pair = served_code(source, (source for source, _ in self.pool.pairs)), target
            self.check_pair(pair)
            return [pair] * len(texts), None
        sources = [source for source, other in self.pool.pairs if other == target]
        if self.detector is None or not sources:
            self.check_pair(("auto", target))

        def detected(text: str) -> DetectedLanguage:
            languages = self.detected([text])
            if languages[0]["language"] == target and languages[0]["confidence"] >= SAME_LANGUAGE:
                return languages[0]
            listed = next((language for language in languages if language["language"] in sources), None)
            return listed or DetectedLanguage(language=sources[0], confidence=0.0)

        languages = await self.threads.run(sum(map(len, texts)), lambda: list(map(detected, texts)))
        return [(language["language"], target) for language in languages], languages

    def check_pair(self, pair: Pair) -> None:
        """Raises Refusal if no served model translates the pair."""
        pairs = self.pool.pairs
        if pair in pairs:
            return
        known = described(pairs)
        if pair[0] == "auto" and self.detector is None:
            raise Refusal(400, f"source auto needs a language detector, which is not installed; served: {known}")
        for code, side in zip(pair, (0, 1), strict=True):
            if code != "auto" and code not in {languages[side] for languages in pairs}:
                raise Refusal(400, f"{code[:40]} is not supported; served: {known}")
        raise Refusal(400, f"{pair[1]} is not available as a target language from {pair[0]}; served: {known}")

    async def detect(self, request: Request, fields: DetectFields) -> Response:
        texts = reading.listed(fields.q)
        return JSONResponse(await self.threads.run(sum(map(len, texts)), self.detected, texts))

    def detected(self, texts: Sequence[str]) -> list[DetectedLanguage]:
        """Detects the common language of `texts`. Returns the languages that the server translates, most likely first.

        Each language has a confidence from 0 to 100. If no language is found, as in texts without letters, the answer
        is the source language of the first pair, with confidence 0, as in LibreTranslate. Raises Refusal 501 if no
        detector is installed.
        """
        detector = self.detector
        if detector is None:
            raise Refusal(501, "no language detector is installed: pip install 'nmtkit[detect]'")
        languages = detector.detect(texts) or [(self.pool.pairs[0][0], 0.0)]
        return [DetectedLanguage(confidence=confidence, language=code) for code, confidence in languages]

    @property
    def detector(self) -> Detector | None:
        return detector_of(frozenset(code for pair in self.pool.pairs for code in pair))

    async def languages(self, request: Request) -> Response:
        codes = sorted({code for pair in self.pool.pairs for code in pair})
        targets: dict[str, list[str]] = {code: [] for code in codes}
        for source, target in self.pool.pairs:
            targets[source].append(target)
        return JSONResponse([Language(code=code, name=name_of(code), targets=targets[code]) for code in codes])

    # --- facts and pages ----------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        ready, models = self.pool.ready, self.pool.models
        facts = {"status": "ok" if ready else "no worker", "engines": {} if models is None else models.facts.engines}
        return JSONResponse(facts, 200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type=self.metrics.MEDIA_TYPE)

    def document(self) -> dict[str, Any]:
        return openapi_document(self.pool.pairs, needs_key=bool(self.keys))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self.document())

    async def docs(self, request: Request) -> Response:
        return web.page(request, web.documentation(self.document(), self.base_url(request)))

    async def index(self, request: Request) -> Response:
        return web.file(request, web.TRANSLATOR)

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in web.STATIC_FILES:
            raise Refusal(404, "Not Found")
        return web.file(request, name)

    async def settings(self, request: Request) -> Response:
        """Answers with the settings that the translator page needs, under LibreTranslate's names."""
        pair = zip(("source", "target"), next(iter(self.pool.pairs), ("", "")), strict=True)
        return JSONResponse(
            {
                "apiKeys": bool(self.keys),
                "keyRequired": bool(self.keys),
                "charLimit": self.config.char_limit,
                "filesTranslation": True,
                "detection": self.detector is not None,
                "supportedFilesFormat": list(reading.EXTENSIONS),
                "suggestions": False,
                "language": {side: {"code": code, "name": name_of(code)} for side, code in pair},
            }
        )


def only_elements(answer: dict[str, list[Any]]) -> dict[str, Any]:
    """Replaces each one-element list of an answer by its element."""
    return {name: values[0] for name, values in answer.items()}


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers a request that matches no route. The answer is an error in the format of LibreTranslate."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, dict(error.headers or {}))
