"""Writes Lark rules for objects and arrays with numbers that llguidance would round.

See exact.py.
"""

import json
from abc import ABC, abstractmethod
from typing import Any

from engine.text.schema.keywords import fail, keyword_path
from engine.text.schema.references import Schema

# Matches the name of a property as a JSON string. The pattern allows only one spelling
# of each name, so excluding this spelling excludes the name.
_ANY_NAME = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'


class ContainerRules(ABC):
    """Writes rules for objects and arrays, and collects them in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._num_names = 0

    @abstractmethod
    def rule(self, schema: Any, path: str) -> str | None:
        """Return the name of the rule for a schema; None if no value matches."""

    @property
    @abstractmethod
    def draft(self) -> int:
        """The draft of JSON Schema: 4, 6, 7, 2019 or 2020."""

    def new_name(self) -> str:
        self._num_names += 1
        return f"value_{self._num_names}"

    def _define(self, body: str) -> str:
        """Add a rule, and return its name."""
        name = self.new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def object_rule(self, schema: Schema, path: str) -> str | None:
        """Return a rule for an object with its properties in the schema's order.

        Returns None if no object matches.

        Raises:
            GrammarError: a keyword cannot be combined with numbers that llguidance
                would round.
        """
        for keyword in ("patternProperties", "minProperties", "maxProperties"):
            if keyword in schema:
                fail(
                    keyword_path(path, keyword),
                    "cannot be enforced in an object that has numbers beyond 2**53; "
                    "leave it out",
                )
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        additional = schema.get("additionalProperties", True)
        pairs: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *schema.get("required", ())]):
            value = self.rule(
                properties.get(name, additional),
                keyword_path(path, f"properties.{name}"),
            )
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append((f"{_quoted(name)} COLON {value}", name in required))
        more = self._additional_pair([*properties, *required], additional, path)
        return self._object_of(pairs, more)

    def _additional_pair(self, listed: list[str], schema: Any, path: str) -> str | None:
        """Return a rule for an additional property: its name and its value.

        Returns None if the object may have no additional property.

        Args:
            listed: the names that an additional property cannot have.
            schema: the schema of additional properties.
        """
        value = self.rule(schema, keyword_path(path, "additionalProperties"))
        if value is None:
            return None
        name = f"NAME_{len(self.lines)}"
        excluded = " | ".join(_quoted(each) for each in dict.fromkeys(listed))
        self.lines.append(
            f"{name}: {_ANY_NAME}" + (f" & ~({excluded})" if excluded else "")
        )
        return self._define(f"{name} COLON {value}")

    def _object_of(self, pairs: list[tuple[str, bool]], more: str | None) -> str | None:
        """Return a rule for an object of `pairs`, followed by additional pairs.

        Args:
            pairs: for each property, a rule for its name and value, and whether the
                property is required.
            more: a rule for an additional pair; None if no additional pairs are
                allowed.
        """
        rest = self._define(f"(COMMA {more})*" if more else '""')
        first = None if more is None else self._define(f"{more} {rest}")
        can_be_empty = True
        for pair, is_required in reversed(pairs):
            first_pair = f"{pair} {rest}"
            if is_required or first is None:
                first = self._define(first_pair)
            else:
                first = self._define(f"{first_pair} | {first}")
            entry = f"COMMA {pair}" if is_required else f"(COMMA {pair})?"
            rest = self._define(f"{entry} {rest}")
            can_be_empty = can_be_empty and not is_required
        bodies = ["EMPTY_OBJECT"] if can_be_empty else []
        if first is not None:
            bodies.append(f"OPEN_OBJECT {first} CLOSE_OBJECT")
        return self._define(" | ".join(bodies)) if bodies else None

    def array_rule(self, schema: Schema, path: str) -> str | None:
        """Return a rule for an array: `prefixItems` first, then `items`.

        Returns None if no array matches.
        """
        prefix, items = self._items_of(schema)
        minimum = schema.get("minItems", 0)
        maximum = schema.get("maxItems")
        first_items: list[str] = []
        for index, each in enumerate(prefix if maximum is None else prefix[:maximum]):
            rule = self.rule(each, keyword_path(path, f"prefixItems[{index}]"))
            if rule is None:
                maximum = index
                break
            first_items.append(rule)
        more = self.rule(items, keyword_path(path, "items"))
        if more is None:
            num_first = len(first_items)
            maximum = num_first if maximum is None else min(maximum, num_first)
        if maximum is not None and minimum > maximum:
            return None
        return self._array_of(first_items, more, minimum, maximum)

    def _items_of(self, schema: Schema) -> tuple[list[Any], Any]:
        """Return the schemas of the first items, and the schema of all later items.

        The keywords are `prefixItems` and `items`. In drafts before 2020, a list in
        `items` has the first schemas, and `additionalItems` is the schema of all later
        items.
        """
        items = schema.get("items", True)
        if isinstance(items, list):
            return items, schema.get("additionalItems", True)
        has_prefix = self.draft >= 2020 and "additionalItems" not in schema
        return schema.get("prefixItems", []) if has_prefix else [], items

    def _array_of(
        self,
        first_items: list[str],
        more: str | None,
        minimum: int,
        maximum: int | None,
    ) -> str | None:
        """Return a rule for an array.

        Args:
            first_items: the rules of the first items.
            more: the rule for all later items; None if no later items are allowed.
            minimum: the smallest number of items.
            maximum: the largest number of items; None if it is not limited.
        """
        bodies = ["EMPTY_ARRAY"] if minimum == 0 else []
        if maximum == 0:
            return self._define("EMPTY_ARRAY") if minimum == 0 else None
        missing = max(0, minimum - max(len(first_items), 1))
        allowed = "" if maximum is None else str(maximum - max(len(first_items), 1))
        rest = '""' if more is None else f"(COMMA {more}){{{missing},{allowed}}}"
        rest = self._define('""' if allowed == "0" else rest)
        for index in range(len(first_items) - 1, 0, -1):
            entry = f"COMMA {first_items[index]} {rest}"
            rest = self._define(entry if index < minimum else f"({entry})?")
        first = first_items[0] if first_items else more
        if first is not None:
            bodies.append(f"OPEN_ARRAY {first} {rest} CLOSE_ARRAY")
        return self._define(" | ".join(bodies)) if bodies else None


def _quoted(name: str) -> str:
    """Return a property's name in JSON as a string literal in Lark syntax."""
    text = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
    return text.replace("\x7f", r"\u007f")
