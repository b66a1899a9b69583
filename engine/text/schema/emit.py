"""Writes the enforced keywords of a checked JSON schema for the grammar library."""

import json
from decimal import Decimal
from typing import Any, Final

from engine.text.schema import numbers
from engine.text.schema.keywords import ENFORCED, FORMATS, CheckedSchema
from engine.text.schema.references import (
    OF_NAMED_SCHEMAS,
    OF_SCHEMA,
    OF_SCHEMAS,
    Schema,
)

_DIALECTS: Final = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
}


def library_json(
    checked: CheckedSchema, schema: Any, options: Schema | None = None
) -> str:
    """Return the JSON text of a schema of `checked`, with its definitions.

    Args:
        options: how the library is to write JSON, for a schema within a grammar.
    """
    copier = _Copier(checked)
    written = copier.copy(schema)
    if not isinstance(written, dict):
        written = {} if written else {"enum": []}
    definitions = copier.definitions()
    if definitions:
        written["$defs"] = definitions
    if checked.draft in _DIALECTS:
        written["$schema"] = _DIALECTS[checked.draft]
    if options:
        written["x-guidance"] = options
    return json.dumps(written, ensure_ascii=False)


class _Copier:
    """Copies schemas and gives names to those that they refer to."""

    def __init__(self, checked: CheckedSchema) -> None:
        self._checked = checked
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any]] = []

    def definitions(self) -> Schema:
        """Return all schemas that were referred to, by name."""
        definitions: Schema = {}
        while self._waiting:
            name, target = self._waiting.pop()
            definitions[name] = self.copy(target)
        return definitions

    def copy(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        copied: Schema = {}
        for keyword, value in schema.items():
            if keyword == "$ref":
                copied[keyword] = self._name(self._checked.target(schema))
            elif keyword in ENFORCED and not (
                keyword == "format" and value not in FORMATS
            ):
                copied[keyword] = self._value(keyword, value)
        if "oneOf" in copied:
            # The options exclude each other, so a match of any is a match of exactly
            # one.
            options = {"anyOf": copied.pop("oneOf")}
            copied["allOf"] = [*copied.get("allOf", ()), options]
        return copied

    def _value(self, keyword: str, value: Any) -> Any:
        if keyword in OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
            return [self.copy(each) for each in value]
        if keyword in OF_SCHEMA:
            return self.copy(value)
        if keyword in OF_NAMED_SCHEMAS:
            return {name: self.copy(each) for name, each in value.items()}
        if keyword == "multipleOf":
            return numbers.library_multiple(value)
        return plain(value)

    def _name(self, target: Any) -> str:
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"s{len(self._names)}"
            self._waiting.append((name, target))
        return f"#/$defs/{name}"


def plain(value: Any) -> Any:
    """Return a JSON value with float for Decimal; the library keeps its numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, Decimal):
        return float(value) if value else 0
    return value
