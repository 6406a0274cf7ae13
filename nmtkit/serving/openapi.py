"""The OpenAPI document of the service, and a page that shows it without asking any other server for anything."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import nmtkit

Json = dict[str, Any]


def document(pairs: Sequence[tuple[str, str]], needs_key: bool) -> Json:
    """Returns the OpenAPI 3.1 document."""
    sources, targets = sorted({source for source, _ in pairs}), sorted({target for _, target in pairs})
    key: Json = {"api_key": _text("one of the server's keys")}
    languages: Json = {
        "source": _text("language of the text", enum=sources),
        "target": _text("language to translate to", enum=targets),
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
        **key,
    }
    links = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    required = ["api_key"] if needs_key else []
    upload = {"file": {"type": "string", "format": "binary", "description": "plain text, .txt"}, **languages, **key}
    paths = {
        "/translate": {"post": _operation(
            "Translate text", {"translatedText": q, "alternatives": {"type": "array"}, "alignment": links},
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


STYLE = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }
body { max-width: 48rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } code, pre { font-family: ui-monospace, monospace }
pre { overflow-x: auto; padding: .8rem; border: 1px solid #8886; border-radius: .4rem }
table { border-collapse: collapse; width: 100% } td { padding: .2rem .8rem .2rem 0; vertical-align: top }
"""


def page(contents: Json) -> str:
    """Returns the document as a web page."""
    rows = []
    for path, operations in contents["paths"].items():
        for method, operation in operations.items():
            rows.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>")
            types = operation.get("requestBody", {}).get("content", {})
            if types:
                schema = next(iter(types.values()))["schema"]
                fields = "".join(
                    f"<tr><td><code>{escape(name)}</code>{' *' if name in schema['required'] else ''}"
                    f"<td>{escape(value.get('description', ''))}<td>{escape(', '.join(value.get('enum', [])))}"
                    for name, value in schema["properties"].items()
                )
                rows.append(f"<p>As {escape(' or '.join(types))}; * must be given:</p><table>{fields}</table>")
    pair = contents["paths"]["/translate"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    example = {
        "q": "…",
        "source": next(iter(pair["source"]["enum"]), ""),
        "target": next(iter(pair["target"]["enum"]), ""),
    }
    body = json.dumps(example, ensure_ascii=False)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>nmtkit: interface</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>nmtkit</h1>'
        '<p>LibreTranslate’s interface; <a href="openapi.json">openapi.json</a> describes it for programs.'
        f"</p><pre>curl …/translate -H 'Content-Type: application/json' -d '{escape(body)}'</pre>"
        f"{''.join(rows)}</body></html>"
    )
