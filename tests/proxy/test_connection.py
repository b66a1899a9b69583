"""What a connection makes of a server's bytes."""

import asyncio

import pytest

from proxy.upstream import Lost
from tests.proxy.fakes import run
from tests.proxy.scripted import OK, Reader, Script, Writer, serving


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\nx-empty:\r\nx-b: 2\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-empty:\r\nx-b: 2\r\n\r\n", b""),
        (
            b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\nx-empty:\r\nX-B: 2\r\n\r\n"
            b"2;x=y\r\nok\r\n0\r\nx-trailer: 1\r\n\r\n",
            b"ok",
        ),
    ],
)
def test_heads_and_bodies_however_they_are_written(answer: bytes, body: bytes) -> None:
    async def by_bytes(_: Reader, writer: Writer) -> None:
        for position in range(len(answer)):
            writer.write(answer[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async def test() -> None:
        script = Script(answer, by_bytes)
        async with serving(script) as client:
            for _ in range(2):
                response = await client.send(script.url, "POST", "/x", body=b"{}")
                assert await response.read() == body
                assert response.header(b"x-empty") == b""
                assert response.header(b"x-b") == b"2"
                assert response.header(b"x-trailer") is None
            assert script.num_connections == 1

    run(test())


@pytest.mark.parametrize("surplus", [OK.replace(b"ok", b"no"), b"garbage"])
def test_what_a_server_sends_unasked_is_no_part_of_an_answer(surplus: bytes) -> None:
    async def test() -> None:
        script = Script(OK + surplus, OK)
        async with serving(script) as client:
            for _ in range(2):
                response = await client.send(script.url, "GET", "/")
                assert (response.status, await response.read()) == (200, b"ok")
                assert response.header(b"x-a") == b"1"
            assert script.num_connections == 2

    run(test())


def test_a_connection_that_speaks_while_nobody_asks_is_not_used_again() -> None:
    async def test() -> None:
        ask = asyncio.Event()

        async def babbles(_: Reader, writer: Writer) -> None:
            writer.write(OK)
            await ask.wait()
            writer.write(OK)
            await writer.drain()

        script = Script(babbles, OK)
        async with serving(script) as client:
            await (await client.send(script.url, "GET", "/")).read()
            ask.set()
            while script.num_closed < 1:
                await asyncio.sleep(0.002)
            assert await (await client.send(script.url, "GET", "/")).read() == b"ok"
            assert script.num_connections == 2

    run(test())


def test_a_head_has_a_limit() -> None:
    async def endless(_: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nx-a: ")
        try:
            while True:
                writer.write(b"a" * 4096)
                await writer.drain()
        except ConnectionError:
            pass

    async def test() -> None:
        script = Script(endless)
        async with serving(script) as client:
            with pytest.raises(Lost, match="head"):
                await client.send(script.url, "GET", "/")

    run(test())
