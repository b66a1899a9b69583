"""What every HTTP request passes: its id, the limit on its body, and errors in OpenAI's shape."""

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

# Of what proxies add: as many as 2**19 logprobs of a prompt have, in a reference of many blocks.
# What they stand for is decoded in 0.2 s; a member takes longer than an element.
MAX_MARKS = 5 << 20
_MARKS = {b",": 1, b"[": 1, b"{": 1, b":": 8}
CLIENT_GONE = 499  # what proxies log for it; nobody reads it


class RequestIdMiddleware:
    """Takes over the client's X-Request-Id, any string, or makes one; echoes it. Lets in who may
    come in."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        header = (b"x-request-id", given or secrets.token_hex(16).encode())
        begun, own = False, [header]

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        with request_context(header[1].decode("latin-1")):
            try:
                visit = self._access.admit(scope)
            except RequestError as error:
                log.info(
                    "%s status=%d: %s", scope["path"][:200], error.status, error.message
                )
                await error_response(error)(scope, receive, send_with_id)
                return
            own += [
                (name.encode(), text.encode()) for name, text in visit.headers.items()
            ]
            try:
                with visit:
                    is_counted = (
                        scope["method"] == "POST" and scope["path"] in ENDPOINTS
                    )
                    refused = None if is_counted else refusal(scope)
                    app = error_response(refused) if refused else self._app
                    await app(scope, receive, send_with_id)
            except asyncio.CancelledError:  # by uvicorn, at the end of its grace time
                if begun:
                    raise
                ending = error_response(
                    NoServerAvailable("This server is shutting down.")
                )
                await ending(scope, receive, send_with_id)


async def read_json(
    request: Request, max_bytes: int, *, is_held: bool = True
) -> tuple[dict[str, Any], int]:
    """The members of the request's body, and its length: `max_bytes` at most beside what proxies
    add. See `read_body` for `is_held`. A large body is read off the event loop.

    Raises:
        PayloadTooLarge: it is longer; at most KV_PARAMS_BYTES more were kept in memory. Or it has
            more members than `check_bounds` allows, or what proxies add has more values than
            servers tell: the event loop waits for their decoding.
        InvalidRequest: it is no JSON object, or nested too deeply.
        ClientDisconnected: the client went away before it was complete.
    """
    most = max_bytes + KV_PARAMS_BYTES
    raw = await read_body(request.scope, request.receive, most, is_held=is_held)
    endpoint = BODIES.get(request.scope["path"])
    unread = unread_fields(endpoint) if endpoint else frozenset()

    def read() -> dict[str, Any]:
        _check_size(raw, max_bytes)
        return parse_json_object(raw, unread)

    return await read_off_loop(len(raw), read), len(raw)


class _Offered(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    baton_resume: msgspec.Raw = msgspec.Raw()


def _check_size(body: bytes, max_bytes: int) -> None:
    """Raises PayloadTooLarge or InvalidRequest, see `read_json`."""
    own = body  # what the client has sent
    if len(body) > min(max_bytes, INLINE_BODY_BYTES) and _may_offer(body):
        try:
            offered = msgspec.structs.astuple(msgspec.json.decode(body, type=_Offered))
        except (msgspec.DecodeError, RecursionError):
            offered = ()
        added = b"".join(offered)
        marks = sum(added.count(mark) * weight for mark, weight in _MARKS.items())
        if marks > MAX_MARKS:
            told = f"{', '.join(_Offered.__struct_fields__)}: {marks} brackets and commas are too "
            raise PayloadTooLarge(
                f"{told}many, the limit is {MAX_MARKS}; send a server's own"
            )
        for value in filter(None, map(bytes, offered)):
            own = own.replace(value, b"", 1)
    if len(own) > max_bytes:
        raise PayloadTooLarge(
            f"the body has {len(body)} bytes, the limit is {max_bytes} bytes; send less at once"
        )
    check_bounds(own)


def _may_offer(body: bytes) -> bool:
    return any(name.encode() in body for name in _Offered.__struct_fields__)


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


# fmt: off
class _UnknownPath(RequestError, status=404, code="not_found"): ...
class _WrongMethod(RequestError, status=405, code="method_not_allowed"): ...
class _HttpError(RequestError, code="http_error"): ...  # any other that the framework finds
# fmt: on


def error_response(
    error: BatonError, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as an HTTP response in OpenAI's shape."""
    return JSONResponse(
        error.to_openai(), error.status, {**error.headers, **(headers or {})}
    )


def refusal_of(raised: BatonError | RecursionError) -> BatonError:
    """The error for a request that was refused. A body that could be read may yet be nested too
    deeply for an error's message or a chat template: there is less of the stack by then."""
    if isinstance(raised, BatonError):
        return raised
    return InvalidRequest("The body is nested too deeply; send a flatter one.")


async def _on_error(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    match error:
        case BatonError() | RecursionError():
            return error_response(refusal_of(error))
        case ClientDisconnected():
            return Response(status_code=CLIENT_GONE)
        case HTTPException(status_code=404):
            return error_response(
                _UnknownPath(f"There is no {path} here; GET /docs lists all paths.")
            )
        case HTTPException(status_code=405):
            told = _WrongMethod(f"{path} does not take {request.method}.")
            return error_response(told, error.headers)
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
