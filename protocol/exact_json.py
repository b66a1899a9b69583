"""JSON whose numbers stay as they were written.

Integers of any size are exact in Python. A decimal that no float64 is equal to becomes an
`ExactFloat`: the nearest float64 (infinity beyond the largest one), which also has its text.
Everything else takes it for a float.
"""

import contextlib
import json
from decimal import Decimal
from typing import Any, NoReturn

import msgspec

_ALWAYS_EXACT_CHARS = 15  # float64 keeps 15 digits


class ExactFloat(float):
    """A float64 that is not quite the number in `text`."""

    text: str


def _float_of(text: str) -> float:
    """The number in a JSON text."""
    value = float(text)
    if len(text) <= _ALWAYS_EXACT_CHARS and "e" not in text and "E" not in text:
        return value
    with contextlib.suppress(
        ArithmeticError
    ):  # an exponent that Decimal does not have either
        if Decimal(repr(value)) == Decimal(text):
            return value
    exact = ExactFloat(value)
    exact.text = text
    return exact


_decode = msgspec.json.Decoder(float_hook=_float_of).decode


def decode(data: bytes) -> Any:
    """The value of a JSON text. Raises msgspec.DecodeError or UnicodeDecodeError where it is not
    JSON."""
    return _decode(data)


def loads(text: str, *, allow_nan: bool = True) -> Any:
    """The value of a JSON text. Raises ValueError where it is not JSON.

    Args:
        allow_nan: whether NaN and Infinity, which JSON has not, are floats as for json.loads.
    """
    constants = None if allow_nan else _refuse_constant
    return json.loads(text, parse_float=_float_of, parse_constant=constants)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dumps(value: Any) -> str:
    """The JSON text of a value that `decode` or `loads` returned, its decimals as they were
    written."""
    return (
        "".join(_parts(value))
        if _has_exact(value)
        else json.dumps(value, ensure_ascii=False)
    )


def _has_exact(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_exact, value.values()))
    if isinstance(value, list):
        return any(map(_has_exact, value))
    return isinstance(value, ExactFloat)


def _parts(value: Any) -> list[str]:
    if isinstance(value, ExactFloat):
        return [value.text]
    parts: list[str] = []
    if isinstance(value, dict):
        for name, each in value.items():
            parts += [", " if parts else "", json.dumps(name, ensure_ascii=False), ": "]
            parts += _parts(each)
        return ["{", *parts, "}"]
    if isinstance(value, list):
        for each in value:
            parts += [", " if parts else "", *_parts(each)]
        return ["[", *parts, "]"]
    return [json.dumps(value, ensure_ascii=False)]
