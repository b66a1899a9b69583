"""Reads the bodies of requests, and limits their total size in a process.

protocol/http/connections.py gives the application three values in an extension of
ASGI's scope: the `Bodies`, the transport and, for a refused request, the error.
`connection_state` returns these values.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from protocol import errors

EXTENSION = "baton.connection"  # key in the `extensions` of ASGI's scope


class Connection(Protocol):
    """A connection with a body that is still arriving (--max-unfinished-bytes)."""

    def give_up(self, error: errors.BatonError) -> None:
        """Answers the request with `error` without waiting for the rest of its body."""


class ClientDisconnected(Exception):
    """The client has disconnected, so no response is needed."""


def refusal(scope: Mapping[str, Any]) -> errors.BatonError | None:
    """Returns the error with which the connection refuses this request, or None.

    The application must send this error as its response. The body of a refused request
    may be incomplete.
    """
    error: errors.BatonError | None = connection_state(scope).get("refusal")
    return error


def is_closing(scope: Mapping[str, Any]) -> bool:
    """Returns whether the connection is closing. The client then receives no more data.

    The result is always False for a connection that `bounded_protocol` does not serve.
    """
    transport = connection_state(scope).get("transport")
    return transport is not None and bool(transport.is_closing())


def connection_state(scope: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the values that a connection shares with the application.

    The keys are "transport", "bodies" and, once the head was read, "refusal". The dict
    is empty if `bounded_protocol` does not serve the connection.
    """
    return (scope.get("extensions") or {}).get(EXTENSION) or {}


async def read_body(
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    limit_bytes: int,
    *,
    is_held: bool = True,
) -> bytes:
    """Returns the complete body of an ASGI request. Call it in the request's task.

    Args:
        is_held: True: count the body against --max-held-bytes until the task ends.
            False: do not count it, because the caller keeps it only briefly.

    Raises:
        PayloadTooLarge: The body has more than `limit_bytes`.
        QueueFull: The bodies of all running requests would have too many bytes.
        BatonError: The `refusal` of the connection.
        ClientDisconnected: The client disconnected before the body was complete.
    """
    parts: list[bytes] = []
    num_bytes = 0
    has_more = refusal(scope) is None
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > limit_bytes:
            raise errors.PayloadTooLarge(
                f"the body has more than {limit_bytes} bytes; send less at once "
                "(--max-body-bytes)"
            )
        has_more = message.get("more_body", False)
    if error := refusal(scope):
        # The connection refers to the error, and the traceback of the error refers to
        # this frame. Without this line, these references keep the body in memory.
        parts.clear()
        raise error
    bodies: Bodies | None = connection_state(scope).get("bodies")
    if is_held and bodies is not None:
        bodies.hold(num_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Bodies:
    """Counts the bytes of all unfinished bodies, and of the bodies of running requests.

    Args:
        unfinished_limit_bytes: Limit on the sum of the bodies that are still arriving.
        held_limit_bytes: Limit on the sum of the bodies of running requests.
    """

    def __init__(self, unfinished_limit_bytes: int, held_limit_bytes: int) -> None:
        self._unfinished_limit_bytes = unfinished_limit_bytes
        self._held_limit_bytes = held_limit_bytes
        # Received bytes by connection, in the order in which the bodies began.
        self._unfinished_bytes: dict[Connection, int] = {}
        self._total_unfinished_bytes = 0
        # Bytes of each complete body, by the task that serves the request.
        self._held_bytes: dict[asyncio.Task[Any] | None, int] = {}

    def add(self, connection: Connection, num_bytes: int) -> None:
        """Counts received bytes. While the limit is exceeded, refuses the oldest body.

        The oldest body is usually that of a slow client, because fast clients finish
        sooner.
        """
        received_bytes = self._unfinished_bytes.get(connection, 0)
        self._unfinished_bytes[connection] = received_bytes + num_bytes
        self._total_unfinished_bytes += num_bytes
        while self._total_unfinished_bytes > self._unfinished_limit_bytes:
            oldest = next(iter(self._unfinished_bytes))
            self.remove(oldest)
            message = (
                "the requests that arrive at the same time have more than "
                f"{self._unfinished_limit_bytes} bytes (--max-unfinished-bytes); send "
                "this request again"
            )
            oldest.give_up(errors.QueueFull(message))

    def remove(self, connection: Connection) -> None:
        """Stops counting the unfinished body of a connection, if there is one."""
        self._total_unfinished_bytes -= self._unfinished_bytes.pop(connection, 0)

    def hold(self, num_bytes: int) -> None:
        """Counts a complete body until the current task (that of the request) ends.

        Raises:
            QueueFull: The sum of the bodies would exceed the limit. If no other body is
                counted, a body of any size is accepted.
        """
        held_bytes = sum(self._held_bytes.values())
        if held_bytes and held_bytes + num_bytes > self._held_limit_bytes:
            raise errors.QueueFull(
                f"requests of {held_bytes} bytes are in progress, and this one has "
                f"{num_bytes}; the limit is {self._held_limit_bytes} bytes "
                "(--max-held-bytes); try again later"
            )
        if task := asyncio.current_task():
            self._held_bytes[task] = num_bytes
            task.add_done_callback(self._held_bytes.pop)
