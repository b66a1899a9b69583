"""The arguments of tool calls as JSON, out of what models write. Pure, no I/O."""

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


def call_in(text: str) -> tuple[str | None, str]:
    """A tool's name, None where `text` is no call, and the arguments."""
    try:
        found = exact_json.loads(text)
        # Some write the arguments as a string, or nothing where there are none.
        name, given = (
            found["name"],
            found.get("arguments", found.get("parameters")) or {},
        )
        arguments = given.strip() if isinstance(given, str) else exact_json.dumps(given)
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


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def json_of_python(text: str) -> str | None:
    """The arguments of Python's `f(a=1, b=[True])`, from behind the first bracket, as JSON."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of what a model writes nobody's log need tell
            call = _JsonNames().visit(ast.parse("f(" + text, mode="eval").body)
        assert isinstance(call, ast.Call) and not call.args
        given = {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}
        arguments = quoted(given)
        arguments.encode()  # half a surrogate pair cannot be sent
        return None if "" in given else arguments
    except (
        AssertionError,
        SyntaxError,
        TypeError,
        ValueError,
        MemoryError,
        RecursionError,
    ):
        return None


def as_json(text: str, schema: Any) -> str:
    """A parameter's text: as it is where that is a value of a type that its schema allows, else a
    text."""
    said = schema if isinstance(schema, dict) else {}
    several = [said]
    for name in (
        "anyOf",
        "oneOf",
    ):  # nobody has looked at a schema that no answer must match
        several += more if isinstance(more := said.get(name), list) else []
    found = (one.get("type") for one in several if isinstance(one, dict))
    kinds = [kind for of in found for kind in (of if isinstance(of, list) else [of])]
    names = [kind for kind in kinds if isinstance(kind, str)] or [*_TYPES]
    given = text.strip()
    given = {"True": "true", "False": "false", "None": "null"}.get(given, given)
    try:
        value = exact_json.loads(given, allow_nan=False)
        kind = float if isinstance(value, float) else type(value)
        if any(kind in _TYPES.get(name, ()) for name in names):
            return given
    except (ValueError, RecursionError):
        pass
    return quoted(text)
