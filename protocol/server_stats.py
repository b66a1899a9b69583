"""The response of a server to GET /stats, which the proxy's page displays.

The response contains metric values and the times of the most recent requests, but no
texts and no token ids.
"""

from typing import Any

import msgspec

STATS_PATH = "/stats"
MAX_ID_CHARS = 128


class PhaseTimes(msgspec.Struct, omit_defaults=True):
    """The times at which the phases of a request ended in the engine.

    A time is None until its phase has ended. The unit is seconds of the machine's
    monotonic clock, which all processes of a server share.
    """

    admitted: float | None = None  # the request got its KV blocks
    # The last byte of a pull arrived. The lender must still confirm the lease (Complete
    # in protocol/handshake.py).
    read: float | None = None
    pulled: float | None = None  # the lender confirmed the lease, or the pull failed
    # The first token was sampled on this server: the KV of the prompt is complete.
    drawn: float | None = None

    def since(self, start_s: float) -> dict[str, float]:
        """Returns the times of the phases that have ended, in seconds after
        `start_s`.
        """
        times = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {
            name: round(time_s - start_s, 6)
            for name, time_s in times
            if time_s is not None
        }


class FinishedRequest(msgspec.Struct, frozen=True):
    """A request that this server has finished.

    Attributes:
        number: Sequence number of the request on this server, in order of completion.
        id: The first MAX_ID_CHARS characters of the X-Request-Id.
        outcome: The value of the label `outcome` in the metric baton_requests.
        error: The error code of a failed request, else None.
        times: Seconds since the server received the request. The keys are the fields of
            PhaseTimes (for the first prompt), `accepted` (tokenized and sent to the
            engine), `first` (the first token was sent to the client) and `end`.
        generated: Number of generated tokens.
        kv: Number of prompt tokens by the source of their KV; see KVUsage in
            protocol/messages.py.
    """

    number: int
    id: str
    endpoint: str
    outcome: str
    error: str | None
    times: dict[str, float]
    prompt_tokens: int
    generated: int
    kv: dict[str, int]


class ServerStats(msgspec.Struct, frozen=True):
    """The response to GET /stats.

    Attributes:
        server: The response to GET /ready.
        values: Metric values. The keys are those of stat_key in protocol/metrics.py,
            but counters that the HTTP process counts have the suffix `_total`.
        served: The most recently finished requests, the oldest first.
        next: The sequence number that the next finished request will have.
    """

    server: dict[str, Any]
    values: dict[str, float]
    served: list[FinishedRequest]
    next: int
