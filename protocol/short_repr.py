"""JSON representations of values for error messages."""

import json
from typing import Any


def short_repr(value: Any, limit: int = 80) -> str:
    """Returns `value` as JSON on one line, cut to `limit` characters.

    The encoding stops at the limit, so that a huge or deeply nested value takes little
    time. Only a long string inside a list or an object is encoded to its end.
    """
    text = _encode_beginning(value, limit, ensure_ascii=False)
    # Unpaired surrogates and bidirectional control characters are escaped.
    if not text.isprintable():
        text = _encode_beginning(value, limit, ensure_ascii=True)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _encode_beginning(value: Any, limit: int, ensure_ascii: bool) -> str:
    """Returns the JSON text of `value`, or only its beginning if it is too long.

    The encoding stops once the text exceeds `limit`. If the result has more than
    `limit` characters, it is incomplete, and the caller must cut it.
    """
    text = ""
    value = value[: limit + 1] if isinstance(value, str) else value
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, default=str, skipkeys=True)
    for piece in encoder.iterencode(value):
        text += piece
        if len(text) > limit:
            break
    return text
