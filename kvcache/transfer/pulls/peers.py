"""What a decode engine knows about prefill engines, and when it asks: first contact only.

Keyed by engine id and incarnation, so what was true of an engine before its restart is never
applied after it. A failed handshake is remembered for a back-off that doubles, so that a queue of
requests to a dead peer fails at once instead of one timeout after another. Pure: no I/O, no clock.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvcache.stripe import Stripe, StripeError
from kvcache.transfer.pulls.messages import PeerKey, PullSettings
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


class PeerStatus(Enum):
    FETCHING = "fetching"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Peer:
    key: PeerKey
    address: tuple[str, int]
    status: PeerStatus = PeerStatus.FETCHING
    deadline: float = 0.0  # FETCHING: gives up; FAILED: may be tried again
    failures: int = 0  # in a row
    error: BatonError | None = None
    metadata: EngineMetadata | None = None
    next_ask: float = field(default=0.0)


def key_of(remote: RemotePrefill) -> PeerKey:
    return remote.engine_id, remote.incarnation


def address_of(remote: RemotePrefill) -> tuple[str, int]:
    """Of the engine's side channel."""
    return remote.host, remote.port


class PeerTable:
    """Peers by (engine id, incarnation).

    Args:
        stripe: what a rank of ours wants to read of a sequence; None: all of it.
    """

    def __init__(
        self,
        local: CompatRecord,
        settings: PullSettings,
        allow_convert: bool = False,
        stripe: Stripe | None = None,
    ) -> None:
        self._local = local
        self._stripe = stripe
        self._settings = settings
        self._allow_convert = allow_convert
        self._peers: dict[PeerKey, Peer] = {}
        # Ended handshakes by outcome: "ok", or the code of the error.
        self.outcomes: Counter[str] = Counter(dict.fromkeys(_OUTCOMES, 0))

    def connect(self, remote: RemotePrefill, now: float) -> Peer:
        """The peer as it is now; begins a handshake (status FETCHING) when one is due."""
        key = key_of(remote)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key, address_of(remote))
            self._begin(peer, now)
            self._prune()
        elif peer.status is PeerStatus.FAILED and now >= peer.deadline:
            peer.address = address_of(remote)
            self._begin(peer, now)
        return peer

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    def fetching_from(self, address: tuple[str, int]) -> list[Peer]:
        return [p for p in self._peers.values() if _is_fetching(p) and p.address == address]

    def due(self, now: float) -> tuple[list[Peer], list[Peer]]:
        """(to ask for metadata now, failed by timeout now)."""
        fetching = [peer for peer in self._peers.values() if _is_fetching(peer)]
        late = [peer for peer in fetching if now >= peer.deadline]
        limit_s = self._settings.handshake_timeout_s
        for peer in late:
            told = f"did not answer within {limit_s:g} s (--handshake-timeout-s)"
            self.fail(peer, unreachable(peer.address, told), now)
        asking = [peer for peer in fetching if _is_fetching(peer) and now >= peer.next_ask]
        for peer in asking:
            peer.next_ask = now + limit_s / 4
        return asking, late

    def deadline(self) -> float:
        """When `due` next has something to say; infinity for never."""
        waits = [min(p.deadline, p.next_ask) for p in self._peers.values() if _is_fetching(p)]
        return min(waits, default=float("inf"))

    def metadata_came(self, peer: Peer, metadata: EngineMetadata, now: float) -> None:
        """Decides whether the peer is usable."""
        try:
            _check_identity(peer, metadata)
            check_consistent(metadata)
            check_compatible(self._local, metadata.compat, self._allow_convert)
            self._check_tokens(metadata)
        except BatonError as error:
            self.fail(peer, error, now)
        else:
            for other in [p for p in self._peers.values() if p.address == peer.address]:
                self.forget(other.key)  # it was restarted
            peer.status, peer.metadata, peer.error = PeerStatus.READY, metadata, None
            peer.failures = 0
            self.outcomes["ok"] += 1

    def fail(self, peer: Peer, error: BatonError, now: float) -> None:
        settings = self._settings
        self.outcomes[error.code] += 1
        peer.failures += 1
        backoff_s = settings.backoff_min_s * 2.0 ** min(peer.failures - 1, 30)
        peer.status, peer.error, peer.metadata = PeerStatus.FAILED, error, None
        peer.deadline = now + min(backoff_s, settings.backoff_max_s)

    def forget(self, key: PeerKey) -> None:
        """The next `connect` shakes hands anew, without back-off; failed peers stay failed."""
        peer = self._peers.get(key)
        if peer is not None and peer.status is PeerStatus.READY:
            del self._peers[key]

    def _begin(self, peer: Peer, now: float) -> None:
        peer.status, peer.error, peer.next_ask = PeerStatus.FETCHING, None, now
        peer.deadline = now + self._settings.handshake_timeout_s

    def _check_tokens(self, metadata: EngineMetadata) -> None:
        """Every rank of the peer has all tokens, in blocks that our stripe can be cut from."""
        if metadata.dcp_size != 1:
            ours = self._stripe.size if self._stripe else 1
            raise PeerIncompatible(
                f"dcp_size is {metadata.dcp_size} on the prefill server (and {ours} here): KV is "
                "read from servers of dcp_size 1 only. Start it without context parallelism.",
                param="dcp_size",
            )
        if self._stripe is None:
            return
        try:
            self._stripe.check_remote(metadata.ranks[0].layout.block_size)
        except StripeError as error:
            raise PeerIncompatible(str(error), param="block_size") from error

    def _prune(self) -> None:
        failed = [key for key, p in self._peers.items() if p.status is PeerStatus.FAILED]
        for key in failed[: max(0, len(failed) - _MAX_FAILED)]:
            del self._peers[key]


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
            wait_s = self._settings.backoff_min_s * 2.0 ** min(over, 30) if over >= 0 else 0.0
            until = now + min(wait_s, self._settings.backoff_max_s)
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


def _check_identity(peer: Peer, metadata: EngineMetadata) -> None:
    """A restarted server has a new incarnation, and a new engine id unless it was given one."""
    if peer.key != (metadata.engine_id, metadata.incarnation):
        where = f"{peer.address[0]}:{peer.address[1]}"
        raise LeaseGone(
            f"prefill server {peer.key[0]} was restarted: {metadata.engine_id} is at {where} now"
        )


def _is_fetching(peer: Peer) -> bool:
    return peer.status is PeerStatus.FETCHING


def check_reference(remote: RemotePrefill, metadata: EngineMetadata) -> None:
    """Raises PeerIncompatible when a reference does not fit the engine it names."""
    layout = metadata.ranks[0].layout
    for name, ours, theirs in (
        ("remote_block_size", remote.block_size, layout.block_size),
        ("tp_size", remote.tp_size, metadata.tp_size),
    ):
        if ours != theirs:
            raise PeerIncompatible(
                f"{name} is {ours} in kv_transfer_params, {theirs} on the prefill server",
                param=f"kv_transfer_params.{name}",
            )
    if max(remote.block_ids) >= layout.num_blocks:
        raise PeerIncompatible(
            f"remote_block_ids names block {max(remote.block_ids)}; the prefill server has "
            f"{layout.num_blocks}",
            param="kv_transfer_params.remote_block_ids",
        )
