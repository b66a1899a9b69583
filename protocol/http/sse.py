"""Server-sent events."""

import msgspec

from protocol.errors import BatonError

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


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
