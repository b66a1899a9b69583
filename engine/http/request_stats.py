"""What one request leaves behind: its metrics and one closing log line."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

from protocol.errors import BatonError, InvalidRequest, RequestError
from protocol.http.access import grant_of, share_of
from protocol.http.bodies import ClientDisconnected
from protocol.metrics import Metrics
from protocol.openai.responses import Usage, kv_header
from protocol.process.logging import current_request_id, get_logger
from protocol.server_stats import MAX_ID_CHARS, FinishedRequest, PhaseTimes, ServerStats
from protocol.short_repr import short_repr

log = get_logger(__name__)

_OUTCOMES = ("stop", "length", "tool_calls", "abort", "rejected", "error", "moved")
MAX_RECENT = 256
_TOLD_OF_ENGINE = (  # what the names begin with
    "baton_requests_",
    "baton_kv_blocks{",
    "baton_kv_transfer_bytes",
    "baton_engine_",
)
_TOLD = (
    "baton_requests_in_progress",
    "baton_generation_tokens",
    "baton_cached_prompt_tokens",
    "baton_kv_tokens",
    "baton_inter_token_seconds",
)


class ServerMetrics(Metrics):
    """The metrics of a server's HTTP process, and its last MAX_RECENT requests that have ended. It
    exposes at once what requests will add to: a rate does not see the event with which a series
    appears."""

    def __init__(self, endpoints: Iterable[str]) -> None:
        super().__init__("server")
        self._recent: deque[FinishedRequest] = deque(maxlen=MAX_RECENT)
        self.num_ended = 0
        for endpoint, outcome in product(endpoints, _OUTCOMES):
            self.begin("baton_requests", endpoint=endpoint, outcome=outcome)
        for source in Usage().baton_kv():
            self.begin("baton_kv_tokens", source=source)

    def ended(self, served: FinishedRequest) -> None:
        self._recent.append(served)
        self.num_ended += 1

    def numbers(
        self, since: str, server: dict[str, Any], engine_values: dict[str, float]
    ) -> ServerStats:
        """What GET /stats answers: of the requests those from the number `since` on, or all where
        that has not been reached yet, as it was an earlier start's. Raises InvalidRequest."""
        if not since.isdecimal():
            told = f"since is {short_repr(since)}: give the `next` of the answer before, or 0"
            raise InvalidRequest(told, param="since")
        number = int(since[:18])
        start = 0 if number > self.num_ended else number
        served = [one for one in self._recent if one.number >= start]
        kept = {
            key: n
            for key, n in engine_values.items()
            if key.startswith(_TOLD_OF_ENGINE)
        }
        return ServerStats(server, kept | self.values(*_TOLD), served, self.num_ended)


class RequestStats:
    """One request's metrics and its closing log line, which names the key of its ASGI `scope`."""

    def __init__(
        self, metrics: ServerMetrics, endpoint: str, scope: Mapping[str, Any]
    ) -> None:
        self._metrics = metrics
        self._key = grant_of(scope).name
        self.share = share_of(scope)  # see AddRequest
        self._endpoint = endpoint
        self._start_s = time.monotonic()
        self._times: dict[str, float] = {}  # as of FinishedRequest
        self._last_s: float | None = None  # when tokens came last
        self._num_prompt_tokens = self._num_generated = 0
        self._has_ended = False
        self._at_end: list[Callable[[], None]] = []
        metrics.inc("baton_requests_in_progress")

    def accepted(self, num_prompt_tokens: int) -> None:
        self._times["accepted"] = time.monotonic() - self._start_s
        self._num_prompt_tokens = num_prompt_tokens
        self._metrics.inc("baton_prompt_tokens", num_prompt_tokens)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls it once, when the request has ended in whatever way."""
        self._at_end.append(callback)

    def tokens(self, count: int) -> None:
        now = time.monotonic()
        self._num_generated += count
        self._metrics.inc("baton_generation_tokens", count)
        if self._last_s is None:
            self._times["first"] = first_s = now - self._start_s
            self._metrics.observe("baton_time_to_first_token_seconds", first_s)
        else:
            self._metrics.observe("baton_inter_token_seconds", now - self._last_s)
        self._last_s = now

    def finished(
        self, usage: Usage, finish_reason: str, times: PhaseTimes | None = None
    ) -> None:
        detail = f"generated={usage.completion_tokens} kv={kv_header(usage)}"
        self._end(finish_reason, detail, times, usage)

    def moved(self) -> None:
        """Another server goes on."""
        self._end("moved", "another server goes on")

    def close(self, error: BaseException) -> None:
        """The request ended in any other way; does nothing once it is finished."""
        if isinstance(error, BatonError):
            outcome = "rejected" if isinstance(error, RequestError) else "error"
            # What is wrong with a request is said in its own words, which are not for the log.
            told = (
                (error.param or "body")
                if type(error) is InvalidRequest
                else error.message
            )
            detail = f"status={error.status} error={error.code}: {told}"
            self._end(outcome, detail, error=error.code)
        elif isinstance(error, ClientDisconnected | asyncio.CancelledError):
            self._end("abort", "the client has gone")
        else:
            self._end("error", f"error={error!r}")

    def _end(
        self,
        outcome: str,
        detail: str,
        times: PhaseTimes | None = None,
        usage: Usage | None = None,
        error: str | None = None,
    ) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        for callback in self._at_end:
            callback()
        kv = usage.baton_kv() if usage else {}
        for source, count in kv.items():
            self._metrics.inc("baton_kv_tokens", count, source=source)
        self._metrics.inc(
            "baton_cached_prompt_tokens", usage.kv.cached_tokens if usage else 0
        )
        seconds = time.monotonic() - self._start_s
        self._metrics.inc("baton_requests_in_progress", -1)
        self._metrics.inc("baton_requests", endpoint=self._endpoint, outcome=outcome)
        if self._last_s is not None:
            self._metrics.observe("baton_request_seconds", seconds)
        first_s = self._times.get("first")
        first = "-" if first_s is None else f"{first_s * 1000:.1f}"
        told = f"prompt={self._num_prompt_tokens} first_ms={first} total_ms={seconds * 1000:.1f}"
        log.info("%s %s key=%s %s %s", self._endpoint, outcome, self._key, told, detail)
        known = {
            name: round(at, 6) for name, at in (self._times | {"end": seconds}).items()
        }
        self._metrics.ended(
            FinishedRequest(
                number=self._metrics.num_ended,
                id=(current_request_id() or "")[:MAX_ID_CHARS],
                endpoint=self._endpoint,
                outcome=outcome,
                error=error,
                times=known | (times.since(self._start_s) if times else {}),
                prompt_tokens=self._num_prompt_tokens,
                generated=self._num_generated,
                kv=kv,
            )
        )
