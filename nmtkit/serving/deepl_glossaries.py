"""The routes of DeepL's interface for glossaries. A glossary has one language pair in /v2, and several in /v3."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nmtkit.serving.deepl import DeepL, base_languages
from nmtkit.serving.deepl_fields import (
    DictionaryFields,
    GlossaryFields,
    LanguagePairFields,
    MultilingualGlossaryFields,
    NoFields,
    ReplaceDictionaryFields,
)
from nmtkit.serving.glossaries import Languages, StoredGlossary, Terms, read_terms
from nmtkit.serving.refusal import Refusal

TSV = "text/tab-separated-values; charset=utf-8"


class DeepLGlossaries:
    """The handlers of DeepL's routes of glossaries. Each account sees its own glossaries only."""

    def __init__(self, deepl: DeepL) -> None:
        self.deepl, self.store, self.door = deepl, deepl.glossaries, deepl.door

    def routes(self) -> list[Route]:
        route, one = self.door.route, "/v3/glossaries/{id}"
        return [
            route("/v2/glossary-language-pairs", self.language_pairs, NoFields),
            route("/v2/glossaries", self.list_single, NoFields),
            route("/v2/glossaries", self.create_single, GlossaryFields, ["POST"]),
            route("/v2/glossaries/{id}", self.show_single, NoFields),
            route("/v2/glossaries/{id}", self.delete_single, NoFields, ["DELETE"]),
            route("/v2/glossaries/{id}/entries", self.entries_single, NoFields),
            route("/v3/glossaries", self.list_all, NoFields),
            route("/v3/glossaries", self.create, MultilingualGlossaryFields, ["POST"]),
            route(one, self.show, NoFields),
            route(one, self.change, MultilingualGlossaryFields, ["PATCH"]),
            route(one, self.delete, NoFields, ["DELETE"]),
            route(f"{one}/entries", self.entries, LanguagePairFields),
            route(f"{one}/dictionaries", self.replace_dictionary, ReplaceDictionaryFields, ["PUT"]),
            route(f"{one}/dictionaries", self.delete_dictionary, LanguagePairFields, ["DELETE"]),
        ]

    def account_and_id(self, request: Request) -> tuple[str, str]:
        return request.state.key.account, request.path_params["id"]

    def stored(self, request: Request) -> StoredGlossary:
        return self.store.get(*self.account_and_id(request))

    async def terms(self, dictionaries: Iterable[DictionaryFields]) -> dict[Languages, Terms]:
        """Returns the terms of each language pair in a request. Raises Refusal for a wrong pair or term."""
        served = {base_languages(pair) for pair in self.deepl.facts.with_glossary}
        result: dict[Languages, Terms] = {}
        for fields in dictionaries:
            languages = base_languages((fields.source_lang, fields.target_lang))
            if languages not in served:
                raise Refusal(400, f"this server does not support glossaries from {languages[0]} to {languages[1]}")
            if languages in result:
                raise Refusal(400, f"the glossary has two dictionaries from {languages[0]} to {languages[1]}")
            entries, threads = fields.entries, self.door.threads
            result[languages] = await threads.run(len(entries), read_terms, entries, fields.entries_format)
        return result

    async def created(self, request: Request, name: str, dictionaries: Iterable[DictionaryFields]) -> StoredGlossary:
        terms = await self.terms(dictionaries)
        return await self.store.write(self.store.create, request.state.key.account, name=name, dictionaries=terms)

    async def language_pairs(self, request: Request, fields: NoFields) -> Response:
        pairs = sorted({base_languages(pair) for pair in self.deepl.facts.with_glossary})
        return JSONResponse({"supported_languages": [language_fields(pair) for pair in pairs]})

    async def delete(self, request: Request, fields: NoFields) -> Response:
        await self.store.write(self.store.delete, *self.account_and_id(request))
        return Response(status_code=204)

    # --- one language pair --------------------------------------------------------------------------------------------

    def single(self, request: Request) -> tuple[StoredGlossary, Languages]:
        """Returns a glossary and its only language pair. Raises Refusal 404 unless the glossary has a single pair."""
        stored = self.stored(request)
        if len(stored.counts) != 1:
            raise Refusal(404, "this glossary does not have exactly one language pair; use /v3/glossaries")
        return stored, next(iter(stored.counts))

    async def list_single(self, request: Request, fields: NoFields) -> Response:
        stored = self.store.listed(request.state.key.account)
        return JSONResponse({"glossaries": [single_facts(each) for each in stored if len(each.counts) == 1]})

    async def create_single(self, request: Request, fields: GlossaryFields) -> Response:
        return JSONResponse(single_facts(await self.created(request, fields.name, [fields])), 201)

    async def show_single(self, request: Request, fields: NoFields) -> Response:
        return JSONResponse(single_facts(self.single(request)[0]))

    async def delete_single(self, request: Request, fields: NoFields) -> Response:
        self.single(request)
        return await self.delete(request, fields)

    async def entries_single(self, request: Request, fields: NoFields) -> Response:
        return Response(self.store.terms(*self.single(request)), media_type=TSV)

    # --- several language pairs ---------------------------------------------------------------------------------------

    async def list_all(self, request: Request, fields: NoFields) -> Response:
        stored = self.store.listed(request.state.key.account)
        return JSONResponse({"glossaries": [facts(each) for each in stored]})

    async def create(self, request: Request, fields: MultilingualGlossaryFields) -> Response:
        if fields.name is None or not fields.dictionaries:
            raise Refusal(400, "a new glossary needs a name and dictionaries")
        return JSONResponse(facts(await self.created(request, fields.name, fields.dictionaries)), 201)

    async def show(self, request: Request, fields: NoFields) -> Response:
        return JSONResponse(facts(self.stored(request)))

    async def change(self, request: Request, fields: MultilingualGlossaryFields) -> Response:
        """Changes the name, and adds terms to the dictionaries."""
        terms, limit = await self.terms(fields.dictionaries), self.door.config.char_limit
        stored = await self.store.write(self.store.change, *self.account_and_id(request), terms, limit, fields.name)
        return JSONResponse(facts(stored))

    async def replace_dictionary(self, request: Request, fields: ReplaceDictionaryFields) -> Response:
        terms = await self.terms([fields])
        stored = await self.store.write(self.store.change, *self.account_and_id(request), terms, None)
        (languages,) = terms
        return JSONResponse({**language_fields(languages), "entry_count": stored.counts[languages]})

    async def delete_dictionary(self, request: Request, fields: LanguagePairFields) -> Response:
        languages = base_languages((fields.source_lang, fields.target_lang))
        await self.store.write(self.store.remove, *self.account_and_id(request), languages)
        return Response(status_code=204)

    async def entries(self, request: Request, fields: LanguagePairFields) -> Response:
        languages = base_languages((fields.source_lang, fields.target_lang))
        terms = {"entries": self.store.terms(self.stored(request), languages), "entries_format": "tsv"}
        return JSONResponse({"dictionaries": [{**language_fields(languages), **terms}]})


def language_fields(languages: Languages) -> dict[str, Any]:
    return dict(zip(("source_lang", "target_lang"), languages, strict=True))


def single_facts(stored: StoredGlossary) -> dict[str, Any]:
    result = facts(stored)
    (dictionary,) = result.pop("dictionaries")
    return {**result, "ready": True, **dictionary}


def facts(stored: StoredGlossary) -> dict[str, Any]:
    return {
        "glossary_id": stored.id,
        "name": stored.name,
        "creation_time": stored.creation_time,
        "dictionaries": [{**language_fields(pair), "entry_count": count} for pair, count in stored.counts.items()],
    }
