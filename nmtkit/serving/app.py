"""The HTTP application: the routes of LibreTranslate and of DeepL, the pages, /health and /metrics."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from nmtkit.serving import reading, web
from nmtkit.serving.config import ServeConfig
from nmtkit.serving.content_translator import ContentTranslator
from nmtkit.serving.deepl import DeepL
from nmtkit.serving.deepl_glossaries import DeepLGlossaries
from nmtkit.serving.door import Door, Handler, answer_http_exception
from nmtkit.serving.glossaries import GlossaryStore
from nmtkit.serving.interface import ENDPOINTS, openapi_document
from nmtkit.serving.keys import Keys, Usage
from nmtkit.serving.libretranslate import LibreTranslate
from nmtkit.serving.metrics import Metrics
from nmtkit.serving.pool import Pool
from nmtkit.serving.protocol import UnambiguousRequests
from nmtkit.serving.refusal import Refusal
from nmtkit.text.languages import name_of


class Service:
    """All routes. The workers of `pool` translate, and `keys` are the valid API keys."""

    def __init__(self, config: ServeConfig, pool: Pool, keys: Keys, usage: Usage, glossaries: GlossaryStore) -> None:
        self.config, self.pool = config, pool
        self.metrics = Metrics(pool)
        self.door = Door(config, keys, usage, self.metrics)
        self.translator = ContentTranslator(self.door, pool)
        self.libretranslate = LibreTranslate(self.translator)
        self.deepl = DeepL(self.translator, glossaries)

    def application(self) -> Starlette:
        handlers: dict[str, Callable[..., Awaitable[Response]]] = {
            "/translate": self.libretranslate.translate,
            "/translate_file": self.libretranslate.translate_file,
            "/detect": self.libretranslate.detect,
            "/languages": self.libretranslate.languages,
            "/health": self.health,
            "/metrics": self.show_metrics,
        }
        routes = [
            self.door.route(path, handlers[endpoint.path], endpoint.fields, endpoint.methods)
            for endpoint in ENDPOINTS
            # The path with a slash is a route, not a redirect: a redirect would lose the path prefix of a proxy.
            for path in (endpoint.path, f"{endpoint.path}/")
        ]
        pages: dict[str, Handler] = {
            "/download_file/{token}": self.libretranslate.download_file,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
            "/static/{name}": self.static,
        }
        if not self.config.disable_web_ui:
            pages |= {"/": self.index, "/frontend/settings": self.settings}
        routes += [self.door.route(path, handler) for path, handler in pages.items()]
        routes += [*self.deepl.routes(), *DeepLGlossaries(self.deepl).routes()]
        routes.append(Route("/docs/", lambda request: RedirectResponse("../docs")))
        middleware = [Middleware(UnambiguousRequests)]
        if origins := self.config.cors_origin:
            methods, headers = ["GET", "POST", "PUT", "PATCH", "DELETE"], ["Authorization", "Content-Type"]
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
            )
        errors = {HTTPException: answer_http_exception}
        application = Starlette(routes=routes, middleware=middleware, exception_handlers=errors)
        application.router.redirect_slashes = False
        return application

    @property
    def needs_key(self) -> bool:
        return bool(self.door.keys)

    # --- facts and pages ----------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        ready = self.pool.ready
        facts = {"status": "ok" if ready else "no worker", "engines": self.pool.models.facts.engines}
        return JSONResponse(facts, 200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type=self.metrics.MEDIA_TYPE)

    def document(self) -> dict[str, Any]:
        return openapi_document(self.pool.pairs, self.needs_key)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self.document())

    async def docs(self, request: Request) -> Response:
        return web.answer(request, web.documentation(self.document(), self.libretranslate.base_url(request)).encode())

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
                "apiKeys": self.needs_key,
                "keyRequired": self.needs_key,
                "charLimit": self.config.char_limit,
                "filesTranslation": True,
                "detection": self.translator.detector is not None,
                "supportedFilesFormat": list(reading.EXTENSIONS),
                "suggestions": False,
                "language": {side: {"code": code, "name": name_of(code)} for side, code in pair},
            }
        )
