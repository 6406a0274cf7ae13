"""The OpenAPI document of the service, and a page that shows it without asking any other server for anything."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import nmtkit
from nmtkit.pages import document as pages
from nmtkit.serving.contents import FILES

Json = dict[str, Any]


def document(pairs: Sequence[tuple[str, str]], needs_key: bool, detects: bool) -> Json:
    """Returns the OpenAPI 3.1 document."""
    sources, targets = sorted({source for source, _ in pairs}), sorted({target for _, target in pairs})
    example = next(iter(pairs), ("", ""))
    key: Json = {"api_key": _text("one of the server's keys")}
    languages: Json = {
        "source": _text("language of the text", enum=sources, example=example[0]),
        "target": _text("language to translate to", enum=targets, example=example[1]),
    }
    q = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "description": "text, or texts"}
    translation = {
        "q": q,
        **languages,
        "format": _text("format of the text", enum=["text", "html"]),
        "alternatives": {"type": "integer", "minimum": 0, "maximum": 10, "description": "further translations"},
        "alignment": {
            "type": "boolean",
            "description": "also links of words: start, end in the text, start, end in its translation; in characters",
        },
        "quality": {
            "type": "boolean",
            "description": "also, for each line of a text that is not empty, how sure the model is of its translation",
        },
        **key,
    }
    links = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    required = ["api_key"] if needs_key else []
    upload = {"file": {"type": "string", "format": "binary", "description": ", ".join(FILES)}, **languages, **key}
    paths = {
        "/translate": {"post": _operation(
            "Translate text", {"translatedText": q, "alternatives": {"type": "array"}, "alignment": links,
             "quality": {"type": "array", "items": _quality()}},
            _body(translation, ["q", "source", "target", *required], "application/json",
                  "application/x-www-form-urlencoded"))},
        "/translate_file": {"post": _operation(
            "Translate a file", {"translatedFileUrl": _text("where the translation can be fetched for ten minutes")},
            _body(upload, ["file", "source", "target", *required], "multipart/form-data"))},
        "/detect": {"post": _operation(
            "Tell the language of a text; 501 where no detector is installed", {},
            _body({"q": _text("text"), **key}, ["q", *required], "application/json"))},
        "/languages": {"get": _operation("Languages and what they can be translated to", {})},
        "/health": {"get": _operation("Whether the server can translate", {"status": _text("ok")})},
        "/metrics": {"get": _operation("Figures for Prometheus", None)},
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "nmtkit", "version": nmtkit.__version__, "description": "Translation by own models."},
        "paths": paths,
    }


def _quality() -> Json:
    """Returns the schema of the quality of a line."""
    numbers = ("score", "mean_probability", "min_probability", "length_ratio", "copied")
    flags: Json = {"type": "array", "items": {"enum": ["uncertain", "too_short", "too_long", "copied"]}}
    return {"type": "object", "properties": {**{name: {"type": "number"} for name in numbers}, "flags": flags}}


def _text(description: str, **more: Any) -> Json:
    return {"type": "string", "description": description, **more}


def _body(properties: Json, required: list[str], *types: str) -> Json:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"required": True, "content": {type: {"schema": schema} for type in types}}


def _operation(summary: str, answer: Json | None, body: Json | None = None) -> Json:
    schema = {"type": "object", "properties": answer}
    content = {"text/plain": {}} if answer is None else {"application/json": {"schema": schema}}
    wrong = {"application/json": {"schema": {"type": "object", "properties": {"error": _text("what is wrong")}}}}
    responses: Json = {"200": {"description": "the answer", "content": content}}
    if body is not None:
        for status, meaning in (
            ("400", "invalid request"), ("403", "no valid API key"), ("413", "too large"),
            ("429", "too much waits: try again after Retry-After seconds"), ("504", "it took too long"),
        ):  # fmt: skip
            responses[status] = {"description": meaning, "content": wrong}
    return {"summary": summary, "responses": responses, **({"requestBody": body} if body else {})}


def page(contents: Json) -> str:
    """Returns the document as a web page, whose style sheet the server has."""
    sections = []
    for path, operations in contents["paths"].items():
        for method, operation in operations.items():
            sections.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>"
            )
            types = operation.get("requestBody", {}).get("content", {})
            if types:
                schema = next(iter(types.values()))["schema"]
                rows = [_field(name, value, name in schema["required"]) for name, value in schema["properties"].items()]
                sections.append(f'<p class="soft">As {escape(" or ".join(types))}:</p>')
                sections.append(pages.table(["field", "", "meaning", "values"], rows))
    fields = contents["paths"]["/translate"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "properties"
    ]
    languages = {name: fields[name]["example"] for name in ("source", "target")}
    body = json.dumps({"q": "…", **languages}, ensure_ascii=False)
    return pages.document(
        "nmtkit: interface",
        '<p class="lead">LibreTranslate’s interface. <a href="openapi.json">openapi.json</a> is for programs.</p>',
        f"<pre>curl …/translate -H 'Content-Type: application/json' -d '{escape(body)}'</pre>",
        *sections,
        linked=True,
    )


def _field(name: str, value: Json, required: bool) -> tuple[str, str, str, str]:
    values = ", ".join(value.get("enum", []))
    return pages.Html(f"<code>{escape(name)}</code>"), "required" * required, value.get("description", ""), values
