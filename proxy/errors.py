"""The proxy's own errors for clients, in addition to protocol.errors."""

from collections.abc import Sequence

from protocol.errors import GrammarQueueFull, QueueFull, RequestError, ServiceError
from protocol.settings.near_names import suggestion

BASE_PATH = "/v1"  # path of the base URL that OpenAI clients are configured with


class DecodeServerLost(
    ServiceError, status=502, phase="decode", code="decode_server_lost"
):
    """A server's answer broke off, and no other server continues the answer."""


class DecodeServerTimeout(
    ServiceError, status=504, phase="decode", code="decode_server_timeout"
):
    """A server did not begin or continue its answer within --read-timeout-s."""


class ShuttingDown(ServiceError, phase="shutdown", code="shutting_down"):
    """This proxy is shutting down."""


class UnknownServer(RequestError, status=404, code="unknown_server"):
    """An operator named a server that is not a member."""


class RegistrationRefused(
    RequestError, status=403, phase="registration", code="registration_refused"
):
    """A server's registration was refused; the message says why and how to fix it."""


class UnknownPath(RequestError, status=404, code="unknown_path"):
    """The proxy has no such path."""

    def __init__(self, method: str, path: str, paths: Sequence[str]) -> None:
        if path.rstrip("/") == BASE_PATH:
            super().__init__(
                f"{BASE_PATH} is the base URL for clients of OpenAI's API and has no "
                f"content of its own; GET {BASE_PATH}/models lists the models, GET "
                "/docs all paths"
            )
            return
        near = suggestion(path[:80].rstrip("/"), paths)
        super().__init__(
            f"no such path: {method} {path}{near}; GET /docs lists all paths"
        )


class MethodNotAllowed(RequestError, status=405, code="method_not_allowed"):
    """The path exists, but not for this method."""

    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        super().__init__(
            f"method {method} is not allowed here; use {allowed[0]}",
            headers={"allow": ", ".join(allowed)},
        )


def queues_full(
    kind: str, retry_after_s: float, *, is_grammar_queue: bool = False
) -> QueueFull:
    """Return the error that reports a full queue at every server of a kind.

    Args:
        kind: "prefill" or "decode".
        is_grammar_queue: the full queues are those for the trial compilation of new
            schemas and grammars, not the request queues.
    """
    if is_grammar_queue:
        return GrammarQueueFull(
            f"every {kind} server has a full trial queue for new schemas and grammars; "
            "try again later, or send schemas that were accepted before",
            retry_after_s,
        )
    return QueueFull(
        f"every {kind} server has a full queue; try again later", retry_after_s
    )
