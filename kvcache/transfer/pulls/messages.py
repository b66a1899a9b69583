"""Pulling a prompt's KV out of a prefill server: the events, commands and reports.

    engine thread --calls--> PullCoordinator --commands--> TransferWorker of each rank --READs--> P
                 <--events--      (rank 0)   <--reports--
                                     |
                                     `--- side channel: metadata, renewals, the fence ---> P

pull_state.py and peers.py decide, without I/O and without a clock; coordinator.py and worker.py are
the threads around them.

Rules for the engine:
- `hold` begins renewing the lease, `pull` begins reading, `cancel` gives up. A remote with a
  `transfer_id` has no lease yet: `hold` subscribes, PullBegun and PullSealed report progress, and
  `pull` may come at any time; the blocks that P has are read cut after cut, with one fence.
- A pull ends in exactly one of PullDone, PullFailed or (after `cancel`) PullDrained. PullFailed may
  come before `pull` was called, when the lease turns out to be gone; `pull` is then ignored.
- PullFailed(drained=False): bytes may still arrive in the pull's blocks, until PullDrained comes.
- `cancel` is always followed by exactly one PullDrained, even for a pull that has ended or was
  never held. An event that was already on its way may come before it, and a PullStuck when READs
  do not end within the grace: their blocks are as undrained as those of a failed pull.
"""

from dataclasses import dataclass

import msgspec

from kvcache.verify.scope import DigestPart, Scope
from protocol.errors import BatonError
from protocol.handshake import EngineMetadata
from protocol.messages import ErrorInfo, KVHint, RemotePrefill

PeerKey = tuple[str, str]  # engine id, incarnation

UNVERIFIED = {
    "converted": "its bytes are others by design: it has another KV dtype or other KV scales",
    "peer": "it computes no digests, or others; use the same version of Baton",
}
PATHS = (
    "direct",
    "staged",
    "mapped",
    "mixed",
    "none",
)  # mixed: several; none: nothing was read


def key_of(remote: RemotePrefill | KVHint) -> PeerKey:
    return remote.engine_id, remote.incarnation


def address_of(remote: RemotePrefill | KVHint) -> tuple[str, int]:
    return remote.host, remote.port  # of the side channel


@dataclass(frozen=True)
class PullSettings:
    """Every wait of a pull, by name, in seconds."""

    handshake_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0  # from the order to read to the last READ's end
    fence_timeout_s: float = 5.0
    lookup_timeout_s: float = (
        1.0  # first contact included; the prompt is computed after it
    )
    connection_timeout_s: float = 2.0  # without a connection to the side channel
    fence_retry_s: float = 1.0  # COMPLETE is repeated, with the same attempt id
    renew_interval_s: float | None = None  # a third of the lease
    drain_grace_s: float = (
        0.25  # a failed pull's READs may end before its verdict is told
    )
    backoff_min_s: float = 1.0  # after a failed handshake, doubling
    backoff_max_s: float = 60.0


class PeerDecided(msgspec.Struct, frozen=True):
    peer: PeerKey
    error: BatonError | None = None  # None: pulls from there may begin


class PullBegun(msgspec.Struct, frozen=True):
    """P still computes the prompt, and has leased the first of its blocks."""

    pull_id: str
    lease_id: str


class PullSealed(msgspec.Struct, frozen=True):
    """P has computed the whole prompt. The remaining blocks are read next, then the fence."""

    pull_id: str
    reference: bytes  # kv_transfer_params as JSON


class LookedUp(msgspec.Struct, frozen=True):
    """The end of `look_up`. The engine has to pull the reference or to cancel it."""

    pull_id: str
    remote: RemotePrefill | None
    outcome: str  # found | none | late
    seconds: float


class PullDone(msgspec.Struct, frozen=True):
    """Every rank has read, and the lease was held until then."""

    pull_id: str
    nbytes: int  # useful bytes, all ranks
    descriptors: int
    seconds: float  # from `pull` until the fence was passed
    path: str  # of PATHS
    fence_s: float = 0.0  # of `seconds`, the part after the last byte
    num_tokens: int = 0
    verified: str = "off"  # or "sample", "all", or a key of UNVERIFIED
    is_converted: bool = False  # to another dtype, or other scales


class PullFailed(msgspec.Struct, frozen=True):
    pull_id: str
    error: BatonError
    drained: bool


class PullDrained(msgspec.Struct, frozen=True):
    pull_id: str


class PullStuck(msgspec.Struct, frozen=True):
    """READs of a cancelled pull go on after the grace; PullDrained comes when they have ended."""

    pull_id: str


Event = (
    PeerDecided
    | LookedUp
    | PullBegun
    | PullSealed
    | PullDone
    | PullFailed
    | PullStuck
    | PullDrained
)


class AddPeer(msgspec.Struct, frozen=True, tag="add_peer"):
    """Coordinator to rank: pulls from this engine will follow."""

    metadata: EngineMetadata


class DropPeer(msgspec.Struct, frozen=True, tag="drop_peer"):
    """Coordinator to rank: forget this peer as soon as no READ from it is active."""

    peer: PeerKey


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Coordinator to rank: read your share of tokens [token_start, token_stop)."""

    pull_id: str
    peer: PeerKey
    lease_id: str
    token_start: int
    token_stop: int
    local_block_ids: list[int]  # from token 0 of the sequence on
    remote_block_ids: list[int]
    reach: int = (
        0  # the fewest tokens that the engine may go on from, as in KVGroups.spans
    )
    scope: Scope | None = None  # of the digest to report with the end; None: no digest


class StopPull(msgspec.Struct, frozen=True, tag="stop"):
    """Coordinator to rank: post nothing more for this pull."""

    pull_id: str


class DigestOrder(msgspec.Struct, frozen=True, tag="digest"):
    """Coordinator to rank: compute a digest of the KV in these blocks of this engine, from token 0
    on. Ends in RankEnded, as a Pull does."""

    pull_id: str
    scope: Scope
    block_ids: tuple[int, ...]


Command = AddPeer | DropPeer | Pull | StopPull | DigestOrder


class RankFailing(msgspec.Struct, frozen=True, tag="failing"):
    """Rank to coordinator: this pull fails here, and READs of it are still active."""

    pull_id: str
    rank: int
    error: ErrorInfo


class RankEnded(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """Rank to coordinator: no READ of this pull is active any more. Sent once for each Pull, and
    for a StopPull of a pull that is unknown or has ended."""

    pull_id: str
    rank: int
    complete: bool  # every byte was read and is in place
    error: ErrorInfo | None = None
    nbytes: int = 0
    descriptors: int = 0
    path: str = "none"
    part: DigestPart | None = None  # where there is a scope


Report = RankFailing | RankEnded

encode = msgspec.msgpack.Encoder().encode
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
