"""The class hierarchy of the errors that clients and peers can receive.

The errors that only the proxy raises are in proxy/errors.py.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

# For each error code, the first class that is defined with the code.
_CLASS_BY_CODE: dict[str, type["BatonError"]] = {}


class BatonError(Exception):
    """The base class of all errors that a client or a peer can receive.

    A subclass sets class variables by class arguments, such as
    `class Overloaded(ServiceError, code="overloaded")`, and inherits all others.

    Class attributes:
        status: The HTTP status.
        retryable: Whether the same request may succeed later, or on another server.
        phase: The phase of processing in which the error occurred, such as "transfer".
        type: The `type` of the error in OpenAI's API.
        code: The `code` of the error in OpenAI's API.

    Args:
        message: A sentence for the client. If a field is at fault, the sentence names
            the field, the value and the fix.
        param: The field or option at fault, if there is one: a field of the request or
            of a peer's metadata.
        headers: Additional headers of the HTTP response.
    """

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    phase: ClassVar[str] = "internal"
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, **class_variables: Any) -> None:
        super().__init_subclass__()
        for name, value in class_variables.items():
            setattr(cls, name, value)
        _CLASS_BY_CODE.setdefault(cls.code, cls)

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}

    def to_openai(self) -> dict[str, Any]:
        """Returns the error object of OpenAI's API, plus `phase` and `retryable`."""
        names = ("message", "type", "param", "code", "phase", "retryable")
        return {"error": {name: getattr(self, name) for name in names}}


class RequestError(
    BatonError,
    status=400,
    phase="request",
    type="invalid_request_error",
    code="invalid_request",
):
    """The request is at fault. A retry of the same request also fails, unless the error
    is `retryable`.
    """


class InvalidRequest(RequestError):
    """The request is invalid. The message names the field at fault, if there is one."""


class ContextLengthExceeded(RequestError, code="context_length_exceeded"):
    """The prompt, or the prompt and the requested output together, exceed the context
    of the model.
    """


class GrammarFailed(RequestError, phase="engine", code="grammar_failed"):
    """The output cannot continue as the grammar of the request requires, or the grammar
    cannot be used. Also raised if finding the allowed tokens takes too long.
    """


class Unauthorized(RequestError, status=401, phase="access", code="invalid_api_key"):
    """The request has no API key, or an unknown one."""


class Forbidden(
    RequestError,
    status=403,
    phase="access",
    type="permission_error",
    code="insufficient_permissions",
):
    """The API key does not permit this request, or an operator's request without a key
    is not trusted (`check_operator` in protocol/http/access.py).
    """


class RateLimited(
    RequestError,
    status=429,
    retryable=True,
    phase="access",
    type="rate_limit_error",
    code="rate_limit_exceeded",
):
    """The API key has reached one of its limits. The header `retry-after` has the
    seconds to wait.
    """


class ModelNotFound(RequestError, status=404, code="model_not_found"):
    """The model of the request is not served by this server, or by any server of this
    proxy.
    """


class RequestTimeout(RequestError, status=408, retryable=True, code="request_timeout"):
    """The client sent the body of the request too slowly."""


class PayloadTooLarge(RequestError, status=413, code="payload_too_large"):
    """The body of the request has too many bytes or too many JSON values."""


class TargetTooLong(RequestError, status=414, code="target_too_long"):
    """The path and query of the request are too long."""


class UnsupportedMediaType(RequestError, status=415, code="unsupported_media_type"):
    """A page of another site sent the request without the Content-Type
    application/json.
    """


class ClientTooSlow(RequestError, status=408, retryable=True, code="client_too_slow"):
    """The client reads the response too slowly."""


class KVParamsRejected(
    RequestError, phase="kv_params", code="kv_transfer_params_rejected"
):
    """The `kv_transfer_params` of the request cannot be used."""


class ResumeRejected(RequestError, phase="resume", code="resume_rejected"):
    """The `baton_resume` of the request is malformed, or no proxy of this cluster
    signed it.
    """


class RemoteKVError(
    BatonError,
    status=502,
    retryable=True,
    phase="transfer",
    type="remote_kv_error",
    code="remote_kv_error",
):
    """The KV of another server could not be used."""


class PeerUnreachable(RemoteKVError, phase="handshake", code="peer_unreachable"):
    """The peer's side channel does not answer or refuses a handshake, or NIXL cannot
    connect to the peer.
    """


class PeerIncompatible(
    RemoteKVError, retryable=False, phase="handshake", code="peer_incompatible"
):
    """This engine cannot use the peer's KV, or the peer's metadata or a reference to
    its KV is invalid. The message names the field or option at fault.
    """


class LeaseGone(RemoteKVError, phase="fence", code="lease_gone"):
    """The lease ended before the pull was complete, or the lender does not know the
    lease. The pulled bytes are not used.
    """


class TransferFailed(RemoteKVError, code="transfer_failed"):
    """Remote KV could not be read, or its digest could not be computed."""


class KVCorrupt(RemoteKVError, code="kv_corrupt"):
    """Pulled KV differs from the lender's KV. The message names the affected tokens and
    heads.
    """


class PullCircuitOpen(RemoteKVError, code="pull_withheld"):
    """This pull was not attempted, or was given up, because earlier pulls failed, READs
    hang, or no KV blocks become free.
    """


class PullTimeout(RemoteKVError, status=504, code="pull_timeout"):
    """A pull did not finish in time."""


class ServiceError(
    BatonError,
    status=503,
    retryable=True,
    phase="routing",
    type="service_unavailable",
    code="service_unavailable",
):
    """The deployment is at fault, not the request."""


class NoServerAvailable(ServiceError, code="no_server_available"):
    """No server can take the request at present, for example because this server is
    starting or shutting down.
    """


class Overloaded(ServiceError, phase="admission", code="overloaded"):
    """A server lacks the capacity that the request needs, such as KV blocks."""


class ResumeRefused(ServiceError, phase="resume", code="resume_refused"):
    """This server cannot continue the stream exactly as the previous server would have
    continued it.

    A different server may be able to continue the stream.
    """


class DeadlineExceeded(
    ServiceError, status=504, phase="deadline", code="deadline_exceeded"
):
    """The request took longer than its client or the operator allows."""


class EngineDied(ServiceError, phase="engine", code="engine_died"):
    """The engine did not start, has failed, or has ended."""


class InternalError(
    ServiceError,
    status=500,
    retryable=False,
    phase="internal",
    type="server_error",
    code="internal_error",
):
    """An unexpected failure, such as a bug in Baton."""


# Maximum `Retry-After` of a QueueFull, in seconds. Predictions of longer waits are
# unreliable, and one retry per minute is cheap.
MAX_RETRY_AFTER_S = 60


class QueueFull(RateLimited, phase="admission"):
    """A queue is full, or a limit on the requests in progress is reached.

    Args:
        retry_after_s: Predicted time until a retry may succeed, in seconds. The header
            `retry-after` has this time, rounded up, but at least 1 and at most
            MAX_RETRY_AFTER_S.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        wait_s = max(1, math.ceil(min(retry_after_s, MAX_RETRY_AFTER_S)))
        super().__init__(message, headers={"retry-after": str(wait_s)})


class GrammarQueueFull(QueueFull, phase="grammar"):
    """Too many requests wait for the trial of a new grammar, or prompts with too many
    tokens wait for their grammars.
    """


def from_code(code: str, message: str, param: str | None = None) -> BatonError:
    """Returns the error that another process sent as a code, a message and a param.

    If several classes have the code, the first one is used. An unknown code becomes an
    InternalError.
    """
    return _CLASS_BY_CODE.get(code, InternalError)(message, param=param)
