"""Does a handshake with a server's side channel, in the way another server does."""

import asyncio
import secrets
import struct

from protocol.handshake import (
    EngineMetadata,
    GetMetadata,
    MessageError,
    Metadata,
    Refused,
    open_reply,
    seal_request,
)
from protocol.ipc.wire import framed

_LENGTH = struct.Struct("<I")
_MAX_REPLY_BYTES = 16 << 20


class SideChannelError(Exception):
    """The side channel cannot be used. The message has the reason."""


async def check(
    host: str, port: int, secret: bytes | None, timeout_s: float
) -> EngineMetadata | None:
    """Connect to a side channel, and request the engine's metadata, within `timeout_s`.

    Args:
        secret: the cluster secret. Without it, only the connection is checked, and the
            result is None.

    Raises:
        SideChannelError: the side channel cannot be reached, refuses the request, or
            sends no valid answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(host, port, secret)
    except TimeoutError:
        raise SideChannelError(f"no answer within {timeout_s:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        reason = getattr(error, "strerror", None) or str(error) or repr(error)
        raise SideChannelError(reason) from None


async def _exchange(
    host: str, port: int, secret: bytes | None
) -> EngineMetadata | None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if secret is None:
            return None
        nonce = secrets.token_hex(8)
        writer.write(framed(seal_request(GetMetadata(nonce=nonce), secret)))
        await writer.drain()
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _MAX_REPLY_BYTES:
            raise SideChannelError(f"the answer has {length} bytes, unlike metadata")
        try:
            reply = open_reply(await reader.readexactly(length), secret)
        except MessageError as error:
            raise SideChannelError(str(error)) from None
    finally:
        writer.close()
    match reply:
        case Metadata(engine=engine):
            return engine
        case Refused(reason=reason):
            raise SideChannelError(reason or "the request was refused")
        case _:
            raise SideChannelError(f"an unexpected answer: {type(reply).__name__}")
