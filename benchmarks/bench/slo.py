"""The service level objective of --slo: limits on the latencies of a request."""

from dataclasses import dataclass
from math import isfinite

from benchmarks.bench.errors import BenchError
from protocol.settings.near_names import suggestion

KEYS = ("ttft", "itl", "e2e")


@dataclass(frozen=True)
class Slo:
    """Limits on the latencies of a request, in seconds; None: no limit.

    Attributes:
        ttft: time to the first token, from the moment at which the request was due.
        itl: mean time per token after the first token.
        e2e: time to the end of the answer.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met(self, ttft_s: float, itl_s: float, e2e_s: float) -> bool:
        """Return whether a completed request is within all limits."""
        return self.limit_use(ttft_s, itl_s, e2e_s) <= 1

    def limit_use(self, ttft_s: float, itl_s: float, e2e_s: float) -> float:
        """Return the largest ratio of a latency to its limit; 0 without limits."""
        pairs = ((ttft_s, self.ttft), (itl_s, self.itl), (e2e_s, self.e2e))
        shares = [seconds / limit for seconds, limit in pairs if limit is not None]
        return max(shares, default=0.0)

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, in seconds."""
        limits = {"ttft": self.ttft, "itl": self.itl, "e2e": self.e2e}
        return {key: limit for key, limit in limits.items() if limit is not None}

    def __str__(self) -> str:
        return ",".join(f"{key}={limit:g}" for key, limit in self.limits().items())


def parse_slo(text: str) -> Slo:
    """Return the limits of a text such as `ttft=2,itl=0.025` (seconds).

    Raises:
        BenchError: a key is unknown or given twice, or a limit is not a number above 0.
    """
    limits: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key not in KEYS:
            raise BenchError(
                f"--slo {text}: unknown key {key!r}{suggestion(key, KEYS)}; "
                "write for example ttft=2,itl=0.025 (s; keys: ttft, itl, e2e)"
            )
        if key in limits:
            raise BenchError(f"--slo {text}: {key} is given twice; give it once")
        limits[key] = _parse_limit(text, key, value)
    return Slo(**limits)


def _parse_limit(text: str, key: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not isfinite(limit) or limit <= 0:
        raise BenchError(
            f"--slo {text}: {key}={value} must be a number of seconds above 0"
        )
    return limit
