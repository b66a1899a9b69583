"""HTTP connections with limits that uvicorn lacks. server.py uses this module.

- If a client stops sending its request, or sends its body slower than
  MIN_BODY_BYTES_PER_S, it receives an error or the connection is closed.
- If the unfinished bodies of all connections are too large together, the body that
  began first is refused.
- If the bodies of the running requests are too large together, a new request is
  refused.
- If the declared length of a body is too large, or if the head violates HTTP/1.1, the
  request is refused before its body arrives. If two servers could disagree about the
  end of the body, the connection is also closed.
- Trailers and chunk extensions are dropped, and their size is limited.
- If a request is answered before its body is complete, the rest of the body is dropped.
  Otherwise the client could not read the response.
- If a client pipelines hundreds of requests, the connection is closed.
- If a client disconnects after it has pipelined requests, the running request is
  notified too. uvicorn notifies only the last request.
- If a client offers another protocol (Java clients offer h2c with every request), the
  response is HTTP/1.1 nevertheless, and the body is read.
- A client of HTTP/1.0 receives no chunked response.
"""

import asyncio
import re
import uuid
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)

from protocol import errors
from protocol.http.bodies import EXTENSION, Bodies, connection_state
from protocol.http.deadlines import Countdown
from protocol.process.logging import request_context
from protocol.settings.server_options import ListenOptions

# Limit on a request's head, and on the chunk framing of its body. All bytes of one read
# count, even bytes that belong to the end of the previous request.
MAX_HEAD_BYTES = 1 << 20
MAX_HEADERS = 200
# Limit on queued pipelined requests. uvicorn resumes reading after each response, so
# a connection can carry more pipelined requests in total.
MAX_PIPELINED = 200
MAX_TARGET_BYTES = 8192  # limit on a request's target; see _TARGET
MIN_BODY_BYTES_PER_S = 16_384
MAX_DROPPED_BYTES = 1 << 28  # limit on the dropped rest of a body
_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
_KEEP_ALIVE_RECHECK_S = 0.1  # see timeout_keep_alive_handler
# Bytes of chunk framing per byte of a body that do not count against MAX_HEAD_BYTES.
_MAX_FRAMING_RATIO = 8
_HOST_CHAR = rb"[\w.~!$&'()*+,;=%-]"
_HOST = re.compile(rb"(?:\[(?:%b|:)+\]|%b*)(?::\d*)?" % (_HOST_CHAR, _HOST_CHAR))
# A request's target. The group is its path and query, without scheme and host.
_TARGET = re.compile(rb"(?:(?i:https?)://[^/?#@]+)?((?:/|(?<=.)\?|$)[^#]*)")


def bounded_protocol(
    options: ListenOptions, extra_body_bytes: int = 0
) -> type[HttpToolsProtocol]:
    """Returns a subclass of uvicorn's protocol class with the bounds of `options`.

    If a request has a `refusal` (protocol/http/bodies.py), the application must send
    this error as its response.

    Args:
        extra_body_bytes: Number of bytes by which a body may exceed --max-body-bytes.
    """
    max_body_bytes = options.max_body_bytes + extra_body_bytes
    bodies = Bodies(
        max(options.max_unfinished_bytes, max_body_bytes), options.max_held_bytes
    )
    members = {
        "options": options,
        "extra_body_bytes": extra_body_bytes,
        "bodies": bodies,
    }
    return type("BoundedHttp", (_BoundedHttp,), members)


class _BoundedHttp(HttpToolsProtocol):
    """One connection. `bounded_protocol` sets the class variables."""

    options: ListenOptions
    extra_body_bytes: int
    bodies: Bodies

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._is_in_body = False
        self._is_given_up = False  # the rest of the arriving body will be dropped
        self._keeps_alive = True  # the connection stays open after the current request
        # Bytes of the head. Within a body: bytes of chunk framing beyond
        # _MAX_FRAMING_RATIO per byte of the body.
        self._head_bytes = 0
        self._piece_bytes = 0  # bytes that have arrived since the timeout began
        self._dropped_bytes = 0
        # The latest request that was passed to the application.
        self._running: RequestResponseCycle | None = None
        self._timeout: Countdown | None = self._start_timeout()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        shared: dict[object, object] = {
            "transport": self.transport,
            "bodies": self.bodies,
        }
        self.scope["extensions"] = {EXTENSION: shared}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:
            return  # a trailer, which is dropped
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError(f"more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if not self.transport.is_closing():
                cause = error.__context__ or error
                self.send_400_response(
                    f"Invalid HTTP request received: {str(cause)[:200]}."
                )
        if self.transport.is_closing():
            return
        self._update_timeout(len(data))
        self._head_bytes = max(0, self._head_bytes + len(data))
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(
                "The request's head, or the framing of its body, is too long; the "
                f"limit is {MAX_HEAD_BYTES} bytes."
            )

    def _update_timeout(self, num_bytes: int) -> None:
        """Starts, restarts or stops the client's timeout.

        The timeout runs while the server waits for the client to send a request. Within
        a body, the timeout restarts whenever `_piece_limit` bytes have arrived, until
        the response is complete.

        Args:
            num_bytes: Number of bytes that have just arrived.
        """
        is_answered = self.cycle is None or self.cycle.response_complete
        client_must_send = (
            self.cycle is self._running if self._is_in_body else is_answered
        )
        self._piece_bytes += num_bytes
        has_piece = (
            self._is_in_body
            and self._piece_bytes >= self._piece_limit
            and not is_answered
        )
        if not client_must_send or has_piece:
            self._stop_timeout()
        if client_must_send and self._timeout is None:
            self._timeout = self._start_timeout()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise httptools.HttpParserError("too many pipelined requests")
        self._check_framing()
        if self.parser.should_upgrade():
            return
        fault = self._normalize_target()
        super().on_headers_complete()
        self._stop_timeout()
        self._is_in_body = True
        self._is_given_up = False
        self._head_bytes = 0
        connection_state(self.scope)["refusal"] = fault or self._check_headers()
        # If a client is answered before its body is complete, it still sends the rest
        # of the body. Therefore the connection stays open; otherwise the client could
        # not read the response. A client that still waits for 100 Continue sends no
        # body, so its connection is closed.
        self._keeps_alive = self.cycle.keep_alive
        self.cycle.keep_alive = not self.expect_100_continue

    def _check_framing(self) -> None:
        """Raises HttpParserError if two servers could disagree on the request's end, or
        if the version of HTTP is unknown.

        For HTTP/1.0 the method also ignores `Expect: 100-continue`.
        """
        version = self.parser.get_http_version()
        codings = [
            value.lower()
            for name, value in self.headers
            if name == b"transfer-encoding"
        ]
        if version not in ("1.0", "1.1"):
            raise httptools.HttpParserError("the version must be HTTP/1.1 or HTTP/1.0")
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise httptools.HttpParserError(
                "Transfer-Encoding must be `chunked`, and it requires HTTP/1.1"
            )
        if version == "1.0":
            self.expect_100_continue = False

    def _normalize_target(self) -> errors.BatonError | None:
        """Sets `url` to the path and query of the target, without scheme and host.

        Returns:
            The error if the target is invalid; `url` is then /.
        """
        target = self.url
        self.url = b"/"
        if len(target) > MAX_TARGET_BYTES:
            return errors.TargetTooLong(
                f"path and query have {len(target)} bytes, the limit is "
                f"{MAX_TARGET_BYTES} bytes"
            )
        match = _TARGET.fullmatch(target)
        path = unquote_to_bytes(match[1].partition(b"?")[0]) if match else b".."
        if not match or not {b".", b".."}.isdisjoint(re.split(rb"[/\\]", path)):
            # If this server is a proxy, the server behind it could resolve the dots to
            # a path that is not public.
            return errors.InvalidRequest(
                f"the target is {target[:80]!r}; send a path without `.` or `..` and "
                "without a fragment"
            )
        self.url = match[1] if match[1].startswith(b"/") else b"/" + match[1]
        return None

    def _check_headers(self) -> errors.BatonError | None:
        """Returns the error if the headers of the request are invalid."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            return errors.InvalidRequest(
                f"the request has {len(hosts)} headers `Host`; send one"
            )
        if hosts and not _HOST.fullmatch(hosts[0]):
            return errors.InvalidRequest(
                f"`Host` is {hosts[0][:80]!r}; send HOST or HOST:PORT"
            )
        if sum(name == b"authorization" for name, _ in self.headers) > 1:
            return errors.InvalidRequest(
                "the request has several headers `Authorization`; send one"
            )
        num_bytes = next(
            (int(v) for name, v in self.headers if name == b"content-length"), 0
        )
        limit = self.options.max_body_bytes
        if num_bytes > limit + self.extra_body_bytes:
            return errors.PayloadTooLarge(
                f"the body has {num_bytes} bytes, the limit is {limit} bytes"
            )
        return None

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= (1 + _MAX_FRAMING_RATIO) * len(body)
        if self.cycle.response_complete or self._is_given_up:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        if self.expect_100_continue:  # the client sends its body after all
            self.expect_100_continue = False
            self.cycle.keep_alive = True
        super().on_body(body)
        self.bodies.add(self, len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        self._dropped_bytes = 0
        self.bodies.remove(self)
        # A `Connection: close` in a trailer also ends the connection.
        self._keeps_alive &= self.parser.should_keep_alive()
        self.cycle.keep_alive = self._keeps_alive
        if self.cycle.response_complete and not self._keeps_alive:
            self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body:
            self._stop_timeout()
            self._update_timeout(0)
            if self.cycle.response_complete:
                self.bodies.remove(self)

    def give_up(self, error: errors.BatonError) -> None:
        """Stops waiting for the rest of the body; `error` is the response."""
        self._is_given_up = True
        connection_state(self.scope)["refusal"] = error
        self.cycle.body.clear()
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Sends an error in the format of Baton's errors, and closes the connection.

        The method replaces uvicorn's. It is called for bytes that are not an HTTP
        request, and for a head or framing that is too long. The error is not sent if
        the client would take it for the response to an earlier request, or for a part
        of a response.
        """
        cycle = self.cycle
        if self._is_in_body:
            can_send = cycle is self._running and not cycle.response_started
        else:
            can_send = cycle is None or cycle.response_complete
        request_id = uuid.uuid4().hex
        with request_context(request_id):
            self.logger.warning(msg)
        if can_send:
            self.transport.write(_bad_request(msg, request_id))
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Feeds `data` to the parser.

        The parser stops after a head that offers another protocol. A new parser then
        receives this head without the offer, followed by the remaining data.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError(
                        "CONNECT needs a proxy, and this server is not a proxy"
                    ) from None
                headers = [
                    header
                    for header in self.headers
                    if header[0] not in _UPGRADE_HEADERS
                ]
                if any(
                    name == b"connection" and b"close" in value
                    for name, value in self.headers
                ):
                    headers.append((b"connection", b"close"))
                request_line = b"%b %b HTTP/%b" % (
                    method,
                    self.url,
                    self.parser.get_http_version().encode(),
                )
                lines = [name + b": " + value for name, value in headers]
                head = b"\r\n".join([request_line, *lines, b"", b""])
                self.parser = httptools.HttpRequestParser(self)
                data = head + data[upgrade.args[0] :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        self.bodies.remove(self)
        if self._running is not None and not self._running.response_complete:
            # Of several pipelined requests, uvicorn notifies only the last one of the
            # disconnection.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection after a short delay, unless a request arrives.

        If the process was suspended, a request may have arrived that is not read yet.
        The short delay lets the event loop read such a request first.
        """
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(
            _KEEP_ALIVE_RECHECK_S, close
        )

    def _start_asgi_task(
        self, cycle: RequestResponseCycle, app: ASGI3Application
    ) -> None:
        self._running = cycle
        is_http_1_0 = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(
            cycle, _without_chunks(app, cycle) if is_http_1_0 else app
        )

    @property
    def _piece_limit(self) -> int:
        """Number of bytes of a body that the client must send within one timeout."""
        return round(MIN_BODY_BYTES_PER_S * self.options.client_timeout_s)

    def _start_timeout(self) -> Countdown:
        self._piece_bytes = 0
        return Countdown(
            self.loop, self.options.client_timeout_s, self._on_client_timeout
        )

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _on_client_timeout(self) -> None:
        self._timeout = None
        if (
            self._is_in_body
            and not self.cycle.response_started
            and not self._is_given_up
        ):
            self._keeps_alive = False
            self.cycle.keep_alive = False
            due = f"{self._piece_limit} bytes or the rest"
            seconds = f"{self.options.client_timeout_s:g} s"
            message = f"the body arrives too slowly; send {due} in {seconds}"
            self.give_up(errors.RequestTimeout(message))
        elif not self.transport.is_closing():
            self.transport.close()


def _without_chunks(
    app: ASGI3Application, cycle: RequestResponseCycle
) -> ASGI3Application:
    """Returns `app` changed to send responses without chunks.

    The client detects the end of a response by the end of the connection.
    """
    # uvicorn raises an error if a response without chunks is longer than its declared
    # length. Therefore each part of the body first increases that length.
    cycle.chunked_encoding = False

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_plain(message: Any) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def _bad_request(message: str, request_id: str) -> bytes:
    body = msgspec.json.encode(errors.InvalidRequest(message).to_openai())
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: "
        f"close\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n\r\n"
    )
    return head.encode() + body
