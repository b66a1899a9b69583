"""Reading a request body: strictly, and with errors that name the field, its value and the fix.

A field's `description` says what it must be: it is the end of the error message and the text of the
OpenAPI page.
"""

import gc
from collections.abc import Callable, Collection, Iterator
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
from protocol.near_names import suggestion
from protocol.short_repr import short_repr

BODIES: Final[dict[str, type["Strict"]]] = {}  # of all endpoints


class Strict(BaseModel):
    """No unknown member, no conversion between types, no NaN; a null means "not given", except for
    the members of `keeps_null`.

    A subclass may say in its `model_config` that other members are allowed.

    Attributes:
        endpoint: of a whole body: the path that it is sent to.
        summary: what that does.
        must_be: how error messages call an object of this class.
        told_whole: what is wrong in such an object is told of all of it.
        keeps_null: members whose null differs from their absence.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )
    endpoint: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    must_be: ClassVar[str] = "an object"
    told_whole: ClassVar[bool] = False
    keeps_null: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "summary" in vars(cls):
            BODIES[cls.endpoint] = cls

    def check(self) -> None:
        """Raises InvalidRequest for members of a whole body that contradict each other."""

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, given: Any) -> Any:
        """The members that are used: no nulls, no neutral ones."""
        if not isinstance(given, dict):
            return given
        used, neutrals = used_fields(cls), neutral_fields(cls)
        unread = unread_fields(cls)
        kept: dict[str, Any] = {}
        for name, value in given.items():
            if value is None and name not in cls.keeps_null:
                continue
            if name in unread and _fields(cls)[name].annotation is Any:
                continue  # anything will do
            if name in used or (
                name not in neutrals and cls.model_config["extra"] != "forbid"
            ):
                kept[name] = value
            elif name not in neutrals:
                near = f"is not supported{suggestion(name[:80], used)}; leave it out"
                raise fault(name, f"{_elsewhere(cls, name) or near}.")
            elif not any(
                value == v and type(value) in _LIKE.get(type(v), (type(v),))
                for v in neutrals[name]
            ):
                allowed = " or ".join(
                    short_repr(candidate) for candidate in neutrals[name]
                )
                told = f"is {short_repr(value)}, which is not implemented"
                raise fault(name, f"{told}; send {allowed} or leave it out.")
        return kept


Model = TypeVar("Model", bound=Strict)


class Read:
    """A field given as `kind`, which its JSON schema says, and kept as `into` makes it: as it was
    given, where there is no `into`."""

    def __init__(self, kind: Any, into: Callable[[Any], Any] | None = None) -> None:
        self.kind, self.into = kind, into

    def __get_pydantic_core_schema__(
        self, _: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        given = handler.generate_schema(self.kind)
        if self.into is None:
            return core_schema.no_info_wrap_validator_function(_checked, given)
        return core_schema.no_info_after_validator_function(self.into, given)


def _checked(given: Any, check: Callable[[Any], Any]) -> Any:
    check(given)
    return given


# May be missing where a server has one model, whose name the server fills in.
ModelName = Annotated[
    str,
    Field(
        min_length=1,
        description="the name of a served model",
        json_schema_extra=lambda schema: schema.pop("default", None),
    ),
]

_FAULT: Final = "fault"
_LARGE_BYTES = 1 << 20
_EMPTY: Final[dict[bytes, Callable[[], Any]]] = {b"{": dict, b"[": list}
_LIKE: Final = {float: (int, float)}  # True is no 1

# Which endpoints call otherwise.
_ALIKE: Final = (
    {"prompt", "messages", "input"},
    {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"response_format", "text"},
)


class _Neutral:
    """Marks a field of request classes, and writes its JSON schema."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __call__(self, schema: dict[str, Any]) -> None:
        schema.clear()
        schema["enum"] = [*self.values, None]


def neutral(*values: Any) -> Any:
    """A field that is accepted with a value that changes nothing, and refused with any other:
    clients send many fields they do not use. 0 and 0.0 are alike where it is a float; True is never
    1."""
    return Field(None, json_schema_extra=_Neutral(values))


@cache
def neutral_fields(model: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The values of each field of `model` that is `neutral`."""
    extras = {name: info.json_schema_extra for name, info in model.model_fields.items()}
    return {
        name: extra.values
        for name, extra in extras.items()
        if isinstance(extra, _Neutral)
    }


@cache
def used_fields(model: type[BaseModel]) -> frozenset[str]:
    """The other fields of `model`, as requests name them."""
    return frozenset(_fields(model)) - neutral_fields(model).keys()


@cache
def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


@cache
def unread_fields(model: type[BaseModel]) -> frozenset[str]:
    """The fields of `model` that change nothing, as requests name them: those that are excluded
    from its dumps. Their values are neither decoded, where a body is large, nor kept."""
    return frozenset(name for name, info in _fields(model).items() if info.exclude)


def parse_json_object(raw: bytes, unread: Collection[str] = ()) -> dict[str, Any]:
    """The JSON object in a request body, unvalidated.

    Args:
        unread: members of which only the kind matters: objects and lists are empty in the result.

    Raises:
        InvalidRequest: it is no JSON object.
    """
    # The collector would go through millions of new lists again and again: it makes 10 MB of them
    # take four times as long, and the event loop waits.
    rests = len(raw) >= _LARGE_BYTES and gc.isenabled()
    if rests:
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
        if rests:
            gc.enable()
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body is {short_repr(body)}; send a JSON object.")
    return body


def _decode_without(raw: bytes, unread: Collection[str]) -> Any:
    members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | msgspec.Raw)
    if not isinstance(members, dict):
        return exact_json.decode(raw)
    body: dict[str, Any] = {}
    for name, value in members.items():
        text = bytes(value)
        if name in unread and text[:1] in _EMPTY:
            check_utf8(text)  # not decoded, so nothing else would look
            body[name] = _EMPTY[text[:1]]()
        else:
            body[name] = exact_json.decode(text)
    return body


def _elsewhere(model: type[Strict], name: str) -> str | None:
    """What to say of a field that other endpoints have and the one of `model` has not."""
    path, used = model.endpoint, used_fields(model)
    if alike := sorted(
        set().union(*(names for names in _ALIKE if name in names)) & used
    ):
        return f"is called `{alike[0]}` at {path}; send that"
    having = sorted(
        other for other, body in BODIES.items() if name in used_fields(body)
    )
    if not path or not having:
        return None
    return f"is not a parameter of {path} but of {' and '.join(having)}; leave it out"


def validate(model: type[Model], body: Any) -> Model:
    """An instance of `model`. Raises InvalidRequest: the field, its value and what it must be."""
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        # The one that is told most of: a value may be of none of several kinds.
        deepest = max(
            error.errors(include_url=False), key=lambda item: len(item["loc"])
        )
        raise _explained(model, body, deepest) from None
    parsed.check()
    return parsed


def _explained(model: type[Strict], body: Any, item: ErrorDetails) -> InvalidRequest:
    path, value, must_be = "", body, model.must_be
    shapes = [model]  # which the value may have
    for part in item["loc"]:
        if isinstance(part, int):
            path, value, must_be = f"{path}[{part}]", value[part], shapes[0].must_be
        else:
            found = next(
                (_fields(shape)[part] for shape in shapes if part in _fields(shape)),
                None,
            )
            if found is None:
                continue  # how pydantic calls one of several kinds
            path, value = f"{path}.{part}".lstrip("."), value.get(part)
            must_be, shapes = found.description or "left out", list(_shapes(found))
        if not shapes or (isinstance(part, int) and shapes[0].told_whole):
            break
    else:
        if item["type"] == _FAULT:
            name, told = item["ctx"]["name"], item["ctx"]["told"]
            shown = f"{path}.{short_repr(name)[1:-1]}".lstrip(".")
            return InvalidRequest(
                f"`{shown}` {told}", param=f"{path}.{name[:80]}".lstrip(".")
            )
    return wrong(path, value, must_be)


def _shapes(kind: Any) -> Iterator[type[Strict]]:
    """The classes of the objects in a value of this kind."""
    match kind:
        case FieldInfo():
            inner: tuple[Any, ...] = (kind.annotation, *kind.metadata)
        case Read():
            inner = (kind.kind,)
        case type() if issubclass(kind, Strict):
            yield kind
            inner = ()
        case _:
            inner = get_args(kind)
    for part in inner:
        yield from _shapes(part)


def fault(name: str, told: str) -> PydanticCustomError:
    """What a class's own validator raises for the member `name`: `told` goes on after it."""
    return PydanticCustomError(_FAULT, "{told}", {"name": name, "told": told})


def wrong(field: str, value: Any, must_be: str) -> InvalidRequest:
    """The error for a value of `field`, which may be a path such as `tools[0].type`."""
    is_missing = value is None and not field.endswith("]")
    given = "missing" if is_missing else short_repr(value)
    return InvalidRequest(f"`{field}` is {given}; it must be {must_be}.", param=field)


def refuse(field: str, problem: str) -> NoReturn:
    """Raises InvalidRequest: `field` ..., as `problem` goes on."""
    raise InvalidRequest(f"`{field}` {problem}.", param=field)
