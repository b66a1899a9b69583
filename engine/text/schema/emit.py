"""Writes a checked JSON schema for llguidance, with only the enforced keywords."""

import json
from decimal import Decimal
from typing import Any, Final

from engine.text.schema import numbers
from engine.text.schema.keywords import ENFORCED, FORMATS, CheckedSchema
from engine.text.schema.references import (
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    Schema,
)

_DIALECTS: Final = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
}


def llguidance_json(
    checked: CheckedSchema, schema: Any, options: Schema | None = None
) -> str:
    """Return the JSON text of a schema, with the definitions that it refers to.

    Args:
        checked: the document to which the schema belongs.
        schema: any schema in the document.
        options: llguidance's whitespace options (`x-guidance`), which a schema within a
            grammar needs.
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
    """Copies schemas, and gives a name to each schema to which a copy refers."""

    def __init__(self, checked: CheckedSchema) -> None:
        self._checked = checked
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any]] = []

    def definitions(self) -> Schema:
        """Copy all schemas to which copies refer, including the new copies.

        Returns:
            The copies by name.
        """
        definitions: Schema = {}
        while self._waiting:
            name, target = self._waiting.pop()
            definitions[name] = self.copy(target)
        return definitions

    def copy(self, schema: Any) -> Any:
        """Return a copy of a schema with only the enforced keywords."""
        if isinstance(schema, bool):
            return schema
        copied: Schema = {}
        for keyword, value in schema.items():
            if keyword == "$ref":
                copied[keyword] = self._ref_to(self._checked.target(schema))
            elif keyword in ENFORCED and not (
                keyword == "format" and value not in FORMATS
            ):
                copied[keyword] = self._copied_value(keyword, value)
        if "oneOf" in copied:
            # CheckedSchema has verified that no value matches two options. So a value
            # that matches any option matches exactly one.
            options = {"anyOf": copied.pop("oneOf")}
            copied["allOf"] = [*copied.get("allOf", ()), options]
        return copied

    def _copied_value(self, keyword: str, value: Any) -> Any:
        if keyword in SCHEMA_LIST_KEYWORDS or (
            keyword == "items" and isinstance(value, list)
        ):
            return [self.copy(each) for each in value]
        if keyword in SCHEMA_KEYWORDS:
            return self.copy(value)
        if keyword in SCHEMA_MAP_KEYWORDS:
            return {name: self.copy(each) for name, each in value.items()}
        if keyword == "multipleOf":
            return numbers.llguidance_multiple(value)
        return decimals_to_floats(value)

    def _ref_to(self, target: Any) -> str:
        """Return a `$ref` to the copy of `target`, which `definitions` will create."""
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"s{len(self._names)}"
            self._waiting.append((name, target))
        return f"#/$defs/{name}"


def decimals_to_floats(value: Any) -> Any:
    """Return a JSON value with each Decimal converted to float.

    The numbers keep their values, because schemas for llguidance have only numbers that
    llguidance reads exactly.
    """
    if isinstance(value, dict):
        return {key: decimals_to_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [decimals_to_floats(each) for each in value]
    if isinstance(value, Decimal):
        return float(value) if value else 0
    return value
