"""Measures the delay that the proxy adds to streams: `python -m tests.rigs.streams`.

A separate process runs fake servers. They stream events that contain the time at which
they were sent. Clients read the streams from a server directly, and then through a
proxy. They measure the delay of every event, and the time to the first event of every
stream, which includes the prefill leg. The last line of the output is one JSON
document: percentiles in milliseconds, and the proxy's CPU time per event.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import uvloop

PERCENTILES = (50, 90, 99)
_DONE = b"data: [DONE]\n\n"
_go_requested = asyncio.Event()
_KV = {"kv_transfer_params": {"remote_engine_id": "fake", "remote_block_ids": [1]}}


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a connection as a prefill and as a decode server.

    The prompt of a streaming request contains the number of events to send and the
    seconds between two events. If the seconds are negative, the second event is sent
    only when a client has requested /go. Requests without streaming get the answer of a
    prefill leg.
    """
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = (line.partition(b": ") for line in head.lower().split(b"\r\n"))
            length = next(
                (int(value) for name, _, value in lines if name == b"content-length"), 0
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            if b" /go " in head:
                _go_requested.set()
            if body.get("stream"):
                await _stream(writer, *map(float, body["prompt"].split()))
                continue
            answer = json.dumps(_KV if body else {}).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )
    writer.close()


async def _stream(
    writer: asyncio.StreamWriter, num_events: float, interval_s: float
) -> None:
    kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
    writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % kind)
    for _ in range(int(num_events)):
        event = b'data: {"sent_s": %.6f}\n\n' % time.monotonic()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        if interval_s >= 0:
            await asyncio.sleep(interval_s)
        else:
            await _go_requested.wait()
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_DONE), _DONE))


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def _started(*command: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def proxy_of_fakes(*options: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Start fake servers and a proxy. Yield the proxy's process, its port and the
    servers' port.
    """
    with _started("tests.rigs.streams", "--serve") as fake, socket.socket() as free:
        assert fake.stdout is not None
        fake_port = int(fake.stdout.readline())
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        url = f"http://127.0.0.1:{fake_port}"
        argv = ["--port", str(port), "--log-level", "error"]
        argv += ["--disaggregate", "always", *options]
        with _started("proxy", "--prefill", url, "--decode", url, *argv) as proxy:
            yield proxy, port, fake_port


async def until_ready(port: int) -> None:
    """Wait until the proxy reports that both servers are ready."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
            report = await reader.read()
            writer.close()
            if b'"missing":[]' in report:
                return
        await asyncio.sleep(0.05)


async def read_stream(
    port: int,
    num_events: int,
    interval_s: float,
    start_limit: asyncio.Semaphore | None = None,
) -> list[float]:
    """Return the delay of each event of a stream in seconds.

    The delay of the first event counts from the request, the delay of each later event
    from the time at which that event was sent.

    Args:
        start_limit: if given, limits the number of streams that wait for their first
            event.

    Raises:
        AssertionError: the answer is not a stream, or the stream ended without [DONE].
    """
    body = {"model": "m", "stream": True, "prompt": f"{num_events} {interval_s}"}
    data = json.dumps(body).encode()
    if start_limit is not None:
        await start_limit.acquire()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        % len(data)
    )
    started_s = time.monotonic()
    delays_s: list[float] = []
    writer.write(head + data)
    try:
        while not (event := await reader.readuntil(b"\n\n")).endswith(_DONE):
            sent_s = started_s
            if delays_s:
                sent_s = float(event[event.rindex(b":") + 1 : -3])
            delays_s.append(time.monotonic() - sent_s)
            if start_limit is not None and len(delays_s) == 1:
                start_limit.release()
    except asyncio.IncompleteReadError as error:
        raise AssertionError(
            f"{len(delays_s)} events, then {error.partial[:500]!r}"
        ) from None
    finally:
        writer.close()
    return delays_s


async def _load(port: int, args: argparse.Namespace) -> list[list[float]]:
    """Return the delays of all streams.

    Each of `args.streams` clients reads `args.rounds` streams one after the other. The
    clients start at different times.
    """

    async def client(index: int) -> list[list[float]]:
        await asyncio.sleep(index / args.streams * args.events * args.interval_s)
        return [
            await read_stream(port, args.events, args.interval_s)
            for _ in range(args.rounds)
        ]

    clients = await asyncio.gather(*(client(index) for index in range(args.streams)))
    return [delays_s for streams in clients for delays_s in streams]


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _percentiles_ms(values: Sequence[float]) -> dict[str, float]:
    values_ms = np.percentile(values, PERCENTILES) * 1e3
    return {
        f"p{level}": round(float(ms), 3)
        for level, ms in zip(PERCENTILES, values_ms, strict=True)
    }


async def _measure(args: argparse.Namespace) -> dict[str, object]:
    with proxy_of_fakes() as (proxy, port, fake_port):
        await until_ready(port)
        delays_s = {"direct": await _load(fake_port, args)}
        cpu_before_s = _cpu_s(proxy.pid)
        delays_s["proxy"] = await _load(port, args)
        cpu_s = _cpu_s(proxy.pid) - cpu_before_s
    figures: dict[str, object] = {
        "streams": args.streams,
        "interval_s": args.interval_s,
    }
    for name, streams in delays_s.items():
        first = [stream[0] for stream in streams]
        later = [delay_s for stream in streams for delay_s in stream[1:]]
        figures[f"{name}_first_event_ms"] = _percentiles_ms(first)
        figures[f"{name}_event_ms"] = _percentiles_ms(later)
    num_events = args.rounds * args.streams * args.events
    figures["proxy_cpu_us_per_event"] = round(cpu_s / num_events * 1e6, 1)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.rigs.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--events", type=int, default=100, help="events of a stream")
    parser.add_argument(
        "--interval-s", type=float, default=0.02, help="seconds between two events"
    )
    parser.add_argument("--rounds", type=int, default=5, help="streams of each client")
    parser.add_argument("--serve", action="store_true", help="run the fake servers")
    args = parser.parse_args(argv)
    if args.serve:
        uvloop.run(_serve())
    else:
        print(json.dumps(uvloop.run(_measure(args))))


if __name__ == "__main__":
    main()
