"""Errors and the version header of the Messages API.

The paths of the Messages API have their own form of errors. The object in `error` has
Anthropic's members and, like all errors of Baton, `code`, `param`, `phase` and
`retryable`. Proxies read these members in the error responses of servers.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from protocol.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    RequestError,
)
from protocol.http import sse
from protocol.process.logging import current_request_id
from protocol.short_repr import short_repr

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"
REQUEST_ID_HEADER = "request-id"  # the name that Anthropic's clients read

VERSION_HEADER = b"anthropic-version"
_VERSION = re.compile(rb"\d{4}-\d{2}-\d{2}")
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ThreadUnsupported(RequestError, code="thread_unsupported_request"):
    """The request refers to a stored conversation, but Baton stores no conversations.

    The code is Anthropic's. When Anthropic's client receives this code, it sends the
    whole conversation.
    """


def is_messages_path(path: str) -> bool:
    """Returns whether a path belongs to the Messages API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def check_version(scope: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a request to the Messages API has a version that is not
    a date.

    All versions, and requests without the header, are served in the same way. A list of
    known versions would exclude the next release of Anthropic's client. That release
    may send a new version although it uses the API as before.
    """
    if not is_messages_path(scope["path"]):
        return
    version = dict(scope["headers"]).get(VERSION_HEADER)
    if version is not None and not _VERSION.fullmatch(version.strip()):
        shown = short_repr(version.decode("latin-1"))
        raise InvalidRequest(
            f"the header anthropic-version is {shown}; send a version such as "
            "2023-06-01, or leave it out"
        )


def error_body(error: BatonError, path: str) -> dict[str, Any]:
    """Returns the JSON body of an error response, in the form of the path's API."""
    openai_body = error.to_openai()
    if not is_messages_path(path):
        return openai_body
    details = {
        **openai_body["error"],
        "type": _type_of(error),
        "message": _message_of(error),
        "details": {"error_code": error.code},
    }
    return {"type": "error", "error": details, "request_id": current_request_id()}


def error_event(error: BatonError) -> bytes:
    """Returns the event that ends a failed stream of the Messages API."""
    data = msgspec.json.encode(error_body(error, MESSAGES_PATH))
    return b"event: error\n" + sse.event(data)


def _type_of(error: BatonError) -> str:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    return _TYPES.get(error.status, default)


def _message_of(error: BatonError) -> str:
    """Returns the message of an error.

    If the message contains "prompt is too long", agents such as Claude Code shorten the
    conversation.
    """
    if isinstance(error, ContextLengthExceeded):
        return f"prompt is too long: {error.message}"
    return error.message
