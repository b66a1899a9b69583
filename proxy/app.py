"""The proxy's ASGI application: routes, reading and ending requests, shutting down.

The application uses no web framework, because a framework would take more time per
request than the rest of the proxy.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from protocol.errors import BatonError, InternalError, InvalidRequest, QueueFull
from protocol.http.access import grant_of, share_header
from protocol.http.bodies import ClientDisconnected, read_body, refusal
from protocol.http.deadlines import deadline_of, enforce_deadline
from protocol.metrics import Metrics
from protocol.process.logging import get_logger, request_context, trace_extra
from protocol.settings.settings import ProxySettings
from proxy.discovery.members import MODELS_PATH, Members
from proxy.errors import MethodNotAllowed, ShuttingDown, UnknownPath
from proxy.keys import FileAccess
from proxy.legs.setup import create_upstreams
from proxy.pd_request import PDRequest
from proxy.relay import Reply, Send
from proxy.ui.site import Site, is_browser
from proxy.upstream import HttpUpstream, num_sent_bytes

logger = get_logger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]

GENERATE_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
# Paths of requests that need only a tokenizer. A decode server answers them.
TOKENIZER_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
POST_PATHS = (*GENERATE_PATHS, *TOKENIZER_PATHS)
CLIENT_PATHS = (*POST_PATHS, MODELS_PATH)
INTERNAL_PATHS = ("/health", "/ready", "/metrics", "/version")
READ_PATHS = ("/openapi.json", "/docs", MODELS_PATH)
# Headers that are forwarded to servers: the trace context, and the API key if servers
# check it instead of the proxy (`passes_keys_on`).
TRACE_HEADERS = (b"traceparent", b"tracestate")
KEY_HEADERS = (b"authorization", b"x-api-key")
# Maximum sizes of forwarded headers. The sizes of request heads and response heads are
# limited, and servers return the request id in the response head.
MAX_ID_BYTES = 4096
MAX_KEY_BYTES = 4096
MAX_TRACE_BYTES = 512  # W3C: proxies should forward a tracestate of up to this size
# Longest time for sending the error to a client after the shutdown ended a request.
STOP_TIMEOUT_S = 1.0


class ProxyApp:
    """One proxy, which runs from ASGI's startup event to its shutdown event.

    Attributes:
        tracer: the Tracer that sends the spans of requests; None if tracing is off.

    Raises:
        ValueError: a file of keys or certificates cannot be used.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.metrics = Metrics("proxy", aliases=settings.metric_aliases)
        self.access = FileAccess(
            settings, self.metrics, Members.open_paths | Site.open_paths
        )
        self._upstream = HttpUpstream(
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
            ca_file=settings.tls_ca,
            api_key=settings.upstream_api_key,
        )
        self._members = Members(
            settings,
            self._upstream,
            self.metrics,
            lambda server, is_long: self._upstreams.on_silence(server, is_long),
        )
        self.fleet = self._members.fleet
        self.load_tracker = self._members.load_tracker
        self._upstreams = create_upstreams(
            settings, self.metrics, self._members, self._upstream
        )
        self._site = Site(
            self.fleet, self._upstream, is_on=settings.ui, has_keys=settings.has_keys
        )
        self.tracer: Any = None
        self._running: set[asyncio.Task[None]] = set()
        self.shutting_down = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                try:
                    request_id = _request_id(scope)
                except InvalidRequest as error:
                    await Reply(send, _new_id(), scope["path"]).fail(error)
                    return
                with request_context(request_id.decode("latin-1")):
                    await self._http(
                        scope, receive, Reply(send, request_id, scope["path"])
                    )
            case "lifespan":
                await self._lifespan(receive, send)
            case _:
                raise NotImplementedError(scope["type"])

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._members.start()
        self._site.start()
        watching = asyncio.create_task(self.access.watch())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watching.cancel()
        await self._members.close()
        await self._site.close()
        await self._upstreams.close()
        await self._upstream.close()
        await send({"type": "lifespan.shutdown.complete"})

    def shut_down(self, grace_s: float) -> None:
        """Make GET /ready fail; end the requests that still run after `grace_s` s."""
        self.shutting_down = True
        self._members.begin_shutdown()
        asyncio.get_running_loop().call_later(grace_s, self._stop_all)

    def _stop_all(self) -> None:
        for task in self._running:
            task.cancel()

    # requests

    async def _http(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        path = scope["path"]
        if is_browser(scope):
            reply.error_page = self._site.error_page
        try:
            with self.access.admit(scope) as grant:
                reply.headers = grant.headers
                if path in GENERATE_PATHS:
                    if self.tracer is not None:
                        span, parent = self.tracer.start(scope["headers"], path)
                        reply.trace.context = span
                        reply.trace.parent = parent
                    self._site.began(path, reply)
                if error := refusal(scope):
                    raise error
                await self._route(scope, receive, reply)
        except ClientDisconnected:
            if not reply.finished:
                self.metrics.inc("baton_proxy_client_disconnects")
                servers = [name for name, _ in reply.trace.legs]
                logger.info("client disconnected; servers tried: %s", servers)
        except BatonError as error:
            if reply.status is None:
                # A request that ends with an error costs the API key nothing. `charged`
                # has not settled the charge if its task was cancelled, for example at
                # the request's deadline.
                grant_of(scope).settle(0)
            await self._fail(reply, error)
        except asyncio.CancelledError:
            if not self.shutting_down:
                raise
            await self._fail(reply, ShuttingDown("this proxy is shutting down"))
        except Exception:
            logger.exception("a request to %s failed", path)
            await self._fail(
                reply, InternalError("the proxy failed; its log has the details")
            )
        finally:
            if path in GENERATE_PATHS:
                self._record(path, reply, grant_of(scope).name)

    async def _fail(self, reply: Reply, error: BatonError) -> None:
        # A client that does not read the response must not delay the shutdown.
        timeout_s = STOP_TIMEOUT_S if isinstance(error, ShuttingDown) else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await reply.fail(error)

    async def _route(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        method = scope["method"]
        path = scope["path"]
        members = self._members
        is_read = path in READ_PATHS or path.startswith(MODELS_PATH + "/")
        is_internal = path in {*INTERNAL_PATHS, *self._site.paths, *members.read_paths}
        allowed = ["GET", "HEAD"] if is_read or is_internal else []
        allowed += ["POST"] if path in POST_PATHS or path in members.paths else []
        if not allowed:
            raise UnknownPath(method, path, CLIENT_PATHS)
        if method not in allowed:
            raise MethodNotAllowed(method, allowed)
        match path:
            case "/health":
                await reply.answer_json(200, {"status": "ok"})
            case "/version":
                await reply.answer_json(200, {"version": self.metrics.version})
            case "/ready":
                await self._ready(reply, self.access.redaction(scope))
            case "/metrics":
                accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
                await self._answer_metrics(reply, accept)
            case _ if is_read and (models := members.models_answer(path)):
                await reply.answer_json(200, models)
            case _ if path in self._site.paths:
                await self._site.answer(scope, reply)
            case _ if path in members.paths:
                await members.answer(scope, receive, reply)
            case _:
                await self._pass_on(scope, receive, reply, is_read)

    async def _pass_on(
        self, scope: Scope, receive: Receive, reply: Reply, is_read: bool
    ) -> None:
        """Relay a request to servers, and the answer to the client."""
        path = scope["path"]
        grant = grant_of(scope)
        sent_path = path
        if is_read:
            sent_path = (scope.get("raw_path") or path.encode()).decode("latin-1")
        # The request's timeout includes the time for reading the body.
        deadline = deadline_of(scope["headers"], self.settings.request_timeout_s)
        async with enforce_deadline(deadline):
            data = b""
            if not is_read:
                data = await read_body(scope, receive, self.settings.max_body_bytes)
            request = PDRequest(
                upstreams=self._upstreams,
                method="GET" if is_read else "POST",
                path=sent_path,
                headers=self._forwarded_headers(scope, reply, is_read),
                reply=reply,
                grant=grant,
                data=data,
                deadline=deadline,
            )
            if path in GENERATE_PATHS:
                await self._run(request.run(), receive)
            else:
                model = path.partition(MODELS_PATH + "/")[2] or None
                await self._run(request.pass_on(model), receive)

    def _forwarded_headers(
        self, scope: Scope, reply: Reply, is_read: bool
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers of the request to a server. Trace headers that are too
        long are left out.

        Raises:
            InvalidRequest: an API key is too long.
        """
        max_bytes: dict[bytes, int] = {}
        if reply.trace.context is None:  # otherwise the proxy sends its own span's ids
            max_bytes.update(dict.fromkeys(TRACE_HEADERS, MAX_TRACE_BYTES))
        if self.settings.passes_keys_on:
            max_bytes.update(dict.fromkeys(KEY_HEADERS, MAX_KEY_BYTES))
        headers = [(b"x-request-id", reply.request_id)]
        for name, value in scope["headers"]:
            if name not in max_bytes:
                continue
            if num_sent_bytes(value) <= max_bytes[name]:
                # Some clients without a key send b"Bearer ". A header with a trailing
                # space must not be forwarded.
                headers.append((name, value.strip()))
            elif name in KEY_HEADERS:
                raise InvalidRequest(
                    f"the header {name.decode()} is too long, the limit is "
                    f"{MAX_KEY_BYTES} bytes"
                )
        headers += share_header(grant_of(scope))
        if not is_read:
            headers.append((b"content-type", b"application/json"))
        return headers

    async def _run(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Await `work`; cancel it when the client disconnects or the proxy shuts down.

        Raises:
            ClientDisconnected, ShuttingDown: `work` was cancelled or not started.
            QueueFull: too many requests are in flight, so `work` was not started.
        """
        if self.shutting_down:
            work.close()
            raise ShuttingDown("this proxy is shutting down")
        if len(self._running) >= self.settings.max_in_flight:
            work.close()
            raise QueueFull(
                f"{len(self._running)} requests are in flight, which is the limit "
                "(--max-in-flight)"
            )
        task = asyncio.create_task(work)
        disconnect = asyncio.create_task(_disconnected(receive))
        self._running.add(task)
        try:
            await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            if task.cancelled():
                raise ShuttingDown(
                    "this proxy is shutting down; the request was cut short"
                )
            task.result()
        finally:
            self._running.discard(task)
            disconnect.cancel()
            if task.cancel():
                await asyncio.wait((task,))

    # the proxy's own answers

    async def _ready(self, reply: Reply, redaction: dict[str, str] | None) -> None:
        fleet = self.fleet
        is_ready, missing = self._members.readiness.report()
        if self.shutting_down:
            is_ready = False
            missing.append("shutting down")
        counts = {
            kind.value: {"ready": len(fleet.ready(kind)), "configured": len(servers)}
            for kind, servers in fleet.by_kind.items()
        }
        servers = {server.name: server.health.ready for server in fleet.servers}
        circuits = {server.name: server.circuit for server in fleet.servers}
        details = {
            "missing": missing,
            **counts,
            "servers": servers,
            "circuits": circuits,
        }
        body = {
            "status": "ready" if is_ready else "not_ready",
            **(redaction or details),
        }
        await reply.answer_json(200 if is_ready else 503, body)

    async def _answer_metrics(self, reply: Reply, accept: str) -> None:
        self._members.update_metrics()
        models = self.fleet.models
        self.metrics.model_name = models[0] if len(models) == 1 else None
        text, content_type = self.metrics.expose(accept)
        await reply.answer(200, [(b"content-type", content_type.encode())], text)

    def _record(self, path: str, reply: Reply, key_name: str) -> None:
        trace = reply.trace
        total_s = trace.elapsed_s()
        status = "broken" if reply.is_broken else str(reply.status or "none")
        self._site.ended(reply, status)
        self.metrics.inc("baton_proxy_responses", status=status)
        trace_id = trace.stored_trace_id
        self.metrics.observe("baton_proxy_request_seconds", total_s, trace_id=trace_id)
        if reply.is_stream and trace.first_byte_s is not None:
            self.metrics.observe(
                "baton_proxy_first_byte_seconds", trace.first_byte_s, trace_id=trace_id
            )
        logger.info(
            "%s status=%s model=%s key=%s %s prefill_leg_ms=%s first_byte_ms=%s "
            "total_ms=%s%s",
            path,
            status,
            trace.model,
            key_name,
            trace.summary(),
            _ms(trace.prefill_s),
            _ms(trace.first_byte_s),
            _ms(total_s),
            "" if reply.finished else " unfinished",
            extra=trace_extra(trace_id),
        )
        if self.tracer is not None and trace_id is not None:
            has_failed = status[0] not in "234"
            error = f"status {status}" if has_failed else ""
            self.tracer.send(trace.spans(f"POST {path}", total_s, error))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> bytes:
    request_id = b""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id = value
            break
    num_bytes = num_sent_bytes(request_id)
    if num_bytes > MAX_ID_BYTES:
        raise InvalidRequest(
            f"the header X-Request-Id has {num_bytes} bytes, the limit is "
            f"{MAX_ID_BYTES}"
        )
    return request_id.strip() or _new_id()


def _new_id() -> bytes:
    return uuid.uuid4().hex.encode()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
