"""What the proxy adds to a request: `python -m benchmarks.proxy_overhead`.

Two processes answer at once, as a prefill and as a decode server would. A client sends the same
requests (a) to one and then to the other by itself, (b) to the proxy in front of them. The
proxy's share is the difference of the medians, which the client, written for the purpose, hardly
adds to. All of it runs on this machine's cores, so with
more than one request at a time the figure includes waiting for the processor.
"""

import argparse
import asyncio
import json
import os
import queue
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.percentiles import LEVELS, percentile
from benchmarks.processor import cpu_s
from protocol.process import lifecycle

PATH = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": [1] * 512, "max_tokens": 16, "seed": 1}).encode()
PARAMS = {"do_remote_prefill": True, "remote_block_ids": list(range(8)), "signature": "0" * 64}
ANSWER = json.dumps({"choices": [{"text": "x" * 64}], "kv_transfer_params": PARAMS}).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(ANSWER),
    ANSWER,
)
REQUEST = (
    b"POST %s HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (PATH.encode(), len(BODY), BODY)
)
READY = b"GET /ready HTTP/1.1\r\nhost: bench\r\n\r\n"
START_TIMEOUT_S = 180.0


async def _respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request on a connection with RESPONSE."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            _, _, rest = head.lower().partition(b"content-length:")
            await reader.readexactly(int(rest.split(b"\r\n")[0]) if rest else 0)
            writer.write(RESPONSE)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _play_server() -> None:
    server = await asyncio.start_server(_respond, "127.0.0.1", 0, backlog=4096)
    lifecycle.report_ready({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    await server.serve_forever()


def _start(name: str, *argv: str) -> tuple[lifecycle.Child, str]:
    """Starts a process of this benchmark and returns its URL."""
    events: queue.Queue[lifecycle.Event] = queue.Queue()
    child = lifecycle.spawn([sys.executable, "-m", *argv], name=name, on_event=events.put)
    event = events.get(timeout=START_TIMEOUT_S)
    if not isinstance(event, lifecycle.Ready):
        raise RuntimeError(f"{name} did not start: {child.reason()}")
    return child, str(event.info["url"])


class _Client:
    """Just enough HTTP for answers with a content-length; one connection per request in flight."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}

    async def send(self, url: str, request: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer to `request`."""
        idle = self._idle.setdefault(url, [])
        if idle:
            reader, writer = idle.pop()
        else:
            host, _, port = url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        body = await reader.readexactly(int(length))
        idle.append((reader, writer))
        return int(head.split()[1]), body

    def close(self) -> None:
        for idle in self._idle.values():
            for _, writer in idle:
                writer.close()


async def _timed(work: Callable[[], Awaitable[None]], concurrency: int, count: int) -> list[float]:
    """Durations in seconds of `count` calls of `work`, `concurrency` at a time."""
    durations: list[float] = []

    async def worker() -> None:
        while len(durations) < count:
            started = time.perf_counter()
            await work()
            durations.append(time.perf_counter() - started)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return durations


@dataclass(frozen=True)
class Measured:
    """Durations in seconds, of requests through both legs."""

    direct_s: list[float]
    proxied_s: list[float]
    elapsed_s: float  # of the proxied ones
    proxy_cpu_s: float  # likewise, of the proxy's process


async def _measure(urls: Sequence[str], proxy_pid: int, concurrency: int, count: int) -> Measured:
    """`urls`: of the prefill server, the decode server and the proxy."""
    prefill, decode, proxy = urls
    client = _Client()

    async def ask(url: str) -> None:
        status, body = await client.send(url, REQUEST)
        if status != 200:
            raise RuntimeError(f"{url} answered {status}: {body.decode()[:200]}")

    async def both() -> None:
        await ask(prefill)
        await ask(decode)

    while (await client.send(proxy, READY))[0] != 200:
        await asyncio.sleep(0.05)
    await _timed(lambda: ask(proxy), concurrency, count // 4)
    direct_s = await _timed(both, concurrency, count)
    began, cpu_began = time.perf_counter(), cpu_s(proxy_pid)
    proxied_s = await _timed(lambda: ask(proxy), concurrency, count)
    elapsed_s, used_s = time.perf_counter() - began, cpu_s(proxy_pid) - cpu_began
    client.close()
    return Measured(direct_s, proxied_s, elapsed_s, used_s)


def _report(measured: Measured, concurrency: int) -> None:
    figures = {
        f"{name}_p{level}_ms": round(percentile(values, level) * 1e3, 3)
        for name, values in (("direct", measured.direct_s), ("proxied", measured.proxied_s))
        for level in LEVELS
    }
    added = round(figures["proxied_p50_ms"] - figures["direct_p50_ms"], 3)
    cpu = round(measured.proxy_cpu_s / len(measured.proxied_s) * 1e3, 3)
    rate = round(len(measured.proxied_s) / measured.elapsed_s, 1)
    print(f"both legs by the client  p50 {figures['direct_p50_ms']:.2f} ms")
    print(f"through the proxy        p50 {figures['proxied_p50_ms']:.2f} ms, {rate} requests/s")
    print(f"added by the proxy       p50 {added:.2f} ms at concurrency {concurrency}")
    print(f"processor time           {cpu:.2f} ms per request")
    result = {
        "benchmark": "proxy_overhead",
        "concurrency": concurrency,
        "requests": len(measured.proxied_s),
        **figures,
        "added_p50_ms": added,
        "proxy_cpu_ms_per_request": cpu,
        "requests_per_s": rate,
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.proxy_overhead", description=__doc__)
    parser.add_argument("--concurrency", type=int, default=1, help="requests in flight")
    parser.add_argument("--num-requests", type=int, default=1000, help="measured requests")
    parser.add_argument("--play-server", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.play_server:
        lifecycle.watch_parent()
        uvloop.run(_play_server())
        return 0
    this = ("benchmarks.proxy_overhead", "--play-server")
    prefill, prefill_url = _start("prefill", *this)
    decode, decode_url = _start("decode", *this)
    legs = ("--prefill", prefill_url, "--decode", decode_url)
    proxy, proxy_url = _start("proxy", "proxy", "--port", "0", "--log-level", "warning", *legs)
    try:
        measured = uvloop.run(
            _measure(
                (prefill_url, decode_url, proxy_url),
                proxy.pid,
                options.concurrency,
                options.num_requests,
            )
        )
    finally:
        lifecycle.terminate([proxy], 5)
        lifecycle.terminate([prefill, decode], 5)
    _report(measured, options.concurrency)
    return 0


if __name__ == "__main__":
    sys.exit(main())
