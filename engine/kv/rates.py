"""Decides whether this engine pulls the beginning of a prompt or computes it. The
decision is based on measured durations of pulls and of prefill on this engine."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvcache.transfer.pulls.messages import PeerKey

BorrowMode = Literal["auto", "always", "never"]

# Assumed latency of a lookup, an empty pull and its fence together, until a lookup has
# been measured.
_DEFAULT_LATENCY_S = 0.005
_MIN_SAMPLE_BYTES = 1 << 20  # the latency dominates the duration of smaller pulls
_MIN_SAMPLE_TOKENS = 16
# Weight of a new measurement in two moving averages: the time to compute a token, and
# the speed or latency of a link. For a link, the weight applies only to a measurement
# that is worse than the estimate. A single bad measurement must not replace the
# estimate, because the first measurements of a link include the setup of the link.
_WORSE_WEIGHT = 0.3
# The estimates of a link return to the defaults this long after they were created, even
# if they were updated since, so that a slow link is tried again.
_ESTIMATE_LIFETIME_S = 60.0
_MAX_PEERS = 1024


@dataclass
class _Link:
    """Estimates for the link to one peer."""

    bytes_per_s: float
    latency_s: float
    created_s: float


class PullCost(NamedTuple):
    """The expected duration of a pull in seconds: `start_s` + `token_s` per token."""

    start_s: float
    token_s: float


class Rates:
    """Measured speeds of this engine and of its links to other engines.

    Args:
        mode: "auto" decides by the measurements; "always" and "never" ignore them. For
            draft KV, the measurements always decide.
        bytes_per_token: bytes of a token's KV, summed over all ranks.
        default_bytes_per_s: assumed speed of a link without measurements.
        draft_bytes_per_token: bytes of a token's draft KV, summed over all ranks.

    Attributes:
        seconds_per_token: time in which this engine computes a prompt token; 0 until
            measured.
    """

    def __init__(
        self,
        mode: BorrowMode,
        bytes_per_token: int,
        default_bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        draft_bytes_per_token: int = 0,
    ) -> None:
        self._mode = mode
        self._bytes_per_token = bytes_per_token
        self._default_bytes_per_s = default_bytes_per_s
        self._clock = clock
        self._draft_bytes_per_token = draft_bytes_per_token
        self.seconds_per_token = 0.0
        self._links: OrderedDict[PeerKey, _Link] = OrderedDict()

    def min_pull_tokens(self, peer: PeerKey) -> float:
        """The smallest number of tokens for which a pull from `peer` takes less time
        than computing the tokens on this engine; infinity if a pull never takes less
        time. 1 if the speed of this engine is not measured yet.
        """
        if self._mode == "never":
            return math.inf
        if self._mode == "always" or not self.seconds_per_token:
            return 1.0
        link = self._link(peer)
        gain_s = self.seconds_per_token - self._bytes_per_token / link.bytes_per_s
        return max(1.0, link.latency_s / gain_s) if gain_s > 0 else math.inf

    def gain_s(self, peer: PeerKey, num_tokens: int) -> float:
        """The time that is saved if `num_tokens` tokens are pulled from `peer` instead
        of computed on this engine, without the latency of the pull. Infinity if the
        speed of this engine is not measured yet, or if the mode is not "auto".
        """
        if self._mode != "auto" or not self.seconds_per_token:
            return math.inf
        token_s = self._bytes_per_token / self._link(peer).bytes_per_s
        return max(0.0, num_tokens * (self.seconds_per_token - token_s))

    def pull_cost(self, peer: PeerKey) -> PullCost | None:
        """The expected duration of pulls from `peer`; None if the mode is "never"."""
        if self._mode == "never":
            return None
        link = self._link(peer)
        return PullCost(link.latency_s, self._bytes_per_token / link.bytes_per_s)

    def is_draft_pull_quicker(self, peer: PeerKey, catch_up_token_s: float) -> bool:
        """Whether adding a token's draft KV to a pull from `peer` takes less time than
        computing the draft KV on this engine. True if nothing is measured yet.

        Args:
            catch_up_token_s: as in KVDrafter.
        """
        pull_s = self._draft_bytes_per_token / self._link(peer).bytes_per_s
        return not catch_up_token_s or pull_s < catch_up_token_s

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """Records how long this engine took to compute `num_tokens` prompt tokens,
        including the time for other requests in the same steps."""
        if num_tokens < _MIN_SAMPLE_TOKENS:
            return
        measured = seconds / num_tokens
        estimate = self.seconds_per_token
        if estimate:
            measured = estimate + (measured - estimate) * _WORSE_WEIGHT
        self.seconds_per_token = measured

    def record_lookup(self, peer: PeerKey, seconds: float) -> None:
        """Records the time from a lookup to its answer, or until it was given up."""
        link = self._link(peer)
        # A peer answers lookups between two of its steps, so `seconds` may include a
        # step. The pull and its fence do not wait for a step, so the default latency is
        # added for them.
        link.latency_s = _blend(
            link.latency_s, _DEFAULT_LATENCY_S + seconds, smaller_is_better=True
        )

    def record_pull(self, peer: PeerKey, nbytes: int, seconds: float) -> None:
        if nbytes >= _MIN_SAMPLE_BYTES:
            link = self._link(peer)
            link.bytes_per_s = _blend(
                link.bytes_per_s, nbytes / seconds, smaller_is_better=False
            )

    def _link(self, peer: PeerKey) -> _Link:
        """Returns the estimates for a link, which begin as the defaults. Beyond
        _MAX_PEERS links, forgets the least recently used one."""
        now = self._clock()
        link = self._links.pop(peer, None)
        if link is None or now - link.created_s > _ESTIMATE_LIFETIME_S:
            link = _Link(self._default_bytes_per_s, _DEFAULT_LATENCY_S, now)
        self._links[peer] = link
        if len(self._links) > _MAX_PEERS:
            self._links.popitem(last=False)
        return link


def _blend(estimate: float, measured: float, *, smaller_is_better: bool) -> float:
    """Returns the new estimate. A measurement that is better than the estimate replaces
    the estimate. A worse measurement counts with the weight _WORSE_WEIGHT."""
    blended = (1 - _WORSE_WEIGHT) * estimate + _WORSE_WEIGHT * measured
    if smaller_is_better:
        return min(measured, blended)
    return max(measured, blended)
