"""Writes the grammar of a JSON schema whose numbers the grammar library would change.

The parts of the schema that lead to such numbers become rules of Lark's form, the numbers regular
expressions (numbers.py), and all other parts stay schemas within the grammar. Whitespace stands in
the tokens between values: the library fails where whitespace of two grammars may follow each other.
"""

import json
from typing import Any, Final

from engine.text.schema import numbers
from engine.text.schema.disjoint import admits, literals_of
from engine.text.schema.emit import library_json
from engine.text.schema.errors import NO_VALUE, GrammarError, located
from engine.text.schema.exact_containers import ContainerRules
from engine.text.schema.keywords import (
    BOUNDS,
    TYPES,
    CheckedSchema,
    below,
    fail,
    has_changing_numbers,
    is_number,
    literal_changes,
)
from engine.text.schema.locate import library_problem
from engine.text.schema.merge import Unsatisfiable, flatten
from engine.text.schema.references import Schema, children

MAX_BLANKS: Final = 12  # whitespace characters in a row
BLANKS: Final = r"[\x20\x0A\x0D\x09]"
OPTIONS: Final = {"whitespace_pattern": f"{BLANKS}{{1,{MAX_BLANKS}}}"}
_MAX_OPTIONS: Final = 256  # of several unions that are multiplied
_NUMERIC: Final = ("integer", "number")
_STRING_KEYWORDS: Final = ("minLength", "maxLength", "pattern", "format")
_OBJECT_KEYWORDS: Final = (
    "properties", "required", "additionalProperties", "patternProperties", "minProperties",
    "maxProperties",
)  # fmt: skip
_ARRAY_KEYWORDS: Final = (
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
)


def exact_lark(checked: CheckedSchema) -> str:
    """A grammar in Lark's form of a schema that has numbers which the library changes.

    Raises:
        GrammarError: a keyword cannot be combined with such numbers, or no value matches.
    """
    grammar = _ExactGrammar(checked)
    root = grammar.rule(checked.document, "")
    if root is None:
        fail("", "matches no value; correct what excludes each other")
    return "\n".join([f"start: {root}", *grammar.lines, *_tokens()])


def _tokens() -> list[str]:
    """The tokens between values."""
    blanks = f"{BLANKS}{{0,{MAX_BLANKS}}}"
    return [
        rf"OPEN_OBJECT: /\{{{blanks}/",
        rf"CLOSE_OBJECT: /{blanks}\}}/",
        rf"EMPTY_OBJECT: /\{{{blanks}\}}/",
        rf"OPEN_ARRAY: /\[{blanks}/",
        rf"CLOSE_ARRAY: /{blanks}\]/",
        rf"EMPTY_ARRAY: /\[{blanks}\]/",
        f"COLON: /{blanks}:{blanks}/",
        f"COMMA: /{blanks},{blanks}/",
    ]


def lark_string(text: str) -> str:
    """A literal in Lark's form, which takes every character as JSON writes it but DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


class _ExactGrammar(ContainerRules):
    """The rules of one grammar. A rule's name is None where no value matches."""

    def __init__(self, checked: CheckedSchema) -> None:
        super().__init__()
        self._checked = checked
        self._names: dict[int, str | None] = {}
        self._kept: list[Any] = []  # new schemas, whose id() must stay theirs
        self._tokens: dict[str, str] = {}  # for numbers, by their expressions
        self._leaves: dict[
            str, str
        ] = {}  # rules for schemas that the library keeps, by their text
        self._problems: dict[
            str, str
        ] = {}  # by the text of a schema that the library keeps

    def rule(self, schema: Any, path: str) -> str | None:
        """The name of the rule for a schema."""
        if schema is False:
            return None
        if id(schema) in self._names and schema is not True:
            return self._names[id(schema)]
        path = self._checked.path(schema) or path
        self._kept.append(schema)
        name = self.new_name()
        if schema is not True:
            self._names[id(schema)] = name
        try:
            body = self._body(schema, path)
        except Unsatisfiable:
            body = None
        if body is None:
            self._names[id(schema)] = None
            self.lines.append(
                rf"{name}: /[^\s\S]/"
            )  # a schema within itself may refer to it
            return None
        self.lines.append(f"{name}: {body}")
        return name

    def needs_exact(self, schema: Any) -> bool:
        """Whether a schema has, here or below, numbers that the library changes."""
        if not isinstance(schema, dict):
            return False
        if id(schema) in self._checked.paths:
            return id(schema) in self._checked.exact
        return has_changing_numbers(schema) or any(
            self.needs_exact(each) for _, each in children(schema)
        )

    @property
    def draft(self) -> int:
        return self._checked.draft

    def _leaf(self, schema: Any, path: str) -> str | None:
        """The rule for a schema that the library itself keeps; None where no value matches."""
        text = library_json(self._checked, schema, OPTIONS)
        if text not in self._problems:
            self._problems[text] = library_problem(text)
        problem = self._problems[text]
        if problem == NO_VALUE:
            return None
        if problem:
            raise GrammarError(located(path, problem))
        if text not in self._leaves:
            self._leaves[text] = self.new_name()
            self.lines.append(f"{self._leaves[text]}: %json {text}")
        return self._leaves[text]

    def _body(self, schema: Any, path: str) -> str | None:
        if not self.needs_exact(schema):
            return self._leaf(schema, path)
        base, unions = flatten(self._checked, schema, path)
        if unions:
            return self._union(base, unions, path)
        if literals_of(base) is not None:
            return self._literals(base, path)
        return self._types(base, path)

    def _union(self, base: Schema, unions: list[list[Any]], path: str) -> str | None:
        """The options of all unions, each combined with the keywords beside them."""
        combinations: list[list[Any]] = [[base] if base else []]
        for options in unions:
            combinations = [
                [*some, option] for some in combinations for option in options
            ]
            if len(combinations) > _MAX_OPTIONS:
                fail(
                    below(path, "anyOf"),
                    f"has more than {_MAX_OPTIONS} combinations of options beside numbers beyond "
                    "2**53; use fewer",
                )
        rules: list[str | None] = []
        for parts in combinations:
            combined = parts[0] if len(parts) == 1 else {"allOf": parts}
            rules.append(self.rule(combined, path))
        found = [rule for rule in rules if rule is not None]
        return " | ".join(found) if found else None

    def _literals(self, base: Schema, path: str) -> str | None:
        """The values of `const` or `enum` that the keywords beside them admit."""
        chosen = "const" if "const" in base else "enum"
        beside = {key: value for key, value in base.items() if key != chosen}
        values = []
        for value in literals_of(base) or ():
            is_admitted = admits(beside, value)
            if is_admitted is None:
                fail(
                    below(path, chosen),
                    "has values that cannot be compared here with the keywords beside it; leave "
                    "out those keywords",
                )
            if is_admitted:
                values.append(value)
        kept = [
            value
            for value in values
            if not (is_number(value) or literal_changes(value))
        ]
        parts: list[str | None] = [
            self._literal(value)
            for value in values
            if is_number(value) or literal_changes(value)
        ]
        if kept:
            parts.append(self._leaf({"enum": kept}, path))
        found = [part for part in parts if part is not None]
        return " | ".join(found) if found else None

    def _literal(self, value: Any) -> str:
        """One JSON value, its numbers digit by digit."""
        if isinstance(value, dict):
            pairs = [
                f"{lark_string(json.dumps(name, ensure_ascii=False))} COLON {self._literal(each)}"
                for name, each in value.items()
            ]
            return (
                f"(OPEN_OBJECT {' COMMA '.join(pairs)} CLOSE_OBJECT)"
                if pairs
                else "EMPTY_OBJECT"
            )
        if isinstance(value, list):
            items = [self._literal(each) for each in value]
            return (
                f"(OPEN_ARRAY {' COMMA '.join(items)} CLOSE_ARRAY)"
                if items
                else "EMPTY_ARRAY"
            )
        if value is None or isinstance(value, bool | str):
            return lark_string(json.dumps(value, ensure_ascii=False))
        return lark_string(str(value))

    def _types(self, base: Schema, path: str) -> str | None:
        """The types that a schema allows, each with its own keywords."""
        given = base.get("type", [name for name in TYPES if name != "integer"])
        types = given if isinstance(given, list) else [given]
        rest: Schema = {"type": []}
        parts: list[str | None] = []
        numeric = _some_of(base, (*BOUNDS, "multipleOf"))
        for name in types:
            keywords = _KEYWORDS_OF.get(name, ())
            own = {"type": name, **_some_of(base, keywords)}
            if name in _NUMERIC and has_changing_numbers(numeric):
                if name == "number" or "number" not in types:
                    parts.append(self._number(numeric, name == "integer", path))
            elif name == "object" and self.needs_exact(own):
                parts.append(self.object_rule(own, path))
            elif name == "array" and self.needs_exact(own):
                parts.append(self.array_rule(own, path))
            else:
                rest["type"].append(name)
                rest |= {key: value for key, value in own.items() if key != "type"}
        if rest["type"]:
            parts.append(self._leaf(rest, path))
        found = [part for part in parts if part is not None]
        return " | ".join(found) if found else None

    def _number(self, numeric: Schema, is_integer: bool, path: str) -> str | None:
        """A token for a range of numbers."""
        make = numbers.integer_pattern if is_integer else numbers.decimal_pattern
        lower = _stricter(numeric, "minimum", "exclusiveMinimum", is_lower=True)
        upper = _stricter(numeric, "maximum", "exclusiveMaximum", is_lower=False)
        pattern = make(lower, upper)
        if pattern is None:
            return None
        expression = f"/{pattern}/"
        if "multipleOf" in numeric:
            exponent = numbers.power_of_ten(numeric["multipleOf"])
            if exponent is None:
                fail(
                    below(path, "multipleOf"),
                    f"is {numeric['multipleOf']}, which cannot be combined exactly with bounds "
                    "beyond 2**53; use a power of 10 or smaller bounds",
                )
            if not numbers.has_multiple(numeric["multipleOf"], lower, upper):
                return None
            expression += f" & /{numbers.multiple_pattern(exponent)}/"
        if expression not in self._tokens:
            self._tokens[expression] = f"NUMBER_{len(self._tokens)}"
            self.lines.append(f"{self._tokens[expression]}: {expression}")
        return self._tokens[expression]


_KEYWORDS_OF: Final = {
    "string": _STRING_KEYWORDS,
    "object": _OBJECT_KEYWORDS,
    "array": _ARRAY_KEYWORDS,
    "integer": (*BOUNDS, "multipleOf"),
    "number": (*BOUNDS, "multipleOf"),
}


def _some_of(schema: Schema, keywords: tuple[str, ...]) -> Schema:
    return {keyword: schema[keyword] for keyword in keywords if keyword in schema}


def _stricter(
    numeric: Schema, inclusive: str, exclusive: str, *, is_lower: bool
) -> numbers.Bound | None:
    """The stricter one of an inclusive and an exclusive bound."""
    given = numeric.get(inclusive)
    barred = numeric.get(exclusive)
    if barred is None:
        return None if given is None else numbers.Bound(given)
    if given is not None and (given > barred if is_lower else given < barred):
        return numbers.Bound(given)
    return numbers.Bound(barred, is_exclusive=True)
