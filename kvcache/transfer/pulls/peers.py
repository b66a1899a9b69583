"""A decode engine's records of prefill engines: handshakes, trust, and questions for prefixes.

Records are keyed by engine id and incarnation, so that none outlives a restart of its engine. A
failed handshake is remembered for a back-off that doubles: a queue of requests to a dead peer fails
at once instead of one timeout after another. Pure: no I/O, no clock.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvcache.stripe import PlanError, Stripe
from kvcache.transfer.pulls.messages import (
    LookedUp,
    PeerKey,
    PullSettings,
    address_of,
    key_of,
)
from protocol.errors import BatonError, LeaseGone, PeerIncompatible, PeerUnreachable
from protocol.handshake import (
    AbortLease,
    CompatRecord,
    EngineMetadata,
    Found,
    GetMetadata,
    Lookup,
    Request,
    check_compatible,
    check_consistent,
)
from protocol.messages import KVHint, RemotePrefill

_OUTCOMES = ("ok", PeerUnreachable.code, PeerIncompatible.code, LeaseGone.code)
_MAX_FAILURES = 2  # of pulls in a row, before a peer gets none for a while
_MAX_IDLE = (
    1024  # peers remembered; the references that name them are signed: this is ample
)
# To be filled in: engine id, host, port.
DISTRUSTED = (
    "pulls from prefill server %s (%s:%d) fail one after the other: its prompts are computed here, "
    "and now and then it is tried again. As its side channel answers, look whether this host "
    "reaches its transfer ports (UCX_TCP_PORT_RANGE pins them), and by which network devices "
    "(UCX_NET_DEVICES names them, on both hosts)"
)


def unreachable(address: tuple[str, int], failure: str) -> PeerUnreachable:
    """The error for a side channel and its failure, with the options to check."""
    return PeerUnreachable(
        f"the prefill server's side channel at {address[0]}:{address[1]} {failure}; if the server "
        "lives, give it a --side-channel-host and -port that this host reaches"
    )


@dataclass(eq=False)
class Peer:
    """A prefill engine: unknown, being asked, known by its metadata, or unusable for the error.

    After two failed pulls in a row it gets none for a time that doubles, then one at a time until
    one succeeds.
    """

    key: PeerKey
    address: tuple[str, int]
    settings: PullSettings
    metadata: EngineMetadata | None = None
    error: BatonError | None = None
    failures: int = 0  # handshakes, in a row
    is_asked: bool = False
    deadline: float = (
        0.0  # when asked: of the handshake; after an error: end of the back-off
    )
    next_ask: float = 0.0
    nonce: str = ""  # of the question; this and the next two are set by the coordinator
    is_awaited: bool = False  # PeerDecided is to be emitted
    is_announced: bool = False  # AddPeer was sent to the ranks
    pulls_failed: int = 0  # in a row
    no_pulls_until: float = 0.0

    @property
    def is_used(self) -> bool:
        return self.is_asked or self.metadata is not None or self.is_announced

    def pull_failed(self, now: float) -> bool:
        """Counts a failed pull; whether the peer has just lost its trust."""
        self.metadata = None  # it may be wrong
        if now < self.no_pulls_until:  # that pull had begun before
            return False
        self.pulls_failed += 1
        over = self.pulls_failed - _MAX_FAILURES
        self.no_pulls_until = now + (
            _backoff_s(self.settings, over) if over >= 0 else 0.0
        )
        return over == 0

    def refuses(self, now: float, *, busy: bool = False) -> bool:
        """Whether a pull shall not be tried now; `busy`: another one is under way."""
        return self.pulls_failed >= _MAX_FAILURES and (
            busy or now < self.no_pulls_until
        )


class PeerTable:
    """All peers. `stripe`: the tokens of a sequence that one rank of this engine reads."""

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
        self.outcomes: Counter[str] = Counter(
            dict.fromkeys(_OUTCOMES, 0)
        )  # of handshakes

    def of(self, remote: RemotePrefill | KVHint) -> Peer:
        """The peer's record; a new one evicts the oldest idle ones beyond the bound."""
        peer = self._peers.get(key_of(remote))
        if peer is None:
            idle = [key for key, p in self._peers.items() if not p.is_used]
            for oldest in idle[: max(0, len(idle) - _MAX_IDLE)]:
                del self._peers[oldest]
            peer = self._peers[key_of(remote)] = Peer(
                key_of(remote), address_of(remote), self._settings
            )
        return peer

    def connect(self, remote: RemotePrefill | KVHint, now: float) -> Peer:
        """Begins a handshake, unless one is done or under way, or its back-off lasts."""
        peer = self.of(remote)
        is_known = peer.is_asked or peer.metadata is not None
        if not is_known and (peer.error is None or now >= peer.deadline):
            peer.is_asked, peer.error, peer.nonce = True, None, ""
            peer.address, peer.next_ask = address_of(remote), now
            peer.deadline = now + self._settings.handshake_timeout_s
        return peer

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    def at(self, address: tuple[str, int]) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.address == address]

    def asked(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.is_asked]

    def due(self, now: float) -> tuple[list[Peer], list[Peer]]:
        """(peers to ask for metadata now, peers whose handshake has timed out now)."""
        late = [peer for peer in self.asked() if now >= peer.deadline]
        limit_s = self._settings.handshake_timeout_s
        for peer in late:
            failure = f"did not answer within {limit_s:g} s (--handshake-timeout-s)"
            self.fail(peer, unreachable(peer.address, failure), now)
        asking = [peer for peer in self.asked() if now >= peer.next_ask]
        for peer in asking:
            peer.next_ask = now + limit_s / 4
        return asking, late

    def deadline(self) -> float:
        """When to call `due` next; infinity for never."""
        waits = [min(peer.deadline, peer.next_ask) for peer in self.asked()]
        return min(waits, default=float("inf"))

    def fail(self, peer: Peer, error: BatonError, now: float) -> None:
        self.outcomes[error.code] += 1
        peer.is_asked, peer.metadata, peer.error = False, None, error
        peer.deadline = now + _backoff_s(self._settings, peer.failures)
        peer.failures += 1

    def metadata_came(self, peer: Peer, metadata: EngineMetadata, now: float) -> None:
        """Decides whether the peer is usable."""
        try:
            if peer.key != (metadata.engine_id, metadata.incarnation):
                restarted = (
                    f"prefill server {peer.key[0]} was restarted: {metadata.engine_id}"
                )
                raise LeaseGone(
                    f"{restarted} is at {peer.address[0]}:{peer.address[1]} now"
                )
            check_consistent(metadata)
            check_compatible(self._local, metadata.compat, self._allow_convert)
            self._stripe.check_remote(metadata.ranks[0].layout.block_size)
        except BatonError as error:
            self.fail(peer, error, now)
        except PlanError as error:  # our stripes cannot be cut from its blocks
            self.fail(peer, PeerIncompatible(str(error), param="block_size"), now)
        else:
            peer.is_asked, peer.metadata, peer.failures = False, metadata, 0
            self.outcomes["ok"] += 1


def _backoff_s(settings: PullSettings, failures: int) -> float:
    """The wait after a failure that `failures` others preceded."""
    return min(
        settings.backoff_min_s * 2.0 ** min(failures, 30), settings.backoff_max_s
    )


def misfit_of(
    remote: RemotePrefill, metadata: EngineMetadata
) -> PeerIncompatible | None:
    """Why a reference does not fit the engine it names; None if it fits."""
    if (
        remote.transfer_id is not None
    ):  # an offer: its blocks come from the engine itself
        return None
    layout = metadata.ranks[0].layout
    for name, ours, theirs in (
        ("remote_block_size", remote.block_size, layout.block_size),
        ("tp_size", remote.tp_size, metadata.tp_size),
    ):
        if ours != theirs:
            message = f"{name} is {ours} in kv_transfer_params, {theirs} on the prefill server"
            return PeerIncompatible(message, param=f"kv_transfer_params.{name}")
    largest, name = max(remote.block_ids), "remote_block_ids"
    if largest < layout.num_blocks:
        return None
    message = (
        f"{name} names block {largest}; the prefill server has {layout.num_blocks}"
    )
    return PeerIncompatible(message, param=f"kv_transfer_params.{name}")


class Lookups:
    """Open questions to peers for prefixes, at most one of each request. Each ends within its
    timeout in one LookedUp, which is passed to `tell`."""

    def __init__(
        self,
        settings: PullSettings,
        peers: PeerTable,
        post: Callable[[tuple[str, int], Request], None],
        tell: Callable[[LookedUp], None],
    ) -> None:
        self._timeout_s = settings.lookup_timeout_s
        self._peers, self._post, self._tell = peers, post, tell
        self._asking: dict[
            str, tuple[str, KVHint, Lookup, float]
        ] = {}  # by nonce, oldest first

    def begin(self, pull_id: str, hint: KVHint, asked: Lookup, now: float) -> None:
        self._asking[asked.nonce] = pull_id, hint, asked, now
        self._send(asked.nonce, self._peers.connect(hint, now), now)

    def peer_decided(self, peer: Peer, now: float) -> None:
        for nonce, (_, hint, _, _) in list(self._asking.items()):
            if key_of(hint) == peer.key:
                self._send(nonce, peer, now)

    def _send(self, nonce: str, peer: Peer, now: float) -> None:
        if peer.metadata is not None and not peer.refuses(now, busy=True):
            # A lease server takes long messages only after a short one over the same connection.
            self._post(peer.address, GetMetadata(nonce=f"before-{nonce}"))
            asked, layout = self._asking[nonce][2], peer.metadata.ranks[0].layout
            room = layout.num_blocks * layout.block_size * peer.metadata.dcp_size
            longest = asked.token_ids[:room]
            self._post(peer.address, replace(asked, token_ids=longest))
        elif not peer.is_asked:
            self._end(nonce, "none", now)

    def deadline(self) -> float:
        return (
            min((a[-1] for a in self._asking.values()), default=float("inf"))
            + self._timeout_s
        )

    def tick(self, now: float) -> None:
        for nonce in [
            n for n, a in self._asking.items() if now >= a[-1] + self._timeout_s
        ]:
            self._end(nonce, "late", now)

    def answered(self, address: tuple[str, int], reply: Found, now: float) -> None:
        """Takes an answer. A reference that comes too late is given back."""
        asking, remote = self._asking.get(reply.nonce), reply.remote
        if asking is not None and (
            remote is None or key_of(remote) == key_of(asking[1])
        ):
            self._end(reply.nonce, "found" if remote else "none", now, remote)
        elif remote is not None:
            about = {"incarnation": remote.incarnation, "lease_id": remote.lease_id}
            self._post(address, AbortLease(nonce="abort-unwanted", **about))

    def _end(
        self, nonce: str, how: str, now: float, remote: RemotePrefill | None = None
    ) -> None:
        pull_id, hint, _, since = self._asking.pop(nonce)
        if remote is not None:  # the engine may not know the address it is reached at
            remote = replace(remote, host=hint.host, port=hint.port)
        self._tell(LookedUp(pull_id, remote, how, now - since))
