"""The OpenAPI document of the service, generated from `interface`, as JSON and as a web page."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

import nmtkit
from nmtkit.pages.document import render
from nmtkit.serving.fair_queue import Pair
from nmtkit.serving.interface import ENDPOINTS, JSON, MULTIPART, STATUSES, Endpoint, Failure

Json = dict[str, Any]


def document(pairs: Sequence[Pair], needs_key: bool) -> Json:
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


# --- the page ---------------------------------------------------------------------------------------------------------


def page(contents: Json, base_url: str) -> str:
    """Returns the HTML of the web page that documents the service for its users.

    Each path of `contents`, the OpenAPI document of the service, has a section with the fields of the request, an
    example of the answer, the errors, and a curl command. `base_url` is the address of the service in the commands.
    """
    routes = [
        {
            "path": path,
            "methods": [method.upper() for method in operations],
            "summary": operation["summary"],
            "command": command(f"{base_url}{path}", operation.get("requestBody")),
            "fields": _field_rows(operation.get("requestBody")),
            "media_types": list(operation.get("requestBody", {}).get("content", ())),
            "answer": _shown(next(iter(operation["responses"]["200"]["content"].values()))["example"]),
            "errors": [(status, each["description"]) for status, each in operation["responses"].items()][1:],
        }
        for path, operations in contents["paths"].items()
        for operation in [next(iter(operations.values()))]
    ]
    return render("interface.html", routes=routes, version=contents["info"]["version"])


def command(url: str, body: Json | None) -> str:
    """Returns a curl command that sends the example of `body`, a `requestBody` of OpenAPI, or no body for None."""
    words = [shlex.quote(url)]
    if body is not None:
        media_type, content = next(iter(body["content"].items()))
        example = content["schema"]["examples"][0]
        if media_type == MULTIPART:
            words += [f"-F {shlex.quote(f'{name}={value}')}" for name, value in example.items()]
        else:
            words.append(f"-H {shlex.quote(f'Content-Type: {media_type}')}")
            words.append(f"-d {shlex.quote(json.dumps(example, ensure_ascii=False))}")
    return " \\\n  ".join([f"curl {words[0]}", *words[1:]])


def _field_rows(body: Json | None) -> list[Json]:
    if body is None:
        return []
    schema = next(iter(body["content"].values()))["schema"]
    return [
        {"name": name, "required": name in schema["required"], "about": field["description"], "values": _values(field)}
        for name, field in schema["properties"].items()
    ]


def _values(field: Json) -> str:
    """Describes the allowed values of a field in words."""
    if "enum" in field:
        return ", ".join(field["enum"])
    if "minimum" in field:
        return f"{field['minimum']} to {field['maximum']}"
    return "true, false" if field.get("type") == "boolean" else ""


def _shown(example: Any) -> str:
    return example if isinstance(example, str) else json.dumps(example, ensure_ascii=False, indent=2)
