"""Writes the grammar of a JSON schema with numbers that llguidance would round.

Such numbers become regular expressions with all digits (numbers.py). The schemas that
contain or refer to such numbers become rules in Lark syntax. All other schemas stay
JSON schemas within the grammar. Whitespace belongs to the tokens between values, such
as COMMA, because llguidance fails if whitespace of two grammars can be adjacent.
"""

import json
from typing import Any, Final

from engine.text.schema import numbers
from engine.text.schema.disjoint import admits, literals_of
from engine.text.schema.emit import llguidance_json
from engine.text.schema.errors import NO_VALUE, GrammarError, located
from engine.text.schema.exact_containers import ContainerRules
from engine.text.schema.keywords import (
    BOUNDS,
    TYPES,
    CheckedSchema,
    fail,
    is_number,
    keyword_path,
    llguidance_rounds_keywords,
    llguidance_rounds_literal,
)
from engine.text.schema.locate import llguidance_problem
from engine.text.schema.merge import Unsatisfiable, flatten
from engine.text.schema.references import Schema, children

MAX_BLANKS: Final = 12  # maximum number of consecutive whitespace characters
BLANKS: Final = r"[\x20\x0A\x0D\x09]"
OPTIONS: Final = {"whitespace_pattern": f"{BLANKS}{{1,{MAX_BLANKS}}}"}
_MAX_COMBINATIONS: Final = 256  # limit of the ways to choose one option of each union
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
    """Return a Lark grammar for a schema with numbers that llguidance would round.

    Raises:
        GrammarError: a keyword cannot be combined with such numbers, or no value
            matches the schema.
    """
    grammar = _ExactGrammar(checked)
    root = grammar.rule(checked.document, "")
    if root is None:
        fail("", "matches no value; correct the keywords that exclude each other")
    return "\n".join([f"start: {root}", *grammar.lines, *_tokens()])


def _tokens() -> list[str]:
    """Return the definitions of the Lark tokens between values, such as COMMA."""
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
    """Return a string literal in Lark syntax, which is JSON with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


class _ExactGrammar(ContainerRules):
    """Collects the rules of one grammar. Methods return None if no value matches."""

    def __init__(self, checked: CheckedSchema) -> None:
        super().__init__()
        self._checked = checked
        self._rule_names: dict[int, str | None] = {}
        # This list keeps schemas alive, so that the id() of a schema is never reused.
        self._schemas: list[Any] = []
        # The names of the tokens for numbers, by their regular expressions.
        self._number_tokens: dict[str, str] = {}
        # For each schema that llguidance enforces, by the schema's JSON text: the name
        # of its rule, and the reason why llguidance refuses it ("" if accepted).
        self._leaf_rules: dict[str, str] = {}
        self._problems: dict[str, str] = {}

    def rule(self, schema: Any, path: str) -> str | None:
        """Return the name of the rule for a schema. Add the rule if it is new.

        Returns None if no value matches the schema.
        """
        if schema is False:
            return None
        if id(schema) in self._rule_names and schema is not True:
            return self._rule_names[id(schema)]
        path = self._checked.path(schema) or path
        self._schemas.append(schema)
        name = self.new_name()
        if schema is not True:
            self._rule_names[id(schema)] = name
        try:
            body = self._body(schema, path)
        except Unsatisfiable:
            body = None
        if body is None:
            self._rule_names[id(schema)] = None
            # Define a rule that matches no text, because a recursive schema may refer
            # to this rule.
            self.lines.append(rf"{name}: /[^\s\S]/")
            return None
        self.lines.append(f"{name}: {body}")
        return name

    def needs_exact_rules(self, schema: Any) -> bool:
        """Whether a schema, or one within it, has numbers that llguidance rounds."""
        if not isinstance(schema, dict):
            return False
        if id(schema) in self._checked.paths:
            return id(schema) in self._checked.needs_exact_rules
        return llguidance_rounds_keywords(schema) or any(
            self.needs_exact_rules(each) for _, each in children(schema)
        )

    @property
    def draft(self) -> int:
        return self._checked.draft

    def _leaf(self, schema: Any, path: str) -> str | None:
        """Return the name of the rule for a schema that llguidance itself can enforce.

        Returns None if no value matches the schema.

        Raises:
            GrammarError: llguidance refuses the schema.
        """
        text = llguidance_json(self._checked, schema, OPTIONS)
        if text not in self._problems:
            self._problems[text] = llguidance_problem(text)
        problem = self._problems[text]
        if problem == NO_VALUE:
            return None
        if problem:
            raise GrammarError(located(path, problem))
        if text not in self._leaf_rules:
            self._leaf_rules[text] = self.new_name()
            self.lines.append(f"{self._leaf_rules[text]}: %json {text}")
        return self._leaf_rules[text]

    def _body(self, schema: Any, path: str) -> str | None:
        """Return the right side of the rule for a schema; None if no value matches."""
        if not self.needs_exact_rules(schema):
            return self._leaf(schema, path)
        base, unions = flatten(self._checked, schema, path)
        if unions:
            return self._union(base, unions, path)
        if literals_of(base) is not None:
            return self._literals(base, path)
        return self._types(base, path)

    def _union(self, base: Schema, unions: list[list[Any]], path: str) -> str | None:
        """Return alternatives, one for each way to choose an option of each union.

        Args:
            base: a schema that a value must match in addition to the options.
            unions: lists of options. A value must match one option of each list.
        """
        combinations: list[list[Any]] = [[base] if base else []]
        for options in unions:
            combinations = [
                [*parts, option] for parts in combinations for option in options
            ]
            if len(combinations) > _MAX_COMBINATIONS:
                fail(
                    keyword_path(path, "anyOf"),
                    f"has more than {_MAX_COMBINATIONS} combinations of options, "
                    "together with numbers beyond 2**53; use fewer options",
                )
        rules: list[str | None] = []
        for parts in combinations:
            combined = parts[0] if len(parts) == 1 else {"allOf": parts}
            rules.append(self.rule(combined, path))
        return _alternatives(rules)

    def _literals(self, base: Schema, path: str) -> str | None:
        """Return alternatives for the values of `const` or `enum`.

        Values that the other keywords of the schema exclude are left out.
        """
        keyword = "const" if "const" in base else "enum"
        other_keywords = {key: value for key, value in base.items() if key != keyword}
        values = []
        for value in literals_of(base) or ():
            is_admitted = admits(other_keywords, value)
            if is_admitted is None:
                fail(
                    keyword_path(path, keyword),
                    "has values that cannot be compared with the other keywords of the "
                    "schema; leave out those keywords",
                )
            if is_admitted:
                values.append(value)
        parts: list[str | None] = []
        llguidance_values = []
        for value in values:
            if is_number(value) or llguidance_rounds_literal(value):
                parts.append(self._literal(value))
            else:
                llguidance_values.append(value)
        if llguidance_values:
            parts.append(self._leaf({"enum": llguidance_values}, path))
        return _alternatives(parts)

    def _literal(self, value: Any) -> str:
        """Return a rule that matches only `value`, with all digits of its numbers."""
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
        """Return alternatives for the types that a schema allows.

        Each type gets the keywords that apply to it. All types without numbers that
        llguidance would round are combined into one schema, which llguidance enforces.
        """
        allowed = base.get("type", [name for name in TYPES if name != "integer"])
        types = allowed if isinstance(allowed, list) else [allowed]
        llguidance_schema: Schema = {"type": []}
        parts: list[str | None] = []
        numeric = _some_of(base, (*BOUNDS, "multipleOf"))
        for name in types:
            keywords = _KEYWORDS_OF.get(name, ())
            type_schema = {"type": name, **_some_of(base, keywords)}
            if name in _NUMERIC and llguidance_rounds_keywords(numeric):
                if name == "number" or "number" not in types:
                    parts.append(self._number(numeric, name == "integer", path))
            elif name == "object" and self.needs_exact_rules(type_schema):
                parts.append(self.object_rule(type_schema, path))
            elif name == "array" and self.needs_exact_rules(type_schema):
                parts.append(self.array_rule(type_schema, path))
            else:
                llguidance_schema["type"].append(name)
                llguidance_schema |= _some_of(type_schema, keywords)
        if llguidance_schema["type"]:
            parts.append(self._leaf(llguidance_schema, path))
        return _alternatives(parts)

    def _number(self, numeric: Schema, is_integer: bool, path: str) -> str | None:
        """Return the name of the Lark token that matches the allowed numbers.

        Returns None if there are no such numbers.

        Args:
            numeric: the bounds and `multipleOf` of a schema.

        Raises:
            GrammarError: `multipleOf` is not a power of 10.
        """
        make_pattern = (
            numbers.integer_pattern if is_integer else numbers.decimal_pattern
        )
        lower = _stricter(numeric, "minimum", "exclusiveMinimum", is_lower=True)
        upper = _stricter(numeric, "maximum", "exclusiveMaximum", is_lower=False)
        pattern = make_pattern(lower, upper)
        if pattern is None:
            return None
        expression = f"/{pattern}/"
        if "multipleOf" in numeric:
            exponent = numbers.power_of_ten(numeric["multipleOf"])
            if exponent is None:
                fail(
                    keyword_path(path, "multipleOf"),
                    f"is {numeric['multipleOf']}, which cannot be combined exactly "
                    "with bounds beyond 2**53; use a power of 10 or smaller bounds",
                )
            if not numbers.has_multiple(numeric["multipleOf"], lower, upper):
                return None
            expression += f" & /{numbers.multiple_pattern(exponent)}/"
        if expression not in self._number_tokens:
            name = f"NUMBER_{len(self._number_tokens)}"
            self._number_tokens[expression] = name
            self.lines.append(f"{name}: {expression}")
        return self._number_tokens[expression]


_KEYWORDS_OF: Final = {
    "string": _STRING_KEYWORDS,
    "object": _OBJECT_KEYWORDS,
    "array": _ARRAY_KEYWORDS,
    "integer": (*BOUNDS, "multipleOf"),
    "number": (*BOUNDS, "multipleOf"),
}


def _alternatives(parts: list[str | None]) -> str | None:
    """Return a rule that matches what any of `parts` matches.

    Returns None if all parts are None, so that no value matches.
    """
    possible = [part for part in parts if part is not None]
    return " | ".join(possible) if possible else None


def _some_of(schema: Schema, keywords: tuple[str, ...]) -> Schema:
    """Return a schema with only these keywords of `schema`."""
    return {keyword: schema[keyword] for keyword in keywords if keyword in schema}


def _stricter(
    numeric: Schema, inclusive: str, exclusive: str, *, is_lower: bool
) -> numbers.Bound | None:
    """Return the stricter of an inclusive and an exclusive bound; None if none is set.

    Args:
        numeric: a schema that may have the bounds.
        inclusive: the keyword of the inclusive bound.
        exclusive: the keyword of the exclusive bound.
        is_lower: whether these are lower bounds.
    """
    included = numeric.get(inclusive)
    excluded = numeric.get(exclusive)
    if excluded is None:
        return None if included is None else numbers.Bound(included)
    if included is not None and (
        included > excluded if is_lower else included < excluded
    ):
        return numbers.Bound(included)
    return numbers.Bound(excluded, is_exclusive=True)
