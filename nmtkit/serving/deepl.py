"""The routes of DeepL's interface for texts, documents, languages and usage."""

import asyncio
import dataclasses
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nmtkit.serving import reading
from nmtkit.serving.config import FORMALITY_TAGS, ModelFacts
from nmtkit.serving.content_translator import FILE_SECONDS, ContentTranslator
from nmtkit.serving.deepl_fields import (
    DocumentKeyFields,
    LanguagesFields,
    NoFields,
    TranslateDocumentFields,
    TranslateTextFields,
    TranslationFields,
)
from nmtkit.serving.door import refusal_of
from nmtkit.serving.fair_queue import BatchKey, Pair
from nmtkit.serving.glossaries import GlossaryStore, Languages
from nmtkit.serving.keys import ApiKey, longest_quota
from nmtkit.serving.languages import code_parts, deepl_code, deepl_target_codes, described, served_code_for_deepl
from nmtkit.serving.libretranslate import download, has_placeholders
from nmtkit.serving.reading import Content, PlainText
from nmtkit.serving.refusal import RETRY, Refusal
from nmtkit.text.documents import ReadOptions, TaggedText, TagRules
from nmtkit.text.languages import name_of

NO_LIMIT = 10**12  # limit of characters that DeepL reports for an account without a limit
UPLOAD_SECONDS = 1.0  # time that an upload waits for the translation, so that short documents need a single poll
POLL_SECONDS = 5  # remaining seconds that the status of an unfinished document reports
MAX_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Upload:
    """An uploaded document. `task` translates and keeps the document, and returns warnings or the error."""

    key: str
    characters: int
    task: "asyncio.Task[Refusal | list[str]]"
    expiry: float  # time of `time.monotonic`


class DeepL:
    """The handlers of DeepL's routes, without the routes of glossaries."""

    def __init__(self, translator: ContentTranslator, glossaries: GlossaryStore) -> None:
        self.translator, self.files, self.glossaries = translator, translator.files, glossaries
        self.door, self.pool, self.threads = translator.door, translator.pool, translator.threads
        self.documents: dict[str, Upload] = {}

    def routes(self) -> list[Route]:
        route = self.door.route
        return [
            route("/v2/translate", self.translate, TranslateTextFields, ["POST"]),
            route("/v2/languages", self.languages, LanguagesFields, ["GET", "POST"]),
            route("/v2/usage", self.usage, NoFields, ["GET", "POST"]),
            route("/v2/document", self.upload, TranslateDocumentFields, ["POST"]),
            route("/v2/document/{id}", self.status, DocumentKeyFields, ["POST"]),
            route("/v2/document/{id}/result", self.result, DocumentKeyFields, ["POST"]),
        ]

    # --- texts --------------------------------------------------------------------------------------------------------

    async def translate(self, request: Request, fields: TranslateTextFields) -> Response:
        texts = reading.listed(fields.text)
        sources = {source for source, _ in self.pool.pairs}
        source, target = self.served_languages(fields)
        contents = await self.threads.run(sum(map(len, texts)), contents_of, texts, target, fields)
        pairs, _ = await self.translator.pairs_of(source, target, contents)
        settings = dataclasses.replace(
            self.settings(request.state.key, fields, pairs),
            html=fields.tag_handling is not None,
            whole=fields.split_sentences == "0",
            placeholders=has_placeholders(texts),
        )
        results = await self.translator.translations(request.state.key, contents, pairs, settings)
        answers = []
        for (language, _), text, (result, *_) in zip(pairs, texts, results, strict=True):
            detected = deepl_code(language, sources)
            answer: dict[str, object] = {"detected_source_language": detected, "text": result["text"]}
            if fields.show_billed_characters:
                answer["billed_characters"] = len(text)
            answers.append(answer)
        return JSONResponse({"translations": answers})

    def served_languages(self, fields: TranslationFields) -> Pair:
        """Returns the served codes of the source and the target language of a request.

        A request without a source language has the source `auto`: the server detects the language. If no detector is
        installed, and only one source language is served for the target, this language is the source.
        Raises Refusal for languages that are not served.
        """
        pairs = self.pool.pairs
        target = served_code_for_deepl(fields.target_lang, (target for _, target in pairs))
        if target is None:
            raise not_served("target_lang", fields.target_lang, pairs)
        sources = [source for source, other in pairs if other == target]
        if fields.source_lang is None:
            return ("auto" if self.translator.detector is not None or len(sources) > 1 else sources[0]), target
        source = served_code_for_deepl(fields.source_lang, sources)
        if source is None:
            raise not_served("source_lang", fields.source_lang, pairs)
        return source, target

    def settings(self, key: ApiKey, fields: TranslationFields, pairs: Sequence[Pair]) -> BatchKey:
        """Returns the settings of a translation without the language pair: formality tag and glossary.

        Raises Refusal if a model does not support a setting, but ignores an unsupported `prefer_more` or `prefer_less`.
        """
        facts, different = self.facts, [pair for pair in dict.fromkeys(pairs) if pair[0] != pair[1]]
        tag = FORMALITY_TAGS.get(fields.formality.removeprefix("prefer_"))
        if tag is not None and not set(different) <= set(facts.with_formality):
            if not fields.formality.startswith("prefer_"):
                raise Refusal(400, "'formality' is not supported for given 'target_lang'")
            tag = None
        settings = BatchKey(tag=tag)
        if fields.glossary_id is None:
            return settings
        if fields.source_lang is None:
            raise Refusal(400, "'source_lang' is required with 'glossary_id'")
        stored = self.glossaries.get(key.account, fields.glossary_id)
        for pair in different:
            if pair not in facts.with_glossary:
                raise Refusal(400, f"this server does not support glossaries from {pair[0]} to {pair[1]}")
            settings = dataclasses.replace(settings, glossary=self.glossaries.path(stored, base_languages(pair)))
        return settings

    # --- documents ----------------------------------------------------------------------------------------------------

    async def upload(self, request: Request, fields: TranslateDocumentFields) -> Response:
        """Begins the translation of a document. The limits and quotas are checked in this request."""
        source, target = self.served_languages(fields)
        file = await self.translator.read_file(fields.file, source, target, fields.filename)
        if fields.output_format is not None and f".{fields.output_format.lower()}" != file.extension:
            raise Refusal(400, f"a {file.extension} file is translated into the same format; leave out output_format")
        settings = self.settings(request.state.key, fields, [file.pair])
        characters = len(file.content.text)
        self.door.usage.check(request.state.key, characters=characters)
        now = time.monotonic()
        self.documents = {id: document for id, document in self.documents.items() if document.expiry > now}
        if len(self.documents) >= MAX_DOCUMENTS:
            raise Refusal(429, "too many documents wait for their download", RETRY)
        id, key = secrets.token_hex(16), secrets.token_hex(32)

        async def translate() -> Refusal | list[str]:
            """Translates the uploaded file, and keeps the result for the download. Returns warnings, or the failure."""
            try:
                async with asyncio.timeout(self.door.config.timeout):
                    data, warnings = await self.translator.translated_file(request.state.key, file, settings)
                self.files.keep(key, file.extension, data)
                return warnings
            except TimeoutError:
                return Refusal(504, f"the translation took longer than {self.door.config.timeout:g} seconds")
            except Exception as error:
                return refusal_of(error, deepl=True)

        task = asyncio.create_task(translate())
        try:
            await asyncio.wait([task], timeout=UPLOAD_SECONDS)
        except asyncio.CancelledError as error:  # the client has not received the id
            task.cancel(*error.args)
            raise
        if task.done() and isinstance(refusal := task.result(), Refusal):
            raise refusal
        self.documents[id] = Upload(key, characters, task, now + self.door.config.timeout + FILE_SECONDS)
        return JSONResponse({"document_id": id, "document_key": key})

    def document(self, request: Request, fields: DocumentKeyFields) -> tuple[str, Upload]:
        """Returns the id of a document, and the document. Raises Refusal 404 if the key of the document is wrong."""
        id = request.path_params["id"]
        document = self.documents.get(id)
        if document is None or not hmac.compare_digest(document.key.encode(), fields.document_key.encode()):
            raise Refusal(404, "this document does not exist")
        return id, document

    async def status(self, request: Request, fields: DocumentKeyFields) -> Response:
        id, document = self.document(request, fields)
        answer: dict[str, object] = {"document_id": id, "status": "translating", "seconds_remaining": POLL_SECONDS}
        if document.task.done():
            result = document.task.result()
            if isinstance(result, Refusal):
                answer = {"document_id": id, "status": "error", "error_message": result.message}
            else:
                answer = {"document_id": id, "status": "done", "billed_characters": document.characters}
                answer |= {"warnings": result} if result else {}
        return JSONResponse(answer)

    async def result(self, request: Request, fields: DocumentKeyFields) -> Response:
        """Answers with the translated document, and removes it: a document can be downloaded only once."""
        id, document = self.document(request, fields)
        if not document.task.done():
            raise Refusal(503, "the document is not translated yet")
        if isinstance(error := document.task.result(), Refusal):
            raise Refusal(404, f"the document has no translation: {error.message}")
        file = self.files.get(document.key)
        self.files.remove(document.key)
        del self.documents[id]
        if file is None:
            raise Refusal(404, "the translation is no longer kept; upload the document again")
        return download(file.extension, file.data)

    # --- languages and usage ------------------------------------------------------------------------------------------

    async def languages(self, request: Request, fields: LanguagesFields) -> Response:
        facts = self.facts
        if fields.type == "source":
            sources = dict.fromkeys(source for source, _ in facts.pairs)
            codes = dict(sorted((deepl_code(code, sources), code) for code in sources))
            return JSONResponse([{"language": shown, "name": name_of(code)} for shown, code in codes.items()])
        targets = dict.fromkeys(target for _, target in facts.pairs)
        formal = {target for _, target in facts.with_formality}
        codes = dict(sorted((shown, code) for code in targets for shown in deepl_target_codes(code, targets)))
        languages = [
            {"language": shown, "name": name_of(code), "supports_formality": code in formal}
            for shown, code in codes.items()
        ]
        return JSONResponse(languages)

    async def usage(self, request: Request, fields: NoFields) -> Response:
        """Answers with the characters used in the longest period that has a quota, and the limit of this period."""
        key: ApiKey = request.state.key
        period, limit = longest_quota(key)
        used = self.door.usage.counts(key)[period].characters
        return JSONResponse({"character_count": used, "character_limit": NO_LIMIT if limit is None else limit})

    @property
    def facts(self) -> ModelFacts:
        return self.pool.models.facts


def not_served(field: str, code: str, pairs: Sequence[Pair]) -> Refusal:
    return Refusal(400, f"Value for '{field}' not supported: {code[:40]}; served: {described(pairs)}")


def base_languages(pair: Pair) -> Languages:
    """Returns the languages of a pair without script and region, because glossaries name languages in this form."""
    return code_parts(pair[0])[0], code_parts(pair[1])[0]


def contents_of(texts: Sequence[str], target: str, fields: TranslateTextFields) -> list[Content]:
    """Returns the content of each text of a request. Called in a thread, because a long text takes time."""
    lists = fields.ignore_tags, fields.splitting_tags, fields.non_splitting_tags
    tags = TagRules(*(frozenset(map(str.lower, names)) for names in lists))
    if fields.tag_handling == "html":
        return [reading.web_page(text, target, tags) for text in texts]
    if fields.tag_handling == "xml":
        options = ReadOptions(target, tags=tags)
        return [TaggedText(text, options, fields.outline_detection) for text in texts]
    return [PlainText(text, by_line=fields.split_sentences == "1") for text in texts]
