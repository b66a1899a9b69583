"""What the proxy itself has to say to a client, beside protocol.errors.

ServiceError
|- DecodeServerLost     502: it ended the connection before its answer was whole
|- DecodeServerTimeout  504: it was silent for longer than --read-timeout-s
`- ShuttingDown         503: this proxy is ending
"""

from collections.abc import Sequence

from protocol.errors import RequestError, ServiceError


class DecodeServerLost(ServiceError):
    status = 502
    phase = "decode"
    code = "decode_server_lost"


class DecodeServerTimeout(ServiceError):
    status = 504
    phase = "decode"
    code = "decode_server_timeout"


class ShuttingDown(ServiceError):
    phase = "shutdown"
    code = "shutting_down"


class UnknownPath(RequestError):
    status = 404
    code = "unknown_path"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        super().__init__(f"method {method} is not allowed here; use {allowed[0]}")
        self.allowed = allowed
