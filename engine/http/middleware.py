"""Gives all HTTP requests ids, limits on bodies, and errors in OpenAI's shape."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.http.api import ENDPOINTS, KV_PARAMS_BYTES
from protocol.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    NoServerAvailable,
    PayloadTooLarge,
    RequestError,
)
from protocol.http.access import Access
from protocol.http.bodies import ClientDisconnected, read_body, refusal
from protocol.http.json_bounds import INLINE_BODY_BYTES, check_bounds, read_off_loop
from protocol.openai.requests import BODIES, parse_json_object, unread_fields
from protocol.process.logging import get_logger, request_context

log = get_logger(__name__)

# The most brackets and commas in the members that proxies add: as many as the 2**19
# logprobs of a prompt have, in a reference to many blocks. They are decoded in 0.2 s. A
# member takes longer to decode than an element.
MAX_MARKS = 5 << 20
_MARKS = {b",": 1, b"[": 1, b"{": 1, b":": 8}
# Proxies log this status for a client that disconnected. No client receives it.
CLIENT_GONE = 499


class RequestIdMiddleware:
    """Gives each request an id, and refuses requests without access.

    The id is the client's X-Request-Id, or a new one. The response repeats it.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_id = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = client_id or secrets.token_hex(16).encode()
        extra_headers = [(b"x-request-id", request_id)]
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = [*message.get("headers", []), *extra_headers]
                message = {**message, "headers": headers}
            await send(message)

        with request_context(request_id.decode("latin-1")):
            try:
                visit = self._access.admit(scope)
            except RequestError as error:
                log.info(
                    "%s status=%d: %s", scope["path"][:200], error.status, error.message
                )
                await error_response(error)(scope, receive, send_with_id)
                return
            for name, text in visit.headers.items():
                extra_headers.append((name.encode(), text.encode()))
            try:
                with visit:
                    generates = scope["method"] == "POST" and scope["path"] in ENDPOINTS
                    # The endpoints that generate check the connection themselves.
                    connection_error = None if generates else refusal(scope)
                    app = (
                        error_response(connection_error)
                        if connection_error
                        else self._app
                    )
                    await app(scope, receive, send_with_id)
            # uvicorn cancels requests at the end of its grace time.
            except asyncio.CancelledError:
                if has_started:
                    raise
                ending = error_response(
                    NoServerAvailable("This server is shutting down.")
                )
                await ending(scope, receive, send_with_id)


async def read_json(
    request: Request, max_bytes: int, *, is_held: bool = True
) -> tuple[dict[str, Any], int]:
    """Return the members of the request's body, and the body's size in bytes.

    A large body is read off the event loop.

    Args:
        max_bytes: the most bytes, without the members that proxies add.
        is_held: see `read_body`.

    Raises:
        PayloadTooLarge: the body is longer; at most KV_PARAMS_BYTES more were kept in
            memory. Or it has more members than `check_bounds` allows, or the members
            that proxies add have more values than servers send.
        InvalidRequest: the body is no JSON object, or nested too deeply.
        ClientDisconnected: the client disconnected before the body was complete.
    """
    limit = max_bytes + KV_PARAMS_BYTES
    raw = await read_body(request.scope, request.receive, limit, is_held=is_held)
    endpoint = BODIES.get(request.scope["path"])
    unread = unread_fields(endpoint) if endpoint else frozenset()

    def read() -> dict[str, Any]:
        _check_size(raw, max_bytes)
        return parse_json_object(raw, unread)

    return await read_off_loop(len(raw), read), len(raw)


class _ProxyMembers(msgspec.Struct):
    """The members of a body that proxies add."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    baton_resume: msgspec.Raw = msgspec.Raw()


def _check_size(body: bytes, max_bytes: int) -> None:
    """Raise PayloadTooLarge or InvalidRequest; see `read_json`."""
    client_part = body
    if len(body) > min(max_bytes, INLINE_BODY_BYTES) and _may_have_proxy_members(body):
        try:
            members = msgspec.json.decode(body, type=_ProxyMembers)
            values = msgspec.structs.astuple(members)
        except (msgspec.DecodeError, RecursionError):
            values = ()
        added = b"".join(values)
        num_marks = sum(added.count(mark) * weight for mark, weight in _MARKS.items())
        if num_marks > MAX_MARKS:
            names = ", ".join(_ProxyMembers.__struct_fields__)
            raise PayloadTooLarge(
                f"{names}: {num_marks} brackets and commas are too many, the limit is "
                f"{MAX_MARKS}; send a server's own"
            )
        for value in filter(None, map(bytes, values)):
            client_part = client_part.replace(value, b"", 1)
    if len(client_part) > max_bytes:
        raise PayloadTooLarge(
            f"the body has {len(body)} bytes, the limit is {max_bytes} bytes; send "
            "less at once"
        )
    check_bounds(client_part)


def _may_have_proxy_members(body: bytes) -> bool:
    return any(name.encode() in body for name in _ProxyMembers.__struct_fields__)


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Raise ClientDisconnected in the `with` body when the client disconnects.

    Use it only after the request's body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    is_disconnected = False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if is_disconnected and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


# fmt: off
class _UnknownPath(RequestError, status=404, code="not_found"): ...
class _WrongMethod(RequestError, status=405, code="method_not_allowed"): ...
class _HttpError(RequestError, code="http_error"): ...  # any other of the framework
# fmt: on


def error_response(
    error: BatonError, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as an HTTP response in OpenAI's shape."""
    return JSONResponse(
        error.to_openai(), error.status, {**error.headers, **(headers or {})}
    )


def as_baton_error(raised: BatonError | RecursionError) -> BatonError:
    """Return the error for a request that was refused.

    A body that could be read may still be nested too deeply for an error's message or a
    chat template, for which less of the stack is left.
    """
    if isinstance(raised, BatonError):
        return raised
    return InvalidRequest("The body is nested too deeply; send a flatter one.")


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    match error:
        case BatonError() | RecursionError():
            return error_response(as_baton_error(error))
        case ClientDisconnected():
            return Response(status_code=CLIENT_GONE)
        case HTTPException(status_code=404):
            return error_response(
                _UnknownPath(f"There is no {path} here; GET /docs lists all paths.")
            )
        case HTTPException(status_code=405):
            wrong_method = _WrongMethod(f"{path} does not take {request.method}.")
            return error_response(wrong_method, error.headers)
        case HTTPException():
            return JSONResponse(
                _HttpError(str(error.detail)).to_openai(), error.status_code
            )
    log.exception("unexpected error", exc_info=error)
    return error_response(InternalError("The server failed on this request."))


ERROR_HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (BatonError, RecursionError, ClientDisconnected, HTTPException, Exception),
    _on_error,
)
