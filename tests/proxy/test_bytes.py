"""Servers that send more or less than an answer, seen by the HTTP client; a decode server that dies
at each byte of its answer, seen by a client of the proxy."""

import asyncio
import contextlib
import socket
import struct

import pytest

from proxy.upstream import HttpUpstream, Lost
from tests.proxy.fakes import Fake, Rig, decodes, until
from tests.proxy.scripted import OK, Reader, Script, Writer, read_request, serving

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


STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'a\r\ndata: {"a"\r\n4\r\n:1}\n\r\n1\r\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)
WHOLE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{"a":1}'


class Dying:
    """Answers health checks, and of each other answer the first `position` bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.position = 0

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        try:
            while (await read_request(reader)).startswith(b"GET /ready"):
                writer.write(OK)
            writer.write(self.answer[: self.position])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("answer", [STREAM, WHOLE])
async def test_the_client_gets_one_end_at_whichever_byte_a_server_dies(answer: bytes) -> None:
    async def asks(rig: Rig, dying: Dying) -> None:
        head = answer.index(b"\r\n\r\n") + 4
        done = answer.find(b"[DONE]\n\n") + len(b"[DONE]\n\n")
        for dying.position in range(len(answer) + 1):
            await until(lambda: rig.is_ready(0))
            response = await rig.complete(stream=answer is STREAM)
            if answer is WHOLE:
                assert response.status_code == (200 if dying.position == len(answer) else 502)
                continue
            assert response.status_code == (200 if dying.position >= head else 502)
            ends = [response.text.count(end) for end in ("data: [DONE]\n\n", '"error":{')]
            assert ends == ([1, 0] if dying.position >= done else [0, 1]), dying.position

    dying = Dying(answer)
    async with await asyncio.start_server(dying, "127.0.0.1", 0) as server:
        fake = Fake(decodes)  # never asked: it lends the rig its place
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Rig(prefill=[], decode=[fake]) as rig:
            await asks(rig, dying)
