"""Reading a request body: strictly, and with errors that name the field, its value and the fix.

The request classes are in openai_sampling.py (what both endpoints share), openai_completions.py
and openai_chat.py. A field's `description` says what it must be: it is the end of the error
message and the text of the OpenAPI page.
"""

import gc
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.errors import InvalidRequest
from protocol.openai_fields import drop_neutral
from protocol.shown import shown


class Strict(BaseModel):
    """No unknown member, no conversion between types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Strict)

_LARGE_BYTES = 1 << 20


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
        raise InvalidRequest(f"The body is {shown(body)}; send a JSON object.")
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
    return drop_neutral(body, model.model_fields.keys() - neutral.keys(), neutral, where)


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
    given = "missing" if value is None else shown(value)
    return InvalidRequest(f"`{field}` is {given}; it must be {must_be}.", param=field)
