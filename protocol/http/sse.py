"""Server-sent events: writing ours and reading anybody's."""

import re

import msgspec

from protocol.errors import BatonError

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event with `data`, which holds no newline (JSON never does)."""
    return b"data: " + data + b"\n\n"


def error_event(error: BatonError) -> bytes:
    """The event that ends a stream which failed after its first byte; no [DONE] follows it."""
    return b"event: error\n" + event(msgspec.json.encode(error.to_openai()))


class SSEParser:
    """Turns a byte stream, cut anywhere, into (event name, data) pairs. Lines end in LF or CRLF;
    comments and unknown fields are skipped; an event that the stream's end cuts off is dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """The events completed by `chunk`; the name is "message" unless the stream said other."""
        *whole, self._rest = re.split(rb"\r?\n\r?\n", self._rest + chunk)
        found = []
        for text in whole:
            parts = [
                line.partition(":") for line in re.split("\r?\n", text.decode(errors="replace"))
            ]
            fields = [(name, value.removeprefix(" ")) for name, _, value in parts]
            data = [value for name, value in fields if name == "data"]
            if data:
                found.append((dict(fields).get("event") or "message", "\n".join(data)))
        return found
