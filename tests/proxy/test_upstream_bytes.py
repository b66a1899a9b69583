"""The HTTP client against servers that send more or less than an answer."""

import contextlib
import socket
import struct

import pytest

from proxy.upstream import HttpUpstream, Lost
from tests.proxy.scripted import OK, Reader, Script, Writer, serving

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"1\r\no\r\n1;a=b\r\nk\r\n0\r\nx-trailer: 1\r\n\r\n"
)
OTHERS = OK.replace(b"\r\n\r\nok", b"\r\n\r\nno")


async def ask(client: HttpUpstream, script: Script) -> bytes:
    return await (await client.send(script.url, "POST", "/", body=b"{}")).read()


@pytest.mark.parametrize(
    "rest", [OTHERS, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"\r\n", b"x"]
)
@pytest.mark.parametrize("answer", [OK, CHUNKED])
async def test_what_comes_with_an_answer_after_its_end_answers_no_other_request(
    answer: bytes, rest: bytes
) -> None:
    script = Script(answer + rest, OK)
    async with serving(script) as client:
        for _ in range(2):
            with contextlib.suppress(Lost):  # of what is not even a head
                assert await ask(client, script) == b"ok"
        if rest == OTHERS:
            assert script.num_connections == 2


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("answer", [OK, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + OK])
async def test_a_server_may_die_at_any_byte_of_its_answer(answer: bytes, resets: bool) -> None:
    async def dies_after(position: int) -> None:
        async def dies(_: Reader, writer: Writer) -> None:
            writer.write(answer[:position])
            await writer.drain()
            if resets:
                link = writer.get_extra_info("socket")
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

        script = Script(dies, OK)
        async with serving(script) as client:
            with pytest.raises(Lost):
                await ask(client, script)
            assert await ask(client, script) == b"ok"

    for position in range(len(answer)):
        await dies_after(position)
