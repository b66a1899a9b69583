"""Strict validation of request bodies, with errors that name field, value and fix.

The `description` of a field states what its value must be. The error message about a
wrong value ends with the description, which also appears in the OpenAPI document.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, NoReturn, TypeVar, get_args

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from protocol import exact_json
from protocol.errors import InvalidRequest
from protocol.http.json_bounds import INLINE_BODY_BYTES, check_utf8
from protocol.settings.near_names import suggestion
from protocol.short_repr import short_repr

BODIES: Final[dict[str, type["Strict"]]] = {}  # classes of request bodies, by endpoint


class Strict(BaseModel):
    """A JSON object that is validated strictly.

    Unknown members, NaN and infinity are errors. No value is coerced to another type,
    except an integer to a float. A null member counts as absent, unless `keeps_null`
    names it. A subclass may allow unknown members by its `model_config`.

    Class attributes:
        endpoint: The path at which the object is the request body, or is made from the
            request body; empty for other objects.
        summary: A sentence that describes the endpoint.
        must_be: The requirement in the error about a value that is not such an object.
        reported_whole: Whether the error about a wrong member shows the whole object.
            Applies only to objects in a list, and not to members that are objects.
        keeps_null: Names of the members for which null and absence differ.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )
    endpoint: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    must_be: ClassVar[str] = "an object"
    reported_whole: ClassVar[bool] = False
    keeps_null: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "summary" in vars(cls):
            BODIES[cls.endpoint] = cls

    def check(self) -> None:
        """Raises InvalidRequest if members of a request body contradict each other."""

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, given: Any) -> Any:
        """Returns the members to validate.

        These members are left out: null members that `keeps_null` does not name,
        members of `neutral` fields, and members of unread fields that accept any value.

        Raises:
            PydanticCustomError: A member is unknown, or a `neutral` field has a value
                that would change something.
        """
        if not isinstance(given, dict):
            return given
        used = supported_fields(cls)
        neutrals = neutral_fields(cls)
        unread = unread_fields(cls)
        members: dict[str, Any] = {}
        for name, value in given.items():
            if value is None and name not in cls.keeps_null:
                continue
            if name in unread and _fields(cls)[name].annotation is Any:
                continue  # any value is valid
            if name in neutrals:
                _check_neutral(name, value, neutrals[name])
            elif name in used or cls.model_config["extra"] != "forbid":
                members[name] = value
            else:
                problem = f"is not supported{suggestion(name[:80], used)}; leave it out"
                raise fault(name, f"{_other_endpoint_hint(cls, name) or problem}.")
        return members


def _check_neutral(name: str, value: Any, neutral_values: tuple[Any, ...]) -> None:
    """Raises the error of `fault` if `value` is not one of the `neutral_values`."""
    for candidate in neutral_values:
        accepted_types = _ACCEPTED_TYPES.get(type(candidate), (type(candidate),))
        if value == candidate and type(value) in accepted_types:
            return
    allowed = " or ".join(short_repr(candidate) for candidate in neutral_values)
    raise fault(
        name,
        f"is {short_repr(value)}, which is not implemented; send {allowed} or leave it "
        "out.",
    )


Model = TypeVar("Model", bound=Strict)


class ReadFrom:
    """Annotates a field that has a different type in requests than in Python.

    Args:
        kind: The type in requests, from which the JSON schema is made.
        convert: Converts a valid value; None: the value stays as the client sent it.
    """

    def __init__(self, kind: Any, convert: Callable[[Any], Any] | None = None) -> None:
        self.kind = kind
        self.convert = convert

    def __get_pydantic_core_schema__(
        self, _: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        given = handler.generate_schema(self.kind)
        if self.convert is None:
            return core_schema.no_info_wrap_validator_function(_check_and_keep, given)
        return core_schema.no_info_after_validator_function(self.convert, given)


def _check_and_keep(given: Any, check: Callable[[Any], Any]) -> Any:
    check(given)
    return given


# A field with the name of a model. If a request lacks the field, the server fills in
# the name of its own model.
ModelName = Annotated[
    str,
    Field(
        min_length=1,
        description="the name of a served model",
        json_schema_extra=lambda schema: schema.pop("default", None),
    ),
]

_FAULT: Final = "fault"
_LARGE_BYTES = 1 << 20  # larger bodies are decoded without garbage collection
# Python types of JSON objects and arrays, by the first byte of their text.
_TYPE_BY_BRACKET: Final[dict[bytes, Callable[[], Any]]] = {b"{": dict, b"[": list}
# Types that a client's value may have, by the type of the neutral value. Neutral values
# of other types accept only their own type. The client may send 1 for 1.0, but True
# never counts as a number.
_ACCEPTED_TYPES: Final = {float: (int, float)}

# Names that a field has at different endpoints.
_SYNONYMS: Final = (
    {"prompt", "messages", "input"},
    {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"response_format", "text"},
)


class _Neutral:
    """Marks a field that `neutral` returned, and writes the field's JSON schema."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __call__(self, schema: dict[str, Any]) -> None:
        schema.clear()
        schema["enum"] = [*self.values, None]


def neutral(*values: Any) -> Any:
    """Returns the field of an unsupported feature. Only `values` are valid.

    With one of these values the field changes nothing. Many clients send such fields
    although they do not use the feature. If a value is a float, an equal integer is
    also valid; True never counts as 1.
    """
    return Field(None, json_schema_extra=_Neutral(values))


@cache
def neutral_fields(model: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """Returns the valid values of each `neutral` field of `model`."""
    extras = {name: info.json_schema_extra for name, info in model.model_fields.items()}
    return {
        name: extra.values
        for name, extra in extras.items()
        if isinstance(extra, _Neutral)
    }


@cache
def supported_fields(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names, in requests, of the fields that are not `neutral`."""
    return frozenset(_fields(model)) - neutral_fields(model).keys()


@cache
def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


@cache
def unread_fields(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names, in requests, of the fields declared with exclude=True.

    In the class of a request body, such fields change nothing, and their objects and
    lists are not decoded if the body is large. Other classes may read such fields.
    """
    return frozenset(name for name, info in _fields(model).items() if info.exclude)


def parse_json_object(raw: bytes, unread: Collection[str] = ()) -> dict[str, Any]:
    """Returns the JSON object in a request body, without validation.

    Args:
        unread: Names of members that no code reads. If the body is larger than
            INLINE_BODY_BYTES, these members are not decoded if they are objects or
            lists, and are empty in the result.

    Raises:
        InvalidRequest: The body is not a JSON object.
    """
    # While millions of lists are created, Python's garbage collector would traverse
    # them repeatedly. Decoding 10 MB of lists, which blocks the event loop, would take
    # four times as long.
    pauses_gc = len(raw) >= _LARGE_BYTES and gc.isenabled()
    if pauses_gc:
        gc.disable()
    try:
        has_unread = len(raw) > INLINE_BODY_BYTES and any(
            f'"{n}"'.encode() in raw for n in unread
        )
        body = _decode_without(raw, unread) if has_unread else exact_json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"The body is not valid JSON ({error}); send a JSON object."
        ) from None
    finally:
        if pauses_gc:
            gc.enable()
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body is {short_repr(body)}; send a JSON object.")
    return body


def _decode_without(raw: bytes, unread: Collection[str]) -> Any:
    """Decodes a body. `unread` members that are objects or lists become empty."""
    members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | msgspec.Raw)
    if not isinstance(members, dict):
        return exact_json.decode(raw)
    body: dict[str, Any] = {}
    for name, value in members.items():
        text = bytes(value)
        if name in unread and text[:1] in _TYPE_BY_BRACKET:
            check_utf8(text)  # nothing else checks a text that is not decoded
            body[name] = _TYPE_BY_BRACKET[text[:1]]()  # empty
        else:
            body[name] = exact_json.decode(text)
    return body


def _other_endpoint_hint(model: type[Strict], name: str) -> str | None:
    """Returns a hint if an unknown field exists at a different endpoint, or has a
    different name at the endpoint of `model`; else None.
    """
    path = model.endpoint
    synonyms = {name}.union(*(names for names in _SYNONYMS if name in names)) - {name}
    names_here = sorted(synonyms & supported_fields(model))
    if names_here:
        return f"is called `{names_here[0]}` at {path}; send that"
    endpoints = sorted(
        other for other, body in BODIES.items() if name in supported_fields(body)
    )
    if not path or not endpoints:
        return None
    other_paths = " and ".join(endpoints)
    return f"is not a parameter of {path} but of {other_paths}; leave it out"


def validate(model: type[Model], body: Any) -> Model:
    """Returns an instance of `model`.

    Raises:
        InvalidRequest: A field is wrong. The message has its name, its value and the
            requirement.
        RequestError: The method `check` of the instance raised it.
    """
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        # If a field has several types, there is an error for each type. The error with
        # the longest path is the most specific one.
        deepest = max(
            error.errors(include_url=False), key=lambda item: len(item["loc"])
        )
        raise _explain(model, body, deepest) from None
    parsed.check()
    return parsed


def _explain(model: type[Strict], body: Any, item: ErrorDetails) -> InvalidRequest:
    """Converts pydantic's error about one member to an InvalidRequest."""
    path = ""
    value = body
    must_be = model.must_be
    classes = [model]  # classes that are allowed for the value
    for index, part in enumerate(item["loc"], 1):
        if isinstance(part, int):
            path = f"{path}[{part}]"
            value = value[part]
            must_be = classes[0].must_be
        else:
            field = next(
                (_fields(cls)[part] for cls in classes if part in _fields(cls)),
                None,
            )
            if field is None:
                continue  # not a field: pydantic's name for one of several types
            path = f"{path}.{part}".lstrip(".")
            value = value.get(part)
            must_be = field.description or "left out"
            classes = list(_object_classes(field))
        if not classes:
            break
        if isinstance(part, int) and classes[0].reported_whole:
            if not _names_object(classes, item["loc"][index:]):
                break
    else:
        if item["type"] == _FAULT:
            name = item["ctx"]["name"]
            problem = item["ctx"]["problem"]
            shown = f"{path}.{short_repr(name)[1:-1]}".lstrip(".")
            return InvalidRequest(
                f"`{shown}` {problem}", param=f"{path}.{name[:80]}".lstrip(".")
            )
    return wrong_value(path, value, must_be)


def _names_object(classes: list[type[Strict]], names: Sequence[int | str]) -> bool:
    """Returns whether one of `names` is the name of a member that is an object in one
    of `classes`.
    """
    return any(
        name in _fields(cls) and any(_object_classes(_fields(cls)[name]))
        for cls in classes
        for name in names
        if isinstance(name, str)
    )


def _object_classes(kind: Any) -> Iterator[type[Strict]]:
    """Yields the classes that are allowed for the objects in a value.

    Args:
        kind: The field or the type of the value.
    """
    match kind:
        case FieldInfo():
            inner: tuple[Any, ...] = (kind.annotation, *kind.metadata)
        case ReadFrom():
            inner = (kind.kind,)
        case type() if issubclass(kind, Strict):
            yield kind
            inner = ()
        case _:
            inner = get_args(kind)
    for part in inner:
        yield from _object_classes(part)


def fault(name: str, problem: str) -> PydanticCustomError:
    """Returns the error that a validator of a Strict class raises about a member.

    `validate` converts the error to an InvalidRequest.

    Args:
        problem: The rest of the message, after the name of the member.
    """
    return PydanticCustomError(_FAULT, "{problem}", {"name": name, "problem": problem})


def wrong_value(field: str, value: Any, must_be: str) -> InvalidRequest:
    """Returns the error about a wrong value.

    Args:
        field: Path of the member, such as tools[0].type.
        value: The wrong value; None if the member is missing.
        must_be: The requirement, which continues the message after "it must be".
    """
    is_missing = value is None and not field.endswith("]")
    given = "missing" if is_missing else short_repr(value)
    return InvalidRequest(f"`{field}` is {given}; it must be {must_be}.", param=field)


def refuse(field: str, problem: str) -> NoReturn:
    """Raises InvalidRequest about a field.

    Args:
        problem: The rest of the message, after the name of the field.
    """
    raise InvalidRequest(f"`{field}` {problem}.", param=field)
