"""Whether to pull the beginning of a prompt or to compute it, by what both have taken here."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcache.transfer.pulls.messages import PeerKey

Borrow = Literal["auto", "always", "never"]

_LATENCY_S = (
    0.005  # of a lookup, a pull of nothing and its fence, until they are measured
)
_SAMPLE_BYTES = 1 << 20  # less says nothing about a link's speed
_SAMPLE_TOKENS = 16
_SHARE = 0.3  # of what was believed, that a worse measurement replaces: the first is of a new link
_BELIEVED_S = 60.0  # after which a link that is not used is taken for a usual one again
_MAX_PEERS = 1024


@dataclass
class _Link:
    bytes_per_s: float
    latency_s: float
    known_at: float


class Rates:
    """
    Args:
        bytes_per_token: of KV, on all ranks.
        usual_bytes_per_s: of a link that nothing was read from lately.
    """

    def __init__(
        self,
        mode: Borrow,
        bytes_per_token: int,
        usual_bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode, self._bytes_per_token, self._clock = mode, bytes_per_token, clock
        self._usual = usual_bytes_per_s
        self.token_s = 0.0  # that a token of a prompt takes here; 0: not known yet
        self._links: OrderedDict[PeerKey, _Link] = OrderedDict()

    def least_tokens(self, peer: PeerKey) -> float:
        """From how many tokens on a pull from there is quicker; infinity for never."""
        if self._mode == "never":
            return math.inf
        if self._mode == "always" or not self.token_s:
            return 1.0
        link = self._link(peer)
        gain_s = self.token_s - self._bytes_per_token / link.bytes_per_s
        return max(1.0, link.latency_s / gain_s) if gain_s > 0 else math.inf

    def computed(self, num_tokens: int, seconds: float) -> None:
        """So much of a prompt was computed in this time, beside whatever else there was to do."""
        if num_tokens >= _SAMPLE_TOKENS:
            rate, before = seconds / num_tokens, self.token_s
            self.token_s = before + (rate - before) * _SHARE if before else rate

    def looked_up(self, peer: PeerKey, seconds: float) -> None:
        """A lookup there took so long, with its answer."""
        link = self._link(peer)
        # Whoever answers it between two steps does not slow the pull and its fence down.
        link.latency_s = _believed(link.latency_s, _LATENCY_S + seconds, smaller=True)

    def pulled(self, peer: PeerKey, nbytes: int, seconds: float) -> None:
        if nbytes >= _SAMPLE_BYTES:
            link = self._link(peer)
            link.bytes_per_s = _believed(
                link.bytes_per_s, nbytes / seconds, smaller=False
            )

    def _link(self, peer: PeerKey) -> _Link:
        now = self._clock()
        link = self._links.pop(peer, None)
        if link is None or now - link.known_at > _BELIEVED_S:
            link = _Link(self._usual, _LATENCY_S, now)
        self._links[peer] = link
        if len(self._links) > _MAX_PEERS:
            self._links.popitem(last=False)
        return link


def _believed(before: float, measured: float, *, smaller: bool) -> float:
    """A better measurement at once, a worse one little by little."""
    blended = (1 - _SHARE) * before + _SHARE * measured
    return min(measured, blended) if smaller else max(measured, blended)
