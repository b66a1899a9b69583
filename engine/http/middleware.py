"""Request ids, limits on bodies and error responses, for all HTTP requests."""

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

from engine.http.api import KV_PARAMS_BYTES
from protocol.anthropic.errors import (
    REQUEST_ID_HEADER,
    error_body,
    is_messages_path,
)
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
from protocol.http.endpoints import ENDPOINTS
from protocol.http.json_bounds import INLINE_BODY_BYTES, check_bounds, read_off_loop
from protocol.openai.requests import BODIES, parse_json_object, unread_fields
from protocol.process.logging import get_logger, request_context

log = get_logger(__name__)

# Maximum number of marks (opening brackets, commas and colons) in the members that
# proxies add, each counted with its weight in _MARK_WEIGHTS. It bounds the time to
# decode these members to 0.2 s. A server's reference to KV has fewer: 3.7 million marks
# for 2**19 logprobs.
MAX_MARKS = 5 << 20
# Each colon belongs to a member of an object, which takes longer to decode than an
# element of a list.
_MARK_WEIGHTS = {b",": 1, b"[": 1, b"{": 1, b":": 8}
# The status in access logs if the client has disconnected, as in nginx. A disconnected
# client does not receive the status.
CLIENT_CLOSED_REQUEST = 499


class RequestIdMiddleware:
    """Gives each request an id, and refuses requests without a valid API key.

    The id is the client's X-Request-Id, or a random id if the client sends none. The
    response has the same X-Request-Id header.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_id = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = client_id or secrets.token_hex(16).encode()
        path = scope["path"]
        extra_headers = [(b"x-request-id", request_id)]
        if is_messages_path(path):
            extra_headers.append((REQUEST_ID_HEADER.encode(), request_id))
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
                grant = self._access.admit(scope)
            except RequestError as error:
                log.info("%s status=%d: %s", path[:200], error.status, error.message)
                await error_response(error, path)(scope, receive, send_with_id)
                return
            for name, text in grant.headers.items():
                extra_headers.append((name.encode(), text.encode()))
            try:
                with grant:
                    generates = scope["method"] == "POST" and path in ENDPOINTS
                    # Endpoints that generate text handle this error in `read_body`.
                    connection_error = None if generates else refusal(scope)
                    app = (
                        error_response(connection_error, path)
                        if connection_error
                        else self._app
                    )
                    await app(scope, receive, send_with_id)
            # At shutdown, uvicorn cancels the requests that exceed its grace period.
            except asyncio.CancelledError:
                if has_started:
                    raise
                shutdown_response = error_response(
                    NoServerAvailable("This server is shutting down."), path
                )
                await shutdown_response(scope, receive, send_with_id)


async def read_json(
    request: Request, max_bytes: int, *, is_held: bool = True
) -> tuple[dict[str, Any], int]:
    """Return the members of the request's body, and the body's size in bytes.

    A thread parses a large body, so that the event loop is not blocked.

    Args:
        max_bytes: the maximum size of the body without the members that proxies add.
            These members may have at most KV_PARAMS_BYTES.
        is_held: whether the body counts against --max-held-bytes; see `read_body`.

    Raises:
        PayloadTooLarge: the body is too large, has more members than `check_bounds`
            allows, or its kv_transfer_params and baton_resume have more values than any
            server sends.
        QueueFull: the bodies of other requests already hold too many bytes.
        InvalidRequest: the body is not a JSON object, or it is nested too deeply.
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
    """The members that proxies add to a body, as JSON texts."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    baton_resume: msgspec.Raw = msgspec.Raw()


def _check_size(body: bytes, max_bytes: int) -> None:
    """Check the size and the structure of a body. `read_json` lists the errors."""
    client_part = body
    if len(body) > min(max_bytes, INLINE_BODY_BYTES) and _may_have_proxy_members(body):
        try:
            members = msgspec.json.decode(body, type=_ProxyMembers)
            values = msgspec.structs.astuple(members)
        except (msgspec.DecodeError, RecursionError):
            values = ()
        added = b"".join(values)
        num_marks = sum(
            added.count(mark) * weight for mark, weight in _MARK_WEIGHTS.items()
        )
        if num_marks > MAX_MARKS:
            names = ", ".join(_ProxyMembers.__struct_fields__)
            raise PayloadTooLarge(
                f"{names}: there are {num_marks} opening brackets, commas and colons "
                f"(a colon counts as {_MARK_WEIGHTS[b':']}), the limit is {MAX_MARKS}; "
                "send the members as a server returned them"
            )
        for value in filter(None, map(bytes, values)):
            client_part = client_part.replace(value, b"", 1)
    if len(client_part) > max_bytes:
        raise PayloadTooLarge(
            f"the body has {len(client_part)} bytes, the limit is {max_bytes} bytes; "
            "send less at once (--max-body-bytes)"
        )
    check_bounds(client_part)


def _may_have_proxy_members(body: bytes) -> bool:
    return any(name.encode() in body for name in _ProxyMembers.__struct_fields__)


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Raise ClientDisconnected in the `with` body when the client disconnects.

    Use this only after the request's body has been read: it discards all messages of
    `receive`.
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
# Starlette's errors with a status other than 404 and 405.
class _HttpError(RequestError, code="http_error"): ...
# fmt: on


def error_response(
    error: BatonError, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as an HTTP response, in the format of the path's API."""
    return JSONResponse(
        error_body(error, path), error.status, {**error.headers, **(headers or {})}
    )


def as_baton_error(raised: BatonError | RecursionError) -> BatonError:
    """Return the error to send to the client.

    A RecursionError means that the body is nested too deeply. It may occur even after
    the body was parsed, because error messages and chat templates use more of the stack
    than the parser.
    """
    if isinstance(raised, BatonError):
        return raised
    return InvalidRequest("The body is nested too deeply; send a flatter body.")


async def _on_error(request: Request, error: Exception) -> Response:
    """Return the response for an exception. Log the exception if it is unexpected."""
    full_path = request.scope["path"]
    path = full_path[:200]
    match error:
        case BatonError() | RecursionError():
            return error_response(as_baton_error(error), full_path)
        case ClientDisconnected():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        case HTTPException(status_code=404):
            return error_response(
                _UnknownPath(f"There is no path {path}; GET /docs lists all paths."),
                full_path,
            )
        case HTTPException(status_code=405):
            wrong_method = _WrongMethod(f"{path} does not accept {request.method}.")
            return error_response(wrong_method, full_path, error.headers)
        case HTTPException():
            return JSONResponse(
                _HttpError(str(error.detail)).to_openai(), error.status_code
            )
    log.exception("Unexpected error in a request for %s.", path, exc_info=error)
    return error_response(
        InternalError("The server failed on this request."), full_path
    )


ERROR_HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (BatonError, RecursionError, ClientDisconnected, HTTPException, Exception),
    _on_error,
)
