"""Many connections and streams at a proxy process, which must still serve new clients.

The clients are idle, slow, or do not read. The proxy's memory and file descriptors must
stay bounded.
"""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.rigs.streams import proxy_of_fakes, read_stream, until_ready

BODY = b'{"model":"m","stream":true,"prompt":"1000000 0"}'  # an endless stream
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@dataclass
class Proxy:
    pid: int
    port: int
    fake_port: int

    @property
    def memory_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    async def assert_serves(self) -> None:
        """Check that a new client receives a complete stream."""
        assert len(await read_stream(self.port, 20, 0.001)) == 20


@contextlib.asynccontextmanager
async def proxied(*options: str) -> AsyncIterator[Proxy]:
    with proxy_of_fakes(*options) as (process, port, fake_port):
        await until_ready(port)
        proxy = Proxy(process.pid, port, fake_port)
        await proxy.assert_serves()
        yield proxy


def raise_descriptor_limit(connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < connections + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, connections + 200), hard))


@contextlib.asynccontextmanager
async def connected(
    port: int, connections: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    raise_descriptor_limit(connections)
    streams = []
    try:
        for _ in range(connections):
            streams.append(await asyncio.open_connection("127.0.0.1", port, limit=1024))
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


@pytest.mark.parametrize(
    "connections", [200, pytest.param(2000, marks=pytest.mark.slow)]
)
async def test_idle_connections_take_little_memory(connections):
    async with proxied() as proxy:
        memory_before = proxy.memory_bytes
        async with connected(proxy.port, connections) as opened:
            # Send a request on each connection, because a connection that has had a
            # request takes more memory.
            for reader, writer in opened:
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readuntil(b'{"status":"ok"}')
            bytes_each = (proxy.memory_bytes - memory_before) / connections
            print(f"{connections} idle connections: {bytes_each / 1024:.1f} KiB each")
            await proxy.assert_serves()
            assert bytes_each < 64 << 10
            for _, writer in opened:
                assert not writer.is_closing()


async def drip(writer: asyncio.StreamWriter, data: bytes, interval_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in data:
            if writer.is_closing():
                return
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(interval_s)


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SLOW = {
    "a head by the byte": HEAD + b"x: " + b"y" * 10_000,
    "a body by the byte": HEAD + b"content-length: 10000\r\n\r\n" + b" " * 10_000,
    "chunks by the byte": CHUNKED + b"1\r\n \r\n" * 2000,
    "a chunk's size by the byte": CHUNKED + b"0" * 10_000,
    "a chunk's extension by the byte": CHUNKED + b"1;" + b"a" * 9999,
    "trailers by the byte": CHUNKED + b"0\r\n" + b"a: b\r\n" * 2000,
}


@pytest.mark.parametrize("num_each", [25, pytest.param(250, marks=pytest.mark.slow)])
async def test_slow_and_non_reading_clients_are_disconnected_and_others_served(
    num_each,
):
    async with proxied("--client-timeout-s", "1") as proxy:
        memory_before = proxy.memory_bytes
        async with connected(proxy.port, (len(SLOW) + 1) * num_each) as opened:
            kinds = list(SLOW.values())
            dripping = [
                asyncio.create_task(drip(writer, kinds[index % len(kinds)], 0.3))
                for index, (_, writer) in enumerate(opened[num_each:])
            ]
            for _, writer in opened[:num_each]:
                writer.transport.pause_reading()  # this client does not read
                writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))
            await proxy.assert_serves()
            slow = [reader.read() for reader, _ in opened[num_each:]]
            answers = await asyncio.gather(*slow, return_exceptions=True)
            statuses = {answer[9:12] for answer in answers if isinstance(answer, bytes)}
            assert statuses <= {b"", b"408"}, statuses
            await proxy.assert_serves()
            assert proxy.memory_bytes - memory_before < (32 << 20) + num_each * (
                1 << 20
            )
            await asyncio.gather(*dripping)


@pytest.mark.parametrize(
    ("num_idle", "num_busy", "interval_s"),
    [(60, 20, 0.02), pytest.param(1000, 200, 0.1, marks=pytest.mark.slow)],
)
async def test_idle_and_busy_streams_all_complete_in_bounded_memory(
    num_idle, num_busy, interval_s
):
    raise_descriptor_limit(num_idle + num_busy)
    async with proxied() as proxy:
        memory_before = proxy.memory_bytes
        start_limit = asyncio.Semaphore(20)
        idle_streams = [
            read_stream(proxy.port, 3, -1, start_limit) for _ in range(num_idle)
        ]
        waiting = asyncio.gather(*idle_streams)
        busy_streams = [
            read_stream(proxy.port, 50, interval_s, start_limit)
            for _ in range(num_busy)
        ]
        assert {len(delays) for delays in await asyncio.gather(*busy_streams)} == {50}
        assert not waiting.done()
        num_bytes = proxy.memory_bytes - memory_before
        kib_each = num_bytes / (num_idle + num_busy) / 1024
        print(f"{num_idle} idle, {num_busy} busy streams: {kib_each:.1f} KiB each")
        assert num_bytes < (32 << 20) + (128 << 10) * (num_idle + num_busy)
        async with connected(proxy.fake_port, 1) as ((_, writer),):
            writer.write(b"GET /go HTTP/1.1\r\n\r\n")
            assert {len(delays) for delays in await waiting} == {3}
