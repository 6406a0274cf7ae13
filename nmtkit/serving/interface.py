"""The HTTP interface as data: routes, fields of requests, fields of answers, error statuses.

The server validates requests with these models, and generates the OpenAPI document from them. FastAPI is not used,
because FastAPI accepts a single encoding per route, and reads the body of a request before any check. Clients of
LibreTranslate send JSON, forms, multipart forms or query strings to the same route. The server must check the API key
before it reads the body.
Errors have the form `{"error": "…"}`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic rejects typing.TypedDict before Python 3.12

import nmtkit
from nmtkit.serving.fair_queue import Pair
from nmtkit.serving.reading import EXTENSIONS, listed
from nmtkit.serving.refusal import Refusal
from nmtkit.text.normalization import check_characters
from nmtkit.text.quality import Quality

EXAMPLE_URL = "http://localhost:5000"  # address in example answers; the page /docs shows the real address
MAX_ALTERNATIVES = 10
MAX_CODE = 100  # maximum letters of a language code

Json = dict[str, Any]
Fields = TypeVar("Fields", bound="RequestFields")


class RequestFields(BaseModel):
    """Fields of a request. Unknown fields are ignored, as in LibreTranslate."""

    model_config = ConfigDict(frozen=True)
    texts_field: ClassVar[str] = "q"  # name of the field with a text or a list of texts; the field may be empty
    counts: ClassVar[tuple[str, ...]] = ("requests", "characters")  # units that count for the quotas of the key

    api_key: Annotated[Any, Field(json_schema_extra={"type": "string"})] = Field(
        None, description="an API key of this server; clients may send the header `Authorization: Bearer KEY` instead"
    )

    @classmethod
    def raw_texts(cls, sent: Mapping[str, Any]) -> list[Any]:
        """Returns the texts of a request that is not validated yet. An element may have any type."""
        return listed(sent.get(cls.texts_field))


def _encodable(text: str) -> str:
    """Returns the text. Raises ValueError for half of a surrogate pair, which is valid in JSON but not in UTF-8."""
    check_characters(text, "it")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TextList = Annotated[list[Text], Field(fail_fast=True)]
TextOrTexts = Annotated[Text | TextList, Field(description="a text, or a list of texts")]
Code = Annotated[Text, Field(max_length=MAX_CODE)]
Source = Annotated[Code, Field(description="source language; `auto` detects it if `nmtkit[detect]` is installed")]
Target = Annotated[Code, Field(description="language of the translation")]


class DetectFields(RequestFields):
    counts = ("requests",)

    q: TextOrTexts


class TranslateFields(RequestFields):
    q: TextOrTexts
    source: Source
    target: Target
    format: Literal["text", "html"] = Field("text", description="format of the text")
    alternatives: int = Field(0, ge=0, le=MAX_ALTERNATIVES, description="number of alternative translations")
    alignment: bool = Field(False, description="also return links between words; not available with format `html`")
    quality: bool = Field(False, description="also return the model's confidence in each line")


class TranslateFileFields(RequestFields):
    file: Annotated[Any, Field(json_schema_extra={"type": "string", "format": "binary"})] = Field(
        description=f"a document: {', '.join(EXTENSIONS)}"
    )
    source: Source
    target: Target


# --- answers ----------------------------------------------------------------------------------------------------------

AlignmentLink = Annotated[list[int], Field(min_length=4, max_length=4)]
AlignmentLinks = Annotated[
    list[AlignmentLink],
    Field(
        description="links between words: start and end in the text, then start and end in the translation, as "
        "offsets in code points after Unicode normalization (NFC)"
    ),
]


class DetectedLanguage(TypedDict):
    confidence: Annotated[float, Field(description="percent")]
    language: str


class Translated(TypedDict):
    """If `q` is a list, every field is a list with one element for each text."""

    translatedText: str | list[str]  # LibreTranslate defines the names of these fields
    alternatives: NotRequired[list[str] | list[list[str]]]
    detectedLanguage: NotRequired[DetectedLanguage | list[DetectedLanguage]]
    alignment: NotRequired[AlignmentLinks | list[AlignmentLinks]]
    alternativesAlignment: NotRequired[list[AlignmentLinks] | list[list[AlignmentLinks]]]
    quality: NotRequired[Annotated[list[Quality] | list[list[Quality]], Field(description="one element per line")]]


class TranslatedFile(TypedDict):
    translatedFileUrl: Annotated[str, Field(description="address of the translated file, valid for ten minutes")]
    warnings: NotRequired[
        Annotated[list[str], Field(description="for example, that the languages in the file differ from the request")]
    ]


class Language(TypedDict):
    code: str
    name: str
    targets: Annotated[list[str], Field(description="target languages for this source language")]


class Health(TypedDict):
    status: Annotated[str, Field(description="`ok`, or `no worker` with status 503")]
    engines: Annotated[
        dict[str, str],
        Field(
            description="engine of each language pair; if PyTorch replaces the engine, the reason follows in "
            "parentheses; if the two steps of --pivot have different engines, the form is `A, then B`"
        ),
    ]


class Failure(TypedDict):
    error: Annotated[str, Field(description="the reason")]


# --- routes -----------------------------------------------------------------------------------------------------------

STATUSES = {
    400: "a field is missing or invalid, or a language is not served; `error` says which",
    403: "the API key is missing or wrong",
    413: "the request exceeds --char-limit or --batch-limit, or is larger than a whole quota of the key",
    415: "the body is compressed, or it is neither JSON nor a form",
    429: "too many lines wait, too many large bodies are in memory, or a quota of the key is exceeded; try again after "
    "`Retry-After` seconds",
    500: "a line of the text cannot be translated",
    501: "no language detector is installed",
    503: "no worker is running",
    504: "the request took longer than --timeout",
}
JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_OF_TRANSLATION = (400, 403, 413, 415, 429, 500, 504)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A documented route. `fields` is the model of requests. `answer` is the type of the JSON, or None for plain text.

    `example` holds the fields of an example request. A served pair replaces the languages in `source` and `target`.
    """

    path: str
    methods: tuple[Literal["GET", "POST"], ...] = ("GET",)
    summary: str
    answer: Any
    answer_example: Any
    fields: type[RequestFields] | None = None
    example: Mapping[str, str] = field(default_factory=dict)
    media_types: tuple[str, ...] = (JSON, FORM)
    statuses: tuple[int, ...] = ()


ENDPOINTS = (
    Endpoint(
        path="/translate",
        methods=("POST",),
        summary="Translate text",
        fields=TranslateFields,
        example={"q": "Hello!", "source": "en", "target": "de"},
        answer=Translated,
        answer_example={"translatedText": "Hallo!"},
        statuses=_OF_TRANSLATION,
    ),
    Endpoint(
        path="/translate_file",
        methods=("POST",),
        summary="Translate a document",
        fields=TranslateFileFields,
        example={"file": "@subtitles.srt", "source": "en", "target": "de"},
        media_types=(MULTIPART,),
        answer=TranslatedFile,
        answer_example={"translatedFileUrl": f"{EXAMPLE_URL}/download_file/bMYp0TzVq1k"},
        statuses=_OF_TRANSLATION,
    ),
    Endpoint(
        path="/detect",
        methods=("POST",),
        summary="Detect the language of a text",
        fields=DetectFields,
        example={"q": "Hello!"},
        answer=list[DetectedLanguage],
        answer_example=[{"confidence": 97.0, "language": "en"}],
        statuses=(400, 403, 413, 415, 429, 501, 504),
    ),
    Endpoint(
        path="/languages",
        methods=("GET", "POST"),
        summary="List the languages, each with its target languages",
        answer=list[Language],
        answer_example=[{"code": "en", "name": "English", "targets": ["de"]}],
    ),
    Endpoint(
        path="/health",
        summary="Tell whether the server can translate",
        answer=Health,
        answer_example={"status": "ok", "engines": {"en-de": "numba"}},
        statuses=(503,),
    ),
    Endpoint(
        path="/metrics",
        summary="Report requests, latencies, lines, queue and workers to Prometheus",
        answer=None,
        answer_example="nmtkit_workers 2.0",
    ),
)


def validated(model: type[Fields], fields: dict[str, Any]) -> Fields:
    """Returns an instance of `model` with the fields of a request. Raises Refusal with the first error.

    A field that is null or empty counts as missing, but the texts may be empty.
    """
    known = {name: fields[name] for name in model.model_fields if name in fields}
    texts = model.texts_field
    sent = {name: value for name, value in known.items() if value is not None and (value != "" or name == texts)}
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        raise Refusal(400, f"Invalid request: {_message(error)}") from None


def _message(error: ValidationError) -> str:
    """Returns the message of the first error, in the words of LibreTranslate if LibreTranslate has this error."""
    first = error.errors(include_url=False, include_input=False)[0]
    name, kind, reason = first["loc"][0], first["type"], first["msg"]
    if kind == "missing":
        return f"missing {name} parameter"
    if kind == "value_error":
        return f"{name} parameter: {reason.removeprefix('Value error, ')}"
    if name in ("q", "text"):
        return f"{name} parameter is not a string or a list of strings"
    return f"{name} parameter: {reason[:1].lower()}{reason[1:]}"


# --- the OpenAPI document ---------------------------------------------------------------------------------------------


def openapi_document(pairs: Sequence[Pair], needs_key: bool) -> Json:
    """Returns the OpenAPI 3.1 document of a server for these language pairs."""
    definitions: Json = {}
    paths: Json = {}
    for endpoint in ENDPOINTS:
        operation: Json = {"summary": endpoint.summary, "responses": _responses(endpoint, definitions)}
        if endpoint.fields is not None:
            schema = _fields_schema(endpoint, pairs, needs_key, definitions)
            content = {media_type: {"schema": schema} for media_type in endpoint.media_types}
            operation["requestBody"] = {"required": True, "content": content}
        paths[endpoint.path] = {method.lower(): operation for method in endpoint.methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nmtkit", "version": nmtkit.__version__, "description": "Machine translation."},
        "paths": paths,
        "components": {"schemas": definitions},
    }


def _fields_schema(endpoint: Endpoint, pairs: Sequence[Pair], needs_key: bool, definitions: Json) -> Json:
    """Returns the JSON schema of a request. The language fields allow only the languages of `pairs`."""
    schema = _schema(endpoint.fields, definitions)
    properties, example = schema["properties"], dict(endpoint.example)
    for side, name in enumerate(("source", "target")):
        if name in properties and pairs:
            codes = sorted({pair[side] for pair in pairs})
            properties[name]["enum"] = [*codes, "auto"] if name == "source" else codes
            example[name] = pairs[0][side]
    key = properties.pop("api_key")
    if needs_key:
        properties["api_key"] = key
        schema["required"].append("api_key")
        example["api_key"] = "KEY"
    return {**schema, "examples": [example]}


def _responses(endpoint: Endpoint, definitions: Json) -> Json:
    if endpoint.answer is None:
        content: Json = {"text/plain": {"example": endpoint.answer_example}}
    else:
        content = {JSON: {"schema": _schema(endpoint.answer, definitions), "example": endpoint.answer_example}}
    failure = {JSON: {"schema": _schema(Failure, definitions)}}
    failures = {str(status): {"description": STATUSES[status], "content": failure} for status in endpoint.statuses}
    return {"200": {"description": "success", "content": content}, **failures}


def _schema(type: Any, definitions: Json) -> Json:
    """Returns the JSON schema of a type. Adds the referenced schemas to `definitions`."""
    schema = TypeAdapter(type).json_schema(ref_template="#/components/schemas/{model}")
    definitions |= schema.pop("$defs", {})
    return schema
