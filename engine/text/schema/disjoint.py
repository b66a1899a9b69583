"""Decides whether it is certain that no value matches two given JSON schemas.

`oneOf` requires that a value matches exactly one option. A grammar cannot count
matches. But if no value matches two options, `oneOf` and `anyOf` are equivalent.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from engine.text.schema.references import Schema

_MAX_DEPTH: Final = 12  # limit for the nesting of compared schemas and references
# Maximum number of comparisons for all `oneOf` of a document. This many comparisons
# take a quarter of a second.
_MAX_STEPS: Final = 50_000


class Disjointness:
    """Compares schemas of one document.

    Args:
        target: returns the schema to which the `$ref` of a schema refers.
    """

    def __init__(self, target: Callable[[Schema], Any]) -> None:
        self._target = target
        self._num_steps = 0

    def find_overlap(self, schema: Schema) -> tuple[int, int] | None:
        """Return the indices of two options of `oneOf` that the same value may match.

        Only values that the other keywords of `schema` allow are considered.

        Returns:
            None if all options certainly exclude each other.
        """
        options = schema["oneOf"]
        if self._have_distinct_tags(options):
            return None
        siblings = {
            keyword: value for keyword, value in schema.items() if keyword != "oneOf"
        }
        if "$ref" in siblings:
            siblings["allOf"] = [*siblings.get("allOf", ()), self._target(schema)]
            del siblings["$ref"]
        possible = [
            (index, option)
            for index, option in enumerate(options)
            if not self.are_disjoint(siblings, option)
        ]
        for number, (index, option) in enumerate(possible):
            for earlier_index, earlier in possible[:number]:
                if not self.are_disjoint(earlier, option):
                    return earlier_index, index
        return None

    def _have_distinct_tags(self, options: list[Any]) -> bool:
        """Whether all options require the same property, with different literals.

        This fast test avoids comparing all pairs of hundreds of options, which takes
        long.
        """
        objects = [self._resolved(option) for option in options]
        if not all(
            isinstance(each, dict) and types_of(each) == {"object"} for each in objects
        ):
            return False
        required = [set(each.get("required", ())) for each in objects]
        return any(
            _are_all_distinct(
                [literals_of(property_of(each, name)) for each in objects]
            )
            for name in set.intersection(*required)
        )

    def _resolved(self, schema: Any) -> Any:
        """Follow the `$ref` of a schema, if any, and return the schema at the end."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema)
        return schema

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether it is certain that no value matches both schemas.

        Returns False if a value may match both schemas, or if _MAX_DEPTH or _MAX_STEPS
        is exceeded.
        """
        self._num_steps += 1
        if depth > _MAX_DEPTH or self._num_steps > _MAX_STEPS:
            return False
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        if self._keywords_exclude(one, other):
            return True
        return self._parts_exclude(one, other, depth) or self._parts_exclude(
            other, one, depth
        )

    def _parts_exclude(self, one: Schema, other: Schema, depth: int) -> bool:
        """Whether a schema within `one` shows that `one` and `other` are disjoint."""
        if "$ref" in one and self.are_disjoint(self._target(one), other, depth + 1):
            return True
        if any(
            self.are_disjoint(each, other, depth + 1) for each in one.get("allOf", ())
        ):
            return True
        alternatives = [
            one[keyword] for keyword in ("anyOf", "oneOf") if keyword in one
        ]
        for options in alternatives:
            if all(self.are_disjoint(option, other, depth + 1) for option in options):
                return True
        return self._properties_exclude(one, other, depth)

    def _keywords_exclude(self, one: Schema, other: Schema) -> bool:
        """Whether the literals, types or bounds of two schemas exclude each other."""
        literals = literals_of(one)
        other_literals = literals_of(other)
        if literals is not None:
            return not any(
                self._may_admit(other, other_literals, value) for value in literals
            )
        if other_literals is not None:
            return not any(
                self._may_admit(one, None, value) for value in other_literals
            )
        types = types_of(one)
        other_types = types_of(other)
        if not _have_common_type(types, other_types):
            return True
        numeric = {"integer", "number"}
        if types <= numeric or other_types <= numeric:
            return _are_apart(one, other) or _are_apart(other, one)
        return False

    def _may_admit(
        self, schema: Schema, literals: list[Any] | None, value: Any
    ) -> bool:
        """Whether `schema` may match the literal `value`.

        Args:
            literals: the literals of `schema`, or None.
        """
        if literals is not None and not any(
            json_equal(value, each) for each in literals
        ):
            return False
        return admits(schema, value) is not False

    def _properties_exclude(self, one: Schema, other: Schema, depth: int) -> bool:
        """Whether `one` requires a property for which no value matches both schemas."""
        if types_of(one) != {"object"} or types_of(other) != {"object"}:
            return False
        return any(
            self.are_disjoint(
                property_of(one, name), property_of(other, name), depth + 1
            )
            for name in one.get("required", ())
        )


def property_of(schema: Schema, name: str) -> Any:
    """Return the schema of the property `name`.

    Returns True, the schema that any value matches, if the schema is not known.
    """
    if name in schema.get("properties", {}):
        return schema["properties"][name]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)


def types_of(schema: Schema) -> set[str]:
    """Return the types that a schema allows.

    These are the types in `type`, or else the types of the schema's literals. "number"
    includes integers.
    """
    literals = literals_of(schema)
    if "type" not in schema and literals is not None:
        return {type_of(value) for value in literals}
    if "type" not in schema:
        return {"null", "boolean", "number", "string", "array", "object"}
    given = schema["type"]
    return set(given) if isinstance(given, list) else {given}


def _are_all_distinct(literal_lists: list[list[Any] | None]) -> bool:
    """Whether no two lists have a common literal.

    Returns False if any list is None or has objects or arrays.
    """
    seen: set[tuple[bool, Any]] = set()
    for literals in literal_lists:
        if literals is None or any(
            isinstance(value, dict | list) for value in literals
        ):
            return False
        values = {(isinstance(value, bool), value) for value in literals}
        if not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def literals_of(schema: Any) -> list[Any] | None:
    """Return the values of `const` or `enum`; None if the schema has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def type_of(value: Any) -> str:
    """Return the narrowest JSON Schema type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | Decimal):
        is_integer = isinstance(value, int) or value == value.to_integral_value()
        return "integer" if is_integer else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def json_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            json_equal(one[key], other[key]) for key in one
        )
    return bool(one == other)


def admits(schema: Any, value: Any) -> bool | None:
    """Whether `schema` matches a literal.

    Returns None if the result depends on keywords that this function does not evaluate.
    """
    if isinstance(schema, bool):
        return schema
    kind = type_of(value)
    types = types_of({"type": schema["type"]}) if "type" in schema else None
    if (
        types is not None
        and kind not in types
        and not (kind == "integer" and "number" in types)
    ):
        return False
    literals = literals_of(schema)
    if literals is not None and not any(json_equal(value, each) for each in literals):
        return False
    if "enum" in schema and not any(json_equal(value, each) for each in schema["enum"]):
        return False
    if kind in ("integer", "number") and not _is_within(schema, value):
        return False
    if kind == "string" and not (
        schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    ):
        return False
    return None if _OTHER_KEYWORDS[kind] & schema.keys() else True


_COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}
# For each type, the keywords that `admits` does not evaluate.
_OTHER_KEYWORDS: Final[dict[str, set[str]]] = {
    "null": _COMBINING,
    "boolean": _COMBINING,
    "integer": _COMBINING,
    "number": _COMBINING,
    "string": _COMBINING | {"pattern", "format"},
    "array": _COMBINING
    | {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "object": _COMBINING
    | {"properties", "patternProperties", "additionalProperties", "required"}
    | {"minProperties", "maxProperties"},
}


def _is_within(schema: Schema, number: int | Decimal) -> bool:
    """Whether a number matches the bounds and `multipleOf` of `schema`."""
    if "minimum" in schema and number < schema["minimum"]:
        return False
    if "maximum" in schema and number > schema["maximum"]:
        return False
    if "exclusiveMinimum" in schema and number <= schema["exclusiveMinimum"]:
        return False
    if "exclusiveMaximum" in schema and number >= schema["exclusiveMaximum"]:
        return False
    if "multipleOf" not in schema:
        return True
    return Fraction(number) % Fraction(schema["multipleOf"]) == 0


def _have_common_type(types: set[str], other_types: set[str]) -> bool:
    """Whether a value can have a type of both sets. Integers are also numbers."""
    if types & other_types:
        return True
    return ("integer" in types and "number" in other_types) or (
        "number" in types and "integer" in other_types
    )


def _are_apart(lower: Schema, upper: Schema) -> bool:
    """Whether the bounds put all numbers of `lower` below all numbers of `upper`."""
    for last, is_last_exclusive in (("maximum", False), ("exclusiveMaximum", True)):
        for first, is_first_exclusive in (
            ("minimum", False),
            ("exclusiveMinimum", True),
        ):
            if last not in lower or first not in upper:
                continue
            if lower[last] < upper[first]:
                return True
            is_either_exclusive = is_last_exclusive or is_first_exclusive
            if lower[last] == upper[first] and is_either_exclusive:
                return True
    return False
