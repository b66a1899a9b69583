"""Server-sent events: writing ours and reading anybody's."""

import codecs

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
    """Turns a byte stream, cut anywhere, into (event name, data) pairs.

    Follows the WHATWG rules: lines end in LF, CRLF or CR; several data lines join by newline;
    comments and unknown fields are skipped; an event that the stream's end cuts off is dropped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """The events completed by `chunk`; the name is "message" unless the stream said other."""
        self._text += self._decoder.decode(chunk)
        # A CR at the very end may be half of a CRLF: it waits for the next chunk.
        held = "\r" if self._text.endswith("\r") else ""
        text = self._text[: len(self._text) - len(held)].replace("\r\n", "\n").replace("\r", "\n")
        *lines, rest = text.split("\n")
        self._text = rest + held
        return [found for line in lines if (found := self._line(line)) is not None]

    def _line(self, line: str) -> tuple[str, str] | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

    def _dispatch(self) -> tuple[str, str] | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return (name, "\n".join(data)) if data else None
