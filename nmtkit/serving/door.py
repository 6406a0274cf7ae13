"""The checks of keys, quotas, limits and fields, which all routes of the service share, and the answers to errors."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nmtkit.serving import reading
from nmtkit.serving.config import ServeConfig
from nmtkit.serving.interface import Fields, RequestFields, validated
from nmtkit.serving.keys import ApiKey, Keys, QuotaExceeded, Usage, found
from nmtkit.serving.metrics import Metrics
from nmtkit.serving.refusal import Refusal

CLIENT_CLOSED = 499  # status in the metrics if the client has disconnected; the same number as in nginx
QUOTA_EXCEEDED = 456  # status of DeepL for a quota that does not renew soon
DEEPL_PATHS = ("/v2/", "/v3/")  # beginnings of the paths of DeepL's interface
SCHEMES = ("bearer", "deepl-auth-key")  # schemes of the header Authorization, in lower case

Handler = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger("nmtkit")


class Door:
    """Checks the key, the quotas, the limits and the fields of each request before its handler runs."""

    def __init__(self, config: ServeConfig, keys: Keys, usage: Usage, metrics: Metrics) -> None:
        self.config, self.keys, self.usage, self.metrics = config, keys, usage, metrics
        self.memory, self.threads = reading.BodyMemory(), reading.TextThreads()

    def route(
        self,
        path: str,
        handler: Callable[..., Awaitable[Response]],
        fields: type[RequestFields] | None = None,
        methods: Sequence[str] = ("GET",),
    ) -> Route:
        """Returns a route with a time limit and metrics. Every error becomes an answer.

        `handler` takes the request and, if the route has `fields`, the validated fields. A slash at the end of the path
        does not change the name of the route in the metrics.
        """
        bare = handler if fields is None else self.with_fields(fields, handler)
        name = path.rstrip("/") or path

        async def answer(request: Request) -> Response:
            start = time.monotonic()
            response = await self.answer_or_error(request, bare)
            self.metrics.observe(name, response.status_code, time.monotonic() - start)
            return response

        return Route(path, answer, methods=list(methods))

    async def answer_or_error(self, request: Request, handler: Handler) -> Response:
        try:
            async with asyncio.timeout(self.config.timeout):
                return await handler(request)
        except TimeoutError:
            message = f"the request took longer than {self.config.timeout:g} seconds"
            return error_response(request, 504, message, {"Connection": "close"})
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except Exception as error:
            refusal = refusal_of(error, deepl=is_deepl(request))
            return error_response(request, refusal.status, refusal.message, refusal.headers)

    def with_fields(self, model: type[RequestFields], handler: Callable[..., Awaitable[Response]]) -> Handler:
        """Returns a handler that checks the API key and the fields of a request, and calls `handler` with the fields.

        Stores the key as `request.state.key`. A key in a header or in the query string is checked before the body is
        read. The routes of DeepL's interface accept no key in the body. If the client disconnects, all work for the
        request ends, including work that waits for a thread.
        """

        async def handle(request: Request) -> Response:
            fields = reading.decoded_form(request.url.query.encode(), "query string")
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() in SCHEMES:
                fields["api_key"] = token.strip()
            if has_key := "api_key" in fields or is_deepl(request):
                self.admit(request, model, fields.get("api_key"))

            async def work(body: bytes) -> Response:
                body_fields = await self.threads.run(len(body), reading.body_fields, request.headers, body)
                if not has_key:
                    self.admit(request, model, body_fields.get("api_key"))
                sent = {**fields, **body_fields}
                valid, characters = await self.threads.run(len(body), self.fields, model, sent)
                if "characters" in model.counts:
                    self.usage.check(request.state.key, characters=characters)
                return await handler(request, valid)

            with self.memory.body() as hold:
                body = await reading.body(request, self.config.char_limit, hold)
                return await reading.unless_disconnected(request, work(body))

        return handle

    def fields(self, model: type[Fields], sent: dict[str, Any]) -> tuple[Fields, int]:
        """Returns validated fields, and the number of characters of their texts.

        Raises Refusal for invalid fields and for texts that exceed a limit. The limits are checked first, because the
        validation of a list creates an object for each element.
        """
        texts = model.raw_texts(sent)
        characters = sum(len(text) for text in texts if isinstance(text, str))
        self.check_size(len(texts), characters)
        return validated(model, sent), characters

    def admit(self, request: Request, model: type[RequestFields], sent: Any) -> None:
        """Finds the key of a request and counts the request.

        Raises Refusal if the server needs a key and `sent` is not a valid key, and QuotaExceeded for too many requests.
        """
        key: ApiKey | None = ApiKey()
        if self.keys:
            given = sent.encode("utf-8", "replace") if isinstance(sent, str) else b""
            key = found(self.keys, given)
            if key is None:
                raise Refusal(403, "Invalid API key" if given else "this server needs an API key")
        request.state.key = key
        if "requests" in model.counts:
            self.usage.count(request.state.key, requests=1)

    def check_size(self, lines: int, characters: int) -> None:
        """Raises Refusal 413 if a request exceeds --batch-limit or --char-limit."""
        limits = ("text", characters, self.config.char_limit), ("batch", lines, self.config.batch_limit)
        for name, count, limit in limits:
            if count > limit:
                raise Refusal(413, f"Invalid request: request ({count}) exceeds {name} limit ({limit})")


def refusal_of(error: Exception, *, deepl: bool) -> Refusal:
    """Returns the HTTP answer to a request that raised `error`. Logs an error that is a fault of this program.

    With `deepl`, the request used DeepL's interface. Clients of DeepL repeat a request after status 429. So they get
    status 429 only if a quota per minute is used up, and status 456 for a quota per day or month.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QuotaExceeded):
        if error.is_too_large:
            return Refusal(413, str(error))
        status = QUOTA_EXCEEDED if deepl and error.period != "minute" else 429
        return Refusal(status, str(error), {"Retry-After": str(error.seconds)})
    logger.error("a request failed:\n%s", "".join(traceback.format_exception(error)))
    return Refusal(500, "internal error")


def is_deepl(request: Request) -> bool:
    return request.url.path.startswith(DEEPL_PATHS)


def error_response(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Returns an error in the format of LibreTranslate, or of DeepL for a path of DeepL's interface."""
    return JSONResponse({"message" if is_deepl(request) else "error": message}, status, headers)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers a request that matches no route."""
    assert isinstance(error, HTTPException)
    return error_response(request, error.status_code, error.detail, dict(error.headers or {}))
