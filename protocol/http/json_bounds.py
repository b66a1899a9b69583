"""Bounds on what a JSON body becomes in memory, checked on its bytes before anything is decoded.

A body's length does not bound that: `{}` takes 2 bytes and becomes an object of 64, a small member
becomes hundreds. The scan looks at structure alone, piece by piece. It is linear and needs little
memory, and it does not check that the body is JSON: the decoder does.
"""

import asyncio
import codecs
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from protocol.errors import InvalidRequest, PayloadTooLarge

MAX_MEMBERS: Final = (
    1 << 18
)  # and arrays and objects: a logit bias for each token of a vocabulary
MAX_TOP_MEMBERS: Final = (
    1024  # of the body itself; all endpoints together have fewer fields
)
MAX_DEPTH: Final = 200
INLINE_BODY_BYTES: Final = 1 << 16  # longer bodies are read off the event loop
_PIECE_BYTES: Final = 1 << 16
_MARKS: Final = b"{}[]:"
_OTHERS: Final = bytes(set(range(256)) - set(_MARKS))
_COLON: Final = ord(":")
_OPENING: Final = frozenset(b"{[")

_T = TypeVar("_T")


class Structure(NamedTuple):
    """What a JSON text consists of."""

    num_values: int  # members, arrays and objects
    num_top_members: int
    depth: int


def check_bounds(body: bytes) -> None:
    """Checks a body that is JSON, or is to be refused by who decodes it.

    Raises:
        PayloadTooLarge: too many members, arrays and objects.
        InvalidRequest: nested too deeply.
    """
    num_opening = body.count(b"{") + body.count(b"[")  # those in strings included
    if num_opening <= MAX_DEPTH and body.count(b":") <= MAX_TOP_MEMBERS:
        return
    found = structure_of(body)
    if found.num_values > MAX_MEMBERS:
        raise PayloadTooLarge(
            f"the body has {found.num_values} JSON members, arrays and objects, the limit is "
            f"{MAX_MEMBERS}; send less at once"
        )
    if found.num_top_members > MAX_TOP_MEMBERS:
        raise PayloadTooLarge(
            f"the body has {found.num_top_members} members, the limit is {MAX_TOP_MEMBERS}; "
            "send only the fields of this endpoint"
        )
    if found.depth > MAX_DEPTH:
        raise InvalidRequest(
            f"the body is nested {found.depth} levels deep, which is too deeply: the limit is "
            f"{MAX_DEPTH}; send a flatter one"
        )


def structure_of(body: bytes) -> Structure:
    """Counts what is outside strings. Depth and members of the body itself are counted only where
    there are at most MAX_MEMBERS values in all, as that takes longer."""
    marks = _marks_of(body)
    num_values = marks.count(b":") + marks.count(b"{") + marks.count(b"[")
    if num_values > MAX_MEMBERS:
        return Structure(num_values, 0, 0)
    num_top_members = 0
    depth = 0
    deepest = 0
    for mark in marks:
        if mark == _COLON:
            num_top_members += depth == 1
        elif mark in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return Structure(num_values, num_top_members, deepest)


def _marks_of(body: bytes) -> bytes:
    """The brackets, braces and colons outside strings, in order."""
    found: list[bytes] = []
    is_in_string = False
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + _PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2:  # an escape stays whole
            piece = body[begin : begin + _PIECE_BYTES + 1]
        begin += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = parts[is_in_string::2]
        is_in_string ^= len(parts) % 2 == 0
        found.append(b"".join(outside).translate(None, _OTHERS))
    return b"".join(found)


def check_utf8(body: bytes) -> None:
    """Raises UnicodeDecodeError. Holds a piece of the text at a time: characters beyond Latin-1
    take up to four bytes each."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(body), _PIECE_BYTES):
        decoder.decode(body[begin : begin + _PIECE_BYTES])
    decoder.decode(b"", final=True)


async def read_off_loop(num_bytes: int, read: Callable[[], _T]) -> _T:
    """The result of `read`, which reads a body of so many bytes: in a thread if that takes long."""
    if num_bytes <= INLINE_BODY_BYTES:
        return read()
    return await asyncio.to_thread(read)
