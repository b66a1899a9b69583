"""Converts the arguments of tool calls, as models write them, to JSON. Pure, no I/O."""

import ast
import json
import warnings
from functools import partial
from typing import Any, Final

from protocol import exact_json

# Returns a Python value as JSON.
to_json = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {  # by type in JSON Schema
    "object": (dict,), "array": (list,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip
_PYTHON_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
_JSON_CONSTANTS: Final = {"true": True, "false": False, "null": None}


def parse_call(text: str) -> tuple[str | None, str]:
    """Read a tool call that is written as a JSON object.

    Returns:
        The tool's name, and the arguments as JSON. The name is None if `text` is not a
        call.
    """
    try:
        call = exact_json.loads(text)
        name = call["name"]
        # Some models write the arguments as a JSON string, or null for no arguments.
        value = call.get("arguments", call.get("parameters")) or {}
        if isinstance(value, str):
            arguments = value.strip()
        else:
            arguments = exact_json.dumps(value)
        (name + arguments).encode()  # raises ValueError if there is a lone surrogate
    except (LookupError, TypeError, ValueError, RecursionError):
        return None, ""
    return name, arguments


def is_json(text: str) -> bool:
    """Whether `text` is a single complete JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON's `true`, `false` and `null` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_CONSTANTS:
            return ast.Constant(_JSON_CONSTANTS[node.id])
        return node


def python_arguments_to_json(text: str) -> str | None:
    """Convert the arguments of a Python call such as `f(a=1, b=[True])` to JSON.

    Args:
        text: the text after the call's opening bracket.

    Returns:
        The arguments as a JSON object. None if the text does not complete a call, or if
        the call has arguments other than keyword arguments with literal values.
    """
    try:
        with warnings.catch_warnings():
            # Python warns about some syntax. The text comes from the model, so these
            # warnings do not belong in the server's log.
            warnings.simplefilter("ignore")
            call = _JsonConstants().visit(ast.parse("f(" + text, mode="eval").body)
        assert isinstance(call, ast.Call) and not call.args
        values = {
            keyword.arg or "": ast.literal_eval(keyword.value)
            for keyword in call.keywords
        }
        arguments = to_json(values)
        arguments.encode()  # raises ValueError if there is a lone surrogate
        return None if "" in values else arguments
    except (
        AssertionError,
        SyntaxError,
        TypeError,
        ValueError,
        MemoryError,
        RecursionError,
    ):
        return None


def parameter_to_json(text: str, schema: Any) -> str:
    """Return a parameter's text as JSON.

    A JSON value of a type that the schema allows, other than a string, is returned as
    it is, without the white space around it. Python's `True`, `False` and `None` are
    converted to JSON first. Any other text is returned as a JSON string.

    Args:
        text: the parameter as the model wrote it.
        schema: the parameter's schema. It may be malformed, because the schemas of
            tools are only checked if calls must match them.
    """
    types = _allowed_types(schema)
    literal = text.strip()
    literal = _PYTHON_CONSTANTS.get(literal, literal)
    try:
        value = exact_json.loads(literal, allow_nan=False)
        value_type = float if isinstance(value, float) else type(value)
        if any(value_type in _PYTHON_TYPES.get(name, ()) for name in types):
            return literal
    except (ValueError, RecursionError):
        pass
    return to_json(text)


def _allowed_types(schema: Any) -> list[str]:
    """Return the types that a schema allows, including those in `anyOf` and `oneOf`.

    Returns all types except "string" if the schema has no types.
    """
    root = schema if isinstance(schema, dict) else {}
    schemas = [root]
    for keyword in ("anyOf", "oneOf"):
        options = root.get(keyword)
        if isinstance(options, list):
            schemas += options
    types: list[str] = []
    for each in schemas:
        if not isinstance(each, dict):
            continue
        value = each.get("type")
        names = value if isinstance(value, list) else [value]
        types += [name for name in names if isinstance(name, str)]
    return types or [*_PYTHON_TYPES]
