"""What every HTTP request passes: its id, the limit on its body, and errors in OpenAI's shape."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.http.hooks import KV_PARAMS_BYTES
from protocol.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    NoServerAvailable,
    PayloadTooLarge,
    RequestError,
)
from protocol.http import body as http_body
from protocol.http.body import ClientDisconnected
from protocol.http.connections import refusal
from protocol.process.logging import get_logger, request_context

log = get_logger(__name__)

CLIENT_GONE = 499  # what proxies log for it; nobody reads it


class RequestIdMiddleware:
    """Takes over the client's X-Request-Id, any string, or makes one; echoes it.

    Args:
        direct: what answers a POST to a path by itself: the rest of the framework takes as long
            over a request as reading and checking 2,048 token ids does.
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[str, Callable[[Request], Awaitable[Response]]] | None = None,
    ) -> None:
        self._app = app
        self._direct = direct or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        header = (b"x-request-id", given or secrets.token_hex(16).encode())

        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message.get("headers", []), header]}
            await send(message)

        with request_context(header[1].decode("latin-1")):
            try:
                await self._answer(scope, receive, send_with_id)
            except asyncio.CancelledError:  # by uvicorn, at the end of its grace time
                if begun:
                    raise
                ending = error_response(NoServerAvailable("This server is shutting down."))
                await ending(scope, receive, send_with_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
        if answer is None and (error := refusal(scope)):
            await error_response(error)(scope, receive, send)
            return
        if answer is None:
            await self._app(scope, receive, send)
            return
        response = await answer(Request(scope, receive, send))
        await response(scope, receive, send)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body, of `max_bytes` at most beside its `kv_transfer_params`.

    Raises:
        PayloadTooLarge: it is longer; at most KV_PARAMS_BYTES more were kept in memory.
        ClientDisconnected: the client went away before it was complete.
    """
    limit_bytes = max_bytes + KV_PARAMS_BYTES
    data = await http_body.read_body(request.scope, request.receive, limit_bytes)
    if len(data) > max_bytes and len(data) - _params_bytes(data) > max_bytes:
        raise PayloadTooLarge(
            f"the body has {len(data)} bytes, the limit is {max_bytes} bytes; send less at once"
        )
    return data


class _Offered(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


def _params_bytes(body: bytes) -> int:
    try:
        return len(memoryview(msgspec.json.decode(body, type=_Offered).kv_transfer_params))
    except (msgspec.DecodeError, RecursionError):
        return 0


def error_response(error: BatonError) -> Response:
    """An error as an HTTP response in OpenAI's shape."""
    return JSONResponse(error.to_openai(), status_code=error.status)


def refusal_of(raised: BatonError | RecursionError) -> BatonError:
    """What a request is refused with. One that could be read may yet be nested too deeply for what
    looks into it later (an error's message, a chat template): by then there is less of the stack.
    """
    if isinstance(raised, BatonError):
        return raised
    return InvalidRequest("The body is nested too deeply; send a flatter one.")


# fmt: off
class _UnknownPath(RequestError, status=404, code="not_found"): ...
class _WrongMethod(RequestError, status=405, code="method_not_allowed"): ...
class _HttpError(RequestError, code="http_error"): ...  # any other that the framework finds
# fmt: on


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the body of the `with` when the client goes away, as ClientDisconnected.

    Use it only once the request's body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


def now_s() -> float:
    """Seconds on a monotonic clock, for latencies."""
    return time.perf_counter()


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(BatonError)
    async def on_baton_error(request: Request, error: BatonError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnected)
    async def on_client_gone(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        told: RequestError = _HttpError(str(error.detail))
        if error.status_code == 404:
            told = _UnknownPath(f"There is no {path} here.")
        elif error.status_code == 405:
            told = _WrongMethod(f"{path} does not take {request.method}.")
        return JSONResponse(told.to_openai(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_any_error(request: Request, error: Exception) -> Response:
        log.exception("unexpected error", exc_info=error)
        return error_response(InternalError("The server failed on this request."))
