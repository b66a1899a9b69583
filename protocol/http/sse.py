"""Server-sent events."""

import time

import msgspec

from protocol.errors import BatonError

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
# A stream whose format has pings gets a ping after this time without events. Clients
# consider a stream without data dead after a minute or more.
PING_INTERVAL_S = 10.0


def event(data: bytes) -> bytes:
    """Returns an event with `data`, which must not have a newline. Encoded JSON has
    none.
    """
    return b"data: " + data + b"\n\n"


def error_event(error: BatonError, number: int | None = None) -> bytes:
    """Returns the event that ends a stream which failed after its first byte.

    No [DONE] follows the event. Clients of /v1/responses identify events by their
    `type`, and expect a sequence number in each event.

    Args:
        number: The sequence number for /v1/responses; None for other endpoints.
    """
    members = error.to_openai()
    if number is not None:
        details = members["error"]
        flat = {name: details[name] for name in ("code", "message", "param")}
        members = {"sequence_number": number, **flat, **members}
    data = msgspec.json.encode({"type": "error", **members})
    return b"event: error\n" + event(data)


class Pings:
    """Adds pings to a stream that has no events for a while, for example because the
    client does not receive the text of the reasoning.

    Args:
        ping: The event to send; empty if the stream's format has none.
    """

    def __init__(self, ping: bytes) -> None:
        self._ping = ping
        self._due_s = time.monotonic() + PING_INTERVAL_S

    def wait_s(self) -> float | None:
        """Returns the time until a ping is due, or None if the format has no pings."""
        return max(self._due_s - time.monotonic(), 0.0) if self._ping else None

    def with_ping(self, events: bytes) -> bytes:
        """Returns `events`, or a ping if there are none and a ping is due."""
        now_s = time.monotonic()
        if not events and now_s >= self._due_s:
            events = self._ping
        if events:
            self._due_s = now_s + PING_INTERVAL_S
        return events
