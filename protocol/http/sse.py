"""Server-sent events."""

import msgspec

from protocol.errors import BatonError

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event with `data`, which holds no newline (JSON never does)."""
    return b"data: " + data + b"\n\n"


def error_event(error: BatonError, number: int | None = None) -> bytes:
    """The event that ends a stream which failed after its first byte; no [DONE] follows it. Readers
    of /v1/responses know it by its `type`, and have the `number` of each event."""
    said = error.to_openai()
    if number is not None:
        flat = {name: said["error"][name] for name in ("code", "message", "param")}
        said = {"sequence_number": number, **flat, **said}
    return b"event: error\n" + event(msgspec.json.encode({"type": "error", **said}))
