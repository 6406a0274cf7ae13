"""The routes of LibreTranslate's interface."""

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nmtkit.serving import reading
from nmtkit.serving.config import WEBLATE_PLACEHOLDER
from nmtkit.serving.content_translator import ContentTranslator
from nmtkit.serving.fair_queue import BatchKey
from nmtkit.serving.interface import DetectFields, Language, TranslatedFile, TranslateFields, TranslateFileFields
from nmtkit.serving.reading import Content, PlainText
from nmtkit.serving.refusal import Refusal
from nmtkit.text.languages import name_of
from nmtkit.text.normalization import normalized

NO_STORE = {"Cache-Control": "no-store"}


class LibreTranslate:
    """The handlers of LibreTranslate's routes."""

    def __init__(self, translator: ContentTranslator) -> None:
        self.translator, self.files = translator, translator.files
        self.config, self.threads = translator.door.config, translator.threads

    async def translate(self, request: Request, fields: TranslateFields) -> Response:
        is_html = fields.format == "html"
        if fields.alignment and is_html:
            raise Refusal(400, "Invalid request: alignment is not available with format html")
        texts = reading.listed(fields.q)
        target = self.translator.served_target(fields.target)

        def content_of(text: str) -> Content:
            if is_html:
                return reading.web_page(text, target)
            return PlainText(normalized(text) if fields.alignment else text)

        # `content_of` and `has_placeholders` run in a thread, because they take time for a long text
        length = sum(map(len, texts))
        pieces = await self.threads.run(length, lambda: list(map(content_of, texts)))
        placeholders = await self.threads.run(length, has_placeholders, texts)
        pairs, detected = await self.translator.pairs_of(fields.source, target, pieces)
        settings = BatchKey(
            alternatives=fields.alternatives,
            html=is_html,
            alignment=fields.alignment,
            quality=fields.quality,
            placeholders=placeholders,
        )
        results = await self.translator.translations(request.state.key, pieces, pairs, settings)
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
        if isinstance(fields.q, str):  # the answer to a single text has no lists
            return JSONResponse({name: values[0] for name, values in answer.items()})
        return JSONResponse(answer)

    async def translate_file(self, request: Request, fields: TranslateFileFields) -> Response:
        file = await self.translator.read_file(fields.file, fields.source, fields.target)
        token = secrets.token_urlsafe(24)
        data, warnings = await self.translator.translated_file(request.state.key, file, BatchKey())
        self.files.keep(token, file.extension, data)
        answer = TranslatedFile(translatedFileUrl=f"{self.base_url(request)}/download_file/{token}")
        if warnings:
            answer["warnings"] = warnings
        return JSONResponse(answer, headers=NO_STORE)

    def base_url(self, request: Request) -> str:
        """Returns the public address of this server: --public-url, or else the scheme and the Host of the request."""
        return (self.config.public_url or f"{request.url.scheme}://{request.url.netloc}").rstrip("/")

    async def download_file(self, request: Request) -> Response:
        """Answers with a translated file. The file is an attachment, so browsers do not show it as a page."""
        file = self.files.get(request.path_params["token"])
        if file is None:
            raise Refusal(404, "this file does not exist or has expired")
        return download(file.extension, file.data)

    async def detect(self, request: Request, fields: DetectFields) -> Response:
        texts = reading.listed(fields.q)
        return JSONResponse(await self.threads.run(sum(map(len, texts)), self.translator.detected, texts))

    async def languages(self, request: Request) -> Response:
        pairs = self.translator.pool.pairs
        codes = sorted({code for pair in pairs for code in pair})
        targets: dict[str, list[str]] = {code: [] for code in codes}
        for source, target in pairs:
            targets[source].append(target)
        return JSONResponse([Language(code=code, name=name_of(code), targets=targets[code]) for code in codes])


def has_placeholders(texts: Sequence[str]) -> bool:
    """Returns whether any text has placeholders of Weblate."""
    return any(map(WEBLATE_PLACEHOLDER.search, texts))


def download(extension: str, data: bytes) -> Response:
    headers = {"Content-Security-Policy": "sandbox"}
    headers["Content-Disposition"] = f'attachment; filename="translated{extension}"'
    media_type = "text/plain; charset=utf-8" if extension == ".txt" else "application/octet-stream"
    return Response(data, media_type=media_type, headers=headers)
