"""HTTP servers that imitate prefill and decode servers, and a proxy in front of them.

Everything runs in the event loop of the test, over loopback. A test is a coroutine and
uses `async with Rig(...)`. A fake's `behave` coroutine, called a behaviour, answers its
generation requests.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from protocol.http.server import drop_unresponsive_clients
from protocol.metrics import TABLE
from protocol.server_stats import STATS_PATH
from protocol.settings.settings import ProxySettings
from proxy.__main__ import ProxyServer
from proxy.app import ProxyApp
from tests.rigs.metric import metric
from tests.rigs.uvicorn_polls import shorten_uvicorn_polls

shorten_uvicorn_polls()
LIMIT_S = 120.0
KV_PARAMS = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "engine-1",
    "remote_block_ids": [4, 5, 6],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "lease_s": 30.0,
    "signature": "00ff",
}
LENT = {"sender_releases": True, **KV_PARAMS}  # KV params, as decode servers get them


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. There is no timeout except that of the test."""
    while not condition():
        await asyncio.sleep(0.002)


@dataclass
class Call:
    """A request that a fake received, and the means to answer it."""

    path: str
    headers: dict[str, str]
    raw: bytes
    query: str
    receive: Any = field(repr=False)
    send: Any = field(repr=False)

    @property
    def body(self) -> dict[str, Any]:
        value = json.loads(self.raw)
        assert isinstance(value, dict)
        return value

    async def answer(
        self, status: int, value: object, headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(value).encode()
        body_headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        await self.start(status, body_headers | (headers or {}))
        await self.write(body, more=False)

    async def start(
        self, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        if headers is None:
            headers = {"content-type": "text/event-stream; charset=utf-8"}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send(
            {"type": "http.response.start", "status": status, "headers": pairs}
        )

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def disconnected(self) -> None:
        """Wait until the client of the fake (the proxy) has closed the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class Drop(Exception):
    """Raised by a behaviour to close the connection without another byte."""


Behave = Callable[[Call], Awaitable[None]]


def answers(
    status: int, value: object, headers: dict[str, str] | None = None
) -> Behave:
    """Return a behaviour that answers each request with this status, JSON value and
    headers.
    """

    async def behave(call: Call) -> None:
        await call.answer(status, value, headers)

    return behave


def fails(status: int, code: str) -> Behave:
    return answers(status, {"error": {"code": code}})


prefills = answers(200, {"id": "p", "choices": [], "kv_transfer_params": KV_PARAMS})
D_KV = {
    "x-baton-kv": "transferred=3, recomputed=0, skipped=0",
    "x-baton-kv-prefill": "transferred=0, recomputed=3, skipped=0",
}
releases = answers(200, {"released": 1})


async def drops(call: Call) -> None:
    raise Drop


class Waits:
    """A behaviour that waits in the middle of a request.

    Args:
        then: the behaviour that answers the request after the test has set `go`. If it
            is None, the request ends when the proxy disconnects.
        sends: the beginning of a stream, sent before the wait.

    Attributes:
        begun: set when a request has arrived and `sends` has been sent.
        left: set when the proxy has disconnected, if `then` is None.
    """

    def __init__(self, then: Behave | None = None, sends: bytes = b"") -> None:
        self._then = then
        self._sends = sends
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        if self._sends:
            await call.start()
            await call.write(self._sends)
        self.begun.set()
        if self._then is not None:
            await self.go.wait()
            await self._then(call)
        else:
            await call.disconnected()
            self.left.set()


async def hangs(call: Call) -> None:
    await call.disconnected()


def streams(*events: bytes, ends: bool = True) -> Behave:
    """Return a behaviour that streams these events.

    Args:
        ends: whether the stream ends correctly. If not, the connection is dropped after
            the events.
    """

    async def behave(call: Call) -> None:
        await call.start()
        for event in events[:-1] if ends else events:
            await call.write(event)
        if not ends:
            raise Drop
        await call.write(events[-1], more=False)

    return behave


async def breaks_off(call: Call) -> None:
    """Answer with a body that is shorter than its Content-Length."""
    await call.start(200, {"content-type": "application/json", "content-length": "100"})
    await call.write(b'{"kv_tr')
    raise Drop


async def decodes(call: Call) -> None:
    if call.body.get("stream"):
        stream = streams(
            b'data: {"text": "one"}\n\n',
            b'data: {"text": "two"}\n\n',
            b"data: [DONE]\n\n",
        )
        await stream(call)
    else:
        await call.answer(200, {"text": "onetwo"}, D_KV)


class Fake:
    """A fake prefill or decode server.

    Attributes:
        details: additional members of its answer to GET /ready.
        pages: maps a path to a behaviour, which takes precedence over all others.
        calls: the generation requests that were received.
        releases: the requests to release KV that were received.
        stats_calls: the requests for statistics, which the proxy sends for its page.
        polls: number of health checks that were received.
        silent: if true, health checks are not answered.
    """

    def __init__(
        self,
        behave: Behave,
        *,
        ready: bool = True,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        role: str | None = None,
        on_release: Behave = releases,
        details: dict[str, Any] | None = None,
        pages: dict[str, Behave] | None = None,
    ) -> None:
        self.details = details or {}
        self.pages = pages or {}
        self.behave = behave
        self.on_release = on_release
        self.role = role
        self.ready = ready
        self.room = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
        self.calls: list[Call] = []
        self.releases: list[Call] = []
        self.on_stats: Behave = answers(404, {})
        self.stats_calls: list[Call] = []
        self.polls = 0
        self.silent = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._task: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        raw = b""
        more = True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"]
        }
        query = scope["query_string"].decode()
        call = Call(scope["path"], headers, raw, query, receive, send)
        if call.path == "/ready":
            self.polls += 1
        if page := self.pages.get(call.path):
            await page(call)
            return
        if call.path == "/ready":
            if self.silent:
                await call.disconnected()
                return
            await call.answer(200 if self.ready else 503, self._ready_report())
            return
        if call.path == STATS_PATH:
            self.stats_calls.append(call)
            await self.on_stats(call)
            return
        is_release = call.path == "/release_kv"
        (self.releases if is_release else self.calls).append(call)
        try:
            await (self.on_release if is_release else self.behave)(call)
        except Drop:
            scope["extensions"]["drop"]()

    def _ready_report(self) -> dict[str, Any]:
        report = dict(self.details)
        if not self.ready:
            report["reason"] = "the engine is starting"
        if self.role is not None:
            report["role"] = self.role
        for name, limit in self.room.items():
            if limit is not None:
                report[name] = limit
        return report

    def start(self) -> None:
        config = uvicorn.Config(
            self,
            lifespan="off",
            log_config=None,
            access_log=False,
            http=_DroppingProtocol,
            # A delay of the shared event loop must not make a connection look idle.
            timeout_keep_alive=600,
        )
        self._server = _QuietServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self.listener]))

    async def stop(self) -> None:
        """Stop as in a crash: open connections break, and the port refuses new ones."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                transport = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
            await self._task
            self._task = None
        self.listener.close()


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _DroppingProtocol(HttpToolsProtocol):
    """The HTTP protocol of uvicorn, extended so that the application can close a
    connection without sending another byte.
    """

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: Any = {"drop": self.transport.abort}
        self.scope["extensions"] = extensions


class Rig:
    """Fake servers, a proxy in front of them, and a client of the proxy.

    Args:
        ready: wait at the start until the proxy has noticed which fakes are ready.
        fixed_series: check at the end that no request has added a time series to the
            metrics.

    Attributes:
        series: the time series of the metrics at the start.
    """

    def __init__(
        self,
        prefill: list[Fake] | None = None,
        decode: list[Fake] | None = None,
        *,
        ready: bool = True,
        fixed_series: bool = True,
        **settings: Any,
    ) -> None:
        self.prefill = [Fake(prefills)] if prefill is None else prefill
        self.decode = [Fake(decodes)] if decode is None else decode
        self._wait = ready
        self._fixed_series = fixed_series
        self._settings = {
            "health_interval_s": 0.02,
            "shutdown_grace_s": 2.0,
            "prefill": tuple(fake.url for fake in self.prefill),
            "decode": tuple(fake.url for fake in self.decode),
            **settings,
        }

    async def __aenter__(self) -> "Rig":
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        for fake in (*self.prefill, *self.decode):
            fake.start()
        self.app = ProxyApp(ProxySettings(**self._settings))
        drop_unresponsive_clients(self.listener, self.app.settings.client_timeout_s)
        self.server = ProxyServer(self.app)
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        await until(lambda: self.server.started)
        self.series = self._labelled_series()
        self.client = httpx.AsyncClient(
            base_url=self.url,
            timeout=LIMIT_S,
            trust_env=False,
            verify=False,
            limits=httpx.Limits(max_connections=None),
        )
        if self._wait:
            await until(self._all_polled)
        return self

    def _all_polled(self) -> bool:
        fakes = (*self.prefill, *self.decode)
        return all(
            self.is_ready(index) == fake.ready for index, fake in enumerate(fakes)
        )

    def is_ready(self, index: int) -> bool:
        """Whether the proxy considers a fake ready. `index` counts prefill servers
        first, then decode servers.
        """
        return self.app.fleet.servers[index].health.ready

    def in_flight(self) -> float:
        name = "baton_proxy_upstream_in_flight"
        return sum(
            self.metric(name, **server.labels) for server in self.app.fleet.servers
        )

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self.server.should_exit = True
        await self.task
        await asyncio.gather(*(fake.stop() for fake in (*self.prefill, *self.decode)))
        if self._fixed_series:
            # All series must be exposed from the start, before they count anything.
            assert self._labelled_series() == self.series

    def _labelled_series(self) -> set[str]:
        """Return the exposed series of the proxy's metrics that have labels.

        A series is returned as text: its name and labels.
        """
        names = [spec.name for spec in TABLE if spec.origin == "proxy" and spec.labels]
        self.app._members.update_metrics()
        lines = self.app.metrics.expose()[0].decode().splitlines()
        return {
            line.rsplit(" ", 1)[0] for line in lines if line.startswith(tuple(names))
        }

    async def complete(
        self, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        body = {"model": "m", "prompt": "hello", **body}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        self.app._members.update_metrics()
        return metric(self.app.metrics, name, **labels)

    def decode_only(self, reason: str) -> float:
        return self.metric("baton_proxy_requests", path="decode_only", reason=reason)
