"""The proxy's ASGI application: routes, reading a request, its end, and shutting down.

Plain ASGI: a framework would take longer per request than everything else here together.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from protocol.errors import BatonError, InternalError, InvalidRequest
from protocol.http.body import ClientDisconnected, read_body
from protocol.http.connections import refusal
from protocol.metrics import CONTENT_TYPE, Metrics
from protocol.near_names import suggestion
from protocol.process.logging import get_logger, request_context
from protocol.settings.settings import ProxySettings
from proxy import body as bodies
from proxy.errors import MethodNotAllowed, ShuttingDown, UnknownPath
from proxy.health import Health
from proxy.membership import Fleet, Server
from proxy.pd_request import ClientRequest, PDRequest
from proxy.poller import Poller
from proxy.relay import Reply, Send
from proxy.retry import Kind
from proxy.series import expose_from_start
from proxy.upstream import HttpUpstream
from proxy.upstream_call import RequestTrace

logger = get_logger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]

GENERATE_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
TOKENIZER_PATHS = ("/tokenize", "/detokenize")  # a decode server's answer, as it is
MODELS_PATH = "/v1/models"
CLIENT_PATHS = (*GENERATE_PATHS, *TOKENIZER_PATHS, MODELS_PATH)
DOCUMENT_PATHS = ("/openapi.json", "/docs")
# What else of the client's headers the servers get: who asks, and which trace it belongs to.
FORWARDED_HEADERS = (b"authorization", b"traceparent", b"tracestate")
MAX_ID_BYTES = 4096  # servers echo it, and an answer's head has a limit of its own
STOP_TIMEOUT_S = 1.0  # for the last bytes to clients whose requests shutting down ends


class _Running:
    """A request that is being served by the current task.

    Attributes:
        end: why it was ended before its time.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.end: Exception | None = None

    def stop(self, end: Exception) -> None:
        if self.end is None:
            self.end = end
            self.task.cancel()

    async def watch(self, receive: Receive) -> None:
        """Stops it when the client goes."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientDisconnected())


class ProxyApp:
    """One proxy. Lives from ASGI's startup to its shutdown event."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.metrics = Metrics("proxy")
        self.fleet = Fleet(on_change=self._on_change, on_silence=self._on_silence)
        self._upstream = HttpUpstream(
            connect_timeout_s=settings.connect_timeout_s, read_timeout_s=settings.read_timeout_s
        )
        self._poller = Poller(
            self.fleet,
            self._upstream,
            interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s,
        )
        self._flow = PDRequest(self.fleet, self._upstream, self.metrics)
        self._running: set[_Running] = set()
        self.shutting_down = False
        for server in (
            *(Server(Kind.PREFILL, url, i) for i, url in enumerate(settings.prefill)),
            *(Server(Kind.DECODE, url, i) for i, url in enumerate(settings.decode)),
        ):
            self.fleet.join(server)
            self._show_ready(server, self.fleet.health(server))
        expose_from_start(self.metrics, self.fleet.servers())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                try:
                    request_id = _request_id(scope)
                except InvalidRequest as error:
                    await Reply(send, _new_id()).fail(error)
                    return
                with request_context(request_id.decode("latin-1")):
                    await self._http(scope, receive, Reply(send, request_id))
            case "lifespan":
                await self._lifespan(receive, send)
            case _:
                raise NotImplementedError(scope["type"])

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._poller.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._poller.close()
        await self._flow.close()
        await self._upstream.close()
        await send({"type": "lifespan.shutdown.complete"})

    def shut_down(self, grace_s: float) -> None:
        """Is not ready from now on; requests still running after `grace_s` end with an error."""
        self.shutting_down = True
        asyncio.get_running_loop().call_later(grace_s, self._stop_all)

    def _stop_all(self) -> None:
        for running in self._running:
            running.stop(ShuttingDown("this proxy is shutting down; the request was cut short"))

    # requests

    async def _http(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        path, trace = scope["path"], RequestTrace()
        try:
            if error := refusal(scope):
                raise error
            await self._route(scope, receive, reply, trace)
        except ClientDisconnected:
            if not reply.finished:
                self.metrics.inc("baton_proxy_client_disconnects")
                logger.info("client gone, phase %s", trace.phase)
        except BatonError as error:
            await self._tell(reply, error)
        except asyncio.CancelledError:
            if not self.shutting_down:
                raise
            await self._tell(reply, ShuttingDown("this proxy is shutting down"))
        except Exception:
            logger.exception("failed: %s", path)
            await self._tell(reply, InternalError("the proxy failed; its log says how"))
        if path in GENERATE_PATHS:
            self._record(path, reply, trace)

    async def _tell(self, reply: Reply, error: BatonError) -> None:
        if not isinstance(error, ShuttingDown):
            await reply.fail(error)
            return
        try:  # a client that does not read must not keep the process
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await reply.fail(error)
        except TimeoutError:
            pass

    async def _route(
        self, scope: Scope, receive: Receive, reply: Reply, trace: RequestTrace
    ) -> None:
        method, path = scope["method"], scope["path"]
        is_told = path == MODELS_PATH or path.startswith(MODELS_PATH + "/")
        if path in GENERATE_PATHS:
            _expect(method, "POST")
            await self._generate(scope, receive, reply, trace)
            return
        if path in TOKENIZER_PATHS:
            _expect(method, "POST")
            data = await read_body(scope, receive, self.settings.max_body_bytes)
            headers = _with_json(scope, reply.request_id)
            await self._run(self._flow.post(path, headers, data, reply, trace), receive)
            return
        is_told = is_told or path in DOCUMENT_PATHS
        if is_told or path in ("/health", "/ready", "/metrics"):
            _expect(method, "GET", "HEAD")
        match path:
            case "/health":
                await reply.answer_json(200, {"status": "ok"})
            case "/ready":
                await self._ready(reply)
            case "/metrics":
                content_type = (b"content-type", CONTENT_TYPE.encode())
                await reply.answer(200, [content_type], self.metrics.expose())
            case _ if is_told:
                headers = _forwarded(scope, reply.request_id)
                raw_path = scope.get("raw_path") or path.encode()
                work = self._flow.get(raw_path.decode("latin-1"), headers, reply, trace)
                await self._run(work, receive)
            case _:
                near = suggestion(path[:80].rstrip("/"), CLIENT_PATHS)
                raise UnknownPath(f"no such path: {method} {path}{near}; GET /docs lists all paths")

    async def _generate(
        self, scope: Scope, receive: Receive, reply: Reply, trace: RequestTrace
    ) -> None:
        data = await read_body(scope, receive, self.settings.max_body_bytes)
        body, stripped = bodies.sanitize(bodies.parse_body(data))
        if stripped:
            self.metrics.inc("baton_proxy_stripped_kv_transfer_params")
        headers = _with_json(scope, reply.request_id)
        trace.begin()
        request = ClientRequest(scope["path"], headers, body)
        self.metrics.inc("baton_proxy_requests_in_progress")
        try:
            await self._run(self._flow.run(request, reply, trace), receive)
        finally:
            self.metrics.dec("baton_proxy_requests_in_progress")

    async def _run(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Awaits `work`, cancelling it when the client goes or this process has to end.

        Raises:
            ClientDisconnected, ShuttingDown: it was cancelled.
        """
        if self.shutting_down:
            work.close()
            raise ShuttingDown("this proxy is shutting down")
        running = _Running()
        self._running.add(running)
        watcher = asyncio.create_task(running.watch(receive))
        try:
            await work  # in this task: another one would begin a turn of the loop later
        except asyncio.CancelledError:
            if running.end is None or running.task.uncancel():
                raise  # it is us who are cancelled
            raise running.end from None
        finally:
            watcher.cancel()
            self._running.discard(running)

    # answers of our own

    async def _ready(self, reply: Reply) -> None:
        counts = {
            kind.value: {
                "ready": self.fleet.num_ready(kind),
                "configured": len(self.fleet.servers(kind)),
            }
            for kind in Kind
        }
        missing = [f"no {kind} server is ready" for kind, n in counts.items() if not n["ready"]]
        if self.shutting_down:
            missing.append("shutting down")
        ready = bool(counts["decode"]["ready"]) and not self.shutting_down
        servers = {s.name: self.fleet.health(s).ready for s in self.fleet.servers()}
        status = {"status": "ready" if ready else "not_ready", "missing": missing}
        await reply.answer_json(200 if ready else 503, {**status, **counts, "servers": servers})

    def _record(self, path: str, reply: Reply, trace: RequestTrace) -> None:
        total_s = trace.elapsed_s()
        status = "broken" if reply.is_broken else str(reply.status or "none")
        self.metrics.inc("baton_proxy_responses", status=status)
        self.metrics.observe("baton_proxy_request_seconds", total_s)
        if reply.is_stream and trace.first_byte_s is not None:
            self.metrics.observe("baton_proxy_first_byte_seconds", trace.first_byte_s)
        logger.info(
            "%s status=%s prefill=%s decode=%s decode_only=%s prefill_ms=%s first_byte_ms=%s "
            "total_ms=%s%s",
            path, status, trace.prefill, trace.decode, trace.decode_only,
            _ms(trace.prefill_s), _ms(trace.first_byte_s), _ms(total_s),
            "" if reply.finished else " unfinished",
        )  # fmt: skip

    def _show_ready(self, server: Server, health: Health) -> None:
        self.metrics.set("baton_proxy_upstream_ready", float(health.ready), **server.labels)

    def _on_change(self, server: Server, old: Health, new: Health) -> None:
        self._show_ready(server, new)
        if new.ready:
            logger.info("%s is ready", server)
            return
        if old.ready:
            self._poller.hurry(server)
        # When all end together, each sees the others go.
        level = logging.DEBUG if self.shutting_down else logging.WARNING
        logger.log(level, "%s is not ready: %s", server, new.reason)

    def _on_silence(self, server: Server, is_long: bool) -> None:
        self._flow.on_silence(server, is_long)


def _expect(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise MethodNotAllowed(method, allowed)


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    if len(given) > MAX_ID_BYTES:
        raise InvalidRequest(
            f"the header X-Request-Id has {len(given)} bytes, the limit is {MAX_ID_BYTES}"
        )
    return given.strip() or _new_id()


def _new_id() -> bytes:
    return uuid.uuid4().hex.encode()


def _forwarded(scope: Scope, request_id: bytes) -> list[tuple[bytes, bytes]]:
    # Stripped: some clients without a key send b"Bearer ", which no one may pass on like that.
    kept = [(n, value.strip()) for n, value in scope["headers"] if n in FORWARDED_HEADERS]
    return [(b"x-request-id", request_id), *kept]


def _with_json(scope: Scope, request_id: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), *_forwarded(scope, request_id)]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
