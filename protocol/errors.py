"""Every error a client or a peer can see, as one tree; proxy/errors.py has the proxy's own."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

_BY_CODE: dict[str, type["BatonError"]] = {}  # the most general of each code


class BatonError(Exception):
    """An error with an HTTP status, whether a retry elsewhere can help, and the phase it arose in.

    Args:
        message: a sentence for the client that names the field, the value and the fix.
        param: the request field at fault, where there is one.
        headers: of the answer, beside those of every answer.
    """

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    phase: ClassVar[str] = "internal"
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, **own: Any) -> None:
        super().__init_subclass__()
        for name, value in own.items():
            setattr(cls, name, value)
        _BY_CODE.setdefault(cls.code, cls)

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
        """The error object of OpenAI's API, with our phase and retryable flag beside it."""
        names = ("message", "type", "param", "code", "phase", "retryable")
        return {"error": {name: getattr(self, name) for name in names}}


# fmt: off
class RequestError(  # the client's fault, never retried
    BatonError, status=400, phase="request", type="invalid_request_error", code="invalid_request"
): ...
class InvalidRequest(RequestError): ...  # names the field
class ContextLengthExceeded(RequestError, code="context_length_exceeded"): ...  # both lengths
class GrammarFailed(RequestError, phase="engine", code="grammar_failed"): ...  # nothing can match
class Unauthorized(  # no API key, or an unknown one
    RequestError, status=401, phase="access", code="invalid_api_key"
): ...
class Forbidden(  # a key that may do other things
    RequestError, status=403, phase="access", type="permission_error",
    code="insufficient_permissions",
): ...
class RateLimited(  # beyond what the key may use; `retry-after` says when it may again
    RequestError, status=429, retryable=True, phase="access", type="rate_limit_error",
    code="rate_limit_exceeded",
): ...
class ModelNotFound(RequestError, status=404, code="model_not_found"): ...
class RequestTimeout(RequestError, status=408, retryable=True, code="request_timeout"): ...  # body
class PayloadTooLarge(RequestError, status=413, code="payload_too_large"): ...
class TargetTooLong(RequestError, status=414, code="target_too_long"): ...
class UnsupportedMediaType(RequestError, status=415, code="unsupported_media_type"): ...
class ClientTooSlow(RequestError, status=408, retryable=True, code="client_too_slow"): ...  # reads
class KVParamsRejected(  # that cannot be honoured
    RequestError, phase="kv_params", code="kv_transfer_params_rejected"
): ...
class ResumeRejected(RequestError, phase="resume", code="resume_rejected"): ...  # no proxy's


class RemoteKVError(  # the KV of a prefill server could not be used
    BatonError, status=502, retryable=True, phase="transfer", type="remote_kv_error",
    code="remote_kv_error",
): ...
class PeerUnreachable(RemoteKVError, phase="handshake", code="peer_unreachable"): ...
class PeerIncompatible(  # names the field and both values
    RemoteKVError, retryable=False, phase="handshake", code="peer_incompatible"
): ...
class LeaseGone(RemoteKVError, phase="fence", code="lease_gone"): ...
class TransferFailed(RemoteKVError, code="transfer_failed"): ...
class KVCorrupt(RemoteKVError, code="kv_corrupt"): ...  # not what the lender holds; names where
class PullCircuitOpen(RemoteKVError, code="pull_withheld"): ...  # not tried
class PullTimeout(RemoteKVError, status=504, code="pull_timeout"): ...


class ServiceError(  # this deployment's fault
    BatonError, status=503, retryable=True, phase="routing", type="service_unavailable",
    code="service_unavailable",
): ...
class NoServerAvailable(ServiceError, code="no_server_available"): ...
class Overloaded(ServiceError, phase="admission", code="overloaded"): ...
class ResumeRefused(  # other servers may do it: the tokens would not be proven the same here
    ServiceError, phase="resume", code="resume_refused"
): ...
class DeadlineExceeded(ServiceError, status=504, phase="deadline", code="deadline_exceeded"): ...
class EngineDied(ServiceError, phase="engine", code="engine_died"): ...
class InternalError(
    ServiceError, status=500, retryable=False, phase="internal", type="server_error",
    code="internal_error",
): ...
# fmt: on


# Longest `Retry-After` of a full queue, in seconds. Longer waits are predicted from a rate that may
# be another one by then, and a request a minute costs a server nothing.
MAX_RETRY_AFTER_S = 60


class QueueFull(RateLimited, phase="admission"):
    """Too much waits already. The queue should be short enough after `retry_after_s` seconds, of
    which the client is told 1 to MAX_RETRY_AFTER_S."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        wait_s = max(1, math.ceil(min(retry_after_s, MAX_RETRY_AFTER_S)))
        super().__init__(message, headers={"retry-after": str(wait_s)})


class GrammarQueueFull(QueueFull, phase="grammar"):
    """Too many schemas and grammars wait for their trial. Requests without a new one are served."""


def from_code(code: str, message: str, param: str | None = None) -> BatonError:
    """Rebuilds an error that crossed a process boundary; an unknown code is an InternalError."""
    return _BY_CODE.get(code, InternalError)(message, param=param)
