"""Bounds on the memory that a decoded JSON body takes, checked before decoding.

The length of a body does not limit its memory: `{}` has 2 bytes and becomes an object
of 64 bytes, and a small member becomes hundreds of bytes. The check scans the structure
piece by piece, in linear time and little memory. It does not check that the body is
JSON; the decoder does.
"""

import asyncio
import codecs
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from protocol.errors import InvalidRequest, PayloadTooLarge

# Members, arrays and objects. A logit bias for each token of a vocabulary fits.
MAX_MEMBERS: Final = 1 << 18
# Members of the body itself. All endpoints together have fewer fields.
MAX_TOP_MEMBERS: Final = 1024
MAX_DEPTH: Final = 200
INLINE_BODY_BYTES: Final = 1 << 16  # a longer body is read in a thread
_PIECE_BYTES: Final = 1 << 16
_MARKS: Final = b"{}[]:"
_OTHERS: Final = bytes(set(range(256)) - set(_MARKS))
_COLON: Final = ord(":")
_OPENING: Final = frozenset(b"{[")

_T = TypeVar("_T")


class Structure(NamedTuple):
    """The size of a JSON text's structure."""

    num_values: int  # members, arrays and objects
    num_top_members: int
    depth: int


def check_bounds(body: bytes) -> None:
    """Checks a body before it is decoded. It need not be valid JSON.

    Raises:
        PayloadTooLarge: It has too many members, arrays and objects.
        InvalidRequest: It is nested too deeply.
    """
    num_opening = body.count(b"{") + body.count(b"[")  # including those in strings
    if num_opening <= MAX_DEPTH and body.count(b":") <= MAX_TOP_MEMBERS:
        return
    found = structure_of(body)
    if found.num_values > MAX_MEMBERS:
        raise PayloadTooLarge(
            f"the body has {found.num_values} JSON members, arrays and objects, the "
            f"limit is {MAX_MEMBERS}; send less at once"
        )
    if found.num_top_members > MAX_TOP_MEMBERS:
        raise PayloadTooLarge(
            f"the body has {found.num_top_members} members, the limit is "
            f"{MAX_TOP_MEMBERS}; send only the fields of this endpoint"
        )
    if found.depth > MAX_DEPTH:
        raise InvalidRequest(
            f"the body is nested {found.depth} levels deep, which is too deeply: the "
            f"limit is {MAX_DEPTH}; send a flatter one"
        )


def structure_of(body: bytes) -> Structure:
    """Returns the structure of a JSON text, without the content of strings.

    The depth and the top members take longer to count. They are 0 if there are more
    than MAX_MEMBERS values in all.
    """
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
    """Returns the brackets, braces and colons outside of strings, in order."""
    found: list[bytes] = []
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
        found.append(b"".join(outside).translate(None, _OTHERS))
    return b"".join(found)


def check_utf8(body: bytes) -> None:
    """Raises UnicodeDecodeError if the body is not UTF-8.

    It decodes the body in pieces, because decoded text takes up to four bytes per
    character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(body), _PIECE_BYTES):
        decoder.decode(body[begin : begin + _PIECE_BYTES])
    decoder.decode(b"", final=True)


async def read_off_loop(num_bytes: int, read: Callable[[], _T]) -> _T:
    """Returns the result of `read`, which reads a body of `num_bytes`.

    A large body is read in a thread, so that the event loop is not blocked.
    """
    if num_bytes <= INLINE_BODY_BYTES:
        return read()
    return await asyncio.to_thread(read)
