"""Reading the body of a request, within a limit."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from protocol.errors import PayloadTooLarge
from protocol.http.connections import refusal


class ClientDisconnected(Exception):
    """The client has gone; nobody reads an answer."""


async def read_body(
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    limit_bytes: int,
) -> bytes:
    """The whole body.

    Args:
        scope, receive: ASGI's, of the request.

    Raises:
        PayloadTooLarge: more than `limit_bytes`.
        BatonError: the connection's `refusal`.
        ClientDisconnected: the client went away before it was complete.
    """
    parts: list[bytes] = []
    num_bytes, more = 0, refusal(scope) is None
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > limit_bytes:
            raise PayloadTooLarge(
                f"the body has more than {limit_bytes} bytes; send less at once (--max-body-bytes)"
            )
        more = message.get("more_body", False)
    if error := refusal(scope):
        parts.clear()  # the connection keeps the error, which keeps this frame
        raise error
    return parts[0] if len(parts) == 1 else b"".join(parts)
