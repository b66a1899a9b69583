"""The HTTP client against servers that answer byte by byte as scripted."""

import asyncio
import errno
import os
import resource
import socket
import time

import pytest

from protocol.errors import InvalidRequest
from proxy import upstream
from proxy.upstream import Exhausted, HttpUpstream, Lost, TimedOut, Unreachable
from tests.proxy.scripted import OK, Reader, Script, Writer, serving


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK,
    ],
)
async def test_bodies_are_read_and_the_connection_is_used_again(answer: bytes) -> None:
    script = Script(answer, answer)
    async with serving(script) as client:
        for _ in range(2):
            response = await client.send(script.url, "POST", "/x", body=b"{}")
            assert (response.status, await response.read()) == (200, b"ok")
        assert script.num_connections == 1
        assert script.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
        assert script.requests[0].lower().endswith(b"content-length: 2\r\n\r\n{}")


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
async def test_heads_and_bodies_however_they_are_written(answer: bytes, body: bytes) -> None:
    async def by_bytes(_: Reader, writer: Writer) -> None:
        for position in range(len(answer)):
            writer.write(answer[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0)

    script = Script(answer, by_bytes)
    async with serving(script) as client:
        for _ in range(2):
            response = await client.send(script.url, "POST", "/x", body=b"{}")
            assert await response.read() == body
            assert response.header(b"x-empty") == b""
            assert response.header(b"x-b") == b"2"
            assert response.header(b"x-trailer") is None
        assert script.num_connections == 1


async def test_a_body_may_end_with_the_connection() -> None:
    async def answer(_: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    script = Script(answer)
    async with serving(script) as client:
        response = await client.send(script.url, "GET", "/")
        assert await response.read() == b"all of it"


async def test_a_connection_that_its_server_will_close_is_not_used_again() -> None:
    script = Script(OK.replace(b"X-A: 1", b"connection: close"), OK)
    async with serving(script) as client:
        for _ in range(2):
            assert await (await client.send(script.url, "GET", "/")).read() == b"ok"
        assert script.num_connections == 2


async def test_a_connection_that_speaks_while_nobody_asks_is_not_used_again() -> None:
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


@pytest.mark.parametrize("told", [b"1", b"2"])
async def test_what_a_server_says_of_itself_is_no_answer_to_the_next_request(told: bytes) -> None:
    babbled = asyncio.Event()
    answer = b"x-request-id: %s".join(OK.split(b"X-A: 1"))

    async def babbles(reader: Reader, writer: Writer) -> None:
        writer.write(answer % b"1")
        await babbled.wait()
        writer.write(answer % told)
        await reader.read()

    script = Script(babbles, OK)
    async with serving(script) as client:
        first = await client.send(script.url, "POST", "/", headers=[(b"x-request-id", b"1")])
        assert await first.read() == b"ok"
        babbled.set()
        await asyncio.sleep(0.05)
        with pytest.raises(Lost):
            await client.send(script.url, "POST", "/", headers=[(b"x-request-id", b"3")])


async def test_a_connection_that_ended_unseen_is_not_used_again() -> None:
    """As where the proxy stood still between an answer and the next request."""
    links: list[int] = []

    async def answers(reader: Reader, writer: Writer) -> None:
        links.append(writer.get_extra_info("socket").fileno())
        writer.write(OK)
        await reader.read()

    script = Script(answers, OK)
    async with serving(script) as client:
        await (await client.send(script.url, "GET", "/")).read()
        with socket.fromfd(links[0], socket.AF_INET, socket.SOCK_STREAM) as link:
            link.shutdown(socket.SHUT_WR)
        assert await (await client.send(script.url, "GET", "/")).read() == b"ok"
        assert script.num_connections == 2


async def test_concurrent_requests_have_connections_of_their_own() -> None:
    script = Script(*[OK] * 40)
    async with serving(script) as client:
        responses = await asyncio.gather(*(client.send(script.url, "GET", "/") for _ in range(20)))
        assert script.num_connections == 20
        for response in responses:
            await response.read()
        for _ in range(20):
            await (await client.send(script.url, "GET", "/")).read()
        assert script.num_connections == 20


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    client = HttpUpstream(connect_timeout_s=5.0, read_timeout_s=5.0)
    for server in (url, url.replace("127.0.0.1", "localhost")):  # several addresses, often
        with pytest.raises(Unreachable, match=f"Errno {errno.ECONNREFUSED}"):
            await client.send(server, "GET", "/")
    with pytest.raises(Unreachable):
        await client.send("http://name.invalid", "GET", "/")
    await client.close()


async def test_a_lack_of_descriptors_is_no_fault_of_the_server() -> None:
    script = Script(OK)
    async with serving(script) as client:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(Exhausted):
                await client.send(script.url, "GET", "/")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await (await client.send(script.url, "GET", "/")).read() == b"ok"


async def test_a_server_that_does_not_take_connections_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(address)
        client = HttpUpstream(connect_timeout_s=0.1, read_timeout_s=5.0)
        with pytest.raises(Unreachable, match=r"within 0\.1 s"):
            await client.send(f"http://127.0.0.1:{address[1]}", "GET", "/")
        await client.close()
        for other in others:
            other.close()


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-le", b"garbage\r\n\r\n", b"\x00" * 100]
)
async def test_a_connection_that_ends_before_the_head(sent: bytes) -> None:
    async def answer(_: Reader, writer: Writer) -> None:
        writer.write(sent)

    script = Script(answer)
    async with serving(script) as client:
        with pytest.raises(Lost):
            await client.send(script.url, "POST", "/", body=b"{}")
        assert len(script.requests) == 1


async def test_a_head_has_a_limit() -> None:
    async def endless(_: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nx-a: ")
        try:
            while True:
                writer.write(b"a" * 4096)
                await writer.drain()
        except ConnectionError:
            pass

    script = Script(endless)
    async with serving(script) as client:
        with pytest.raises(Lost, match="8190 bytes"):
            await client.send(script.url, "GET", "/")


@pytest.mark.parametrize("framing", [b"content-length: 99", b"transfer-encoding: chunked"])
async def test_a_body_that_breaks_off_is_no_body(framing: bytes) -> None:
    async def answer(_: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n4\r\nhalf\r\n")

    script = Script(answer)
    async with serving(script) as client:
        response = await client.send(script.url, "GET", "/")
        with pytest.raises(Lost):
            await response.read()


async def test_a_malformed_chunk_ends_the_body_at_once() -> None:
    read = asyncio.Event()

    async def answer(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await read.wait()
        writer.write(b"ZZ\r\n")
        await reader.read()  # until the client hangs up

    script = Script(answer)
    async with serving(script, read_timeout_s=60) as client:
        response = await client.send(script.url, "GET", "/")
        assert await response.next_chunk() == b"hello"
        read.set()
        with pytest.raises(Lost):
            await response.next_chunk()
        await response.aclose()


async def test_what_came_before_a_body_broke_off_is_read() -> None:
    async def answer(_: Reader, writer: Writer) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"3\r\nall\r\n4\r\n of \r\n2\r\nit\r\n")

    script = Script(answer)
    async with serving(script) as client:
        response = await client.send(script.url, "GET", "/")
        while response._response.content.exception() is None:  # a slow client held up the relay
            await asyncio.sleep(0)
        assert await response.next_chunk() == b"all of it"
        with pytest.raises(Lost):
            await response.next_chunk()
        await response.aclose()


async def test_silence_is_timed_before_and_within_a_body() -> None:
    async def silent(reader: Reader, _: Writer) -> None:
        await reader.read()

    async def stalls(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await reader.read()  # until the client hangs up

    script = Script(silent, stalls)
    async with serving(script, read_timeout_s=0.1) as client:
        with pytest.raises(TimedOut, match=r"0\.1 s"):
            await client.send(script.url, "GET", "/")
        response = await client.send(script.url, "GET", "/")
        assert await response.next_chunk() == b"half"
        with pytest.raises(TimedOut):
            await response.next_chunk()
        await response.aclose()
        assert script.num_connections == 2


async def test_a_server_on_a_machine_that_stood_still_is_not_late() -> None:
    loop, timeout_s = asyncio.get_running_loop(), 0.4

    async def answers(reader: Reader, writer: Writer) -> None:
        loop.call_later(timeout_s / 4, writer.write, OK)
        time.sleep(1.5 * timeout_s)  # then the time to answer has come, and the limit's
        await reader.read()  # until the client hangs up

    script = Script(answers)
    async with serving(script, read_timeout_s=timeout_s) as client:
        assert await (await client.send(script.url, "GET", "/")).read() == b"ok"


async def test_a_server_that_takes_no_request_is_given_up() -> None:
    given_up, ended = asyncio.Event(), asyncio.Event()

    async def takes_nothing(_: Reader, writer: Writer) -> None:
        await given_up.wait()
        writer.transport.abort()
        ended.set()

    server = await asyncio.start_server(takes_nothing, "127.0.0.1", 0)
    client = HttpUpstream(connect_timeout_s=5, read_timeout_s=0.3)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    body = bytes(64 << 20)  # more than sockets hold
    with pytest.raises(TimedOut):
        await client.send(url, "POST", "/", body=body)
    given_up.set()
    await ended.wait()
    await client.close()
    server.close()
    await server.wait_closed()


async def test_closing_early_hangs_up() -> None:
    hung_up = asyncio.Event()

    async def streams(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        try:
            await reader.read()
        except ConnectionError:
            pass
        hung_up.set()

    script = Script(streams)
    async with serving(script) as client:
        response = await client.send(script.url, "GET", "/")
        await response.aclose()
        await hung_up.wait()


async def test_a_connection_lost_while_it_was_busy_is_not_replaced() -> None:
    async def close(_: Reader, writer: Writer) -> None:
        pass

    script = Script(OK, close, OK)
    async with serving(script) as client:
        await (await client.send(script.url, "POST", "/")).read()
        with pytest.raises(Lost):
            await client.send(script.url, "POST", "/")
        assert len(script.requests) == 2


async def test_connections_idle_for_long_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "IDLE_S", 0.0)

    script = Script(OK, OK)
    async with serving(script) as client:
        for _ in range(2):
            await (await client.send(script.url, "GET", "/")).read()
        assert script.num_connections == 2


async def test_connections_that_nobody_needs_any_more_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "IDLE_S", 0.1)
    script = Script(*[OK] * 8)
    async with serving(script) as client:
        responses = await asyncio.gather(*(client.send(script.url, "GET", "/") for _ in range(8)))
        for response in responses:
            await response.read()
        assert script.num_connections == 8
        while script.num_closed < 8:
            await asyncio.sleep(0.002)


async def test_cancelling_hangs_up_at_once_before_and_within_a_body() -> None:
    async def half(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await reader.read()

    async def silent(reader: Reader, _: Writer) -> None:
        await reader.read()

    script = Script(silent, half)
    async with serving(script) as client:
        for count in (1, 2):

            async def ask() -> None:
                await (await client.send(script.url, "GET", "/")).read()

            task = asyncio.create_task(ask())
            while len(script.requests) < count:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0)
            task.cancel()
            while script.num_closed < count:
                await asyncio.sleep(0.002)
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_headers_that_http_cannot_carry_are_refused() -> None:
    script = Script(OK)
    async with serving(script) as client:
        with pytest.raises(InvalidRequest):
            await client.send(script.url, "GET", "/", headers=[(b"x-request-id", b"a\nb: c")])
        assert script.requests == []
        assert await (await client.send(script.url, "GET", "/")).read() == b"ok"


@pytest.mark.parametrize("path", ["/v1/models/a%2Fb%20c?x=%41&y", "/a//b/../c;d='e'"])
async def test_a_path_is_sent_as_it_is(path: str) -> None:
    script = Script(OK)
    async with serving(script) as client:
        await (await client.send(script.url, "GET", path)).read()
        assert script.requests[0].startswith(b"GET %s HTTP/1.1\r\n" % path.encode())


async def test_a_request_carries_the_given_headers_and_no_more() -> None:
    script = Script(OK.replace(b"X-A: 1", b"set-cookie: a=b"), OK)
    async with serving(script) as client:
        for _ in range(2):
            response = await client.send(
                script.url, "POST", "/", headers=[(b"x-a", "é".encode())], body=b"{}"
            )
            await response.read()
        lines = set(script.requests[1].lower().split(b"\r\n"))
        host = b"host: " + script.url.removeprefix("http://").encode()
        head = {b"post / http/1.1", host, b"x-a: \xc3\xa9", b"content-length: 2"}
        assert lines == head | {b"", b"{}"}


async def test_a_server_that_sends_more_than_is_read_has_to_wait() -> None:
    size = 64 * 1024 * 1024
    written = 0

    async def floods(_: Reader, writer: Writer) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * 65536)
            written += 65536
            await writer.drain()

    script = Script(floods)
    async with serving(script) as client:
        response = await client.send(script.url, "GET", "/")
        before = -1
        while before != written:  # until it makes no more progress
            before = written
            await asyncio.sleep(0.05)
        assert written < size // 2
        assert len(await response.read()) == size
