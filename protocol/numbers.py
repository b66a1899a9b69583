"""What a server tells of its work at GET /stats, to the proxy's page: numbers and the times of its
last requests. No texts, no token ids."""

from typing import Any

import msgspec

STATS_PATH = "/stats"
MAX_ID_CHARS = 128


class PhaseTimes(msgspec.Struct, omit_defaults=True):
    """When a request's phases ended in the engine, each None until then: seconds of the machine's
    monotonic clock, which all of a server's processes share."""

    admitted: float | None = None  # it has its blocks: it waited for them until now
    read: float | None = None  # a pull's last byte is here; the fence is asked
    pulled: float | None = None  # the fence is passed, or the pull has failed
    drawn: float | None = (
        None  # the first token was drawn here: its prompt's KV is complete
    )

    def since(self, start_s: float) -> dict[str, float]:
        """Those that are known, in seconds from `start_s` on."""
        known = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: round(at - start_s, 6) for name, at in known if at is not None}


class Served(msgspec.Struct, frozen=True):
    """A request that has ended at a server.

    Attributes:
        number: counts a server's requests in the order of their ends.
        id: the first MAX_ID_CHARS of the X-Request-Id.
        outcome: as in baton_requests; where that is an error, `error` is its code.
        times: seconds since it was received: of PhaseTimes (of its first prompt), and `accepted`
            (tokenized and sent to the engine), `first` (token told to the client), `end`.
        kv: prompt tokens by where their KV came from.
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


class Numbers(msgspec.Struct, frozen=True):
    """
    Attributes:
        server: what GET /ready says.
        values: by the names of protocol.metrics, as stat_key writes them.
        served: the last requests, the oldest first.
        next: the number of the next one.
    """

    server: dict[str, Any]
    values: dict[str, float]
    served: list[Served]
    next: int
