"""What clients that are silent, do not read, or leave may keep of the proxy and its servers."""

import asyncio
import contextlib
import json
import socket
import time

import pytest

from protocol.http.connections import MAX_AHEAD, MAX_HEAD_BYTES
from tests.proxy.fakes import Call, Fake, Rig, decodes, until

TIMEOUT_S = 0.4
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\n"


def request(**members: object) -> bytes:
    body = json.dumps({"prompt": "x", **members}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def connect(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*rig.listener.getsockname())


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD, HEAD + b"\r\n{", request()[:-1]])
async def test_a_client_that_owes_a_request_and_is_silent_is_let_go(sent: bytes) -> None:
    async with Rig(client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408") if b"\r\n\r\n" in sent else answer == b""
        writer.close()
        assert rig.prefill[0].calls == []


async def test_a_head_that_comes_in_drops_has_one_timeout() -> None:
    async with Rig(client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        for byte in HEAD:
            if reader.at_eof():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(TIMEOUT_S / 10)
        assert reader.at_eof(), "a byte now and then is not enough"
        writer.close()


async def test_a_client_on_a_machine_that_stood_still_is_not_late() -> None:
    async with Rig(client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        data = request()
        writer.write(data[:-1])
        await until(lambda: bool(rig.server.server_state.tasks))  # its body is being read
        asyncio.get_running_loop().call_later(TIMEOUT_S / 10, writer.write, data[-1:])
        time.sleep(1.5 * TIMEOUT_S)  # then the client's time to send has come, and the limit's
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_neither_an_idle_connection_nor_one_that_is_being_served_is_closed() -> None:
    silence_is_over = asyncio.Event()

    async def waits(call: Call) -> None:
        await silence_is_over.wait()
        await decodes(call)

    async with Rig(decode=[Fake(waits)], client_timeout_s=TIMEOUT_S) as rig:
        reader, writer = await connect(rig)
        for _ in range(2):
            silence_is_over.clear()
            writer.write(request())
            silent, other = await connect(rig)
            assert await silent.read() == b""  # longer than the timeout
            other.close()
            silence_is_over.set()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(len(b'{"text": "onetwo"}'))
            silent, other = await connect(rig)
            assert await silent.read() == b""  # idle for as long
            other.close()
        writer.close()


async def test_a_head_without_end_is_refused() -> None:
    async with Rig() as rig:
        reader, writer = await connect(rig)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        piece = b"X-Filler: " + b"y" * 60_000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and reader.exception() is None:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()


async def test_a_body_that_comes_after_its_answer_is_no_head() -> None:
    async with Rig() as rig:
        reader, writer = await connect(rig)
        length = 3 * MAX_HEAD_BYTES
        head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % length)
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.write(b"z" * length + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        rest = b""
        while b"HTTP/1.1 200" not in rest:
            rest += await reader.read(4096)
        assert b"HTTP/1.1 400" not in rest
        writer.close()


async def test_a_client_that_leaves_with_requests_ahead_ends_the_one_that_runs() -> None:
    ended = asyncio.Event()

    async def never_ends(call: Call) -> None:
        gone = asyncio.create_task(call.gone())
        await call.start()
        while not gone.done():
            await call.write(b"data: 1\n\n")
            await asyncio.sleep(0.001)
        ended.set()

    async with Rig(decode=[Fake(never_ends)]) as rig:
        reader, writer = await connect(rig)
        writer.write(request(stream=True))
        await reader.readuntil(b"data: 1\n\n")
        writer.write(request(stream=True) + request())
        await asyncio.sleep(0)
        writer.close()
        await ended.wait()
        await until(lambda: rig.metric("baton_proxy_requests_in_progress") == 0)


async def test_requests_sent_ahead_are_answered_in_order_up_to_a_bound() -> None:
    one = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    async with Rig() as rig:
        reader, writer = await connect(rig)
        writer.write(one * MAX_AHEAD)
        for _ in range(MAX_AHEAD):
            await reader.readuntil(b'{"status":"ok"}')
        writer.close()
        reader, writer = await connect(rig)
        with contextlib.suppress(ConnectionError):
            writer.write(one * 100 * MAX_AHEAD)
            assert (await reader.read()).count(b"HTTP/1.1 200") <= 2 * MAX_AHEAD
        writer.close()
        assert (await rig.client.get("/health")).status_code == 200


async def test_a_client_that_reads_nothing_ends_its_request() -> None:
    ended = asyncio.Event()

    async def never_ends(call: Call) -> None:
        gone = asyncio.create_task(call.gone())
        await call.start()
        while not gone.done():
            await call.write(b"data: " + b"x" * 60_000 + b"\n\n")
            await asyncio.sleep(0)
        ended.set()

    async with Rig(decode=[Fake(never_ends)], client_timeout_s=TIMEOUT_S) as rig:
        with socket.create_connection(rig.listener.getsockname()) as deaf:
            deaf.sendall(request(stream=True))
            await ended.wait()
            await until(lambda: rig.metric("baton_proxy_requests_in_progress") == 0)


@pytest.mark.parametrize("cut", [0, 3, 40, 200])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_answered(
    protocol: bytes, cut: int
) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AA\r\n"
    data = request(stream=True).replace(b"Host: x\r\n", b"Host: x\r\n" + offer % protocol)

    async with Rig() as rig:
        reader, writer = await connect(rig)
        for _ in range(2):
            writer.write(data[:cut])
            await asyncio.sleep(0.01)
            writer.write(data[cut:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        assert rig.prefill[0].calls[0].body["prompt"] == "x"


async def test_offers_that_come_together_are_declined_one_by_one() -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    data = request(stream=True).replace(b"Host: x\r\n", b"Host: x\r\n" + offer)

    async with Rig() as rig:
        reader, writer = await connect(rig)
        writer.write(3 * data)
        for _ in range(3):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_tunnel_is_refused() -> None:
    async with Rig() as rig:
        reader, writer = await connect(rig)
        writer.write(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()
