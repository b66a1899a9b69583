"""Sends the answer to one client request: a complete response, or a stream.

A stream that breaks ends with an error event and without `[DONE]`. An event is sent
only when it has arrived completely. Otherwise the error event could follow an
incomplete event, and clients could not parse the stream.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from protocol.anthropic.errors import (
    REQUEST_ID_HEADER,
    error_body,
    error_event,
    is_messages_path,
)
from protocol.errors import BatonError
from protocol.http import sse
from protocol.openai.token_meter import TokenMeter
from protocol.resume import (
    DIED,
    FAILOVER_PREFIX,
    MOVED,
    REPORT_PREFIX,
    FrameHistory,
    Frames,
)
from protocol.resume import HEADER as FRAMES_HEADER
from protocol.server_stats import REPORT_HEADER
from proxy.request_trace import RequestTrace
from proxy.upstream import (
    Failure,
    Headers,
    IncompleteStream,
    Lost,
    Response,
    UpstreamError,
)

Send = Callable[[dict[str, Any]], Awaitable[None]]

_FRAMES_HEADER = FRAMES_HEADER.encode()
# Headers that are not relayed, because RFC 9110 restricts them to one connection, or
# because the proxy sets them itself.
_NOT_RELAYED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer "
    b"transfer-encoding upgrade content-length date server x-request-id".split()
) | {_FRAMES_HEADER, REPORT_HEADER.encode(), REQUEST_ID_HEADER.encode()}
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = sse.DONE.rstrip()
_ERROR_EVENTS = (b"event: error", b"event: response.failed")
_LAST_EVENTS = (
    *_ERROR_EVENTS,
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: message_stop",
)
_decode_event = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class EventBuffer:
    """Passes complete events on and holds an incomplete event back.

    It also detects whether the last event of the stream has arrived.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        # The latest events that `feed` or `rest` returned, without [DONE].
        self._latest_events = b""
        self._is_done = False

    def feed(self, data: bytes) -> bytes:
        """Return the events that are complete now; hold back an incomplete event."""
        if not self._held and data.endswith(_EVENT_ENDS):  # the usual case
            return self._track_end(data)
        # An event may be long and arrive in many pieces. So the search for the end of
        # an event covers only the new piece and the 3 bytes before it. This suffices,
        # because the end has at most 4 bytes.
        search_start = max(0, len(self._held) - 3)
        self._held += data
        length = 0
        for end in _EVENT_ENDS:
            position = self._held.rfind(end, search_start)
            if position >= 0:
                length = max(length, position + len(end))
        return self._pass_on(length)

    def on_sent(self) -> None:
        """Called after the events that `feed` returned were sent to the client."""

    def rest(self) -> bytes:
        """Return the bytes that are held back, after the stream has ended properly."""
        return self._pass_on(len(self._held))

    def _pass_on(self, length: int) -> bytes:
        passed = bytes(self._held[:length])
        del self._held[:length]
        return self._track_end(passed)

    def _track_end(self, passed: bytes) -> bytes:
        if events := passed.rstrip():
            self._is_done = events.endswith(_DONE)
            self._latest_events = events.removesuffix(_DONE) or self._latest_events
        return passed

    @property
    def has_ended(self) -> bool:
        """Whether the latest event ends the stream, for example [DONE] or an error."""
        if self._is_done or self._last_event().startswith(_LAST_EVENTS):
            return True
        return self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the last event before any [DONE] was an error."""
        last = self._last_event()
        return last.startswith(_ERROR_EVENTS) or _is_error(last)

    def _last_event(self) -> bytes:
        events = self._latest_events.replace(b"\r\n", b"\n").strip()
        return events[events.rfind(b"\n\n") + 1 :].strip()


class Migrated(UpstreamError):
    """A server ended a stream with an error event, and another server may continue.

    Args:
        frame_text: the text of the error event's frame, which has the server's reason.
        event: the error event, for the client if no server continues the stream.

    Attributes:
        params: kv_transfer_params of the KV that the server lends to the server that
            continues; None if it lends none.
    """

    def __init__(self, frame_text: bytes, event: bytes) -> None:
        has_died = frame_text == DIED
        message = "its engine ended" if has_died else "it does not continue the answer"
        super().__init__(message)
        self.failure = Failure.DIED if has_died else Failure.BUSY
        self.event = event
        self.params: msgspec.Raw | None = None
        if frame_text.startswith(MOVED):
            self.failure = Failure.MOVED
            self.params = msgspec.Raw(frame_text[len(MOVED) :])


class FramedEvents(EventBuffer):
    """A stream in frames: events go to the client, frames' texts to `frame_history`.

    protocol/resume.py describes frames.

    Args:
        on_report: called with the report that the server sends at the end of its
            answer.
    """

    def __init__(
        self,
        frame_history: FrameHistory,
        meter: TokenMeter | None = None,
        on_report: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._frame_history = frame_history
        self._on_report = on_report
        self._frames = Frames()
        self._meter = meter
        # Texts of frames with events that have not been sent to the client yet.
        self._unsent_texts = b""
        self._migrated: Migrated | None = None

    def feed(self, data: bytes) -> bytes:
        try:
            frames = self._frames.feed(data)
        except ValueError:
            raise Lost("its stream is not in frames") from None
        passed = b""
        for text, events in frames:
            if text[:1] == FAILOVER_PREFIX:
                self._migrated = Migrated(text, events)
                break
            if text[:1] == REPORT_PREFIX:
                self._on_report(text[1:])
                continue
            self._unsent_texts += text + b","
            if self._meter is not None:
                self._meter.on_frame(text)
            passed = passed + events if passed else events
        return self._track_end(passed)

    def on_sent(self) -> None:
        if self._unsent_texts:
            self._frame_history.add(self._unsent_texts)
            self._unsent_texts = b""
        if self._migrated is not None:
            raise self._migrated


def _is_error(event: bytes) -> bool:
    """Return whether an event's data has an `error` object at the top level."""
    if b'"error"' not in event:
        return False
    lines = (line.partition(b":") for line in event.splitlines())
    data = b"".join(value for name, _, value in lines if name == b"data")
    try:
        members = _decode_event(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return bytes(members.get("error", b"")).startswith(b"{")


class _NumberedEvent(msgspec.Struct):
    sequence_number: int


def _next_sequence_number(sent: bytes) -> int:
    """Return the number of the event that follows these events of /v1/responses."""
    try:
        last = (b"\n" + sent).rpartition(b"\ndata:")[2]
        return msgspec.json.decode(last, type=_NumberedEvent).sequence_number + 1
    except (msgspec.DecodeError, RecursionError):
        return 0


# Returns the headers and the body of an HTML page that shows an error.
ErrorPage = Callable[[BatonError], tuple[list[tuple[bytes, bytes]], bytes]]


class Reply:
    """The answer to one client request. It has exactly one head and one end.

    Attributes:
        headers: sent with any response, in addition to the response's own headers.
        error_page: makes the HTML page for an error; set if a browser displays the
            response.
        status: the HTTP status, once the head has been sent.
        finished: the end of the response has been sent, or is being sent.
        is_broken: the stream ended with an error, even if its HTTP status was 200.
        frame_history: the stream's frames, with which another server can continue.
        meter: counts tokens, if the API key limits them.
    """

    def __init__(self, send: Send, request_id: bytes, path: str = "") -> None:
        self._send = send
        self._path = path
        self._last_sent = b""  # the latest events of a stream
        self.request_id = request_id
        self.headers: Mapping[str, str] = {}
        self.error_page: ErrorPage | None = None
        self.trace = RequestTrace()
        self.status: int | None = None
        self.finished = False
        self.is_stream = False
        self.is_broken = False
        self.frame_history = FrameHistory()
        self.meter: TokenMeter | None = None

    @property
    def has_succeeded(self) -> bool:
        """Whether a complete answer that is not an error was sent to the client."""
        is_error = self.is_broken or self.status is None or self.status >= 400
        return self.finished and not is_error

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete response."""
        length = (b"content-length", b"%d" % len(body))
        await self._send_head(status, [*headers, length])
        await self._send_body(body, more=False)

    async def answer_json(
        self, status: int, value: object, headers: Headers = ()
    ) -> None:
        content_type = (b"content-type", b"application/json")
        body = msgspec.json.encode(value)
        await self.answer(status, [content_type, *headers], body)

    async def fail(self, error: BatonError) -> None:
        """Send `error`: as the response, or as the last event of a stream."""
        if self.finished:
            return
        if self.status is not None:
            await self.break_off(self._error_event(error))
            return
        headers = [(b"retry-after", b"1")] if error.status == 503 else []
        headers += [
            (name.encode(), text.encode()) for name, text in error.headers.items()
        ]
        if self.error_page is None:
            await self.answer_json(error.status, error_body(error, self._path), headers)
        else:
            page_headers, page = self.error_page(error)
            await self.answer(error.status, [*page_headers, *headers], page)

    def _error_event(self, error: BatonError) -> bytes:
        if is_messages_path(self._path):
            return error_event(error)
        sequence_number = None
        if self._path == "/v1/responses":
            sequence_number = _next_sequence_number(self._last_sent)
        return sse.error_event(error, sequence_number)

    async def relay(self, response: Response) -> None:
        """Send a server's response.

        An event stream is sent as it arrives. It may be the rest of a stream that
        another server began. Any other response is sent when it is complete.

        Raises:
            UpstreamError: the response broke off; call `fail`, or relay the response of
                another server.
        """
        if response.body is None and response.is_event_stream:
            await self._relay_stream(response)
            return
        # Nothing is sent until the body is complete, so that a failure can still be
        # reported as an HTTP error.
        body = await response.read()
        self.trace.on_bytes()
        if self.meter is not None:
            self.meter.on_response(body)
        await self.answer(response.status, end_to_end(response.headers), body)

    async def _relay_stream(self, response: Response) -> None:
        if _is_framed(response):
            events: EventBuffer = FramedEvents(
                self.frame_history, self.meter, partial(self.trace.add_report, "decode")
            )
        else:
            events = EventBuffer()
            await self._begin_stream(response)
            self.frame_history.forget()
        is_sent = True  # all events that arrived have been sent to the client
        try:
            while (chunk := await response.next_chunk()) is not None:
                self.trace.on_bytes()
                is_sent = False
                if complete := events.feed(chunk):
                    if self.meter is not None:
                        self.meter.on_events(complete)
                    await self._begin_stream(response)
                    await self._send_body(complete, more=True)
                    self._last_sent = complete
                is_sent = True
                events.on_sent()
        except asyncio.CancelledError:
            # Many clients close the connection at [DONE], which is not a failure.
            self.finished = is_sent and events.has_ended
            self.is_broken = events.has_failed
            raise
        except UpstreamError:
            # After the last event, only the end of the HTTP body is missing.
            if not events.has_ended:
                raise
        else:
            if rest := events.rest():
                await self._send_body(rest, more=True)
        if not events.has_ended:
            raise IncompleteStream("it ended the stream before its last event")
        self.is_broken = events.has_failed
        await self.end()

    async def end(self) -> None:
        """End a stream after its last event has been sent."""
        await self._send_body(b"", more=False)

    async def _begin_stream(self, response: Response) -> None:
        """Send the head of a stream, unless it was sent before.

        For a stream in frames, the head is sent with the first event. If the answer
        migrates before its first event, the client has received nothing, so the next
        server's response need not be a stream.
        """
        self.is_stream = True
        if self.status is None:
            await self._send_head(response.status, end_to_end(response.headers))

    def can_continue_with(self, response: Response) -> bool:
        """Return whether a response can be relayed as the rest of the begun stream."""
        is_stream = response.status == 200 and response.is_event_stream
        return is_stream and (_is_framed(response) or not self.frame_history)

    async def break_off(self, event: bytes) -> None:
        """End a stream with an error event."""
        self.is_broken = True
        await self._send_body(event, more=False)

    async def _send_head(self, status: int, headers: Headers) -> None:
        headers_of_proxy = [
            (name.encode(), text.encode()) for name, text in self.headers.items()
        ]
        if is_messages_path(self._path):
            headers_of_proxy.append((REQUEST_ID_HEADER.encode(), self.request_id))
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    *headers_of_proxy,
                    (b"x-request-id", self.request_id),
                ],
            }
        )
        # The status is set only after the head was sent. If the task is cancelled while
        # it waits to send the head, the status stays None.
        self.status = status

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        self.finished = not more
        await self._send(
            {"type": "http.response.body", "body": data, "more_body": more}
        )


def _is_framed(response: Response) -> bool:
    return any(name == _FRAMES_HEADER for name, _ in response.headers)


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a server's response that are meant for the client."""
    return [(name, value) for name, value in headers if name not in _NOT_RELAYED]
