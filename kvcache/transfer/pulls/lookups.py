"""Lookups that are under way: who was asked for which prefix, and until when. No I/O, no clock."""

from collections.abc import Callable

from msgspec.structs import replace

from kvcache.transfer.pulls.messages import LookedUp, PullSettings, key_of
from kvcache.transfer.pulls.peers import Peer, PeerTable
from protocol.handshake import AbortLease, Found, GetMetadata, Lookup, Request
from protocol.messages import KVHint, RemotePrefill


class Lookups:
    """At most one of each request: all end in a LookedUp, which `tell` takes, within a timeout."""

    def __init__(
        self,
        settings: PullSettings,
        peers: PeerTable,
        post: Callable[[tuple[str, int], Request], None],
        tell: Callable[[LookedUp], None],
    ) -> None:
        self._timeout_s = settings.lookup_timeout_s
        self._peers, self._post, self._tell = peers, post, tell
        self._asking: dict[str, tuple[str, KVHint, Lookup, float]] = {}  # by nonce, oldest first

    def begin(self, pull_id: str, hint: KVHint, asked: Lookup, now: float) -> None:
        self._asking[asked.nonce] = pull_id, hint, asked, now
        self._send(asked.nonce, self._peers.connect(hint, now), now)

    def peer_decided(self, peer: Peer, now: float) -> None:
        for nonce, (_, hint, _, _) in list(self._asking.items()):
            if key_of(hint) == peer.key:
                self._send(nonce, peer, now)

    def _send(self, nonce: str, peer: Peer, now: float) -> None:
        if peer.metadata is not None and not peer.refuses(now, busy=True):
            # It takes long messages only of those who have sent a short one over their connection.
            self._post(peer.address, GetMetadata(nonce=f"before-{nonce}"))
            asked, layout = self._asking[nonce][2], peer.metadata.ranks[0].layout
            room = layout.num_blocks * layout.block_size * peer.metadata.dcp_size
            longest = asked.token_ids[:room]
            self._post(peer.address, replace(asked, token_ids=longest))
        elif not peer.is_asked:
            self._end(nonce, "none", now)

    def deadline(self) -> float:
        return min((a[-1] for a in self._asking.values()), default=float("inf")) + self._timeout_s

    def tick(self, now: float) -> None:
        for nonce in [n for n, a in self._asking.items() if now >= a[-1] + self._timeout_s]:
            self._end(nonce, "late", now)

    def answered(self, address: tuple[str, int], reply: Found, now: float) -> None:
        """A reference that nobody waits for goes back."""
        asking, remote = self._asking.get(reply.nonce), reply.remote
        if asking is not None and (remote is None or key_of(remote) == key_of(asking[1])):
            self._end(reply.nonce, "found" if remote else "none", now, remote)
        elif remote is not None:
            about = {"incarnation": remote.incarnation, "lease_id": remote.lease_id}
            self._post(address, AbortLease(nonce="abort-unwanted", **about))

    def _end(self, nonce: str, how: str, now: float, remote: RemotePrefill | None = None) -> None:
        pull_id, hint, _, since = self._asking.pop(nonce)
        if remote is not None:  # which may not know its own address
            remote = replace(remote, host=hint.host, port=hint.port)
        self._tell(LookedUp(pull_id, remote, how, now - since))
