"""Writes the grammar of a JSON schema with numbers that the grammar library changes.

The parts of the schema that lead to such numbers become rules of Lark's form, the
numbers regular expressions (numbers.py), and all other parts stay schemas within the
grammar. Whitespace stands in the tokens between values: the library fails where
whitespace of two grammars may follow each other.
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
    "properties", "required", "additionalProperties", "patternProperties",
    "minProperties", "maxProperties",
)  # fmt: skip
_ARRAY_KEYWORDS: Final = (
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
)


def exact_lark(checked: CheckedSchema) -> str:
    """Return a grammar in Lark's form of a schema that needs exact numbers.

    Raises:
        GrammarError: a keyword cannot be combined with such numbers, or no value
            matches.
    """
    grammar = _ExactGrammar(checked)
    root = grammar.rule(checked.document, "")
    if root is None:
        fail("", "matches no value; correct what excludes each other")
    return "\n".join([f"start: {root}", *grammar.lines, *_tokens()])


def _tokens() -> list[str]:
    """Return the definitions of the tokens between values."""
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
    """Return a literal in Lark's form: JSON's spelling, but DEL is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


class _ExactGrammar(ContainerRules):
    """Collects the rules of one grammar. A rule is None where no value matches."""

    def __init__(self, checked: CheckedSchema) -> None:
        super().__init__()
        self._checked = checked
        self._names: dict[int, str | None] = {}
        # Keeps new schemas alive, so that no other object gets their id().
        self._schemas: list[Any] = []
        self._tokens: dict[str, str] = {}  # tokens for numbers, by their expressions
        # Rules and problems of schemas that the library writes, by the schemas' text.
        self._leaves: dict[str, str] = {}
        self._problems: dict[str, str] = {}

    def rule(self, schema: Any, path: str) -> str | None:
        """Return the name of the rule for a schema; None where no value matches."""
        if schema is False:
            return None
        if id(schema) in self._names and schema is not True:
            return self._names[id(schema)]
        path = self._checked.path(schema) or path
        self._schemas.append(schema)
        name = self.new_name()
        if schema is not True:
            self._names[id(schema)] = name
        try:
            body = self._body(schema, path)
        except Unsatisfiable:
            body = None
        if body is None:
            self._names[id(schema)] = None
            # A recursive schema may refer to the rule, so it matches nothing.
            self.lines.append(rf"{name}: /[^\s\S]/")
            return None
        self.lines.append(f"{name}: {body}")
        return name

    def needs_exact(self, schema: Any) -> bool:
        """Whether a schema or a part of it has numbers that the library changes."""
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
        """Return a rule of the library's for a schema; None where no value matches."""
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
        """Combine the options of all unions with each other and with `base`."""
        combinations: list[list[Any]] = [[base] if base else []]
        for options in unions:
            combinations = [
                [*some, option] for some in combinations for option in options
            ]
            if len(combinations) > _MAX_OPTIONS:
                fail(
                    below(path, "anyOf"),
                    f"has more than {_MAX_OPTIONS} combinations of options together "
                    "with numbers beyond 2**53; use fewer",
                )
        rules: list[str | None] = []
        for parts in combinations:
            combined = parts[0] if len(parts) == 1 else {"allOf": parts}
            rules.append(self.rule(combined, path))
        return _alternatives(rules)

    def _literals(self, base: Schema, path: str) -> str | None:
        """Return the values of `const` or `enum` that the other keywords admit."""
        chosen = "const" if "const" in base else "enum"
        other_keywords = {key: value for key, value in base.items() if key != chosen}
        values = []
        for value in literals_of(base) or ():
            is_admitted = admits(other_keywords, value)
            if is_admitted is None:
                fail(
                    below(path, chosen),
                    "has values that cannot be compared here with the other keywords "
                    "of its schema; leave out those keywords",
                )
            if is_admitted:
                values.append(value)
        parts: list[str | None] = []
        library_values = []
        for value in values:
            if is_number(value) or literal_changes(value):
                parts.append(self._literal(value))
            else:
                library_values.append(value)
        if library_values:
            parts.append(self._leaf({"enum": library_values}, path))
        return _alternatives(parts)

    def _literal(self, value: Any) -> str:
        """Return one JSON value, with its numbers digit by digit."""
        if isinstance(value, dict):
            if not value:
                return "EMPTY_OBJECT"
            pairs = []
            for name, each in value.items():
                key = lark_string(json.dumps(name, ensure_ascii=False))
                pairs.append(f"{key} COLON {self._literal(each)}")
            return f"(OPEN_OBJECT {' COMMA '.join(pairs)} CLOSE_OBJECT)"
        if isinstance(value, list):
            if not value:
                return "EMPTY_ARRAY"
            items = [self._literal(each) for each in value]
            return f"(OPEN_ARRAY {' COMMA '.join(items)} CLOSE_ARRAY)"
        if value is None or isinstance(value, bool | str):
            return lark_string(json.dumps(value, ensure_ascii=False))
        return lark_string(str(value))

    def _types(self, base: Schema, path: str) -> str | None:
        """Return rules for the types that a schema allows, each with its keywords."""
        given = base.get("type", [name for name in TYPES if name != "integer"])
        types = given if isinstance(given, list) else [given]
        rest: Schema = {"type": []}
        parts: list[str | None] = []
        numeric = _some_of(base, (*BOUNDS, "multipleOf"))
        for name in types:
            keywords = _KEYWORDS_OF.get(name, ())
            of_type = {"type": name, **_some_of(base, keywords)}
            if name in _NUMERIC and has_changing_numbers(numeric):
                if name == "number" or "number" not in types:
                    parts.append(self._number(numeric, name == "integer", path))
            elif name == "object" and self.needs_exact(of_type):
                parts.append(self.object_rule(of_type, path))
            elif name == "array" and self.needs_exact(of_type):
                parts.append(self.array_rule(of_type, path))
            else:
                rest["type"].append(name)
                rest |= {key: value for key, value in of_type.items() if key != "type"}
        if rest["type"]:
            parts.append(self._leaf(rest, path))
        return _alternatives(parts)

    def _number(self, numeric: Schema, is_integer: bool, path: str) -> str | None:
        """Return the token for a range of numbers."""
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
                    f"is {numeric['multipleOf']}, which cannot be combined exactly "
                    "with bounds beyond 2**53; use a power of 10 or smaller bounds",
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


def _alternatives(parts: list[str | None]) -> str | None:
    """Return a rule for any of the parts that match some value."""
    possible = [part for part in parts if part is not None]
    return " | ".join(possible) if possible else None


def _some_of(schema: Schema, keywords: tuple[str, ...]) -> Schema:
    return {keyword: schema[keyword] for keyword in keywords if keyword in schema}


def _stricter(
    numeric: Schema, inclusive: str, exclusive: str, *, is_lower: bool
) -> numbers.Bound | None:
    """Return the stricter one of an inclusive and an exclusive bound."""
    inner = numeric.get(inclusive)
    outer = numeric.get(exclusive)
    if outer is None:
        return None if inner is None else numbers.Bound(inner)
    if inner is not None and (inner > outer if is_lower else inner < outer):
        return numbers.Bound(inner)
    return numbers.Bound(outer, is_exclusive=True)
