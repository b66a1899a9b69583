"""Reading a request body: strictly, and with errors that name the field, its value and the fix.

The request classes are in sampling.py (what both endpoints share), completions.py
and chat.py. A field's `description` says what it must be: it is the end of the error
message and the text of the OpenAPI page.
"""

import gc
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import InvalidRequest
from protocol.openai.fields import drop_neutral
from protocol.short_repr import short_repr


class Strict(BaseModel):
    """No unknown member, no conversion between types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Strict)

# May be missing where a server has one model, whose name the server fills in.
ModelName = Annotated[
    str,
    Field(
        min_length=1,
        description="the name of a served model",
        json_schema_extra=lambda schema: schema.pop("default", None),
    ),
]

_LARGE_BYTES = 1 << 20

_BODIES: Final[dict[str, type[Strict]]] = {}  # by path; see body_of
# What is called otherwise at an endpoint than at the one that a client may have come from.
_CALLED: Final[dict[str, dict[str, str]]] = {
    "/v1/completions": {
        "messages": "prompt",
        "input": "prompt",
        "max_output_tokens": "max_tokens",
    },
    "/v1/chat/completions": {
        "prompt": "messages",
        "input": "messages",
        "max_output_tokens": "max_completion_tokens",
        "text": "response_format",
    },
    "/v1/responses": {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
    },
}


def body_of(path: str) -> Callable[[type[Model]], type[Model]]:
    """Marks the class of the bodies that are sent to `path`."""

    def mark(model: type[Model]) -> type[Model]:
        _BODIES[path] = model
        return model

    return mark


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body, unvalidated: all that a proxy needs to know.

    Raises:
        InvalidRequest: not JSON, or not an object.
    """
    try:
        body = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON ({error}); send a JSON object.") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body is {short_repr(body)}; send a JSON object.")
    return body


def _decode(raw: bytes) -> Any:
    """Without the collector where that would go through millions of new lists again and again: it
    makes 10 MB of them take four times as long, and the event loop waits."""
    if len(raw) < _LARGE_BYTES or not gc.isenabled():
        return msgspec.json.decode(raw)
    gc.disable()
    try:
        return msgspec.json.decode(raw)
    finally:
        gc.enable()


def clean(
    body: dict[str, Any], model: type[Strict], neutral: dict[str, tuple[Any, ...]], where: str = ""
) -> dict[str, Any]:
    """The members of `body` that `model` knows; see drop_neutral for those of `neutral`."""
    known = model.model_fields.keys() - neutral.keys()
    return drop_neutral(body, known, neutral, where, lambda name: _elsewhere(model, name))


def _elsewhere(model: type[Strict], name: str) -> str | None:
    """What to say of a field that other endpoints have and the one of `model` has not."""
    path = next((path for path, body in _BODIES.items() if body is model), "")
    if other := _CALLED.get(path, {}).get(name):
        return f"is called `{other}` at {path}; send that"
    having = sorted(other for other, body in _BODIES.items() if name in body.model_fields)
    if not path or not having:
        return None
    return f"is not a parameter of {path} but of {' and '.join(having)}; leave it out"


def validate(model: type[Model], cleaned: dict[str, Any]) -> Model:
    """An instance of `model`.

    Raises:
        InvalidRequest: names the field at fault and what it must be.
    """
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0])
        raise refusal(model, field, cleaned.get(field)) from None


def refusal(model: type[Strict], field: str, value: Any) -> InvalidRequest:
    """The error for a value that `field` of `model` cannot have."""
    found = model.model_fields.get(field)
    must_be = (found.description if found else None) or "left out"
    return wrong(field, value, must_be)


def wrong(field: str, value: Any, must_be: str) -> InvalidRequest:
    """The error for a value of `field`, which may be a path such as `tools[0].type`."""
    given = "missing" if value is None else short_repr(value)
    return InvalidRequest(f"`{field}` is {given}; it must be {must_be}.", param=field)
