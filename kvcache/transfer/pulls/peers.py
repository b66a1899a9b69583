"""What a decode engine knows about prefill engines, and when it asks: first contact only.

Keyed by engine id and incarnation, so what was true of an engine before its restart is never
applied after it. A failed handshake is remembered for a back-off that doubles, so that a queue of
requests to a dead peer fails at once instead of one timeout after another. Pure: no I/O, no clock.
"""

from collections import Counter
from dataclasses import dataclass

from kvcache.stripe import Stripe, StripeError
from kvcache.transfer.pulls.messages import PeerKey, PullSettings, address_of, key_of
from protocol.errors import BatonError, LeaseGone, PeerIncompatible, PeerUnreachable
from protocol.handshake import CompatRecord, EngineMetadata, check_compatible, check_consistent
from protocol.messages import RemotePrefill

_OUTCOMES = ("ok", PeerUnreachable.code, PeerIncompatible.code, LeaseGone.code)
_MAX_FAILURES = 2  # of pulls in a row, before a peer gets none for a while
_MAX_FAILED = 1024  # remembered; the references that name peers are signed, so this is ample
# To be filled in: engine id, host, port.
DISTRUSTED = (
    "pulls from prefill server %s (%s:%d) fail one after the other: its prompts are computed here, "
    "and now and then it is tried again. As its side channel answers, look whether this host "
    "reaches its transfer ports (UCX_TCP_PORT_RANGE pins them), and by which network devices "
    "(UCX_NET_DEVICES names them, on both hosts)"
)


def unreachable(address: tuple[str, int], what: str) -> PeerUnreachable:
    """The error for a side channel that `what` was seen of, with what to look at."""
    return PeerUnreachable(
        f"the prefill server's side channel at {address[0]}:{address[1]} {what}; if the server "
        "lives, give it a --side-channel-host and -port that this host reaches"
    )


@dataclass
class Peer:
    """Being asked, or known by its metadata, or not usable for the error."""

    key: PeerKey
    address: tuple[str, int]
    metadata: EngineMetadata | None = None
    error: BatonError | None = None
    failures: int = 0  # in a row
    deadline: float = 0.0  # gives up; after an error: may be tried again
    next_ask: float = 0.0
    nonce: str = ""  # of the question; set by who asks
    is_awaited: bool = False  # somebody is to be told what comes of it; likewise

    @property
    def is_asked(self) -> bool:
        return self.metadata is None and self.error is None


class PeerTable:
    """
    Args:
        stripe: what a rank of ours wants to read of a sequence.
    """

    def __init__(
        self,
        local: CompatRecord,
        settings: PullSettings,
        allow_convert: bool,
        stripe: Stripe,
    ) -> None:
        self._local, self._settings = local, settings
        self._allow_convert, self._stripe = allow_convert, stripe
        self._peers: dict[PeerKey, Peer] = {}
        # Ended handshakes by outcome: "ok", or the code of the error.
        self.outcomes: Counter[str] = Counter(dict.fromkeys(_OUTCOMES, 0))

    def connect(self, remote: RemotePrefill, now: float) -> Peer:
        """The peer as it is now; begins to ask it when that is due."""
        key = key_of(remote)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key, address_of(remote))
            failed = [key for key, other in self._peers.items() if other.error is not None]
            for oldest in failed[: max(0, len(failed) - _MAX_FAILED)]:
                del self._peers[oldest]
        elif peer.error is None or now < peer.deadline:
            return peer
        peer.address, peer.error, peer.nonce, peer.next_ask = address_of(remote), None, "", now
        peer.deadline = now + self._settings.handshake_timeout_s
        return peer

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    def asked_at(self, address: tuple[str, int]) -> list[Peer]:
        return [p for p in self._peers.values() if p.is_asked and p.address == address]

    def due(self, now: float) -> tuple[list[Peer], list[Peer]]:
        """(to ask for metadata now, failed by timeout now)."""
        asked = [peer for peer in self._peers.values() if peer.is_asked]
        late = [peer for peer in asked if now >= peer.deadline]
        limit_s = self._settings.handshake_timeout_s
        for peer in late:
            told = f"did not answer within {limit_s:g} s (--handshake-timeout-s)"
            self.fail(peer, unreachable(peer.address, told), now)
        asking = [peer for peer in asked if peer.is_asked and now >= peer.next_ask]
        for peer in asking:
            peer.next_ask = now + limit_s / 4
        return asking, late

    def deadline(self) -> float:
        """When `due` next has something to say; infinity for never."""
        waits = [min(p.deadline, p.next_ask) for p in self._peers.values() if p.is_asked]
        return min(waits, default=float("inf"))

    def metadata_came(self, peer: Peer, metadata: EngineMetadata, now: float) -> None:
        """Decides whether the peer is usable."""
        try:
            if peer.key != (metadata.engine_id, metadata.incarnation):
                restarted = f"prefill server {peer.key[0]} was restarted: {metadata.engine_id}"
                raise LeaseGone(f"{restarted} is at {peer.address[0]}:{peer.address[1]} now")
            check_consistent(metadata)
            check_compatible(self._local, metadata.compat, self._allow_convert)
            self._check_tokens(metadata)
        except BatonError as error:
            self.fail(peer, error, now)
        else:
            for other in [p for p in self._peers.values() if p.address == peer.address]:
                self.forget(other.key)  # it was restarted
            peer.metadata, peer.failures = metadata, 0
            self.outcomes["ok"] += 1

    def fail(self, peer: Peer, error: BatonError, now: float) -> None:
        self.outcomes[error.code] += 1
        peer.metadata, peer.error = None, error
        peer.deadline = now + _backoff_s(self._settings, peer.failures)
        peer.failures += 1

    def forget(self, key: PeerKey) -> None:
        """The next `connect` shakes hands anew, without back-off; failed peers stay failed."""
        peer = self._peers.get(key)
        if peer is not None and peer.metadata is not None:
            del self._peers[key]

    def _check_tokens(self, metadata: EngineMetadata) -> None:
        """Every rank of the peer has all tokens, in blocks that our stripe can be cut from."""
        if metadata.dcp_size != 1:
            raise PeerIncompatible(
                f"dcp_size is {metadata.dcp_size} on the prefill server (and {self._stripe.size} "
                "here): KV is "
                "read from servers of dcp_size 1 only. Start it without context parallelism.",
                param="dcp_size",
            )
        try:
            self._stripe.check_remote(metadata.ranks[0].layout.block_size)
        except StripeError as error:
            raise PeerIncompatible(str(error), param="block_size") from error


class Trust:
    """Which peers get pulls: one whose pulls failed twice in a row gets none for a time that
    doubles, then one at a time, until one is done. Times as of a failed handshake."""

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self._failed: dict[PeerKey, tuple[int, float]] = {}  # times in a row, no pulls until

    def __contains__(self, key: PeerKey) -> bool:
        """Whether its latest pull failed."""
        return key in self._failed

    def failed(self, key: PeerKey, now: float) -> bool:
        """Counts a pull that failed; whether its peer has just lost its trust."""
        failures, until = self._failed.pop(key, (0, now))
        if is_news := now >= until:  # else it had begun before
            failures += 1
            over = failures - _MAX_FAILURES
            until = now + (_backoff_s(self._settings, over) if over >= 0 else 0.0)
        self._failed[key] = failures, until
        if len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        return is_news and failures == _MAX_FAILURES

    def done(self, key: PeerKey) -> None:
        self._failed.pop(key, None)

    def refuses(self, key: PeerKey, now: float, *, busy: bool = False) -> bool:
        """Whether a pull shall not be tried now; `busy`: another one is under way."""
        failures, until = self._failed.get(key, (0, now))
        return failures >= _MAX_FAILURES and (busy or now < until)


def _backoff_s(settings: PullSettings, failures: int) -> float:
    """After as many failures before."""
    return min(settings.backoff_min_s * 2.0 ** min(failures, 30), settings.backoff_max_s)


def misfit_of(remote: RemotePrefill, metadata: EngineMetadata) -> PeerIncompatible | None:
    """Why a reference does not fit the engine it names, if it does not."""
    layout = metadata.ranks[0].layout
    for name, ours, theirs in (
        ("remote_block_size", remote.block_size, layout.block_size),
        ("tp_size", remote.tp_size, metadata.tp_size),
    ):
        if ours != theirs:
            told = f"{name} is {ours} in kv_transfer_params, {theirs} on the prefill server"
            return PeerIncompatible(told, param=f"kv_transfer_params.{name}")
    largest, name = max(remote.block_ids), "remote_block_ids"
    if largest < layout.num_blocks:
        return None
    told = f"{name} names block {largest}; the prefill server has {layout.num_blocks}"
    return PeerIncompatible(told, param=f"kv_transfer_params.{name}")
