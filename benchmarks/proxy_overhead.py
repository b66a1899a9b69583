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
from collections.abc import Sequence

import uvloop

from benchmarks.percentiles import LEVELS, percentile
from benchmarks.processor import cpu_s
from protocol.process import lifecycle

BODY = json.dumps({"model": "m", "prompt": [1] * 512, "max_tokens": 16, "seed": 1}).encode()
PARAMS = {"do_remote_prefill": True, "remote_block_ids": list(range(8)), "signature": "0" * 64}
ANSWER = json.dumps({"choices": [{"text": "x" * 64}], "kv_transfer_params": PARAMS}).encode()
JSON_OF = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
RESPONSE = b"HTTP/1.1 200 OK\r\n" + JSON_OF % (len(ANSWER), ANSWER)
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\n" + JSON_OF % (len(BODY), BODY)
READY = b"GET /ready HTTP/1.1\r\nhost: bench\r\n\r\n"
START_TIMEOUT_S = 180.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of what comes next: just enough HTTP."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    return head, await reader.readexactly(int(length or 0))


async def _respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request on a connection with RESPONSE."""
    try:
        while True:
            await _message(reader)
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


async def _send(idle: dict[str, list[Streams]], url: str, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer; one connection per request in flight."""
    connections = idle.setdefault(url, [])
    if connections:
        reader, writer = connections.pop()
    else:
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    head, body = await _message(reader)
    connections.append((reader, writer))
    return int(head.split()[1]), body


async def _timed(
    idle: dict[str, list[Streams]], urls: Sequence[str], concurrency: int, count: int
) -> list[float]:
    """Seconds of `count` requests to each of `urls` in turn, `concurrency` at a time."""
    durations: list[float] = []

    async def worker() -> None:
        while len(durations) < count:
            started = time.perf_counter()
            for url in urls:
                status, body = await _send(idle, url, REQUEST)
                if status != 200:
                    raise RuntimeError(f"{url} answered {status}: {body.decode()[:200]}")
            durations.append(time.perf_counter() - started)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return durations


async def _measure(
    servers: Sequence[str], proxy: str, pid: int, concurrency: int, count: int
) -> None:
    """Prints the figures; `pid` is the proxy's."""
    idle: dict[str, list[Streams]] = {}
    while (await _send(idle, proxy, READY))[0] != 200:
        await asyncio.sleep(0.05)
    await _timed(idle, [proxy], concurrency, count // 4)
    direct_s = await _timed(idle, servers, concurrency, count)
    began, cpu_began = time.perf_counter(), cpu_s(pid)
    proxied_s = await _timed(idle, [proxy], concurrency, count)
    elapsed_s, used_s = time.perf_counter() - began, cpu_s(pid) - cpu_began
    for _, writer in (each for connections in idle.values() for each in connections):
        writer.close()
    figures = {
        f"{name}_p{level}_ms": round(percentile(values, level) * 1e3, 3)
        for name, values in (("direct", direct_s), ("proxied", proxied_s))
        for level in LEVELS
    }
    result = {
        "benchmark": "proxy_overhead",
        "concurrency": concurrency,
        "requests": len(proxied_s),
        **figures,
        "added_p50_ms": round(figures["proxied_p50_ms"] - figures["direct_p50_ms"], 3),
        "proxy_cpu_ms_per_request": round(used_s / len(proxied_s) * 1e3, 3),
        "requests_per_s": round(len(proxied_s) / elapsed_s, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(f"both legs by the client  p50 {result['direct_p50_ms']:.2f} ms")
    print(f"through the proxy        p50 {result['proxied_p50_ms']:.2f} ms, "
          f"{result['requests_per_s']} requests/s")  # fmt: skip
    print(f"added by the proxy       p50 {result['added_p50_ms']:.2f} ms at concurrency "
          f"{concurrency}")  # fmt: skip
    print(f"processor time           {result['proxy_cpu_ms_per_request']:.2f} ms per request")
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
    servers = [_start(name, *this) for name in ("prefill", "decode")]
    urls = [url for _, url in servers]
    legs = ("--prefill", urls[0], "--decode", urls[1])
    proxy, proxy_url = _start("proxy", "proxy", "--port", "0", "--log-level", "warning", *legs)
    try:
        sizes = (options.concurrency, options.num_requests)
        uvloop.run(_measure(urls, proxy_url, proxy.pid, *sizes))
    finally:
        lifecycle.terminate([proxy], 5)
        lifecycle.terminate([child for child, _ in servers], 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
