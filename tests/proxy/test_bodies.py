"""What clients may send, how slowly, how much at once, and in which version of HTTP."""

import asyncio
import json
from typing import Any

import pytest

from protocol.http.connections import MAX_TARGET_BYTES, MIN_BODY_BYTES_PER_S
from tests.proxy.fakes import Call, Fake, Rig, decodes
from tests.proxy.test_connections import TIMEOUT_S, connect, request


def head(length: int, *lines: bytes, version: bytes = b"1.1") -> bytes:
    first = b"POST /v1/completions HTTP/%s" % version
    return b"\r\n".join([first, b"Host: x", b"Content-Length: %d" % length, *lines, b"", b""])


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers and JSON body of an answer of known length."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).strip().split(b"\r\n")
    headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers[b"content-length"]))
    return int(first.split()[1]), headers, json.loads(body)


async def test_a_body_that_comes_in_drops_is_refused() -> None:
    async with Rig(client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        writer.write(head(1000, b"X-Request-Id: mine"))
        answer = asyncio.create_task(read_answer(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(TIMEOUT_S / 10)
        status, headers, body = await answer
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert (headers[b"x-request-id"], headers[b"connection"]) == (b"mine", b"close")
        assert body["error"]["retryable"]
        writer.close()
        assert rig.metric("baton_proxy_responses", status="408") == 1
        assert rig.prefill[0].calls == []


async def test_a_body_that_keeps_the_least_rate_is_served() -> None:
    piece = b" " * round(MIN_BODY_BYTES_PER_S * TIMEOUT_S / 2)

    async with Rig(client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        body = b'{"prompt": "x"}'
        writer.write(head(len(body) + 8 * len(piece)))
        for _ in range(8):
            await asyncio.sleep(TIMEOUT_S / 3)
            writer.write(piece)
        writer.write(body)
        assert (await read_answer(reader))[0] == 200
        writer.close()


async def test_no_body_is_asked_for_that_is_declared_too_long() -> None:
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
        assert (await read_answer(reader))[0] == 200  # the connection is kept
        writer.close()


@pytest.mark.parametrize("closing", [(), (b"Connection: close",)])
async def test_a_client_that_sends_too_much_sees_its_answer_first(closing: Any) -> None:
    async with Rig(max_body_bytes=1000) as rig:
        reader, writer = await connect(rig)
        writer.write(head(5_000_000, *closing))
        assert (await read_answer(reader))[0] == 413
        writer.write(b" " * 5_000_000)
        await writer.drain()
        if closing:
            assert await reader.read() == b""
        else:
            writer.write(request())
            assert (await read_answer(reader))[0] == 200
        writer.close()


async def test_of_too_many_unfinished_bodies_the_first_is_refused() -> None:
    async with Rig(max_body_bytes=40_000, max_unfinished_bytes=100_000) as rig:
        gone = [await connect(rig) for _ in range(3)]
        for _, writer in gone:
            writer.write(head(40_000) + b" " * 30_000)
            await writer.drain()
        for reader, writer in gone:  # what they held is free again
            writer.write_eof()
            writer.close()
            await reader.read()
        slow = [await connect(rig) for _ in range(4)]
        for _, writer in slow:
            writer.write(head(40_000) + b" " * 30_000)
            await writer.drain()
            await asyncio.sleep(0.05)
        status, headers, body = await read_answer(slow[0][0])
        assert (status, body["error"]["code"]) == (503, "overloaded")
        assert b"retry-after" in headers
        slow[0][1].write(b" " * 10_000 + request())  # the rest is dropped
        assert (await read_answer(slow[0][0]))[0] == 200
        for reader, writer in slow[1:]:
            writer.write(b" " * (10_000 - 15) + b'{"prompt": "x"}')
            assert (await read_answer(reader))[0] == 200
        for _, writer in slow:
            writer.close()


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        (b"1.1", b"", 400),
        (b"1.1", b"Host: x\r\nHost: x\r\n", 400),
        (b"1.1", b"Host: x\r\nhOST: y\r\n", 400),
        (b"1.0", b"Host: x\r\nHost: x\r\n", 400),
        (b"1.0", b"", 200),
        (b"1.1", b"Host: \r\n", 200),
    ],
)
async def test_a_request_names_one_host(version: bytes, hosts: bytes, status: int) -> None:
    async with Rig() as rig:
        reader, writer = await connect(rig)
        writer.write(b"GET /health HTTP/" + version + b"\r\n" + hosts + b"\r\n")
        told, headers, body = await read_answer(reader)
        assert told == status
        assert headers[b"x-request-id"]
        assert status == 200 or "`Host`" in body["error"]["message"]
        writer.close()


async def test_nothing_is_sent_in_chunks_to_a_client_of_http_1_0() -> None:
    async with Rig() as rig:
        for body, expected in (
            (b'{"prompt": "x", "stream": true}', b"data: [DONE]\n\n"),
            (b'{"prompt": "x"}', b'{"text": "onetwo"}'),
        ):
            reader, writer = await connect(rig)
            writer.write(head(len(body), version=b"1.0") + body)
            told, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in told.lower()
            assert answer.endswith(expected) and answer[:1] in b"d{"
            writer.close()


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\r\n\r\n", request() + b"?"]
)
async def test_what_is_no_http_gets_an_error_like_any_other(raw: bytes) -> None:
    async with Rig() as rig:
        reader, writer = await connect(rig)
        if raw.endswith(b"?"):  # a good request, then a broken one
            writer.write(raw[:-1])
            assert (await read_answer(reader))[0] == 200
            raw = b"? ? ?\r\n\r\n"
        writer.write(raw)
        status, headers, body = await read_answer(reader)
        assert (status, headers[b"content-type"]) == (400, b"application/json")
        assert len(headers[b"x-request-id"]) == 32
        assert body["error"]["code"] == "invalid_request"
        assert await reader.read() == b""
        writer.close()


async def test_what_is_no_http_is_no_part_of_the_answer_before_it() -> None:
    async def never_ends(call: Call) -> None:
        await call.start()
        await call.write(b"data: 1\n\n")
        await call.gone()

    async with Rig(decode=[Fake(never_ends)]) as rig:
        reader, writer = await connect(rig)
        writer.write(request(stream=True))
        await reader.readuntil(b"data: 1\n\n\r\n")
        writer.write(b"? ? ?\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_a_long_target_is_refused() -> None:
    async with Rig(decode=[Fake(decodes)]) as rig:
        reader, writer = await connect(rig)
        for size, status in ((MAX_TARGET_BYTES - 100, 404), (MAX_TARGET_BYTES, 414), (60_000, 414)):
            writer.write(b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"y" * size))
            assert (await read_answer(reader))[0] == status
        writer.close()
