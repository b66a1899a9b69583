"""Lookups: requests to prefill engines for a reference to the KV of a cached prefix.

This module has no clock; times are arguments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from kvcache.transfer.pulls.messages import LookedUp, PullSettings, key_of
from kvcache.transfer.pulls.peers import PeerRecord, PeerTable
from protocol.handshake import (
    AbortLease,
    Demote,
    GetMetadata,
    Lookup,
    LookupResult,
    Request,
)
from protocol.messages import KVHint, RemotePrefill


@dataclass(frozen=True)
class _OpenLookup:
    """A lookup that has not ended. It began at `began` and ends at `deadline`, by the
    caller's clock."""

    pull_id: str
    hint: KVHint
    request: Lookup
    began: float
    deadline: float


class Lookups:
    """The open lookups, at most one for each pull.

    Each lookup ends with one LookedUp, at the latest after `lookup_timeout_s`, or after
    its own timeout if that is shorter.

    Args:
        post: sends a request to an address.
        emit: called with each LookedUp.
    """

    def __init__(
        self,
        settings: PullSettings,
        peers: PeerTable,
        post: Callable[[tuple[str, int], Request], None],
        emit: Callable[[LookedUp], None],
    ) -> None:
        self._timeout_s = settings.lookup_timeout_s
        self._peers = peers
        self._post = post
        self._emit = emit
        self._open: dict[str, _OpenLookup] = {}  # by nonce, oldest first

    def begin(
        self,
        pull_id: str,
        hint: KVHint,
        request: Lookup,
        now: float,
        timeout_s: float = math.inf,
    ) -> None:
        """Sends a lookup to the engine of the hint, after a handshake if necessary."""
        deadline = now + min(timeout_s, self._timeout_s)
        self._open[request.nonce] = _OpenLookup(pull_id, hint, request, now, deadline)
        self._send(request.nonce, self._peers.connect(hint, now), now)

    def on_peer_decided(self, peer: PeerRecord, now: float) -> None:
        """Sends or ends the lookups that wait for the peer's handshake."""
        for nonce, lookup in list(self._open.items()):
            if key_of(lookup.hint) == peer.key:
                self._send(nonce, peer, now)

    def _send(self, nonce: str, peer: PeerRecord, now: float) -> None:
        """Sends a lookup, or ends it if no pull from the peer would be allowed.

        Does nothing while the handshake is in progress.
        """
        metadata = peer.metadata
        if metadata is not None and peer.circuit.allows_pull(now, is_busy=True):
            request = self._open[nonce].request
            layout = metadata.ranks[0].layout
            max_tokens = layout.num_blocks * layout.block_size * metadata.dcp_size
            token_ids = request.token_ids[:max_tokens]
            self.post_long(peer.address, replace(request, token_ids=token_ids))
        elif not peer.is_handshaking:
            self._end(nonce, "none", now)

    def post_long(self, address: tuple[str, int], request: Lookup | Demote) -> None:
        """Sends a request that may be long.

        GetMetadata comes first, because a lease server accepts a long message only
        after an authentic short message over the same connection.
        """
        self._post(address, GetMetadata(nonce=f"before-{request.nonce}"[:128]))
        self._post(address, request)

    def deadline(self) -> float:
        """When to call `tick` next; infinity for never."""
        deadlines = (lookup.deadline for lookup in self._open.values())
        return min(deadlines, default=math.inf)

    def tick(self, now: float) -> None:
        """Ends the lookups that have timed out."""
        expired_nonces = [
            nonce for nonce, lookup in self._open.items() if now >= lookup.deadline
        ]
        for nonce in expired_nonces:
            self._end(nonce, "late", now)

    def on_reply(
        self, address: tuple[str, int], reply: LookupResult, now: float
    ) -> None:
        """Ends the lookup that an engine has answered.

        If the lookup has ended already, or the reference names a different engine, the
        lease of the reference is aborted.
        """
        lookup = self._open.get(reply.nonce)
        remote = reply.remote
        if lookup is not None and (
            remote is None or key_of(remote) == key_of(lookup.hint)
        ):
            self._end(reply.nonce, "found" if remote else "none", now, remote)
        elif remote is not None:
            abort = AbortLease(
                nonce="abort-unwanted",
                incarnation=remote.incarnation,
                lease_id=remote.lease_id,
            )
            self._post(address, abort)

    def _end(
        self, nonce: str, outcome: str, now: float, remote: RemotePrefill | None = None
    ) -> None:
        lookup = self._open.pop(nonce)
        if remote is not None:
            # The engine may not know the address at which this host reaches it, so the
            # address of the hint is used.
            remote = replace(remote, host=lookup.hint.host, port=lookup.hint.port)
        self._emit(LookedUp(lookup.pull_id, remote, outcome, now - lookup.began))
