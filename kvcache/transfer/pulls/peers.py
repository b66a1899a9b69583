"""A decode engine's records of prefill engines, and of handshakes with these engines.

Records are keyed by engine id and incarnation, so that a restarted engine gets a new
record. A failed handshake is remembered for a backoff time, which doubles with every
failure. So requests to a dead peer fail at once, not after one timeout each. Pure: no
I/O, no clock.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from kvcache.stripe import PlanError, Stripe
from kvcache.transfer.pulls.circuit_breaker import CircuitBreaker, backoff_s
from kvcache.transfer.pulls.messages import PeerKey, PullSettings, address_of, key_of
from kvcache.transfer.pulls.pull_state import PullState
from protocol.errors import (
    BatonError,
    LeaseGone,
    PeerIncompatible,
    PeerUnreachable,
    PullCircuitOpen,
)
from protocol.handshake import (
    DIGEST_VERSION,
    CompatRecord,
    DraftKV,
    EngineMetadata,
    check_compatible,
    shares_draft_kv,
)
from protocol.messages import KVHint, RemotePrefill
from protocol.metadata_rules import check_consistent
from protocol.short_repr import short_repr

_OUTCOMES = ("ok", PeerUnreachable.code, PeerIncompatible.code, LeaseGone.code)
_LEASE_ID = re.compile("[0-9a-f]{32}")
# Limit on the number of idle records; above it, the oldest idle records are evicted.
# The limit is not expected to be reached: references and hints that name a peer are
# signed, so there are only a few peers.
_MAX_IDLE = 1024

# Arguments of this log line: engine id, host, port, number of failures.
CIRCUIT_OPENED = (
    "KV pulls from prefill server %s (%s:%d) failed %d times in a row; recomputing its "
    "prompts locally and retrying with backoff. The handshake with it succeeded, so "
    "check that this host reaches its transfer ports (UCX_TCP_PORT_RANGE), and the "
    "network devices (UCX_NET_DEVICES) on both hosts."
)


def unreachable(address: tuple[str, int], failure: str) -> PeerUnreachable:
    """The error for a failure of a side channel, with the options to check.

    Args:
        failure: what has failed, as the predicate of a sentence about the side channel.
    """
    return PeerUnreachable(
        f"the prefill server's side channel at {address[0]}:{address[1]} {failure}; "
        "if the server runs, set its --side-channel-host and --side-channel-port so "
        "that this host reaches them"
    )


class PeerRecord:
    """The record of a prefill engine.

    The handshake with the engine has not begun, is in progress, is complete (then
    `metadata` is set), or has failed (then `error` is set).

    Attributes:
        num_failed_handshakes: number of failed handshakes in a row.
        deadline: when a handshake in progress times out; after an error, when the
            backoff ends.
        next_request: when to request the metadata again in a handshake in progress.
        nonce: the nonce of the handshake's requests; set by Handshakes.
        is_awaited: a PeerDecided has to be emitted after the handshake; set by the
            coordinator.
        is_announced: AddPeer was sent to the ranks; set by the coordinator.
        prepared_ranks: the ranks that have answered AddPeer with PeerPrepared.
        circuit: the circuit breaker for pulls from the engine.
    """

    def __init__(
        self, key: PeerKey, address: tuple[str, int], settings: PullSettings
    ) -> None:
        self.key = key
        self.address = address
        self.metadata: EngineMetadata | None = None
        self.error: BatonError | None = None
        self.num_failed_handshakes = 0
        self.is_handshaking = False
        self.deadline = 0.0
        self.next_request = 0.0
        self.nonce = ""
        self.is_awaited = False
        self.is_announced = False
        self.prepared_ranks: set[int] = set()
        self.circuit = CircuitBreaker(settings.backoff_min_s, settings.backoff_max_s)

    @property
    def is_used(self) -> bool:
        """False if the record may be evicted."""
        return self.is_handshaking or self.metadata is not None or self.is_announced

    def allows_pull(self, now: float) -> bool:
        """True if the handshake is complete and the circuit breaker allows a pull."""
        return self.metadata is not None and self.circuit.allows_pull(now)

    def record_pull_failure(self, now: float) -> bool:
        """Counts a failed pull; returns True if that opens a closed circuit breaker.

        The metadata may be wrong, so the next pull repeats the handshake.
        """
        self.metadata = None
        return self.circuit.record_failure(now)

    def circuit_error(
        self, now: float, reading_from: Callable[[PeerKey], Sequence[PullState]]
    ) -> PullCircuitOpen | None:
        """The error if no pull from the peer is allowed now, else None.

        If READs of a pull from the peer hang, a new pull might hang as well, and its
        blocks would be quarantined.

        Args:
            reading_from: returns the pulls that read from a peer. It searches all open
                pulls, so it is only called for a peer with failures.
        """
        if not self.circuit.num_failures:
            return None
        pulls = reading_from(self.key)
        if any(state.hangs for state in pulls):
            reason = "READs from the server hang"
        elif not self.circuit.allows_pull(now, is_busy=bool(pulls)):
            reason = "the latest pulls from the server failed"
        else:
            return None
        return PullCircuitOpen(
            f"the circuit breaker of prefill server {self.key[0]} is open: {reason}"
        )


class PeerTable:
    """The records of all peers.

    Args:
        local: the compatibility record of this engine.
        allow_convert: accept peers with a different KV dtype or KV scales.
        stripe: the stripe of one rank of this engine, for `Stripe.check_remote`.
        draft: as in EngineMetadata of this engine.

    Attributes:
        outcomes: number of ended handshakes, by "ok" or the code of the error.
    """

    def __init__(
        self,
        local: CompatRecord,
        settings: PullSettings,
        allow_convert: bool,
        stripe: Stripe,
        draft: DraftKV | None = None,
    ) -> None:
        self._local = local
        self._draft = draft
        self._settings = settings
        self._allow_convert = allow_convert
        self._stripe = stripe
        self._peers: dict[PeerKey, PeerRecord] = {}
        self.outcomes: Counter[str] = Counter(dict.fromkeys(_OUTCOMES, 0))

    def find_or_add(self, remote: RemotePrefill | KVHint) -> PeerRecord:
        """Returns the record of the engine that a reference or hint names.

        Adds a record if there is none; this may evict the oldest idle records.
        """
        key = key_of(remote)
        peer = self._peers.get(key)
        if peer is None:
            idle_keys = [idle.key for idle in self._peers.values() if not idle.is_used]
            for oldest in idle_keys[: max(0, len(idle_keys) - _MAX_IDLE)]:
                del self._peers[oldest]
            peer = PeerRecord(key, address_of(remote), self._settings)
            self._peers[key] = peer
        return peer

    def shares_draft_kv(self, key: PeerKey) -> bool:
        """True if pulls from an engine also bring the KV of a drafter."""
        peer = self._peers.get(key)
        if peer is None or peer.metadata is None:
            return False
        return shares_draft_kv(self._draft, peer.metadata)

    def connect(self, remote: RemotePrefill | KVHint, now: float) -> PeerRecord:
        """Begins a handshake with the engine that a reference or hint names.

        Does nothing if the handshake is complete or in progress, or if the backoff of a
        failed handshake has not ended.
        """
        peer = self.find_or_add(remote)
        if peer.is_handshaking or peer.metadata is not None:
            return peer
        if peer.error is None or now >= peer.deadline:
            peer.is_handshaking = True
            peer.error = None
            peer.nonce = ""
            peer.address = address_of(remote)
            peer.next_request = now
            peer.deadline = now + self._settings.handshake_timeout_s
        return peer

    def get(self, key: PeerKey) -> PeerRecord | None:
        return self._peers.get(key)

    def circuit_error(
        self,
        key: PeerKey,
        now: float,
        reading_from: Callable[[PeerKey], Sequence[PullState]],
    ) -> PullCircuitOpen | None:
        """Returns the peer's PeerRecord.circuit_error; None for an unknown peer."""
        peer = self._peers.get(key)
        return None if peer is None else peer.circuit_error(now, reading_from)

    def on_prepared(self, key: PeerKey, rank: int) -> None:
        """Records that a rank has prepared pulls from a peer."""
        peer = self._peers.get(key)
        if peer is not None and peer.is_announced:
            peer.prepared_ranks.add(rank)

    def peers_at(self, address: tuple[str, int]) -> list[PeerRecord]:
        """The peers with a side channel at this address."""
        return [peer for peer in self._peers.values() if peer.address == address]

    def handshaking(self) -> list[PeerRecord]:
        """The peers with a handshake in progress."""
        return [peer for peer in self._peers.values() if peer.is_handshaking]

    def take_due(self, now: float) -> tuple[list[PeerRecord], list[PeerRecord]]:
        """Fails handshakes that have timed out, and schedules the next requests.

        Returns:
            The peers from which to request metadata now, and the peers with handshakes
            that this call has failed.
        """
        timed_out = [peer for peer in self.handshaking() if now >= peer.deadline]
        limit_s = self._settings.handshake_timeout_s
        for peer in timed_out:
            failure = f"did not answer within {limit_s:g} s (--handshake-timeout-s)"
            self.fail(peer, unreachable(peer.address, failure), now)
        due = [peer for peer in self.handshaking() if now >= peer.next_request]
        for peer in due:
            peer.next_request = now + limit_s / 4
        return due, timed_out

    def deadline(self) -> float:
        """When to call `take_due` next; infinity for never."""
        deadlines = [
            min(peer.deadline, peer.next_request) for peer in self.handshaking()
        ]
        return min(deadlines, default=float("inf"))

    def fail(self, peer: PeerRecord, error: BatonError, now: float) -> None:
        """Ends a handshake with an error, and begins its backoff."""
        self.outcomes[error.code] += 1
        peer.is_handshaking = False
        peer.metadata = None
        peer.error = error
        peer.deadline = now + backoff_s(
            self._settings.backoff_min_s,
            self._settings.backoff_max_s,
            peer.num_failed_handshakes,
        )
        peer.num_failed_handshakes += 1

    def on_metadata(
        self, peer: PeerRecord, metadata: EngineMetadata, now: float
    ) -> None:
        """Ends a handshake: checks the metadata, then stores it or an error."""
        try:
            if peer.key != (metadata.engine_id, metadata.incarnation):
                host, port = peer.address
                raise LeaseGone(
                    f"prefill server {peer.key[0]} was restarted: the server at "
                    f"{host}:{port} is {metadata.engine_id} now"
                )
            check_consistent(metadata)
            check_compatible(self._local, metadata.compat, self._allow_convert)
            self._stripe.check_remote(metadata.ranks[0].layout.block_size)
        except BatonError as error:
            self.fail(peer, error, now)
        # PlanError: a block of the peer has tokens of several ranks of this engine.
        except PlanError as error:
            self.fail(peer, PeerIncompatible(str(error), param="block_size"), now)
        else:
            peer.is_handshaking = False
            peer.metadata = metadata
            peer.num_failed_handshakes = 0
            self.outcomes["ok"] += 1


def verification_of(local: CompatRecord, metadata: EngineMetadata, verify: str) -> str:
    """The value of PullDone.verified for pulls from an engine.

    Args:
        local: the compatibility record of this engine.
        verify: as in PullCoordinator.
    """
    if verify == "off":
        return "off"
    if is_converted(local, metadata.compat):
        return "converted"
    return verify if metadata.digests == DIGEST_VERSION else "peer"


def is_converted(local: CompatRecord, remote: CompatRecord) -> bool:
    """True if the two engines have different KV dtypes or KV scales."""
    return (local.kv_dtype, local.kv_scales) != (remote.kv_dtype, remote.kv_scales)


def reference_error(
    remote: RemotePrefill, metadata: EngineMetadata
) -> PeerIncompatible | None:
    """The error if a reference contradicts the metadata of its engine, else None.

    References in answers to lookups are not signed, so all fields that a plan relies on
    are checked.
    """
    if remote.transfer_id is not None:
        # The prefill server still computes the prompt, so the reference has no blocks.
        return None
    layout = metadata.ranks[0].layout
    for name, value, engine_value in (
        ("remote_block_size", remote.block_size, layout.block_size),
        ("tp_size", remote.tp_size, metadata.tp_size),
    ):
        if value != engine_value:
            message = (
                f"{name} is {value} in kv_transfer_params, but "
                f"{engine_value} on the prefill server"
            )
            return PeerIncompatible(message, param=f"kv_transfer_params.{name}")
    if not _LEASE_ID.fullmatch(remote.lease_id):
        message = f"lease_id is {short_repr(remote.lease_id)}, which is no lease"
        return PeerIncompatible(message, param="kv_transfer_params.lease_id")
    num_blocks = layout.num_blocks
    unknown = [block for block in remote.block_ids if not 0 <= block < num_blocks]
    if remote.block_ids and not unknown:
        return None
    message = (
        f"remote_block_ids has the block ids {unknown[:4]}; "
        f"the prefill server has blocks from 0 to {num_blocks - 1}"
    )
    return PeerIncompatible(message, param="kv_transfer_params.remote_block_ids")
