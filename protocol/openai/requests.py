"""Reading a request body: strictly, and with errors that name the field, its value and the fix.

The request classes are in sampling.py (what both endpoints share), completions.py
and chat.py. A field's `description` says what it must be: it is the end of the error
message and the text of the OpenAPI page.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import InvalidRequest
from protocol.near_names import suggestion
from protocol.short_repr import short_repr


class Strict(BaseModel):
    """No unknown member, no conversion between types, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    endpoint: ClassVar[str] = ""  # of a whole body: the path that it is sent to, see body_of


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

BODIES: Final[dict[str, tuple[type[Strict], str]]] = {}  # by path: see body_of
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


def body_of(path: str, summary: str) -> Callable[[type[Model]], type[Model]]:
    """Marks the class of the bodies that are sent to `path`; `summary` says what that does."""

    def mark(model: type[Model]) -> type[Model]:
        model.endpoint = path
        BODIES[path] = (model, summary)
        return model

    return mark


class _Neutral:
    """Marks a field of request classes, and writes its JSON schema."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __call__(self, schema: dict[str, Any]) -> None:
        schema.clear()
        schema["enum"] = [*self.values, None]


def neutral(*values: Any) -> Any:
    """A field that is accepted with a value that changes nothing, and refused with any other.

    Clients and routers send many fields they do not use. `clean` drops these. A float accepts 0
    and 0.0 alike, an int that int only; True is never 1.
    """
    return Field(None, json_schema_extra=_Neutral(values))


@cache
def neutral_fields(model: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The values of each field of `model` that is `neutral`."""
    extras = {name: info.json_schema_extra for name, info in model.model_fields.items()}
    return {name: extra.values for name, extra in extras.items() if isinstance(extra, _Neutral)}


@cache
def used_fields(model: type[BaseModel]) -> frozenset[str]:
    """The other fields of `model`."""
    return frozenset(model.model_fields) - neutral_fields(model).keys()


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


def clean(body: dict[str, Any], model: type[Strict], where: str = "") -> dict[str, Any]:
    """The members of `body` that `model` uses, without nulls, which mean "not given".

    Args:
        where: a prefix that tells the client where the field stands, e.g. "messages[0].".

    Raises:
        InvalidRequest: a member is unknown, or neutral but for its value.
    """
    used, neutrals = used_fields(model), neutral_fields(model)
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in used:
            kept[name] = value
        elif name not in neutrals:
            near = f"is not supported{suggestion(name[:80], used)}; leave it out"
            raise InvalidRequest(
                f"`{where}{short_repr(name)[1:-1]}` {_elsewhere(model, name) or near}.",
                param=where + name[:80],
            )
        elif not any(_same(value, candidate) for candidate in neutrals[name]):
            allowed = " or ".join(short_repr(candidate) for candidate in neutrals[name])
            raise InvalidRequest(
                f"`{where}{name}` is {short_repr(value)}, which is not implemented; "
                f"send {allowed} or leave it out.",
                param=where + name,
            )
    return kept


def _same(value: Any, candidate: Any) -> bool:
    if type(candidate) is float:
        return type(value) in (int, float) and value == candidate
    return type(value) is type(candidate) and bool(value == candidate)


def _elsewhere(model: type[Strict], name: str) -> str | None:
    """What to say of a field that other endpoints have and the one of `model` has not."""
    path = model.endpoint
    if other := _CALLED.get(path, {}).get(name):
        return f"is called `{other}` at {path}; send that"
    having = sorted(other for other, (body, _) in BODIES.items() if name in used_fields(body))
    if not path or not having:
        return None
    return f"is not a parameter of {path} but of {' and '.join(having)}; leave it out"


def validate(model: type[Model], cleaned: dict[str, Any], where: str = "") -> Model:
    """An instance of `model`.

    Args:
        where: as of `clean`.

    Raises:
        InvalidRequest: names the field at fault and what it must be.
    """
    try:
        return model.model_validate(cleaned)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0])
        raise refusal(model, field, cleaned.get(field), where) from None


def refusal(model: type[Strict], field: str, value: Any, where: str = "") -> InvalidRequest:
    """The error for a value that `field` of `model` cannot have."""
    found = {info.alias or name: info for name, info in model.model_fields.items()}.get(field)
    must_be = (found.description if found else None) or "left out"
    return wrong(where + field[:80], value, must_be)


def wrong(field: str, value: Any, must_be: str) -> InvalidRequest:
    """The error for a value of `field`, which may be a path such as `tools[0].type`."""
    given = "missing" if value is None else short_repr(value)
    return InvalidRequest(f"`{field}` is {given}; it must be {must_be}.", param=field)
