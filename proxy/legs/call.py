"""One leg of a request: what is sent to a server, and the server's answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocol.http.deadlines import Deadline
from proxy.membership import Kind, Pool, Server
from proxy.placement.assignment import Assignment
from proxy.placement.request_profile import RequestProfile
from proxy.request_trace import Attempt
from proxy.upstream import Failure, Headers, Response

# How many servers may receive a request and fail to answer, if it cannot fail over.
MAX_DELIVERIES = 2


def _ignore_end() -> None:
    pass


def _ignore_server(server: Server) -> None:
    pass


@dataclass(frozen=True)
class UpstreamCall:
    """One leg: the request to send, and the servers that may receive the request.

    Attributes:
        pool: the servers that may be chosen.
        kind: the kind of server that receives the leg.
        profile: the request's prompt, for placement; None if there is no prompt.
        min_read_status: a response with this status or above, or with 429, is read
            completely. Any other response is left open, to be relayed.
        transfer_id: id by which the proxy cancels a prefill, or releases its KV, if the
            leg's answer is lost; None for other legs.
        computes: the server computes the prompt.
        foreign_body: returns the body for a server that speaks vLLM's dialect; None if
            such a server gets `body`, too.
        deadline: deadline of the whole request; Baton servers receive the time left.
        priority: smaller is more urgent.
        baton_headers: headers that only Baton servers receive.
        max_deliveries: how many servers may receive the request and fail to answer.
        can_fail_over: another server can take over the request at any time. So the
            proxy gives up a silent server early.
        is_admitted: a server has admitted the request before, so the proxy no longer
            refuses the request because of full queues.
        last_resort: the server that gets the request if no other server is ready, even
            if the last resort itself is not ready.
        reservation: the load that was reserved for this request, if any.
        on_server_chosen: called with each server before the request is sent to it.
    """

    kind: Kind
    method: str
    path: str
    headers: Headers
    body: bytes
    pool: Pool
    profile: RequestProfile | None
    min_read_status: int = 500
    transfer_id: str | None = None
    computes: bool = False
    foreign_body: Callable[[], bytes] | None = None
    deadline: Deadline | None = None
    priority: int = 0
    baton_headers: Headers = ()
    max_deliveries: int = MAX_DELIVERIES
    can_fail_over: bool = False
    is_admitted: bool = False
    last_resort: Server | None = None
    reservation: Assignment | None = None
    on_server_chosen: Callable[[Server], None] = _ignore_server

    def below(self, attempt: Attempt) -> "UpstreamCall":
        """Return the call with the attempt's span as parent of the server's spans."""
        if attempt.context is None:
            return self
        return replace(self, headers=[*self.headers, *attempt.context.headers()])

    def untried_last_resort(self, tried: Sequence[Server]) -> Server | None:
        """Return the last resort; None if there is none or it is in `tried`."""
        return None if self.last_resort in tried else self.last_resort


class LegFailed(Exception):
    """No server could serve a leg. The message may be sent to clients.

    Attributes:
        failure: the failure of the last server, if any was tried.
        response: the error response of the last server, if there is one.
    """

    def __init__(
        self, message: str, failure: Failure | None, response: Response | None
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.response = response


@dataclass
class Leg:
    """A server's response to one leg.

    Attributes:
        assignment: the leg's share of the server's load.
        is_open: the response has not been read to its end.
        end_attempt: records the end of the leg.
    """

    server: Server
    response: Response
    assignment: Assignment | None
    is_open: bool = True
    end_attempt: Callable[[], None] = _ignore_end
