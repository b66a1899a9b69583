"""Values as error messages quote them: in JSON, as the client wrote them."""

import json
from typing import Any


def short_repr(value: Any, limit: int = 80) -> str:
    """`value` as JSON on one line, cut to `limit` characters: no more of it is looked at than that,
    however large or deep it is, but for the text that it is cut in."""
    text = _begin(value, limit, ensure_ascii=False)
    if not text.isprintable():  # half a character, or what turns lines around
        text = _begin(value, limit, ensure_ascii=True)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _begin(value: Any, limit: int, ensure_ascii: bool) -> str:
    text = ""
    value = value[: limit + 1] if isinstance(value, str) else value
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, default=str, skipkeys=True)
    for piece in encoder.iterencode(value):
        text += piece
        if len(text) > limit:
            break
    return text
