"""What the proxy itself has to say to a client, beside protocol.errors."""

from collections.abc import Sequence

from protocol.errors import GrammarQueueFull, QueueFull, RequestError, ServiceError
from protocol.near_names import suggestion

BASE_PATH = "/v1"  # what clients are configured with


# fmt: off
class DecodeServerLost(  # it ended the connection before its answer was whole
    ServiceError, status=502, phase="decode", code="decode_server_lost"
): ...
class DecodeServerTimeout(  # it was silent for longer than --read-timeout-s
    ServiceError, status=504, phase="decode", code="decode_server_timeout"
): ...
class ShuttingDown(ServiceError, phase="shutdown", code="shutting_down"): ...  # this proxy
class UnknownServer(RequestError, status=404, code="unknown_server"): ...  # to an operator
class RegistrationRefused(  # of a server; says why, and what to do
    RequestError, status=403, phase="registration", code="registration_refused"
): ...
# fmt: on


class UnknownPath(RequestError, status=404, code="unknown_path"):
    def __init__(self, method: str, path: str, known: Sequence[str]) -> None:
        if path.rstrip("/") == BASE_PATH:
            super().__init__(
                f"{BASE_PATH} is the base URL for clients of OpenAI's API and has no content of "
                f"its own; GET {BASE_PATH}/models lists the models, GET /docs all paths"
            )
            return
        near = suggestion(path[:80].rstrip("/"), known)
        super().__init__(
            f"no such path: {method} {path}{near}; GET /docs lists all paths"
        )


class MethodNotAllowed(RequestError, status=405, code="method_not_allowed"):
    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        told = f"method {method} is not allowed here; use {allowed[0]}"
        super().__init__(told, headers={"allow": ", ".join(allowed)})


def queues_full(
    kind: str, retry_after_s: float, *, is_of_grammars: bool = False
) -> QueueFull:
    """The error where every server of a kind, "prefill" or "decode", has refused a request: for its
    queue, or for its trial queue of new schemas and grammars."""
    if is_of_grammars:
        return GrammarQueueFull(
            f"every {kind} server has a full trial queue for new schemas and grammars; try again "
            "later, or send schemas that were accepted before",
            retry_after_s,
        )
    return QueueFull(
        f"every {kind} server has a full queue; try again later", retry_after_s
    )
