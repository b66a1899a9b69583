"""Handshakes with prefill engines, and the handling of lost side channels.

A handshake requests the metadata of an engine over the engine's side channel. The
handshake ends when the metadata arrives, the server refuses, or a timeout passes.
"""

from collections.abc import Callable

from kvcache.transfer.pulls.lease_client import Address, LeaseClient, new_id
from kvcache.transfer.pulls.messages import (
    UNVERIFIED,
    AddPeer,
    Command,
    DropPeer,
    PeerKey,
)
from kvcache.transfer.pulls.peers import PeerRecord, PeerTable, unreachable
from kvcache.transfer.pulls.pull_state import PullState
from protocol.errors import BatonError, LeaseGone, PeerUnreachable
from protocol.handshake import EngineMetadata, GetMetadata, Metadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)


class Handshakes:
    """Drives the handshakes of a PeerTable. Used only by the coordinator's thread.

    Args:
        side_channel_timeout_s: after this time without a connection, pulls from an
            address and handshakes with it fail.
        broadcast: sends a command to every rank.
        pulls_from: returns the open pulls from an address.
        fail_pull: fails a pull.
        on_decided: called with the peer at the end of each handshake.
    """

    def __init__(
        self,
        peers: PeerTable,
        leases: LeaseClient,
        side_channel_timeout_s: float,
        clock: Callable[[], float],
        *,
        broadcast: Callable[[Command], None],
        pulls_from: Callable[[Address], list[PullState]],
        fail_pull: Callable[[PullState, BatonError], None],
        on_decided: Callable[[PeerRecord], None],
    ) -> None:
        self._peers = peers
        self._leases = leases
        self._side_channel_timeout_s = side_channel_timeout_s
        self._clock = clock
        self._broadcast = broadcast
        self._pulls_from = pulls_from
        self._fail_pull = fail_pull
        self._on_decided = on_decided

    def deadline(self) -> float:
        """When to call `send_requests` and `fail_unconnected` next; infinity: never."""
        lost_deadlines = [
            since + self._side_channel_timeout_s
            for since in self._leases.unconnected().values()
        ]
        return min([self._peers.deadline(), *lost_deadlines])

    def send_requests(self, now: float) -> None:
        """Sends the requests that are due, and ends handshakes that have timed out."""
        due, timed_out = self._peers.take_due(now)
        for peer in due:
            peer.nonce = peer.nonce or new_id()
            self._leases.post(peer.address, GetMetadata(nonce=peer.nonce))
        for peer in timed_out:
            self._on_decided(peer)

    def fail_unconnected(self, now: float) -> None:
        """Fails pulls and handshakes if an address had no connection for too long."""
        for address, since in self._leases.unconnected().items():
            if now - since >= self._side_channel_timeout_s:
                self._drop_servers(address)

    def on_metadata(self, address: Address, reply: Metadata) -> None:
        """Ends the handshakes that a server has answered with its metadata."""
        peers = [
            peer for peer in self._handshaking_at(address) if peer.nonce == reply.nonce
        ]
        if peers:
            key = (reply.engine.engine_id, reply.engine.incarnation)
            self._drop_earlier_engines(key, address)
        for peer in peers:
            self._peers.on_metadata(peer, reply.engine, self._clock())
            self._on_decided(peer)

    def on_refused(self, address: Address, reason: str) -> None:
        """Fails the handshakes at an address, because the server refused a request."""
        message = f"{address[0]}:{address[1]} refused the handshake: {reason}"
        self._fail_handshakes(address, PeerUnreachable(message))

    def _drop_servers(self, address: Address) -> None:
        """Fails all pulls and handshakes with the servers at an address.

        The servers are probably dead. The ranks forget them, because the memory of a
        dead server is freed only when this engine has unmapped it.
        """
        error = unreachable(address, "cannot be connected to")
        for peer in self._peers.peers_at(address):
            self._forget(peer)
        self._leases.forget(address)
        for state in self._pulls_from(address):
            self._fail_pull(state, error)
        self._fail_handshakes(address, error)

    def _drop_earlier_engines(self, key: PeerKey, address: Address) -> None:
        """Forgets all engines at an address except `key`; fails the pulls from them.

        A restarted server has a new engine id and a new incarnation, and its old leases
        ended with its old process.
        """
        for peer in self._peers.peers_at(address):
            if peer.key != key:
                self._forget(peer)
        for state in self._pulls_from(address):
            if state.key != key:
                error = LeaseGone(f"prefill server {state.key[0]} was restarted")
                self._fail_pull(state, error)

    def _fail_handshakes(self, address: Address, error: PeerUnreachable) -> None:
        for peer in self._handshaking_at(address):
            self._peers.fail(peer, error, self._clock())
            self._on_decided(peer)

    def announce(
        self, peer: PeerRecord, metadata: EngineMetadata, verified: str
    ) -> None:
        """Sends AddPeer to the ranks, once.

        Args:
            verified: as in PullDone.
        """
        if peer.is_announced:
            return
        peer.is_announced = True
        self._broadcast(AddPeer(metadata))
        if verified in UNVERIFIED:
            reason = UNVERIFIED[verified]
            logger.warning("KV of %s is not verified: %s", peer.key[0], reason)

    def _forget(self, peer: PeerRecord) -> None:
        """Drops a peer's metadata, and sends DropPeer to the ranks."""
        peer.metadata = None
        if peer.is_announced:
            peer.is_announced = False
            peer.prepared_ranks.clear()
            self._broadcast(DropPeer(peer.key))

    def _handshaking_at(self, address: Address) -> list[PeerRecord]:
        return [peer for peer in self._peers.peers_at(address) if peer.is_handshaking]
