"""What the proxy adds to streams: `python -m tests.rigs.streams`.

Fake servers in a process of their own stream events that say when they were sent.
Clients read them from a server itself, then through a proxy: of every event how late it
comes, and of every stream the time to its first event, the prefill leg in it. The last
line is one JSON document: milliseconds at percentiles, and the processor time of the
proxy for an event.
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

LEVELS = (50, 90, 99)  # percentiles
_DONE = b"data: [DONE]\n\n"
_go = asyncio.Event()
_KV = {"kv_transfer_params": {"remote_engine_id": "fake", "remote_block_ids": [1]}}


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves a connection: as a prefill server what is one's, and else a stream, of
    whose events the prompt says how many they are and how many seconds apart; below 0,
    the first is followed by the others once anybody has asked for /go.
    """
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = (line.partition(b": ") for line in head.lower().split(b"\r\n"))
            length = next(
                (int(value) for name, _, value in lines if name == b"content-length"), 0
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            if b" /go " in head:
                _go.set()
            if body.get("stream"):
                await _stream(writer, *map(float, body["prompt"].split()))
                continue
            told = json.dumps(_KV if body else {}).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(told), told)
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
        await (asyncio.sleep(interval_s) if interval_s >= 0 else _go.wait())
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_DONE), _DONE))


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def _started(*command: str) -> Iterator[subprocess.Popen[str]]:
    told = [sys.executable, "-m", *command]
    with subprocess.Popen(told, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def proxy_of_fakes(*options: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A proxy's process in front of fake servers, its port and that of the servers."""
    with _started("tests.rigs.streams", "--serve") as fake, socket.socket() as free:
        assert fake.stdout is not None
        fake_port = int(fake.stdout.readline())
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        url = f"http://127.0.0.1:{fake_port}"
        told = [
            "--port",
            str(port),
            "--log-level",
            "error",
            "--disaggregate",
            "always",
            *options,
        ]
        with _started("proxy", "--prefill", url, "--decode", url, *told) as proxy:
            yield proxy, port, fake_port


async def until_ready(port: int) -> None:
    """Returns when the proxy has found both servers."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
            told = await reader.read()
            writer.close()
            if b'"missing":[]' in told:
                return
        await asyncio.sleep(0.05)


async def read_stream(
    port: int, num_events: int, interval_s: float, turn: asyncio.Semaphore | None = None
) -> list[float]:
    """How late each event was, in seconds: the first one since the request, the others
    since they were sent. Raises AssertionError for what is no stream, or one without
    its end.
    """
    body = {"model": "m", "stream": True, "prompt": f"{num_events} {interval_s}"}
    data = json.dumps(body).encode()
    if turn is not None:  # to begin
        await turn.acquire()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        % len(data)
    )
    begun_s, late = time.monotonic(), list[float]()
    writer.write(head + data)
    try:
        while (event := await reader.readuntil(b"\n\n"))[-len(_DONE) :] != _DONE:
            sent_s = float(event[event.rindex(b":") + 1 : -3]) if late else begun_s
            late.append(time.monotonic() - sent_s)
            if turn is not None and len(late) == 1:
                turn.release()
    except asyncio.IncompleteReadError as error:
        raise AssertionError(
            f"{len(late)} events, then {error.partial[:500]!r}"
        ) from None
    finally:
        writer.close()
    return late


async def _load(port: int, args: argparse.Namespace) -> list[list[float]]:
    """Streams, one after the other on each of `args.streams` clients, which begin by
    turns.
    """

    async def client(at: int) -> list[list[float]]:
        await asyncio.sleep(at / args.streams * args.events * args.interval_s)
        return [
            await read_stream(port, args.events, args.interval_s)
            for _ in range(args.rounds)
        ]

    found = await asyncio.gather(*(client(at) for at in range(args.streams)))
    return [late for streams in found for late in streams]


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, LEVELS) * 1e3
    return {
        f"p{level}": round(float(ms), 3)
        for level, ms in zip(LEVELS, found, strict=True)
    }


async def _measure(args: argparse.Namespace) -> dict[str, object]:
    with proxy_of_fakes() as (proxy, port, fake_port):
        await until_ready(port)
        found = {"direct": await _load(fake_port, args)}
        begun_s = _cpu_s(proxy.pid)
        found["proxy"] = await _load(port, args)
        spent_s = _cpu_s(proxy.pid) - begun_s
    told: dict[str, object] = {"streams": args.streams, "interval_s": args.interval_s}
    for name, late in found.items():
        told[f"{name}_first_event_ms"] = _percentiles([times[0] for times in late])
        told[f"{name}_event_ms"] = _percentiles(
            [late_s for times in late for late_s in times[1:]]
        )
    num_events = args.rounds * args.streams * args.events
    return told | {"proxy_cpu_us_per_event": round(spent_s / num_events * 1e6, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.rigs.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--events", type=int, default=100, help="of a stream")
    parser.add_argument(
        "--interval-s", type=float, default=0.02, help="between two of them"
    )
    parser.add_argument("--rounds", type=int, default=5, help="streams of a client")
    parser.add_argument("--serve", action="store_true", help="be the fake servers")
    args = parser.parse_args(argv)
    if args.serve:
        uvloop.run(_serve())
    else:
        print(json.dumps(uvloop.run(_measure(args))))


if __name__ == "__main__":
    main()
