"""Checks a JSON schema keyword by keyword. Error messages have the keyword's path.

The library llguidance receives only keywords that this module has checked. Unknown
keywords, annotations and formats that are not enforced are left out, and references are
resolved. A `oneOf` becomes an `anyOf` (emit.py). The two are equivalent, because a
`oneOf` is accepted only if no value can match two of its options.
"""

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NoReturn

from engine.text.schema import numbers
from engine.text.schema.disjoint import Disjointness
from engine.text.schema.errors import GrammarError, shortened
from engine.text.schema.references import References, Resource, Schema, children
from protocol.settings.near_names import suggestion
from protocol.short_repr import short_repr

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
# The values of `format` that are enforced. All other values are only annotations.
FORMATS: Final = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri",
    "uuid",
)  # fmt: skip
# No answer has this many characters, items or properties.
MAX_COUNT: Final = 2**31 - 1
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"
)  # fmt: skip
ENFORCED: Final = frozenset({
    "$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type", "format", "pattern",
    "multipleOf", "required", "properties", "additionalProperties", "patternProperties",
    "items", "prefixItems", "additionalItems", *BOUNDS, *COUNTS,
})  # fmt: skip

_DRAFTS: Final = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}  # fmt: skip
_DEFAULT_DRAFT: Final = 2020  # the draft of schemas without a known `$schema`
# Keywords that restrict values but cannot be enforced, with the draft of JSON Schema
# that introduced each.
_NOT_ENFORCED: Final = {
    "not": 4, "dependencies": 4, "uniqueItems": 4, "contains": 6, "propertyNames": 6,
    "if": 7, "then": 7, "else": 7, "dependentRequired": 2019, "dependentSchemas": 2019,
    "minContains": 2019, "maxContains": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "$recursiveRef": 2019, "$dynamicRef": 2020,
}  # fmt: skip
# Keywords that have an effect only if the schema also has a second keyword.
_ONLY_WITH: Final = {
    "then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"
}  # fmt: skip
# Values with which a keyword of `_NOT_ENFORCED` restricts nothing.
_NO_RESTRICTION: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,), "not": (False,), "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},),
}  # fmt: skip


def load(text: str) -> Schema:
    """Parse the JSON text of a schema. Numbers with a point or exponent become Decimal.

    Raises:
        GrammarError: the text is not a JSON object.
    """
    try:
        document = json.loads(
            text, parse_float=Decimal, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise GrammarError("it is nested too deeply; send a flatter one") from None
    except ArithmeticError:
        raise GrammarError(
            "it has an exponent that is too large; send a smaller one"
        ) from None
    except json.JSONDecodeError as error:
        raise GrammarError(f"it is not JSON ({error}); send a JSON object") from None
    except ValueError:
        raise GrammarError(
            "it has an integer with too many digits; send a smaller one"
        ) from None
    if not isinstance(document, dict):
        raise GrammarError(f"it is {short_repr(document)}; send a JSON object")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"it has {name}, which is not JSON; leave it out")


def fail(path: str, problem: str) -> NoReturn:
    """Raise GrammarError about the keyword or schema at `path`; "" is the root schema.

    Args:
        problem: the predicate of the message, such as "must be a string".
    """
    raise GrammarError(f"`{shortened(path)}` {problem}" if path else f"it {problem}")


def keyword_path(path: str, key: str) -> str:
    """Return the path of the keyword `key` in the schema at `path`."""
    return f"{path}.{key}" if path else key


class CheckedSchema:
    """A JSON schema that has been checked.

    Args:
        text: the schema as JSON text.

    Raises:
        GrammarError: the schema has a mistake, or a keyword that cannot be enforced.
            The message names the keyword by its path.

    Attributes:
        document: the root schema. Counts are int, numbers with a point or exponent are
            Decimal, and exclusive bounds are numbers in every draft.
        draft: the draft of JSON Schema: 4, 6, 7, 2019 or 2020.
        paths: the paths of all schemas in the document, by id().
        needs_exact_rules: the id() of each schema that has numbers which llguidance
            would round, or that contains or refers to such a schema.
    """

    def __init__(self, text: str) -> None:
        self.document = load(text)
        dialect = self.document.get("$schema")
        dialect = dialect.rstrip("#") if isinstance(dialect, str) else ""
        self.draft = _DRAFTS.get(dialect, _DEFAULT_DRAFT)
        self.paths: dict[int, str] = {}
        self.needs_exact_rules: set[int] = set()
        self._references = References(self.document, "id" if self.draft == 4 else "$id")
        # The schemas to which `$ref` refers, by the id() of the schema with the `$ref`.
        self._targets: dict[int, Any] = {}
        # By the id() of a schema: the id() of each schema that contains it or refers to
        # it.
        self._parents: dict[int, list[int]] = {}
        self._schemas: list[Schema] = []
        self._walk()
        self._check_loops()
        self._spread_to_parents()
        self._check_multiples()
        self._check_one_of()

    def target(self, schema: Schema) -> Any:
        """Return the schema to which the `$ref` of `schema` refers."""
        return self._targets[id(schema)]

    def path(self, schema: Any) -> str:
        """Return the path of a schema; "" if the schema is not in this document."""
        return self.paths.get(id(schema), "")

    def _walk(self) -> None:
        """Visit and check all schemas that the root schema contains or refers to."""
        waiting: list[tuple[str, Any, Resource]] = [
            ("", self.document, self._references.root)
        ]
        while waiting:
            path, schema, resource = waiting.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                fail(
                    path, f"is {short_repr(schema)}; it must be an object or a boolean"
                )
            if id(schema) in self.paths:
                continue
            self.paths[id(schema)] = path
            self._schemas.append(schema)
            resource = self._references.resource_of(schema, resource)
            self._check_keywords(schema, path)
            if llguidance_rounds_keywords(schema):
                self.needs_exact_rules.add(id(schema))
            parts = [
                (keyword_path(path, key), each, resource)
                for key, each in children(schema)
            ]
            if "$ref" in schema:
                parts.append(self._follow(schema, path, resource))
            for _, each, _ in parts:
                self._parents.setdefault(id(each), []).append(id(schema))
            waiting += reversed(parts)

    def _follow(
        self, schema: Schema, path: str, resource: Resource
    ) -> tuple[str, Any, Resource]:
        """Return the path, the schema and the resource to which a `$ref` refers.

        Args:
            schema: the schema with the `$ref`.
            resource: the resource to which `schema` belongs.
        """
        reference = schema["$ref"]
        ref_path = keyword_path(path, "$ref")
        if not isinstance(reference, str):
            fail(ref_path, f"is {short_repr(reference)}; it must be a string")
        resolved = self._references.resolve(reference, resource)
        if resolved is None:
            fail(
                ref_path,
                f"is {short_repr(reference)}, which is not present in this schema; "
                'refer to a schema within it, such as "#/$defs/..."',
            )
        self._targets[id(schema)] = resolved[0]
        target_path = reference.removeprefix("#/").replace("/", ".") or "#"
        return target_path, *resolved

    def _check_loops(self) -> None:
        """Refuse a `$ref` that leads into a loop of `$ref`s."""
        checked_ids: set[int] = set()  # schemas from which no loop can be reached
        for schema in self._schemas:
            followed: dict[int, None] = {}
            current: Any = schema
            while id(current) in self._targets and id(current) not in checked_ids:
                if id(current) in followed:
                    fail(
                        keyword_path(self.path(schema), "$ref"),
                        "leads back to itself; refer to another schema",
                    )
                followed[id(current)] = None
                current = self._targets[id(current)]
            checked_ids.update(followed)

    def _check_keywords(self, schema: Schema, path: str) -> None:
        """Check the keywords of one schema.

        Normalizes the schema: counts become int, limits that no value reaches are
        removed, and exclusive bounds become numbers.
        """
        for keyword in list(schema):
            value = schema[keyword]
            if keyword in _NOT_ENFORCED and self._restricts(keyword, schema):
                fail(
                    keyword_path(path, keyword),
                    f"is {short_repr(value)}, and `{keyword}` cannot be enforced; "
                    "leave it out",
                )
            if keyword in COUNTS:
                count = _count(value, keyword_path(path, keyword))
                schema[keyword] = count
                if count == MAX_COUNT and keyword.startswith("max"):
                    # No value reaches this limit, but llguidance would need a state for
                    # each count up to the limit.
                    del schema[keyword]
                elif count == MAX_COUNT:
                    must_be = f"it must be below {MAX_COUNT}"
                    fail(
                        keyword_path(path, keyword),
                        f"is {short_repr(value)}; {must_be}",
                    )
            elif keyword in _MUST_BE:
                is_right, must_be = _MUST_BE[keyword]
                if not is_right(value):
                    fail(
                        keyword_path(path, keyword),
                        f"is {short_repr(value)}; it must be {must_be}",
                    )
        _check_types(schema, path)
        _normalize_bounds(schema, path)
        for keyword in (*BOUNDS, "multipleOf", "const", "enum"):
            if keyword in schema:
                _check_digits(schema[keyword], keyword_path(path, keyword))

    def _restricts(self, keyword: str, schema: Schema) -> bool:
        """Whether a keyword of `_NOT_ENFORCED` restricts the values of a schema."""
        if self.draft < _NOT_ENFORCED[keyword]:
            return False
        if keyword in _ONLY_WITH and _ONLY_WITH[keyword] not in schema:
            return False
        if keyword == "if":
            return "then" in schema or "else" in schema
        return not any(
            schema[keyword] == neutral and type(schema[keyword]) is type(neutral)
            for neutral in _NO_RESTRICTION.get(keyword, ())
        )

    def _spread_to_parents(self) -> None:
        """Add to `needs_exact_rules` the schemas that contain or refer to members."""
        waiting = list(self.needs_exact_rules)
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in self.needs_exact_rules:
                    self.needs_exact_rules.add(parent)
                    waiting.append(parent)

    def _check_multiples(self) -> None:
        """Refuse `multipleOf` values that llguidance might combine inexactly.

        llguidance computes the least common multiple of the values, which may overflow.
        """
        common = 1  # a common multiple of all multiples so far
        seen: set[tuple[int, int]] = set()
        is_combined = any("allOf" in schema for schema in self._schemas) or any(
            "multipleOf" in schema and {"$ref", "anyOf", "oneOf"} & schema.keys()
            for schema in self._schemas
        )
        for schema in self._schemas:
            if "multipleOf" not in schema or not is_combined:
                continue
            multiple = numbers.scaled(schema["multipleOf"])
            if multiple in seen:
                continue
            seen.add(multiple)
            coefficient, exponent = multiple
            common *= coefficient * 10 ** abs(exponent)
            if common >= 2**32 and len(seen) > 1:
                fail(
                    keyword_path(self.path(schema), "multipleOf"),
                    f"is {schema['multipleOf']}, which cannot be combined exactly with "
                    "the other multiples of this schema; use one `multipleOf`",
                )

    def _check_one_of(self) -> None:
        """Refuse a `oneOf` if two of its options may match the same value."""
        disjointness = Disjointness(self.target)
        for schema in self._schemas:
            if "oneOf" not in schema:
                continue
            overlap = disjointness.find_overlap(schema)
            if overlap is not None:
                fail(
                    keyword_path(self.path(schema), "oneOf"),
                    f"has options {overlap[0]} and {overlap[1]}, which the same value "
                    "may match; exactly one match cannot be enforced; use `anyOf`, "
                    "or give the options a required property with a different `const` "
                    "in each",
                )


def llguidance_rounds_keywords(schema: Schema) -> bool:
    """Whether llguidance would round a number in the keywords of `schema`.

    The numbers in schemas within `schema` do not count.
    """
    if any(
        not numbers.is_exact_in_llguidance(schema[name])
        for name in BOUNDS
        if name in schema
    ):
        return True
    literals = [schema["const"]] if "const" in schema else []
    return any(
        llguidance_rounds_literal(value)
        for value in [*literals, *schema.get("enum", ())]
    )


def llguidance_rounds_literal(value: Any) -> bool:
    """Whether llguidance would round a number in a JSON value."""
    if isinstance(value, dict):
        return any(llguidance_rounds_literal(each) for each in value.values())
    if isinstance(value, list):
        return any(llguidance_rounds_literal(each) for each in value)
    return is_number(value) and not numbers.is_exact_in_llguidance(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _count(value: Any, path: str) -> int:
    """Return the value of a keyword of COUNTS as an int, at most MAX_COUNT.

    Raises:
        GrammarError: the value is not a non-negative integer.
    """
    if not is_number(value) or value < 0:
        fail(path, f"is {short_repr(value)}; it must be an integer of at least 0")
    if value >= MAX_COUNT:
        return MAX_COUNT
    if value != int(value):
        fail(path, f"is {value}; it must be an integer")
    return int(value)


def _check_types(schema: Schema, path: str) -> None:
    given = schema.get("type", [])
    for name in given if isinstance(given, list) else [given]:
        if name not in TYPES:
            near = suggestion(name, TYPES) if isinstance(name, str) else ""
            allowed = ", ".join(TYPES)
            fail(
                keyword_path(path, "type"),
                f"is {short_repr(name)}{near}; it must be one of {allowed}",
            )


def _normalize_bounds(schema: Schema, path: str) -> None:
    """Turn exclusive bounds that are booleans, as in draft 4, into numbers.

    Also checks `multipleOf`.
    """
    for exclusive, inclusive in (
        ("exclusiveMinimum", "minimum"),
        ("exclusiveMaximum", "maximum"),
    ):
        if isinstance(schema.get(exclusive), bool):
            is_exclusive = schema.pop(exclusive)
            if is_exclusive and inclusive in schema:
                schema[exclusive] = schema.pop(inclusive)
    multiple = schema.get("multipleOf")
    if multiple is not None and multiple <= 0:
        fail(
            keyword_path(path, "multipleOf"),
            f"is {multiple}; it must be greater than 0",
        )
    if multiple is not None and numbers.llguidance_multiple(multiple) is None:
        fail(
            keyword_path(path, "multipleOf"),
            f"is {short_repr(multiple)}, which cannot be enforced exactly; use a "
            "number with fewer digits, below 4294967296",
        )


def _check_digits(value: Any, path: str) -> None:
    """Refuse a JSON value that has a number with too many digits."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_digits(each, path)
    elif is_number(value) and numbers.num_digits(value) > numbers.MAX_DIGITS:
        digits = numbers.num_digits(value)
        shown = str(value)[:20]
        fail(
            path,
            f"has the number {shown}..., which has {digits} digits; the limit is "
            f"{numbers.MAX_DIGITS}",
        )


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_filled_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_bound(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


# For each keyword, a function that checks a value, and a description of valid values.
_MUST_BE: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (
        lambda value: _is_string(value) or _is_filled_list(value),
        "a type or a list of types",
    ),
    "properties": (_is_object, "an object of schemas"),
    "patternProperties": (_is_object, "an object of schemas"),
    "required": (_is_string_list, "a list of strings"),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    "enum": (_is_filled_list, "a list of at least one value"),
    "anyOf": (_is_filled_list, "a list of at least one schema"),
    "oneOf": (_is_filled_list, "a list of at least one schema"),
    "allOf": (lambda value: isinstance(value, list), "a list of schemas"),
    "minimum": (is_number, "a number"),
    "maximum": (is_number, "a number"),
    "exclusiveMinimum": (_is_bound, "a number"),
    "exclusiveMaximum": (_is_bound, "a number"),
    "multipleOf": (is_number, "a number"),
    "pattern": (_is_string, "a string"),
    "format": (_is_string, "a string"),
}
