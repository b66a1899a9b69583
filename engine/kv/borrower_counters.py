"""Counts the lookups and pulls of KV from other engines, for metrics."""

from collections import defaultdict

from kvcache.transfer.pulls.messages import PATHS, UNVERIFIED, PullDone
from protocol.errors import BatonError, InternalError, RemoteKVError
from protocol.metrics import EngineHistogram, stat_key

_LOOKUP_OUTCOMES = ("found", "none", "late", "computed")
_PULL_SOURCES = ("prefill", "peer", "host")


class BorrowerCounters:
    """Totals of the borrower, by series (protocol/metrics.py).

    Args:
        policy: the failure policy, which is a label of the counter of recoveries.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._totals: defaultdict[str, float] = defaultdict(
            float, _initial_totals(policy)
        )
        self._transfer_seconds = EngineHistogram("baton_kv_transfer_seconds")

    def count_rejected_params(self) -> None:
        """Counts a request with kv_transfer_params that this engine cannot use."""
        self._totals["baton_kv_params_rejected"] += 1

    def count_redrawn_first_token(self) -> None:
        """Counts a request with KV on another engine, but without a usable first token.
        This engine draws the first token of the request."""
        self._totals["baton_kv_first_tokens_redrawn"] += 1

    def count_quarantine_timeout(self) -> None:
        """Counts a request that failed because it waited too long for quarantined
        blocks."""
        self._totals["baton_requests_locked_out"] += 1

    def count_lookup(self, outcome: str) -> None:
        """Counts a prompt with a hint. A hint names an engine that may have KV of it.

        Args:
            outcome: one of _LOOKUP_OUTCOMES; "computed" if no lookup was sent.
        """
        self._totals[stat_key("baton_kv_lookups", outcome=outcome)] += 1

    def count_store_lookup(self, outcome: str) -> None:
        """Counts a lookup in the KV store of this host; `outcome` as in LookedUp."""
        self._totals[stat_key("baton_host_kv_lookups", outcome=outcome)] += 1

    def count_pulled_tokens(self, source: str, num_tokens: int) -> None:
        """Counts the tokens of a pull that succeeded.

        Args:
            source: one of _PULL_SOURCES.
        """
        self._totals[stat_key("baton_kv_pulled_tokens", source=source)] += num_tokens

    def count_transfer(self, event: PullDone) -> None:
        """Counts a pull that succeeded, with its bytes, duration and verification."""
        key = stat_key("baton_kv_transfers", outcome="done", path=event.path)
        self._totals[key] += 1
        self._totals["baton_kv_transfer_bytes"] += event.nbytes
        self._totals["baton_kv_transfer_descriptors"] += event.num_descriptors
        if event.verified in UNVERIFIED:
            key = stat_key("baton_kv_unverified_tokens", reason=event.verified)
            self._totals[key] += event.num_tokens
        elif event.verified != "off":
            self._totals["baton_kv_verified_tokens"] += event.num_tokens
        self._transfer_seconds.observe(event.seconds)

    def count_verify_failure(self) -> None:
        self._totals["baton_kv_verify_failures"] += 1

    def count_failure(self, error: BatonError, *, is_recomputed: bool) -> None:
        """Counts a failed pull, and whether this engine computes the prompt instead."""
        self._totals[stat_key("baton_kv_transfers", outcome="failed", path="none")] += 1
        self._totals[stat_key("baton_kv_transfer_failures", code=error.code)] += 1
        if is_recomputed:
            self._totals[stat_key("baton_kv_recoveries", policy=self._policy)] += 1

    def values(self) -> dict[str, float]:
        return {**self._totals, **self._transfer_seconds.values()}


def _initial_totals(policy: str) -> dict[str, float]:
    """The counters that are exposed from the start, with the value 0.

    A Prometheus rate() misses the event with which a counter first appears. Some events
    happen only once, so their counters must be exposed before the event.
    """
    errors: list[type[BatonError]] = [*RemoteKVError.__subclasses__(), InternalError]
    names = [
        "baton_kv_params_rejected",
        "baton_kv_first_tokens_redrawn",
        "baton_requests_locked_out",
        "baton_kv_transfer_bytes",
        "baton_kv_transfer_descriptors",
        "baton_kv_verified_tokens",
        "baton_kv_verify_failures",
        stat_key("baton_kv_recoveries", policy=policy),
        stat_key("baton_kv_transfers", outcome="failed", path="none"),
    ]
    for reason in UNVERIFIED:
        names.append(stat_key("baton_kv_unverified_tokens", reason=reason))
    for outcome in _LOOKUP_OUTCOMES:
        names.append(stat_key("baton_kv_lookups", outcome=outcome))
    for outcome in ("found", "none", "late"):
        names.append(stat_key("baton_host_kv_lookups", outcome=outcome))
    for source in _PULL_SOURCES:
        names.append(stat_key("baton_kv_pulled_tokens", source=source))
    for error in errors:
        names.append(stat_key("baton_kv_transfer_failures", code=error.code))
    for path in PATHS:
        names.append(stat_key("baton_kv_transfers", outcome="done", path=path))
    return dict.fromkeys(names, 0.0)
