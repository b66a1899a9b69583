"""JSON representations of values for error messages."""

import json
from typing import Any


def short_repr(value: Any, limit: int = 80) -> str:
    """Returns `value` as JSON on one line, cut to `limit` characters.

    No more of the value is encoded than that, however large or deep the value is. A
    long string at the cut is the exception.
    """
    text = _begin(value, limit, ensure_ascii=False)
    # Unpaired surrogates and bidirectional control characters are escaped.
    if not text.isprintable():
        text = _begin(value, limit, ensure_ascii=True)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _begin(value: Any, limit: int, ensure_ascii: bool) -> str:
    """Returns the JSON text of `value`, at least until it exceeds `limit`
    characters.
    """
    text = ""
    value = value[: limit + 1] if isinstance(value, str) else value
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, default=str, skipkeys=True)
    for piece in encoder.iterencode(value):
        text += piece
        if len(text) > limit:
            break
    return text
