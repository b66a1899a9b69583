"""Merges JSON schemas into one schema that combines the restrictions of all of them.

Only schemas with numbers that llguidance would round are merged here, for exact.py.
llguidance merges all other schemas.
"""

from collections.abc import Callable
from typing import Any, Final

from engine.text.schema.disjoint import json_equal
from engine.text.schema.keywords import ENFORCED, CheckedSchema, fail, keyword_path
from engine.text.schema.references import Schema

COMBINING: Final = ("$ref", "allOf", "anyOf", "oneOf")
_MAX_DEPTH: Final = 50
_CANNOT_COMBINE: Final = (
    "cannot be combined exactly with numbers beyond 2**53 in the same schema; leave "
    "the keyword out"
)


class Unsatisfiable(Exception):
    """No value matches all of the merged schemas."""


def flatten(
    checked: CheckedSchema, schema: Schema, path: str, depth: int = 0
) -> tuple[Schema, list[list[Any]]]:
    """Resolve the combining keywords of a schema.

    Returns:
        A schema without combining keywords, and lists of options. A value matches
        `schema` if it matches the returned schema and an option of each list.

    Raises:
        GrammarError: the schemas have keywords that cannot be combined.
        Unsatisfiable: the schemas exclude each other.
    """
    if depth > _MAX_DEPTH:
        fail(path, "has references that never end; leave the reference out")
    base = {
        keyword: value
        for keyword, value in schema.items()
        if keyword in ENFORCED and keyword not in COMBINING
    }
    unions = [schema[keyword] for keyword in ("anyOf", "oneOf") if keyword in schema]
    conjuncts = list(schema.get("allOf", ()))
    if "$ref" in schema:
        conjuncts.append(checked.target(schema))
    for conjunct in conjuncts:
        if conjunct is False:
            raise Unsatisfiable
        if conjunct is not True:
            more, more_unions = flatten(checked, conjunct, path, depth + 1)
            base = _merge(base, more, path)
            unions += more_unions
    return base, unions


def _merge(one: Schema, other: Schema, path: str) -> Schema:
    """Return a schema that has the restrictions of both schemas.

    Raises:
        GrammarError: a keyword of the two schemas cannot be combined.
        Unsatisfiable: the schemas exclude each other.
    """
    merged = dict(one)
    for keyword, value in other.items():
        if keyword not in merged or json_equal(merged[keyword], value):
            merged[keyword] = value
        elif keyword == "properties":
            merged[keyword] = _merge_properties(merged[keyword], value)
        elif keyword in _STRICTER:
            merged[keyword] = _STRICTER[keyword](merged[keyword], value)
        else:
            fail(keyword_path(path, keyword), _CANNOT_COMBINE)
    for closed, open_ in ((one, other), (other, one)):
        if closed.get("additionalProperties", True) is not True:
            if open_.get("properties", {}).keys() - closed.get("properties", {}).keys():
                fail(keyword_path(path, "additionalProperties"), _CANNOT_COMBINE)
    return merged


def _merge_properties(one: Schema, other: Schema) -> Schema:
    """Return the value of `properties` that has the restrictions of both values."""
    merged = dict(one)
    for name, schema in other.items():
        merged[name] = {"allOf": [merged[name], schema]} if name in merged else schema
    return merged


def _common_types(one: Any, other: Any) -> list[str]:
    """Return the types that both values of `type` allow.

    Raises:
        Unsatisfiable: there are no such types.
    """
    types = set(one if isinstance(one, list) else [one])
    other_types = set(other if isinstance(other, list) else [other])
    common = types & other_types
    if ("integer" in types and "number" in other_types) or (
        "number" in types and "integer" in other_types
    ):
        common.add("integer")
    if not common:
        raise Unsatisfiable
    return sorted(common)


def _common_literals(one: list[Any], other: list[Any]) -> list[Any]:
    """Return the literals that both values of `enum` have.

    Raises:
        Unsatisfiable: there are no such literals.
    """
    common = [value for value in one if any(json_equal(value, each) for each in other)]
    if not common:
        raise Unsatisfiable
    return common


def _names_of_both(one: list[str], other: list[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _refuse_unequal(one: Any, other: Any) -> Any:
    raise Unsatisfiable


# For each keyword, the function that combines two different values of the keyword.
_STRICTER: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "minimum": max,
    "exclusiveMinimum": max,
    "minLength": max,
    "minItems": max,
    "minProperties": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "maxLength": min,
    "maxItems": min,
    "maxProperties": min,
    "type": _common_types,
    "enum": _common_literals,
    "const": _refuse_unequal,
    "required": _names_of_both,
}
