"""One leg of a request: servers are tried until one answers, and what happened is remembered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from protocol.errors import BatonError, NoServerAvailable
from protocol.metrics import Metrics
from protocol.process.logging import get_logger
from proxy import retry
from proxy.body import error_code
from proxy.errors import DecodeServerLost, DecodeServerTimeout
from proxy.membership import Fleet, Server
from proxy.retry import Failure, Kind, RetryPolicy
from proxy.upstream import (
    Exhausted,
    Headers,
    Lost,
    Response,
    TimedOut,
    Unreachable,
    UpstreamError,
)

logger = get_logger(__name__)


@dataclass
class RequestTrace:
    """What became of a request: for its log line and the metrics."""

    prefill: str = "-"  # URL of the server that answered
    decode: str = "-"
    decode_only: str = "-"  # why no prefill server was used
    rotation: str = "pair"  # one of a few words; see Fleet.choose
    phase: str = "body"  # "prefill" or "decode" from the time on that leg begins
    started_at: float = field(default_factory=time.monotonic)
    prefill_s: float | None = None
    first_byte_s: float | None = None

    def begin(self) -> None:
        """The request is read; its time runs from here."""
        self.started_at = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def on_bytes(self) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = self.elapsed_s()


@dataclass(frozen=True)
class Answer:
    """A whole response of a server."""

    status: int
    headers: Headers
    body: bytes


ResultT = TypeVar("ResultT", Answer, Answer | Response)
WorkT = TypeVar("WorkT")


class LegFailed(Exception):
    """No server of a kind did the work.

    Args:
        message: for the client, without addresses.
        answer: the error response of the last one, if any.
    """

    def __init__(
        self, kind: Kind, failures: list[Failure], message: str, answer: Answer | None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.failures = failures
        self.answer = answer

    @property
    def reason(self) -> str:
        """One word for metrics."""
        return self.failures[-1].value if self.failures else f"no_{self.kind.value}_server"

    def to_error(self) -> BatonError:
        """What a client is told when it was the decode leg."""
        match self.failures[-1] if self.failures else None:
            case Failure.LOST:
                return DecodeServerLost(f"the decode server was lost: {self}")
            case Failure.TIMEOUT:
                return DecodeServerTimeout(f"the decode server did not answer: {self}")
            case _:
                return NoServerAvailable(f"no decode server could be had: {self}")


class UpstreamCall:
    """Sends legs to the fleet's servers and tells the fleet how they did."""

    def __init__(self, fleet: Fleet, metrics: Metrics, policy: RetryPolicy) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._policy = policy
        self._patience: dict[Server, set[asyncio.Timeout]] = {}  # of whom it keeps waiting

    async def run(
        self,
        kind: Kind,
        send: Callable[[Server], Awaitable[ResultT]],
        trace: RequestTrace,
        unfit: Sequence[Server] = (),
    ) -> tuple[Server, ResultT]:
        """The first answer that is not a server's failure, and whose it is: `release` that.

        Args:
            unfit: servers that cannot do this; asked only where no other is ready.

        Raises:
            LegFailed: no server is ready, or those that may be tried failed.
        """
        trace.phase = kind.value
        tried: list[Server] = []
        failures: list[Failure] = []
        message, answer = f"no {kind.value} server is ready", None
        if self._fleet.num_ready(kind, unfit) == 0:
            unfit = ()
        choose = self._fleet.choose
        while (server := choose(kind, [*unfit, *tried], trace.rotation)) is not None:
            if tried:
                self._metrics.inc("baton_proxy_retries", leg=kind.value)
            tried.append(server)
            try:
                result = await self._attempt(server, send)
            except UpstreamError as error:
                failure, answer, detail = failure_of(error), None, str(error)
                has_address = isinstance(error, Unreachable | Exhausted)
                message = f"{server.name}: {error.reason if has_address else detail}"
            else:
                status_failure = _failure_of_answer(result)
                if status_failure is None:
                    return server, result
                self.release(server)
                assert isinstance(result, Answer)
                failure, answer, detail = status_failure, result, str(result.status)
                message = f"{server.name}: {detail}"
            failures.append(failure)
            self.failed(server, failure, answer, f"{server}: {detail}")
            if not retry.may_retry(kind, failures, self._policy):
                break
        raise LegFailed(kind, failures, message, answer)

    async def _attempt(
        self, server: Server, send: Callable[[Server], Awaitable[ResultT]]
    ) -> ResultT:
        self._in_flight(server, +1)
        try:
            return await self.unless_given_up(server, send(server))
        except BaseException:
            self.release(server)
            raise

    async def unless_given_up(self, server: Server, work: Awaitable[WorkT]) -> WorkT:
        """What the server is waited for. Raises Lost once it is given up."""
        waiting = self._patience.setdefault(server, set())
        try:
            async with asyncio.timeout(None) as patience:
                waiting.add(patience)
                try:
                    return await work
                finally:
                    waiting.discard(patience)
        except TimeoutError:
            raise Lost("silent, to health checks as well") from None

    def give_up(self, server: Server) -> None:
        """The server does not even answer health checks: nothing waits for it any longer."""
        for patience in self._patience.pop(server, ()):
            patience.reschedule(asyncio.get_running_loop().time())

    def release(self, server: Server) -> None:
        """The server has nothing more to do for this leg."""
        self._in_flight(server, -1)

    def _in_flight(self, server: Server, change: int) -> None:
        self._metrics.inc("baton_proxy_upstream_in_flight", change, **server.labels)

    def failed(self, server: Server, failure: Failure, answer: Answer | None, message: str) -> None:
        """Counts a failure and lets the fleet know."""
        self._metrics.inc(
            "baton_proxy_upstream_failures", leg=server.kind.value, reason=failure.value
        )
        logger.warning("%s leg: %s: %s", server.kind.value, failure.value, message)
        if failure in (Failure.UNREACHABLE, Failure.LOST, Failure.DIED):
            self._fleet.unreachable(server, message)
        elif retry.trips_breaker(failure, answer.status if answer else None):
            self._fleet.failed(server)

    def succeeded(self, server: Server) -> None:
        self._fleet.succeeded(server)


async def read(response: Response) -> Answer:
    """The whole response. Raises UpstreamError when it breaks off."""
    return Answer(response.status, response.headers, await response.read())


def _failure_of_answer(answer: Answer | Response) -> Failure | None:
    code = error_code(answer.body) if isinstance(answer, Answer) and answer.status == 503 else ""
    return retry.failure_of_status(answer.status, code)


def failure_of(error: UpstreamError) -> Failure:
    match error:
        case Unreachable():
            return Failure.UNREACHABLE
        case TimedOut():
            return Failure.TIMEOUT
        case Exhausted():
            return Failure.BUSY  # not begun, and the server is well
        case _:
            return Failure.LOST
