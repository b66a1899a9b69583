"""Writes rules of Lark's form for the objects and arrays of a schema (exact.py)."""

import json
from abc import ABC, abstractmethod
from typing import Any

from engine.text.schema.keywords import below, fail
from engine.text.schema.references import Schema

# A property's name in the only spelling that is allowed here. So to exclude a spelling
# excludes the name.
_ANY_NAME = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'


class ContainerRules(ABC):
    """Collects the lines of a grammar in `lines`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._num_names = 0

    @abstractmethod
    def rule(self, schema: Any, path: str) -> str | None:
        """Return the name of the rule for a schema; None where no value matches."""

    @property
    @abstractmethod
    def draft(self) -> int:
        """The draft of JSON Schema: 4, 6, 7, 2019 or 2020."""

    def new_name(self) -> str:
        self._num_names += 1
        return f"value_{self._num_names}"

    def _define(self, body: str) -> str:
        name = self.new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def object_rule(self, schema: Schema, path: str) -> str | None:
        """Return a rule for an object, its properties in the order of the schema."""
        for keyword in ("patternProperties", "minProperties", "maxProperties"):
            if keyword in schema:
                fail(
                    below(path, keyword),
                    "cannot be enforced in an object that has numbers beyond 2**53; "
                    "leave it out",
                )
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        additional = schema.get("additionalProperties", True)
        pairs: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *schema.get("required", ())]):
            value = self.rule(
                properties.get(name, additional), below(path, f"properties.{name}")
            )
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append((f"{_quoted(name)} COLON {value}", name in required))
        more = self._additional_pair([*properties, *required], additional, path)
        return self._object_of(pairs, more)

    def _additional_pair(self, taken: list[str], schema: Any, path: str) -> str | None:
        """Return a rule for a name that the schema does not list, and its value."""
        value = self.rule(schema, below(path, "additionalProperties"))
        if value is None:
            return None
        name = f"NAME_{len(self.lines)}"
        excluded = " | ".join(_quoted(each) for each in dict.fromkeys(taken))
        self.lines.append(
            f"{name}: {_ANY_NAME}" + (f" & ~({excluded})" if excluded else "")
        )
        return self._define(f"{name} COLON {value}")

    def _object_of(self, pairs: list[tuple[str, bool]], more: str | None) -> str | None:
        """Return a rule for an object of these pairs and any number of `more`.

        Args:
            pairs: rules for a name and its value, and whether the pair is required.
            more: a rule for any other pair; None: there are no others.
        """
        rest = self._define(f"(COMMA {more})*" if more else '""')
        first = None if more is None else self._define(f"{more} {rest}")
        can_be_empty = True
        for pair, is_required in reversed(pairs):
            begun = f"{pair} {rest}"
            if is_required or first is None:
                first = self._define(begun)
            else:
                first = self._define(f"{begun} | {first}")
            entry = f"COMMA {pair}" if is_required else f"(COMMA {pair})?"
            rest = self._define(f"{entry} {rest}")
            can_be_empty = can_be_empty and not is_required
        bodies = ["EMPTY_OBJECT"] if can_be_empty else []
        if first is not None:
            bodies.append(f"OPEN_OBJECT {first} CLOSE_OBJECT")
        return self._define(" | ".join(bodies)) if bodies else None

    def array_rule(self, schema: Schema, path: str) -> str | None:
        """Return a rule for an array: `prefixItems` first, then `items`."""
        prefix, items = self._items_of(schema)
        minimum = schema.get("minItems", 0)
        maximum = schema.get("maxItems")
        begins: list[str] = []
        for at, each in enumerate(prefix if maximum is None else prefix[:maximum]):
            rule = self.rule(each, below(path, f"prefixItems[{at}]"))
            if rule is None:
                maximum = at
                break
            begins.append(rule)
        others = self.rule(items, below(path, "items"))
        if others is None:
            maximum = len(begins) if maximum is None else min(maximum, len(begins))
        if maximum is not None and minimum > maximum:
            return None
        return self._array_of(begins, others, minimum, maximum)

    def _items_of(self, schema: Schema) -> tuple[list[Any], Any]:
        """Return `prefixItems` and `items`.

        Drafts before 2020 call them `items` and `additionalItems`.
        """
        items = schema.get("items", True)
        if isinstance(items, list):
            return items, schema.get("additionalItems", True)
        is_new = self.draft >= 2020 and "additionalItems" not in schema
        return schema.get("prefixItems", []) if is_new else [], items

    def _array_of(
        self, begins: list[str], others: str | None, minimum: int, maximum: int | None
    ) -> str | None:
        """Return a rule for an array of these first items, with `others` after them."""
        bodies = ["EMPTY_ARRAY"] if minimum == 0 else []
        if maximum == 0:
            return self._define("EMPTY_ARRAY") if minimum == 0 else None
        missing = max(0, minimum - max(len(begins), 1))
        allowed = "" if maximum is None else str(maximum - max(len(begins), 1))
        rest = '""' if others is None else f"(COMMA {others}){{{missing},{allowed}}}"
        rest = self._define('""' if allowed == "0" else rest)
        for at in range(len(begins) - 1, 0, -1):
            entry = f"COMMA {begins[at]} {rest}"
            rest = self._define(entry if at < minimum else f"({entry})?")
        first = begins[0] if begins else others
        if first is not None:
            bodies.append(f"OPEN_ARRAY {first} {rest} CLOSE_ARRAY")
        return self._define(" | ".join(bodies)) if bodies else None


def _quoted(name: str) -> str:
    """Return a property's name as a literal in Lark's form."""
    text = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
    return text.replace("\x7f", r"\u007f")
