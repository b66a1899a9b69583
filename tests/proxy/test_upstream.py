"""The HTTP client against servers that send scripted bytes."""

import asyncio
import contextlib
import errno
import os
import re
import resource
import socket
import ssl
import struct
import time
from functools import partial

import pytest

from protocol.errors import InvalidRequest
from proxy import upstream
from proxy.upstream import HttpUpstream, Lost, OutOfSockets, TimedOut, Unreachable
from tests.engine.test_tls import make_certificate
from tests.proxy.scripted import OK, Reader, Script, Writer, serving, until_closed

CHUNKED = (
    b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"1\r\no\r\n1;a=b\r\nk\r\n0\r\nx-trailer: 1\r\n\r\n"
)


async def post(client: HttpUpstream, script: Script) -> bytes:
    return await (await client.send(script.url, "POST", "/x", body=b"{}")).read()


@pytest.mark.parametrize(
    ("answer", "body", "num_connections"),
    [
        (OK, b"ok", 1),
        (CHUNKED, b"ok", 1),
        (b"HTTP/1.1 204 No Content\r\nx-empty:\r\n\r\n", b"", 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", 1),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"ok", 1),
        (OK.replace(b"X-A: 1", b"connection: close"), b"ok", 2),
        # A surplus response must not answer a later request.
        (OK + OK.replace(b"\r\n\r\nok", b"\r\n\r\nno"), b"ok", 2),
        (CHUNKED + OK.replace(b"\r\n\r\nok", b"\r\n\r\nno"), b"ok", 2),
    ],
)
async def test_body_is_read_and_its_connection_reused_if_allowed(
    answer, body, num_connections
):
    script = Script(answer, answer)
    async with serving(script) as client:
        for _ in range(2):
            assert await post(client, script) == body
        assert script.num_connections == num_connections
        assert script.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
        assert script.requests[0].lower().endswith(b"content-length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    "rest", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"x"]
)
async def test_partial_head_after_a_response_is_not_used(rest):
    script = Script(OK + rest, OK)
    async with serving(script) as client:
        for _ in range(2):
            with contextlib.suppress(Lost):
                assert await post(client, script) == b"ok"


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("answer", [OK, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + OK])
async def test_server_may_die_at_any_byte_of_its_response(answer, resets):
    """The request must not be sent again, nor the connection be reused."""

    async def dies(position: int, _: Reader, writer: Writer) -> None:
        writer.write(answer[:position])
        await writer.drain()
        if resets:
            link = writer.get_extra_info("socket")
            link.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()

    for position in range(len(answer)):
        script = Script(OK, partial(dies, position), OK)
        async with serving(script) as client:
            assert await post(client, script) == b"ok"
            with pytest.raises(Lost) as raised:
                await post(client, script)
            # The error must not quote received headers or invent a status.
            assert "headers" not in str(raised.value)
            assert "400" not in str(raised.value)
            assert len(script.requests) == 2
            assert await post(client, script) == b"ok"


@pytest.mark.parametrize(
    "sent", [b"garbage\r\n\r\n", b"\x00" * 100, b"HTTP/1.1 200 OK\r\nx: "]
)
async def test_error_does_not_quote_an_invalid_head(sent):
    """The head may be part of another client's response."""

    async def answer(_: Reader, writer: Writer) -> None:
        writer.write(sent if sent[:1] != b"H" else sent + b"a" * 10_000)

    script = Script(answer)
    async with serving(script) as client:
        expected = "8190 bytes" if sent[:1] == b"H" else None
        with pytest.raises(Lost, match=expected) as raised:
            await post(client, script)
        assert not re.search("garbage|x00|aaa", str(raised.value))


@pytest.mark.parametrize("status", [101, 304, 307, 600])
async def test_status_that_no_server_sends_is_an_error(status):
    """For example, a redirect by a gateway would make clients send their keys to
    another host.
    """
    script = Script(b"HTTP/1.1 %d X\r\nlocation: http://inside\r\n\r\n" % status, OK)
    async with serving(script) as client:
        with pytest.raises(Lost, match=f"it answers with status {status}"):
            await post(client, script)
        await until_closed(script, 1)
        assert await post(client, script) == b"ok"


@pytest.mark.parametrize("surplus_id", [b"1", b"2"])
async def test_surplus_response_does_not_answer_the_next_request(surplus_id):
    first_is_read = asyncio.Event()
    answer = b"x-request-id: %s".join(OK.split(b"X-A: 1"))

    async def sends_twice(reader: Reader, writer: Writer) -> None:
        writer.write(answer % b"1")
        await first_is_read.wait()
        writer.write(answer % surplus_id)
        await reader.read()

    script = Script(sends_twice, OK)
    async with serving(script) as client:
        first = await client.send(
            script.url, "POST", "/", headers=[(b"x-request-id", b"1")]
        )
        assert await first.read() == b"ok"
        first_is_read.set()
        await asyncio.sleep(0.05)
        with pytest.raises(Lost):
            await client.send(
                script.url, "POST", "/", headers=[(b"x-request-id", b"3")]
            )


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 60_000, b"x" * 100_000])
async def test_connection_whose_end_was_not_noticed_is_not_reused(body):
    """The proxy was suspended between a response and the next request.

    A request with a body in pieces is not sent again, because some pieces may have been
    delivered. The error message for the client must contain no address.
    """
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
        method = "POST" if body else "GET"
        sending = client.send(script.url, method, "/", body=body)
        if len(body) == 100_000:
            with pytest.raises(Lost) as raised:
                await sending
            assert "127.0.0.1" not in raised.value.client_message
        else:
            assert await (await sending).read() == b"ok"
            assert script.num_connections == 2


@pytest.mark.parametrize("idle_s", [1.0, 0.1])
async def test_each_concurrent_request_has_a_connection_until_it_is_idle(
    idle_s, monkeypatch
):
    monkeypatch.setattr(upstream, "IDLE_S", idle_s)
    script = Script(*[OK] * 40)
    async with serving(script) as client:
        responses = await asyncio.gather(
            *(client.send(script.url, "GET", "/") for _ in range(20))
        )
        assert script.num_connections == 20
        for response in responses:
            await response.read()
        if idle_s < 1.0:
            await until_closed(script, 20)
        for _ in range(20):
            await post(client, script)
        assert script.num_connections == (20 if idle_s == 1.0 else 21)


async def test_closed_port_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    client = HttpUpstream(connect_timeout_s=5.0, read_timeout_s=5.0)
    # The second URL has "localhost", which often has several addresses.
    for server in (url, url.replace("127.0.0.1", "localhost")):
        with pytest.raises(Unreachable, match=f"Errno {errno.ECONNREFUSED}"):
            await client.send(server, "GET", "/")
    with pytest.raises(Unreachable):
        await client.send("http://name.invalid", "GET", "/")
    await client.close()


async def test_lack_of_descriptors_is_not_a_failure_of_the_server():
    script = Script(OK)
    async with serving(script) as client:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(OutOfSockets):
                await client.send(script.url, "GET", "/")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await post(client, script) == b"ok"


async def test_delay_of_the_event_loop_makes_no_server_unreachable():
    """For example, a thousand requests that arrive at once delay the event loop."""
    script = Script(OK)
    async with serving(script, connect_timeout_s=0.1) as client:
        request = asyncio.create_task(post(client, script))
        for _ in range(3):
            await asyncio.sleep(0)
            time.sleep(0.2)
        assert await request == b"ok"


async def test_server_that_accepts_no_connections_is_unreachable():
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


async def test_server_that_does_not_read_the_request_times_out():
    script = Script()
    async with serving(script, read_timeout_s=0.3) as client:
        # The body is larger than the socket buffers.
        with pytest.raises(TimedOut):
            await client.send(script.url, "POST", "/", body=bytes(64 << 20))


async def test_malformed_chunk_ends_the_body_at_once():
    read = asyncio.Event()

    async def answer(reader: Reader, writer: Writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
        )
        await read.wait()
        writer.write(b"ZZ\r\n")
        await reader.read()  # returns when the client disconnects

    script = Script(answer)
    async with serving(script, read_timeout_s=60) as client:
        response = await client.send(script.url, "GET", "/")
        assert await response.next_chunk() == b"hello"
        read.set()
        with pytest.raises(Lost):
            await response.next_chunk()
        response.close()


async def test_data_before_the_break_of_a_body_is_read():
    async def answer(_: Reader, writer: Writer) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"3\r\nall\r\n4\r\n of \r\n2\r\nit\r\n")

    script = Script(answer)
    async with serving(script) as client:
        response = await client.send(script.url, "GET", "/")
        # Like a slow client, the test reads only after the connection has ended.
        while response._response.content.exception() is None:
            await asyncio.sleep(0)
        assert await response.next_chunk() == b"all of it"
        with pytest.raises(Lost):
            await response.next_chunk()
        response.close()


@pytest.mark.parametrize("path", ["/v1/models/a%2Fb%20c?x=%41&y", "/a//b/../c;d='e'"])
async def test_request_has_the_given_path_and_headers_unchanged_and_no_others(path):
    script = Script(OK.replace(b"X-A: 1", b"set-cookie: a=b"), OK)
    async with serving(script) as client:
        with pytest.raises(InvalidRequest):
            await client.send(
                script.url, "GET", "/", headers=[(b"x-request-id", b"a\nb: c")]
            )
        assert script.requests == []
        for _ in range(2):
            headers = [(b"x-a", "é".encode())]
            response = await client.send(
                script.url, "POST", path, headers=headers, body=b"{}"
            )
            await response.read()
        first, *lines = script.requests[1].split(b"\r\n")
        assert first == b"POST %s HTTP/1.1" % path.encode()
        host = b"host: " + script.url.removeprefix("http://").encode()
        head = {host, b"x-a: \xc3\xa9", b"content-length: 2"}
        assert {line.lower() for line in lines} == head | {b"", b"{}"}


async def test_server_that_sends_more_than_is_read_is_slowed_down():
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
        while before != written:  # until the server sends no more
            before = written
            await asyncio.sleep(0.05)
        assert written < size // 2
        assert len(await response.read()) == size


# -- servers behind TLS, with IPv4 and IPv6 addresses


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "server")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("trusted", [True, False])
async def test_requests_go_to_tls_servers_only_if_they_are_trusted(
    certificate, monkeypatch, host, trusted
):
    async def breaks(_: Reader, writer: Writer) -> None:
        writer.write(OK[:-1])
        await writer.drain()

    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    script = Script(OK, OK, breaks)
    try:
        server = await asyncio.start_server(script, host, 0, ssl=context)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    port = server.sockets[0].getsockname()[1]
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    client = HttpUpstream(connect_timeout_s=5.0, read_timeout_s=5.0)
    try:
        if not trusted:
            with pytest.raises(Unreachable, match="self-signed"):
                await client.send(url, "GET", "/")
            return
        for _ in range(2):
            response = await client.send(url, "POST", "/", body=b"{}")
            assert await response.read() == b"ok"
        assert script.num_connections == 1
        response = await client.send(url, "GET", "/")
        with pytest.raises(Lost):
            await response.read()
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
