"""Generates the OpenAPI document from the classes that validate requests.

Therefore the document lists exactly the fields that the server accepts.
"""

import html
import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

# These imports register their classes in BODIES.
from protocol.anthropic import request  # noqa: F401
from protocol.openai import responses_request, tokenize  # noqa: F401
from protocol.openai.requests import BODIES, Strict
from protocol.version import VERSION

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_GET_SUMMARIES = {
    "/v1/models": "The served model and the length of its context.",
    "/v1/models/{name}": "One model, if it is served.",
    "/version": "The version of Baton.",
    "/health": "Reports whether this process and its engine are alive.",
    "/ready": "Reports whether requests can be served.",
    "/metrics": "Metrics of this process in Prometheus' format.",
}


def _object_schema(**members: Any) -> Schema:
    return {"type": "object", "properties": members, "required": [*members]}


_TEXT = {"type": "string"}
_ERROR = _object_schema(  # see protocol/errors.py
    **dict.fromkeys(("message", "type", "code", "phase"), _TEXT),
    param={"type": ["string", "null"]},
    retryable={"type": "boolean"},
)


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document() -> Schema:
    """Returns the OpenAPI 3.1 document as JSON types."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in BODIES.values()],
        ref_template=_REF,
        schema_generator=_Untitled,
    )
    paths: Schema = {
        path: {"post": _operation(body.summary, body)} for path, body in BODIES.items()
    }
    paths |= {
        path: {"get": _operation(summary)} for path, summary in _GET_SUMMARIES.items()
    }
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    ]
    paths["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _object_schema(error=_ERROR)}
        },
    }


def _operation(summary: str, body: type[Strict] | None = None) -> Schema:
    """Returns the description of one operation, with its request and its response.

    docs/api.md lists the errors.

    Args:
        body: The class of the request body; None for GET.
    """
    content: Schema = {"application/json": {}}
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "An error.", "content": _json_content("Error")},
        },
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _json_content(body.__name__),
        }
        if "stream" in body.model_fields:
            content["text/event-stream"] = {}
    return operation


def _json_content(model: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def page(document: Schema) -> str:
    """Returns the OpenAPI document as an HTML page without external resources.

    The page has a table of fields for each operation with a request body.
    """
    parts = [_HEAD]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            summary = html.escape(operation["summary"])
            parts.append(
                f"<h2><code>{method.upper()} {path}</code></h2><p>{summary}</p>"
            )
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"][
                    "schema"
                ]
                parts.append(_table(schemas[reference["$ref"].rpartition("/")[2]]))
    return "\n".join(parts)


def _table(schema: Schema) -> str:
    rows = []
    for name, member in sorted(schema["properties"].items()):
        needed = "required" if name in schema.get("required", ()) else ""
        if "enum" in member:
            text = "only " + " or ".join(json.dumps(value) for value in member["enum"])
        else:
            text = member.get("description", "")
        cells = (f"<code>{html.escape(name)}</code>", needed, html.escape(text))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "<table>" + "\n".join(rows) + "</table>"


_HEAD = """<!doctype html><meta charset="utf-8"><title>Baton</title>
<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
td{padding:.2em .8em .2em 0;vertical-align:top;border-top:1px solid #ddd}</style>
<h1>Baton</h1><p>The server accepts these fields only. A field that is null counts as
absent. The machine-readable form is <a href="/openapi.json">/openapi.json</a>.</p>"""
