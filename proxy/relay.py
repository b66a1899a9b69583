"""The client's half of a request: exactly one answer, or one stream with one end.

A stream that breaks ends in an error event without `[DONE]`. To leave that event readable, the
beginning of an event that has not fully arrived is held back: no client could use it anyway.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from protocol.errors import BatonError
from protocol.http import sse
from proxy.errors import MethodNotAllowed
from proxy.upstream import Headers, Response, UpstreamError

Send = Callable[[dict[str, Any]], Awaitable[None]]

# Named by RFC 9110 as of one connection alone, or written by our own HTTP server.
_NOT_RELAYED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
    }
)


_FAILURES = (b"event: error", b"event: response.failed")
_LAST_EVENTS = (*_FAILURES, b"event: response.completed", b"event: response.incomplete")


class _Event(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode_event = msgspec.json.Decoder(_Event).decode

_SEAM_BYTES = 3  # one less than the longest end of an event


class EventBuffer:
    """Passes complete events on and keeps the rest; knows whether the stream came to its end."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._seam = b""  # the end of what is held: an event's end may lie across it
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        """`data` up to the end of its last event, after what was held back before."""
        if not self._held and data.endswith(b"\n\n"):  # nearly always
            self._last = data
            return data
        cut = _last_event_end(self._seam + data) - len(self._seam)
        if cut <= 0:
            self._hold(data)
            return b""
        passed, rest = data[:cut], data[cut:]
        if self._held:  # joined once: an event may be long, and come in many pieces
            passed = b"".join([*self._held, passed])
            self._held, self._seam = [], b""
        if rest:
            self._hold(rest)
        self._last = passed
        return passed

    def rest(self) -> bytes:
        """What is held back, at the end of a stream that ended well."""
        held, self._held, self._seam = b"".join(self._held), [], b""
        self._last = held or self._last
        return held

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._seam = (self._seam + data)[-_SEAM_BYTES:]

    @property
    def has_ended(self) -> bool:
        """Whether the last event was one that ends a stream: [DONE], an error, a whole response."""
        last = self._last_event()
        return last == b"data: [DONE]" or last.startswith(_LAST_EVENTS) or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the last event was an error."""
        last = self._last_event()
        return last.startswith(_FAILURES) or _is_error(last)

    def _last_event(self) -> bytes:
        text = self._last.replace(b"\r\n", b"\n").strip()
        return text[text.rfind(b"\n\n") + 1 :].strip()


def _is_error(event: bytes) -> bool:
    """Whether what an event says is an error: a member of its own, no schema's or response's."""
    if b'"error"' not in event:
        return False
    lines = (line.partition(b":") for line in event.splitlines())
    try:
        said = _decode_event(b"".join(value for name, _, value in lines if name == b"data"))
    except (msgspec.DecodeError, RecursionError):
        return False
    return bytes(said.error).startswith(b"{")


def _last_event_end(data: bytes) -> int:
    """The length of the complete events at the start of `data`."""
    ends = (data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data)
    return max(ends, default=0)


class Reply:
    """Answers one client request. Whatever happens, it sends one head and one end."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None  # once the head is sent
        self.finished = False
        self.is_stream = False
        self.is_broken = False  # the stream ended in an error, whatever its status says

    @property
    def has_succeeded(self) -> bool:
        """The client was sent all of an answer that is no error."""
        is_error = self.is_broken or self.status is None or self.status >= 400
        return self.finished and not is_error

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole response."""
        await self._head(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._body(body, more=False)

    async def answer_json(self, status: int, value: object, headers: Headers = ()) -> None:
        body = msgspec.json.encode(value)
        await self.answer(status, [(b"content-type", b"application/json"), *headers], body)

    async def fail(self, error: BatonError) -> None:
        """Ends in `error`: as the response, or as the last event of a stream that has begun."""
        if self.finished:
            return
        if self.status is None:
            headers = [(b"retry-after", b"1")] if error.status == 503 else []
            if isinstance(error, MethodNotAllowed):
                headers.append((b"allow", ", ".join(error.allowed).encode()))
            await self.answer_json(error.status, error.to_openai(), headers)
        else:
            self.is_broken = True
            await self._body(sse.error_event(error), more=False)

    async def relay_answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a server's whole response."""
        await self.answer(status, end_to_end(headers), body)

    async def relay_stream(self, response: Response, on_bytes: Callable[[], None]) -> bool:
        """Sends a server's event stream as it comes.

        Returns:
            Whether the stream had an end of its own. If not, `fail` has to end it.

        Raises:
            UpstreamError: the server broke it off before that.
        """
        events = EventBuffer()
        self.is_stream = True
        await self._head(response.status, end_to_end(response.headers))
        try:
            while (chunk := await response.next_chunk()) is not None:
                on_bytes()
                if complete := events.feed(chunk):
                    await self._body(complete, more=True)
        except asyncio.CancelledError:
            self.finished = events.has_ended  # many clients hang up at [DONE]
            self.is_broken = events.has_failed
            raise
        except UpstreamError:
            if not events.has_ended:  # all that is missing is HTTP's own end
                raise
        else:
            if rest := events.rest():
                await self._body(rest, more=True)
        if events.has_ended:
            self.is_broken = events.has_failed
            await self._body(b"", more=False)
        return events.has_ended

    async def _head(self, status: int, headers: Headers) -> None:
        self.status = status
        identified = [*headers, (b"x-request-id", self.request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": identified})

    async def _body(self, data: bytes, *, more: bool) -> None:
        self.finished = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a server's response that are meant for the client."""
    return [(name, value) for name, value in headers if name not in _NOT_RELAYED]
