"""Converts what models write as the arguments of tool calls to JSON. Pure, no I/O."""

import ast
import json
import warnings
from functools import partial
from typing import Any, Final

from protocol import exact_json

quoted = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip
_PYTHON_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
_JSON_CONSTANTS: Final = {"true": True, "false": False, "null": None}


def parse_call(text: str) -> tuple[str | None, str]:
    """Return a call's tool name and its arguments as JSON.

    The name is None where `text` is no call.
    """
    try:
        call = exact_json.loads(text)
        name = call["name"]
        # Some models write the arguments as a string, or null where there are none.
        value = call.get("arguments", call.get("parameters")) or {}
        if isinstance(value, str):
            arguments = value.strip()
        else:
            arguments = exact_json.dumps(value)
        (name + arguments).encode()
    except (LookupError, TypeError, ValueError, RecursionError):
        return None, ""
    return name, arguments


def is_json(text: str) -> bool:
    """Whether a text is one complete JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON's names `true`, `false` and `null` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_CONSTANTS:
            return ast.Constant(_JSON_CONSTANTS[node.id])
        return node


def python_arguments_to_json(text: str) -> str | None:
    """Convert the arguments of a Python call such as `f(a=1, b=[True])` to JSON.

    Args:
        text: the call after its opening bracket.

    Returns:
        None where the text is no call with literal keyword arguments.
    """
    try:
        with warnings.catch_warnings():
            # Warnings about text that a model writes do not belong in the server's log.
            warnings.simplefilter("ignore")
            call = _JsonConstants().visit(ast.parse("f(" + text, mode="eval").body)
        assert isinstance(call, ast.Call) and not call.args
        values = {
            keyword.arg or "": ast.literal_eval(keyword.value)
            for keyword in call.keywords
        }
        arguments = quoted(values)
        arguments.encode()  # half a surrogate pair cannot be sent
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

    The text stays as it is where it is a JSON value of a type that the schema allows.
    Other text becomes a JSON string.

    Args:
        text: the parameter as the model wrote it.
        schema: the parameter's schema, which may be malformed: no request is refused
            for a schema that its answer need not match.
    """
    types = _allowed_types(schema)
    literal = text.strip()
    literal = _PYTHON_CONSTANTS.get(literal, literal)
    try:
        value = exact_json.loads(literal, allow_nan=False)
        value_type = float if isinstance(value, float) else type(value)
        if any(value_type in _TYPES.get(name, ()) for name in types):
            return literal
    except (ValueError, RecursionError):
        pass
    return quoted(text)


def _allowed_types(schema: Any) -> list[str]:
    """Return the types that a schema, its `anyOf` and its `oneOf` name; else all."""
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
    return types or [*_TYPES]
