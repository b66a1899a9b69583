"""What many streams cost beside the model: `python -m benchmarks.http_streams`.

A process plays the engine: each step it sends one token for every open request, `--rate` steps a
second, over the real sockets. In front of it run the real HTTP process of a server (validation,
tokenizing, detokenizing, SSE) and the real proxy. A client holds `--streams` streams open through
the proxy. Measured is the processor time of both processes while all of them stream, as cores.
"""

import argparse
import asyncio
import json
import os
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvicorn
import uvloop

from benchmarks.processor import cpu_s
from engine.client import EngineClient
from engine.http import ServerHooks, create_app
from engine.launch import SocketFolder
from engine.tokenizer import Tokenizer
from engine.transport import EngineTransport
from model.hub import DEFAULT_MODEL, resolve_model
from protocol import lifecycle
from protocol.messages import AbortRequest, AddRequest, EngineReady, KVUsage, TokenDelta

START_TIMEOUT_S = 180.0
WARM_UP_S = 1.0
MODEL = "m"
PROMPT = "Once upon a time there was a small house near a river. "


@dataclass(frozen=True)
class _Settings:
    model: str = MODEL
    served_model_name: str | None = MODEL
    max_body_bytes: int = 10_000_000
    max_num_seqs: int = 4096
    cors_origin: tuple[str, ...] = ()
    tool_call_parser: str = "auto"


def _play_engine(folder: str, rate: float, text_ids: Sequence[int]) -> None:
    """Answers every request with the ids of a text, over and over, until it is aborted."""
    transport = _connected(f"ipc://{folder}/http")
    transport.send_ready(
        EngineReady(num_blocks=1, block_size=64, max_model_len=10**6, vocab_size=10**6)
    )
    sent: dict[str, int] = {}
    due = time.perf_counter()
    while True:
        messages, told_to_end = transport.receive(max(0.0, due - time.perf_counter()))
        for message in messages:
            if isinstance(message, AddRequest):
                sent[message.request_id] = 0
            elif isinstance(message, AbortRequest):
                sent.pop(message.request_id, None)
        if told_to_end:
            return
        if time.perf_counter() >= due:
            due += 1 / rate
            if sent:
                transport.send([_next_delta(i, n, text_ids) for i, n in sent.items()])
                sent = {request_id: count + 1 for request_id, count in sent.items()}


def _connected(address: str) -> EngineTransport:
    """The link to the HTTP process, as soon as that listens."""
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return EngineTransport(address)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _next_delta(request_id: str, count: int, text_ids: Sequence[int]) -> TokenDelta:
    usage = KVUsage(recomputed=1) if count == 0 else None
    token_id = text_ids[count % len(text_ids)]
    return TokenDelta(request_id=request_id, token_ids=[token_id], usage=usage)


async def _play_http(folder: str, tokenizer: Tokenizer) -> None:
    """A server's HTTP process, as engine/serve.py runs it."""
    client = EngineClient(f"ipc://{folder}/http")
    await client.start()
    await client.wait_ready(START_TIMEOUT_S)
    app = create_app(client, tokenizer, _Settings(), ServerHooks(), "fp_benchmark")
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off")
    listener = config.bind_socket()
    lifecycle.report_ready({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
    await uvicorn.Server(config).serve(sockets=[listener])


def _start(name: str, *argv: str, wait: bool = True) -> tuple[lifecycle.Child, str]:
    events: queue.Queue[lifecycle.Event] = queue.Queue()
    child = lifecycle.spawn([sys.executable, "-m", *argv], name=name, on_event=events.put)
    if not wait:
        return child, ""
    event = events.get(timeout=START_TIMEOUT_S)
    if not isinstance(event, lifecycle.Ready):
        raise RuntimeError(f"{name} did not start: {child.reason()}")
    return child, str(event.info["url"])


def _request(options: argparse.Namespace) -> bytes:
    body = {"model": MODEL, "stream": True, "max_tokens": 100_000, "ignore_eos": True}
    if options.chat:
        body |= {"messages": [{"role": "user", "content": PROMPT}]}
    else:
        body |= {"prompt": PROMPT}
    if options.stop:
        body |= {"stop": ["\n\nUser:", "###", "</answer>"]}
    if options.logprobs:
        body |= {"logprobs": True, "top_logprobs": 0} if options.chat else {"logprobs": 0}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


class _Drain:
    """Reads streams and counts their events."""

    def __init__(self) -> None:
        self.num_events = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []

    async def open(self, url: str, request: bytes) -> None:
        """Sends a request; returns once its stream has begun."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self._writers.append(writer)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"refused: {(await reader.read(2000)).decode()}")
        self._readers.append(asyncio.create_task(self._read(reader)))

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._readers)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            self.num_events += data.count(b"data: ")


@dataclass(frozen=True)
class Measured:
    seconds: float
    events: int  # that reached the client
    cpu_s: dict[str, float]  # by process


async def _measure(url: str, pids: dict[str, int], options: argparse.Namespace) -> Measured:
    drain = _Drain()
    await _until_ready(url)
    for _ in range(options.streams):
        await drain.open(url, _request(options))
    await asyncio.sleep(WARM_UP_S)
    events, began = drain.num_events, time.perf_counter()
    cpu = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(options.seconds)
    used = {name: cpu_s(pid) - cpu[name] for name, pid in pids.items()}
    measured = Measured(time.perf_counter() - began, drain.num_events - events, used)
    await drain.close()
    return measured


async def _until_ready(url: str) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /ready HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n")
        head = await reader.read(-1)
        writer.close()
        if b" 200 " in head.split(b"\r\n")[0]:
            return
        await asyncio.sleep(0.05)


def _report(measured: Measured, options: argparse.Namespace) -> None:
    rate = measured.events / measured.seconds
    cores = {name: round(s / measured.seconds, 3) for name, s in measured.cpu_s.items()}
    total = round(sum(cores.values()), 3)
    for name, share in cores.items():
        each = measured.cpu_s[name] / max(measured.events, 1) * 1e6
        print(f"{name:6} {share:.3f} cores, {each:.0f} us per event")
    print(f"both   {total:.3f} cores for {options.streams} streams, {rate:.0f} events/s")
    result = {
        "benchmark": "http_streams",
        "streams": options.streams,
        "rate": options.rate,
        "chat": options.chat,
        "events_per_s": round(rate, 1),
        **{f"{name}_cores": share for name, share in cores.items()},
        "cores": total,
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    options = _options(argv)
    model_dir = options.model_dir or str(resolve_model(DEFAULT_MODEL))
    if options.play:
        lifecycle.watch_parent()
        tokenizer = Tokenizer.from_directory(model_dir)
        if options.play == "engine":
            _play_engine(options.folder, options.rate, tokenizer.encode(PROMPT))
        else:
            uvloop.run(_play_http(options.folder, tokenizer))
        return 0
    children: list[lifecycle.Child] = []
    folder = SocketFolder()
    this = ("benchmarks.http_streams", "--folder", str(folder.path), "--model-dir", model_dir)
    try:
        engine_argv = (*this, "--rate", str(options.rate), "--play", "engine")
        children.append(_start("engine", *engine_argv, wait=False)[0])
        http, http_url = _start("http", *this, "--play", "http")
        children.append(http)
        legs = ("--port", "0", "--log-level", "error", "--decode", http_url)
        proxy, url = _start("proxy", "proxy", *legs)
        children.append(proxy)
        pids = {"http": http.pid, "proxy": proxy.pid}
        measured = uvloop.run(_measure(url, pids, options))
    finally:
        lifecycle.terminate(reversed(children), 5)
        folder.remove()
    _report(measured, options)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.http_streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="open at once")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens/s of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument("--chat", action="store_true", help="chat instead of completions")
    parser.add_argument("--stop", action="store_true", help="with three stop strings")
    parser.add_argument("--logprobs", action="store_true", help="with the tokens' logprobs")
    parser.add_argument("--model-dir", help="whose tokenizer (default: SmolLM2's)")
    parser.add_argument("--play", choices=("engine", "http"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
