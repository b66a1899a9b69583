"""Values as error messages quote them: in JSON, as the client wrote them."""

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any


class _Mark(str):
    """What stands between values: no value itself."""


def short_repr(value: Any, limit: int = 80) -> str:
    """`value` as JSON on one line, cut to `limit` characters.

    The work is bounded by `limit` as well, however large or deep the value is.
    """
    text, todo = "", [value]
    while todo and len(text) <= limit:
        item = todo.pop()
        room = limit + 1 - len(text)
        match item:
            case _Mark():
                text += item
            case str():
                text += _quoted(item[:room])
            case dict():
                todo += reversed([_Mark("{"), *_members(item, room), _Mark("}")])
            case list() | tuple():
                todo += reversed([_Mark("["), *_items(item, room), _Mark("]")])
            case None | bool() | int() | float():
                text += json.dumps(item)
            case _:
                text += _quoted(str(item)[:room])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _quoted(text: str) -> str:
    readable = json.dumps(text, ensure_ascii=False)
    # Half a character has no UTF-8, and what turns lines around is better seen than obeyed.
    return readable if readable.isprintable() else json.dumps(text)


def _items(items: list[Any] | tuple[Any, ...], most: int) -> Iterator[Any]:
    for index, item in enumerate(islice(items, most)):
        if index:
            yield _Mark(", ")
        yield item


def _members(members: dict[Any, Any], most: int) -> Iterator[Any]:
    for index, (name, value) in enumerate(islice(members.items(), most)):
        if index:
            yield _Mark(", ")
        yield str(name)
        yield _Mark(": ")
        yield value
