"""What the proxy itself has to say to a client, beside protocol.errors."""

from collections.abc import Sequence

from protocol.errors import RequestError, ServiceError


# fmt: off
class DecodeServerLost(  # it ended the connection before its answer was whole
    ServiceError, status=502, phase="decode", code="decode_server_lost"
): ...
class DecodeServerTimeout(  # it was silent for longer than --read-timeout-s
    ServiceError, status=504, phase="decode", code="decode_server_timeout"
): ...
class ShuttingDown(ServiceError, phase="shutdown", code="shutting_down"): ...  # this proxy
class UnknownPath(RequestError, status=404, code="unknown_path"): ...
# fmt: on


class MethodNotAllowed(RequestError, status=405, code="method_not_allowed"):
    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        told = f"method {method} is not allowed here; use {allowed[0]}"
        super().__init__(told, headers={"allow": ", ".join(allowed)})
