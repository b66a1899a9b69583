"""Clients that are silent, slow, do not read, or disconnect, and limits of HTTP.

Such clients must occupy only bounded resources of the proxy and its servers. Further
tests check the limits of what clients may send, and versions of HTTP other than 1.1.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.http.connections import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MAX_TARGET_BYTES,
    MIN_BODY_BYTES_PER_S,
)
from tests.proxy.fakes import Call, Fake, Rig, Waits, decodes, until

TIMEOUT_S = 0.4


def head(length: int, *lines: bytes, version: bytes = b"1.1") -> bytes:
    first = b"POST /v1/completions HTTP/%s" % version
    return b"\r\n".join(
        [first, b"Host: x", b"Content-Length: %d" % length, *lines, b"", b""]
    )


HEAD = head(400)[:-2]


def request(**members: object) -> bytes:
    body = json.dumps({"prompt": "x", **members}).encode()
    return head(len(body)) + body


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(rig: Rig) -> Streams:
    return await asyncio.open_connection(*rig.listener.getsockname())


@contextlib.asynccontextmanager
async def connected(
    decode: list[Fake] | None = None, **settings: Any
) -> AsyncIterator[tuple[Rig, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a proxy, and a connection to it."""
    async with Rig(decode=decode, **settings) as rig:
        reader, writer = await connect(rig)
        try:
            yield rig, reader, writer
        finally:
            writer.close()


async def test_head_that_arrives_byte_by_byte_has_one_timeout():
    async with connected(client_timeout_s=TIMEOUT_S) as (_, reader, writer):
        for byte in HEAD:
            # The proxy has refused the head and closed the connection.
            if reader.at_eof() or writer.is_closing():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(TIMEOUT_S / 10)
        else:
            pytest.fail("a byte within each timeout keeps the connection open")


async def test_neither_idle_nor_active_connections_are_closed():
    waits = Waits(decodes)
    async with Rig(decode=[Fake(waits)], client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        for _ in range(2):
            waits.go.clear()
            writer.write(request())
            silent, other = await connect(rig)
            assert await silent.read() == b""  # returns after the timeout of a head
            other.close()
            waits.go.set()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(len(b'{"text": "onetwo"}'))
            silent, other = await connect(rig)
            # The connection of `reader` has been idle for the same time. It must stay
            # open, because it has had a request.
            assert await silent.read() == b""
            other.close()
        writer.close()


async def test_body_that_arrives_after_its_answer_is_not_parsed_as_a_head():
    async with connected() as (_, reader, writer):
        length = 3 * MAX_HEAD_BYTES
        writer.write(head(length).replace(b"/v1/completions", b"/nowhere"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.write(b"z" * length + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        rest = b""
        while b"HTTP/1.1 200" not in rest:
            rest += await reader.read(4096)
        assert b"HTTP/1.1 400" not in rest


class NeverEnds:
    """A behaviour that streams events until the client disconnects.

    Attributes:
        ended: set when the client has disconnected.
    """

    def __init__(self, event: bytes) -> None:
        self._event = event
        self.ended = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        disconnect = asyncio.create_task(call.disconnected())
        await call.start()
        while not disconnect.done():
            await call.write(self._event)
            await asyncio.sleep(0.001)
        self.ended.set()


async def test_disconnect_with_pipelined_requests_ends_the_running_one():
    never_ends = NeverEnds(b"data: 1\n\n")
    async with connected([Fake(never_ends)]) as (rig, reader, writer):
        writer.write(request(stream=True))
        await reader.readuntil(b"data: 1\n\n")
        writer.write(request(stream=True) + request())
        await asyncio.sleep(0)
        writer.close()
        await never_ends.ended.wait()
        await until(lambda: rig.metric("baton_proxy_requests_in_progress") == 0)
        assert len(rig.decode[0].calls) == 1


async def test_pipelined_requests_are_answered_in_order_up_to_a_limit():
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    async with Rig() as rig:
        reader, writer = await connect(rig)
        writer.write(one * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            await reader.readuntil(b'{"status":"ok"}')
        writer.close()
        reader, writer = await connect(rig)
        with contextlib.suppress(ConnectionError):
            writer.write(one * 100 * MAX_PIPELINED)
            assert (await reader.read()).count(b"HTTP/1.1 200") <= 2 * MAX_PIPELINED
        writer.close()
        assert (await rig.client.get("/health")).status_code == 200


async def test_request_of_a_client_that_reads_nothing_is_ended():
    never_ends = NeverEnds(b"data: " + b"x" * 600_000 + b"\n\n")
    async with Rig(decode=[Fake(never_ends)], client_timeout_s=TIMEOUT_S) as rig:
        with socket.create_connection(rig.listener.getsockname()) as client:
            client.sendall(request(stream=True))
            await never_ends.ended.wait()
            await until(lambda: rig.metric("baton_proxy_requests_in_progress") == 0)
            assert rig.in_flight() == 0


@pytest.mark.parametrize("cut", [0, 3, 40, 200])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_protocol_upgrades_are_declined_and_the_requests_answered(protocol, cut):
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AA\r\n"
    )
    data = request(stream=True).replace(
        b"Host: x\r\n", b"Host: x\r\n" + offer % protocol
    )

    async with connected() as (rig, reader, writer):
        writer.write(data[:cut])
        await asyncio.sleep(0.01)
        writer.write(data[cut:] + 2 * data)
        for _ in range(3):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert rig.prefill[0].calls[0].body["prompt"] == "x"


# -- bodies, and other versions of HTTP


async def read_answer(
    reader: asyncio.StreamReader,
) -> tuple[int, dict[bytes, bytes], Any]:
    """Return status, headers and JSON body of a response with a Content-Length."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).strip().split(b"\r\n")
    headers = {
        name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)
    }
    body = await reader.readexactly(int(headers[b"content-length"]))
    return int(first.split()[1]), headers, json.loads(body)


async def test_body_that_arrives_byte_by_byte_is_refused():
    async with connected(client_timeout_s=TIMEOUT_S) as (rig, reader, writer):
        writer.write(head(1000, b"X-Request-Id: mine"))
        answer = asyncio.create_task(read_answer(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(TIMEOUT_S / 10)
        status, headers, body = await answer
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert (headers[b"x-request-id"], headers[b"connection"]) == (b"mine", b"close")
        assert body["error"]["retryable"]
        assert rig.metric("baton_proxy_responses", status="408") == 1
        assert rig.prefill[0].calls == []


async def test_body_at_the_minimum_rate_is_served():
    piece = b" " * round(MIN_BODY_BYTES_PER_S * TIMEOUT_S / 2)

    async with connected(client_timeout_s=TIMEOUT_S) as (_, reader, writer):
        body = b'{"prompt": "x"}'
        writer.write(head(len(body) + 8 * len(piece)))
        for _ in range(8):
            await asyncio.sleep(TIMEOUT_S / 3)
            writer.write(piece)
        writer.write(body)
        assert (await read_answer(reader))[0] == 200


async def test_body_that_is_declared_too_long_is_refused_before_it_is_sent():
    async with Rig(max_body_bytes=1000) as rig:
        reader, writer = await connect(rig)
        writer.write(head(1001, b"Expect: 100-continue"))
        status, headers, body = await read_answer(reader)
        assert (status, body["error"]["code"]) == (413, "payload_too_large")
        assert "1001 bytes, the limit is 1000" in body["error"]["message"]
        assert headers[b"connection"] == b"close"
        assert await reader.read() == b""
        writer.close()
        reader, writer = await connect(rig)
        good = request(stream=True)
        cut = good.index(b"\r\n\r\n") + 4
        writer.write(good[: cut - 2] + b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(good[cut:] + request())
        await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (await read_answer(reader))[0] == 200  # the same connection still works
        writer.close()


@pytest.mark.parametrize("closing", [(), (b"Connection: close",)])
async def test_client_that_sends_too_much_receives_the_error_first(closing):
    async with connected(max_body_bytes=1000) as (_, reader, writer):
        writer.write(head(5_000_000, *closing))
        assert (await read_answer(reader))[0] == 413
        writer.write(b" " * 5_000_000)
        await writer.drain()
        if closing:
            assert await reader.read() == b""
        else:
            writer.write(request())
            assert (await read_answer(reader))[0] == 200


async def test_oldest_unfinished_body_is_refused_when_there_are_too_many():
    async with Rig(max_body_bytes=40_000, max_unfinished_bytes=100_000) as rig:
        closed = [await connect(rig) for _ in range(3)]
        for _, writer in closed:
            writer.write(head(40_000) + b" " * 30_000)
            await writer.drain()
        for reader, writer in closed:  # this frees the memory of their bodies
            writer.write_eof()
            writer.close()
            await reader.read()
        slow = [await connect(rig) for _ in range(4)]
        for _, writer in slow:
            writer.write(head(40_000) + b" " * 30_000)
            await writer.drain()
            await asyncio.sleep(0.05)
        status, headers, body = await read_answer(slow[0][0])
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert b"retry-after" in headers
        # The proxy discards the rest of the refused body.
        slow[0][1].write(b" " * 10_000 + request())
        assert (await read_answer(slow[0][0]))[0] == 200
        for reader, writer in slow[1:]:
            writer.write(b" " * (10_000 - 15) + b'{"prompt": "x"}')
            assert (await read_answer(reader))[0] == 200
        for _, writer in slow:
            writer.close()


async def test_http_1_0_client_receives_no_chunked_response():
    async with Rig() as rig:
        for body, expected in (
            (b'{"prompt": "x", "stream": true}', b"data: [DONE]\n\n"),
            (b'{"prompt": "x"}', b'{"text": "onetwo"}'),
        ):
            reader, writer = await connect(rig)
            writer.write(head(len(body), version=b"1.0") + body)
            received_head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in received_head.lower()
            assert answer.endswith(expected) and answer[:1] in b"d{"
            writer.close()


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "`Host`"),
        (
            b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"y" * MAX_TARGET_BYTES),
            414,
            "bytes",
        ),
        (b"\x16\x03\x01\r\n\r\n", 400, "HTTP"),
    ],
)
async def test_malformed_head_gets_a_json_error(raw, status, words):
    """tests/engine/malformed.py has more cases."""
    async with connected() as (_, reader, writer):
        writer.write(raw)
        received_status, headers, body = await read_answer(reader)
        assert received_status == status
        assert headers[b"content-type"] == b"application/json"
        assert len(headers[b"x-request-id"]) == 32
        assert words in body["error"]["message"]
        assert status != 400 or body["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_http_after_a_request_does_not_corrupt_its_response(stream):
    fakes = [Fake(Waits(sends=b"data: 1\n\n"))] if stream else None
    async with connected(fakes) as (_, reader, writer):
        writer.write(request(stream=stream))
        if stream:
            await reader.readuntil(b"data: 1\n\n\r\n")
        else:
            assert (await read_answer(reader))[0] == 200
        writer.write(b"? ? ?\r\n\r\n")
        if not stream:
            assert (await read_answer(reader))[0] == 400
        assert await reader.read() == b""
