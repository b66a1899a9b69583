"""Decodes and encodes JSON without changing the value of any number.

Python integers of any size are exact. A decimal that would change in a float64 becomes
an `ExactFloat`: the nearest float64 (infinity if the decimal is out of range), together
with the text of the decimal. All other code treats an ExactFloat as a float.
"""

import contextlib
import json
from decimal import Decimal
from typing import Any, NoReturn

import msgspec

_ALWAYS_EXACT_CHARS = 15  # float64 preserves every decimal of up to 15 digits


class ExactFloat(float):
    """The float64 nearest to a JSON number, and the exact number as `text`."""

    text: str


def _float_of(text: str) -> float:
    """Returns the number in `text`, as an ExactFloat if a float64 does not preserve
    it.
    """
    value = float(text)
    if len(text) <= _ALWAYS_EXACT_CHARS and "e" not in text and "E" not in text:
        return value
    # Decimal raises ArithmeticError for an exponent beyond its own range.
    with contextlib.suppress(ArithmeticError):
        if Decimal(repr(value)) == Decimal(text):
            return value
    exact = ExactFloat(value)
    exact.text = text
    return exact


_decode = msgspec.json.Decoder(float_hook=_float_of).decode


def decode(data: bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: The text is not JSON, or an integer has
            too many digits for Python.
        RecursionError: The text is nested too deeply.
    """
    return _decode(data)


def loads(text: str, *, allow_nan: bool = True) -> Any:
    """Returns the value of a JSON text.

    Args:
        allow_nan: Accept NaN and Infinity as floats, like json.loads. The JSON standard
            allows neither.

    Raises:
        ValueError: The text is not JSON, or an integer has too many digits for Python.
        RecursionError: The text is nested too deeply.
    """
    constants = None if allow_nan else _refuse_constant
    return json.loads(text, parse_float=_float_of, parse_constant=constants)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def dumps(value: Any) -> str:
    """Returns the JSON text of a value that `decode` or `loads` returned.

    An ExactFloat becomes its `text`. Any other NaN or infinite float becomes NaN or
    Infinity, which the JSON standard does not allow.
    """
    if _has_exact_float(value):
        return "".join(_text_pieces(value))
    return json.dumps(value, ensure_ascii=False)


def _has_exact_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_exact_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_exact_float, value))
    return isinstance(value, ExactFloat)


def _text_pieces(value: Any) -> list[str]:
    """Returns strings that together are the JSON text of `value`."""
    if isinstance(value, ExactFloat):
        return [value.text]
    pieces: list[str] = []
    if isinstance(value, dict):
        for name, member in value.items():
            pieces += [", " if pieces else "", json.dumps(name, ensure_ascii=False)]
            pieces += [": ", *_text_pieces(member)]
        return ["{", *pieces, "}"]
    if isinstance(value, list):
        for item in value:
            pieces += [", " if pieces else "", *_text_pieces(item)]
        return ["[", *pieces, "]"]
    return [json.dumps(value, ensure_ascii=False)]
