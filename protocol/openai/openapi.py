"""The OpenAPI document, made from the classes that read requests: it cannot promise more.

Fields that are accepted with a neutral value alone (fields.py) are listed with just that.
"""

import html
import json
from typing import Any

from pydantic import BaseModel

from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.fields import NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_MESSAGE
from protocol.openai.responses_request import NEUTRAL_RESPONSES, ResponsesRequest
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tokenize import DetokenizeRequest, TokenizeRequest
from protocol.version import VERSION

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_NEUTRAL: dict[type[BaseModel], dict[str, tuple[Any, ...]]] = {
    CompletionRequest: NEUTRAL_COMPLETION,
    ChatRequest: NEUTRAL_CHAT,
    ResponsesRequest: NEUTRAL_RESPONSES,
}
_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Continues texts."),
    "/v1/chat/completions": (ChatRequest, "Answers a conversation."),
    "/v1/responses": (ResponsesRequest, "Answers a text or a conversation."),
    "/tokenize": (TokenizeRequest, "The token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
_GETS = {
    "/v1/models": "The served model and the length of its context.",
    "/v1/models/{name}": "One model, if it is served.",
    "/health": "Whether this process and its engine are alive.",
    "/ready": "Whether requests can be served.",
    "/metrics": "What this process has counted, for Prometheus.",
}
_ERRORS = {
    "400": "The request is at fault; the message names field, value and limit.",
    "404": "There is no such model.",
    "413": "The body is too long.",
    "500": "The server failed on this request.",
    "502": "KV could not be had from a prefill server, or a decode server was lost.",
    "503": "The server cannot serve now.",
    "504": "KV did not come in time, or a decode server was silent.",
}


def document() -> Schema:
    """The OpenAPI 3.1 document as JSON types."""
    schemas: Schema = {"Error": _error_schema()}
    paths: Schema = {}
    for path, (model, summary) in _POSTS.items():
        schemas |= _schemas_of(model)
        paths[path] = {"post": _operation(summary, model)}
    for path, summary in _GETS.items():
        paths[path] = {"get": _read(path, summary)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _read(path: str, summary: str) -> Schema:
    """What takes no body."""
    kind = "text/plain" if path == "/metrics" else "application/json"
    responses: Schema = {"200": {"description": "The answer.", "content": {kind: {}}}}
    if path != "/metrics":
        responses["503"] = {"description": _ERRORS["503"]}
    operation: Schema = {"summary": summary, "responses": responses}
    if "{name}" in path:
        text = {"type": "string"}
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": text}]
        responses["404"] = {"description": _ERRORS["404"]}
    return operation


def _operation(summary: str, model: type[BaseModel]) -> Schema:
    kinds: Schema = {"application/json": {}}
    if issubclass(model, GenerationRequest | ResponsesRequest):
        kinds["text/event-stream"] = {}
    responses: Schema = {"200": {"description": "The answer.", "content": kinds}}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for status, description in _ERRORS.items():
        responses[status] = {"description": description, "content": error}
    body = {"schema": {"$ref": _REF.format(model=model.__name__)}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": responses,
    }


def _schemas_of(model: type[BaseModel]) -> Schema:
    schema = model.model_json_schema(ref_template=_REF)
    found: Schema = schema.pop("$defs", {})
    if "Message" in found:
        found["Message"]["properties"] |= _message_members()
    neutral = _NEUTRAL.get(model, {})
    for name, values in neutral.items():
        schema["properties"].pop(name, None)
        if values:
            schema["properties"][name] = {"enum": [*values, None]}
    for member in schema["properties"].values():
        member.pop("title", None)
    return {**found, model.__name__: schema}


def _message_members() -> Schema:
    """Those that are read by hand."""
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]}
    neutral = {name: {"enum": [*values, None]} for name, values in NEUTRAL_MESSAGE.items()}
    return {"content": content, **neutral}


def _error_schema() -> Schema:
    text_or_null = {"type": ["string", "null"]}
    members = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": text_or_null,
        "code": {"type": "string"},
        "phase": {"type": "string"},
        "retryable": {"type": "boolean"},
    }
    error = {"type": "object", "properties": members, "required": list(members)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def page(document: Schema) -> str:
    """The document for people: a table of fields per operation, nothing fetched from elsewhere."""
    parts = [_HEAD]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            summary = html.escape(operation["summary"])
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{summary}</p>")
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]
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
<h1>Baton</h1><p>What is accepted, and nothing else. A member that is null counts as not given.
The machine-readable form is <a href="/openapi.json">/openapi.json</a>.</p>"""
