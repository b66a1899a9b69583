"""Bounds on the memory that a decoded JSON body takes, checked before decoding.

A short body can take much memory when it is decoded: `{}` has 2 bytes and becomes an
object of 64 bytes, and a small member becomes hundreds of bytes. The check scans the
body piece by piece, in linear time and with little memory. Only the decoder checks that
the body is valid JSON.
"""

import asyncio
import codecs
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from protocol.errors import InvalidRequest, PayloadTooLarge

# Limit on members, arrays and objects together. The limit allows a logit bias for every
# token of a vocabulary.
MAX_NODES: Final = 1 << 18
# Limit on the members of the outermost object. All endpoints together have fewer
# fields.
MAX_TOP_MEMBERS: Final = 1024
MAX_DEPTH: Final = 200
INLINE_BODY_BYTES: Final = 1 << 16  # longer bodies are decoded in a thread
_PIECE_BYTES: Final = 1 << 16  # size of the pieces in which a body is scanned
_MARKS: Final = b"{}[]:"  # the characters from which `structure_of` counts nodes
_NOT_MARKS: Final = bytes(set(range(256)) - set(_MARKS))
_COLON: Final = ord(":")
_OPENING: Final = frozenset(b"{[")

_T = TypeVar("_T")


class Structure(NamedTuple):
    """The size of a JSON text's structure."""

    # Object members, arrays and objects together. Scalars in arrays do not count.
    num_nodes: int
    num_top_members: int  # members of the outermost object
    depth: int


def check_bounds(body: bytes) -> None:
    """Checks the bounds of a body, valid JSON or not, before the body is decoded.

    Raises:
        PayloadTooLarge: The body has too many members, arrays and objects, or too many
            members in its outermost object.
        InvalidRequest: The body is nested too deeply.
    """
    # These counts include characters within strings, so they are upper bounds.
    num_opening = body.count(b"{") + body.count(b"[")
    if num_opening <= MAX_DEPTH and body.count(b":") <= MAX_TOP_MEMBERS:
        return
    structure = structure_of(body)
    if structure.num_nodes > MAX_NODES:
        raise PayloadTooLarge(
            f"the body has {structure.num_nodes} JSON members, arrays and objects, "
            f"the limit is {MAX_NODES}; send less at once"
        )
    if structure.num_top_members > MAX_TOP_MEMBERS:
        raise PayloadTooLarge(
            f"the body has {structure.num_top_members} members, the limit is "
            f"{MAX_TOP_MEMBERS}; send only the fields of this endpoint"
        )
    if structure.depth > MAX_DEPTH:
        raise InvalidRequest(
            f"the body is nested {structure.depth} levels deep, the limit is "
            f"{MAX_DEPTH}; send a body with fewer levels"
        )


def structure_of(body: bytes) -> Structure:
    """Returns the structure of a JSON text. The content of strings does not count.

    If the text has more than MAX_NODES nodes, its depth and its top members are not
    counted, to save time. Both numbers are 0 in the result.
    """
    marks = _marks_of(body)
    num_nodes = marks.count(b":") + marks.count(b"{") + marks.count(b"[")
    if num_nodes > MAX_NODES:
        return Structure(num_nodes, 0, 0)
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
    return Structure(num_nodes, num_top_members, deepest)


def _marks_of(body: bytes) -> bytes:
    """Returns the brackets, braces and colons outside of strings, in order."""
    marks: list[bytes] = []
    is_in_string = False
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + _PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2:  # the piece must not end within an escape sequence
            piece = body[begin : begin + _PIECE_BYTES + 1]
        begin += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = parts[is_in_string::2]
        is_in_string ^= len(parts) % 2 == 0
        marks.append(b"".join(outside).translate(None, _NOT_MARKS))
    return b"".join(marks)


def check_utf8(body: bytes) -> None:
    """Raises UnicodeDecodeError if the body is not UTF-8.

    The body is decoded in pieces, because decoded text takes up to four bytes per
    character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(body), _PIECE_BYTES):
        decoder.decode(body[begin : begin + _PIECE_BYTES])
    decoder.decode(b"", final=True)


async def read_off_loop(num_bytes: int, read: Callable[[], _T]) -> _T:
    """Returns the result of `read`, a function that decodes a body of `num_bytes`.

    If the body is larger than INLINE_BODY_BYTES, the function runs in a thread, so that
    it does not block the event loop.
    """
    if num_bytes <= INLINE_BODY_BYTES:
        return read()
    return await asyncio.to_thread(read)
