"""What a request says its output must match: OpenAI's `response_format`, and `structured_outputs`
(once `guided_json` and so on) as other servers of open models name it.

Only the shape is checked here; llguidance decides whether a schema or regex can be used
(engine/text/grammar_text.py).
"""

import json
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import Field, WithJsonSchema

from protocol.errors import InvalidRequest
from protocol.messages import Grammar, GrammarKind
from protocol.openai.requests import Strict, validate, wrong

MAX_CHOICES = 1024

FORMAT_MUST_BE = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
    '"json_schema": {"name": "...", "schema": {...}}}'
)
STRUCTURED_MUST_BE = "an object with one of `json`, `regex`, `choice`, `grammar` and `json_object`"


class GuidedDecoding(NamedTuple):
    """A grammar, and the field of the request that it comes from."""

    grammar: Grammar
    field: str


_A_SCHEMA = {"type": "object", "description": "a JSON schema"}


class NamedSchema(Strict):
    """OpenAI's: the schema is always enforced, strict or not."""

    name: str = Field(description="a string")
    description: str | None = Field(None, description="a string")
    strict: bool | None = Field(None, description="true or false")
    schema_: Annotated[Any, WithJsonSchema(_A_SCHEMA)] = Field(None, alias="schema")


_NAMED = NamedSchema.model_json_schema()
_FORMAT_SCHEMA = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, "json_schema": _NAMED},
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
    ]
}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_CHOICE_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_CHOICES,
    "items": {"type": "string"},
}
_STRUCTURED_SCHEMA = {
    "type": "object",
    "properties": {
        "json": _A_SCHEMA,
        "regex": _TEXT_SCHEMA,
        "choice": _CHOICE_SCHEMA,
        "grammar": _TEXT_SCHEMA,
        "json_object": {"const": True},
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}


def _any(schema: dict[str, Any], must_be: str) -> Any:
    """Anything, as far as pydantic looks: `find_guided` reads it."""
    return Annotated[Any, Field(description=must_be), WithJsonSchema(schema)]


class StructuredFields(Strict):
    """What both endpoints have to say what their output must match."""

    response_format: _any(_FORMAT_SCHEMA, FORMAT_MUST_BE) = None  # type: ignore[valid-type]
    structured_outputs: _any(_STRUCTURED_SCHEMA, STRUCTURED_MUST_BE) = None  # type: ignore[valid-type]
    guided_json: _any(_A_SCHEMA, "a JSON schema") = None  # type: ignore[valid-type]
    guided_regex: _any(_TEXT_SCHEMA, "a regular expression") = None  # type: ignore[valid-type]
    guided_choice: _any(_CHOICE_SCHEMA, "a list of strings") = None  # type: ignore[valid-type]
    guided_grammar: _any(_TEXT_SCHEMA, "a grammar") = None  # type: ignore[valid-type]

    @cached_property
    def guided(self) -> GuidedDecoding | None:
        """What the output must match, if anything.

        Raises:
            InvalidRequest: names the field that is wrong, or the two that contradict each other.
        """
        return find_guided({name: getattr(self, name) for name in StructuredFields.model_fields})


def find_guided(fields: dict[str, Any]) -> GuidedDecoding | None:
    """What the output must match, from the members of StructuredFields; None is "not given".

    Raises:
        InvalidRequest: names the field that is wrong, or the two that contradict each other.
    """
    found: list[GuidedDecoding] = []
    if fields.get("response_format") is not None:
        found += _from_format(fields["response_format"], "response_format")
    if fields.get("structured_outputs") is not None:
        found += _from_structured(fields["structured_outputs"])
    for name in ("json", "regex", "choice", "grammar"):
        if (value := fields.get(f"guided_{name}")) is not None:
            found.append(_READERS[name](value, f"guided_{name}"))
    return only_one(found)


def only_one(found: list[GuidedDecoding]) -> GuidedDecoding | None:
    """Raises InvalidRequest where two fields say what the output must match."""
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise InvalidRequest(
            f"`{first}` and `{second}` both say what the output must match; send one of them.",
            param=second,
        )
    return found[0] if found else None


def _from_format(value: Any, where: str) -> list[GuidedDecoding]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and len(value) == 1:
        return []
    if kind == "json_object" and len(value) == 1:
        return [GuidedDecoding(Grammar("json_object"), where)]
    if kind != "json_schema" or not set(value) <= {"type", "json_schema"}:
        raise wrong(where, value, FORMAT_MUST_BE)
    return [_from_named_schema(value.get("json_schema"), f"{where}.json_schema")]


def _from_named_schema(named: Any, where: str) -> GuidedDecoding:
    if not isinstance(named, dict):
        raise wrong(where, named, "an object with `name` and `schema`")
    schema = validate(NamedSchema, named, where + ".").schema_
    if schema is None:
        return GuidedDecoding(Grammar("json_object"), where)
    return read_schema(schema, f"{where}.schema")


def read_schema(value: Any, where: str) -> GuidedDecoding:
    """A JSON schema as an object."""
    if not isinstance(value, dict):
        raise wrong(where, value, "a JSON schema, an object")
    return GuidedDecoding(Grammar("json_schema", json.dumps(value, ensure_ascii=False)), where)


def _from_structured(value: Any) -> list[GuidedDecoding]:
    if not isinstance(value, dict):
        raise wrong("structured_outputs", value, STRUCTURED_MUST_BE)
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    for name in given:
        if name not in (*_READERS, "json_object"):
            raise wrong(f"structured_outputs.{name[:80]}", given[name], "left out")
    if len(given) != 1:
        raise wrong("structured_outputs", value, STRUCTURED_MUST_BE)
    ((name, item),) = given.items()
    where = f"structured_outputs.{name}"
    if name == "json_object":
        if item is not True:
            raise wrong(where, item, "true or false")
        return [GuidedDecoding(Grammar("json_object"), where)]
    return [_READERS[name](item, where)]


def _read_json(value: Any, where: str) -> GuidedDecoding:
    """A schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise wrong(where, value, "a JSON schema, an object or its text") from None
    return read_schema(value, where)


def _read_choice(value: Any, where: str) -> GuidedDecoding:
    good = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not good or not all(isinstance(item, str) for item in value):
        raise wrong(where, value, f"a list of 1 to {MAX_CHOICES} strings")
    return GuidedDecoding(Grammar("choice", json.dumps(value, ensure_ascii=False)), where)


def _text_reader(kind: GrammarKind, must_be: str) -> Callable[[Any, str], GuidedDecoding]:
    def read(value: Any, where: str) -> GuidedDecoding:
        if not isinstance(value, str) or not value:
            raise wrong(where, value, must_be)
        return GuidedDecoding(Grammar(kind, value), where)

    return read


_READERS: dict[str, Callable[[Any, str], GuidedDecoding]] = {
    "json": _read_json,
    "regex": _text_reader("regex", "a regular expression, a string that is not empty"),
    "choice": _read_choice,
    "grammar": _text_reader("grammar", "a grammar in Lark or GBNF form, a string"),
}
