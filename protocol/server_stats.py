"""The response of a server to GET /stats, which the proxy's page displays.

The response contains the response to GET /ready, metric values and reports of the most
recent requests, but no texts and no token ids.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

STATS_PATH = "/stats"
MAX_ID_CHARS = 128
# Response header with a RequestReport as JSON. A stream in frames has a frame with the
# report instead (protocol/resume.py), because its headers are sent first.
REPORT_HEADER = "x-baton-report"
PHASES = ("queue", "transfer", "fence", "prefill", "decode")


class PhaseTimes(msgspec.Struct, omit_defaults=True):
    """The times of the events of a request in the engine.

    A time is None until its event. The unit is seconds of the machine's monotonic
    clock, which all processes of a server share.
    """

    # The request began to wait for KV blocks. If the request pulls KV, the lender had
    # already granted the lease.
    queued: float | None = None
    admitted: float | None = None  # the request got its KV blocks
    # The last byte of a pull arrived. The lender must still confirm the lease (Complete
    # in protocol/handshake.py).
    read: float | None = None
    pulled: float | None = None  # the lender confirmed the lease, or the pull failed
    # The first token was sampled on this server: the KV of the prompt is complete.
    drawn: float | None = None

    def since(self, start_s: float) -> dict[str, float]:
        """Returns the times of the events so far, in seconds after `start_s`."""
        times = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {
            name: round(time_s - start_s, 6)
            for name, time_s in times
            if time_s is not None
        }


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """A server's summary of a request that has ended.

    Attributes:
        endpoint: The value of the label `endpoint` in the metric baton_requests.
        outcome: The value of the label `outcome` in the same metric.
        error: The code of the BatonError that ended the request, else None.
        times: Seconds since the server received the request. The keys are those of the
            following events that occurred: the fields of PhaseTimes (for the first
            prompt), `accepted` (tokenized and sent to the engine), `first` (the engine
            sent the first token) and `end`.
        generated: Number of generated tokens.
        cached_tokens: Number of prompt tokens whose KV neither this server nor the
            prefill server computed. 0 unless the response is complete.
        kv: Number of prompt tokens by the source of their KV; see KVUsage in
            protocol/messages.py. Empty unless the response is complete.
    """

    endpoint: str
    outcome: str
    error: str | None
    times: dict[str, float]
    prompt_tokens: int
    generated: int
    cached_tokens: int = 0
    kv: dict[str, int]

    def encode(self) -> bytes:
        """Returns the report as JSON, without the fields that subclasses add."""
        names = RequestReport.__struct_fields__
        return msgspec.json.encode({name: getattr(self, name) for name in names})

    def phases(self) -> dict[str, tuple[float, float]]:
        """Returns the start and the end of each phase that the request went through.

        The times are seconds since the server received the request. The phases are, in
        order: queue, transfer (reading KV), fence (confirming the lease), prefill
        (computing the prompt on this server) and decode.
        """
        times = self.times
        phases: dict[str, tuple[float, float]] = {}

        def add(name: str, start: float | None, end: float | None) -> None:
            if start is not None and end is not None:
                phases[name] = (start, max(start, end))

        pulled = times.get("pulled")
        add("queue", times.get("queued"), times.get("admitted"))
        add("transfer", times.get("admitted"), times.get("read"))
        add("fence", times.get("read"), pulled)
        if self.kv.get("recomputed"):
            # A pull may have failed before the request was admitted.
            began = [
                time for time in (pulled, times.get("admitted")) if time is not None
            ]
            add("prefill", max(began, default=None), times.get("drawn"))
        first = times.get("first")
        if first is not None and self.generated > 1:
            # The first token from a prefill server may arrive before the KV.
            add("decode", max(first, pulled or 0.0), times.get("end"))
        return phases


class FinishedRequest(RequestReport, frozen=True, kw_only=True):
    """A request that this server has finished.

    Attributes:
        number: Sequence number of the request on this server, in order of completion.
        id: The first MAX_ID_CHARS characters of the X-Request-Id.
    """

    number: int
    id: str


def phases_text(phases: Mapping[str, tuple[float, float]]) -> str:
    """Returns the durations of all phases for a log line; "-" for a missing phase."""
    parts = []
    for name in PHASES:
        start_end = phases.get(name)
        duration = "-"
        if start_end is not None:
            duration = f"{(start_end[1] - start_end[0]) * 1000:.1f}"
        parts.append(f"{name}_ms={duration}")
    return " ".join(parts)


class ServerStats(msgspec.Struct, frozen=True):
    """The response to GET /stats.

    Attributes:
        server: The response to GET /ready.
        values: Metric values by the keys of stat_key in protocol/metrics.py. The names
            of the HTTP process's own counters end in `_total`.
        served: The most recently finished requests, the oldest first.
        next: The sequence number that the next finished request will have.
    """

    server: dict[str, Any]
    values: dict[str, float]
    served: list[FinishedRequest]
    next: int
