"""Pulling a prompt's KV from a prefill server (P): the events, commands and reports.

    engine thread --calls--> PullCoordinator --commands--> TransferWorker --READs--> P
                 <--events--   (on rank 0)  <--reports--   of each rank
                                     |
                                     `--- side channel: metadata, renewals, fence ---> P

pull_state.py and peers.py decide, without I/O and without a clock. coordinator.py and
worker.py do the I/O, in the transfer threads of the ranks.

Rules for the engine:
- `hold` begins renewing the lease, `pull` begins reading, `cancel` gives the pull up.
- A reference with a `transfer_id` has no lease yet: P still computes the prompt. `hold`
  subscribes to the offer of the prompt, and PullBegun and PullSealed report P's
  progress. `pull` may be called at any time. The KV is read in several cuts: each cut
  has the tokens that P has announced since the previous cut. The fence follows after
  the last cut: P confirms that the lease was held until all READs had ended.
- A pull ends in exactly one of PullDone, PullFailed or (after `cancel`) PullDrained.
- PullFailed may come before `pull` was called, for example if the lease has ended. A
  later call of `pull` is then ignored.
- After PullFailed(drained=False), bytes may still arrive in the pull's blocks until the
  PullDrained event.
- A cancelled pull gets exactly one PullDrained, even if the pull had ended before or
  was never held. Events that were already queued may come before PullDrained.
- If READs of a cancelled pull do not end within `drain_grace_s`, PullStuck comes before
  PullDrained. Until PullDrained, bytes may still arrive in the pull's blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvcache.verify.scope import DigestPart, Scope
from protocol.errors import BatonError
from protocol.handshake import EngineMetadata
from protocol.messages import ErrorInfo, KVHint, RemotePrefill

PeerKey = tuple[str, str]  # engine id, incarnation

# The reasons why the KV of a pull was not verified, by the value of PullDone.verified.
UNVERIFIED = {
    "converted": (
        "the two servers have different KV dtypes or KV scales, so the bytes differ"
    ),
    "peer": (
        "the prefill server computes no digests, or digests of a different kind; "
        "use the same version of Baton on both servers"
    ),
}
# The paths by which the KV of a pull can be moved; see plan/plan.py. "mixed": several
# paths were used; "none": nothing was read.
PATHS = ("direct", "staged", "mapped", "mixed", "none")


def joint_path(paths: Iterable[str]) -> str:
    """The path of a pull, given the paths of its cuts on all ranks."""
    used_paths = set(paths) - {"none"}
    if len(used_paths) > 1:
        return "mixed"
    return used_paths.pop() if used_paths else "none"


def key_of(remote: RemotePrefill | KVHint) -> PeerKey:
    """The key of the engine that a reference or hint names."""
    return remote.engine_id, remote.incarnation


def address_of(remote: RemotePrefill | KVHint) -> tuple[str, int]:
    """Host and port of the engine's side channel."""
    return remote.host, remote.port


@dataclass(frozen=True)
class PullSettings:
    """The timeouts and intervals of a pull, in seconds.

    Attributes:
        handshake_timeout_s: longest wait for a peer's metadata.
        pull_timeout_s: longest time from the command to read a cut (a part of the
            prompt) until the last READ of the cut has ended and its KV is verified.
            While P computes the prompt, also the longest wait for more blocks.
        fence_timeout_s: longest wait for P's answer to COMPLETE. While P computes the
            prompt, also the longest wait for any answer from P.
        lookup_timeout_s: longest time of a lookup, including a handshake. After this
            time the prompt is computed locally.
        side_channel_timeout_s: a pull fails if P's side channel has had no connection
            for this time.
        fence_retry_s: a COMPLETE or a request for a digest that is not answered is
            repeated after this time, with the same nonce.
        renew_interval_s: time between two renewals; None: a third of the time for which
            a renewal extends the lease.
        drain_grace_s: longest time that a failed or cancelled pull waits for its READs
            to end. After this time, PullFailed or PullStuck is emitted although READs
            are still active.
        backoff_min_s: pause after a failed handshake, or after the failure of a pull
            that opens the circuit breaker. The pause doubles with every further
            failure, up to `backoff_max_s`.
    """

    handshake_timeout_s: float = 5.0
    pull_timeout_s: float = 30.0
    fence_timeout_s: float = 5.0
    lookup_timeout_s: float = 1.0
    side_channel_timeout_s: float = 2.0
    fence_retry_s: float = 1.0
    renew_interval_s: float | None = None
    drain_grace_s: float = 0.25
    backoff_min_s: float = 1.0
    backoff_max_s: float = 60.0


class PeerDecided(msgspec.Struct, frozen=True):
    """The outcome of PullCoordinator.connect: the peer is ready for pulls, or an error.

    Attributes:
        error: why no pull from the peer may begin; None if pulls may begin.
    """

    peer: PeerKey
    error: BatonError | None = None


class PullBegun(msgspec.Struct, frozen=True):
    """The prefill server has leased the first blocks of the offered prompt."""

    pull_id: str
    lease_id: str


class PullSealed(msgspec.Struct, frozen=True):
    """The prefill server (P) has computed the prompt and leased all blocks of it.

    After all blocks have been read, the fence follows: P confirms the lease.
    """

    pull_id: str
    reference: bytes  # kv_transfer_params as JSON


class LookedUp(msgspec.Struct, frozen=True):
    """`look_up` has ended. The engine must now pull from `remote`, or cancel the pull.

    Attributes:
        remote: the reference; None if no prefix was found in time.
        outcome: "found", "none", or "late" for a lookup that has timed out.
        seconds: the duration of the lookup.
    """

    pull_id: str
    remote: RemotePrefill | None
    outcome: str
    seconds: float


class PullDone(msgspec.Struct, frozen=True):
    """Every rank has read its share, and the lease was held until the last READ ended.

    Attributes:
        nbytes: bytes of the wanted tokens, on all ranks together.
        num_descriptors: number of runs of all READs.
        seconds: time from `pull` until P has confirmed the lease (the fence).
        path: one of PATHS.
        fence_s: the part of `seconds` that was spent waiting for the fence.
        verified: "off", "sample", "all", or a key of UNVERIFIED.
        is_converted: P's KV has a different dtype or different scales than D's, and was
            converted.
    """

    pull_id: str
    nbytes: int
    num_descriptors: int
    seconds: float
    path: str
    fence_s: float = 0.0
    num_tokens: int = 0
    verified: str = "off"
    is_converted: bool = False


class PullFailed(msgspec.Struct, frozen=True):
    """The pull has failed.

    Attributes:
        drained: True if no READ of the pull is active; otherwise a PullDrained follows.
    """

    pull_id: str
    error: BatonError
    drained: bool


class PullDrained(msgspec.Struct, frozen=True):
    """No READ of a failed or cancelled pull is active any more."""

    pull_id: str


class PullStuck(msgspec.Struct, frozen=True):
    """READs of a cancelled pull are still active after `drain_grace_s`.

    A PullDrained follows when the last READ has ended.
    """

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
    """Coordinator to rank: pulls from this engine will follow. The rank answers with
    PeerPrepared."""

    metadata: EngineMetadata


class DropPeer(msgspec.Struct, frozen=True, tag="drop_peer"):
    """Coordinator to rank: forget this peer once no pull from the peer is active."""

    peer: PeerKey


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Coordinator to rank: read your share of tokens [token_start, token_stop).

    Attributes:
        local_block_ids: blocks of this engine, from token 0 of the sequence on. A block
            holds (block_size x dcp) tokens.
        remote_block_ids: blocks of the peer, from token 0 of the sequence on.
        min_resume_tokens: the smallest number of tokens after which the engine may
            continue the sequence, as in KVGroups.token_ranges.
        scope: the scope of the digest that RankEnded has to contain; None: no digest.
        has_draft_kv: also read the KV of the drafter, if the peer has the same drafter.
    """

    pull_id: str
    peer: PeerKey
    lease_id: str
    token_start: int
    token_stop: int
    local_block_ids: list[int]
    remote_block_ids: list[int]
    min_resume_tokens: int = 0
    scope: Scope | None = None
    has_draft_kv: bool = True


class StopPull(msgspec.Struct, frozen=True, tag="stop"):
    """Coordinator to rank: post nothing more for this pull."""

    pull_id: str


class DigestOrder(msgspec.Struct, frozen=True, tag="digest"):
    """Coordinator to rank: compute a digest of the KV in this engine's blocks.

    Every rank answers with RankEnded, as to a Pull.

    Attributes:
        block_ids: this engine's blocks, from token 0 of the sequence on.
    """

    pull_id: str
    scope: Scope
    block_ids: tuple[int, ...]


Command = AddPeer | DropPeer | Pull | StopPull | DigestOrder


class PeerPrepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Rank to coordinator: the peer's memory is mapped, or the rank is connected to the
    peer, or neither is possible. Sent once for each AddPeer."""

    peer: PeerKey
    rank: int


class RankFailing(msgspec.Struct, frozen=True, tag="failing"):
    """Rank to coordinator: the pull has failed on this rank; READs are still active."""

    pull_id: str
    rank: int
    error: ErrorInfo


class RankEnded(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """Rank to coordinator: no READ of this pull is active any more.

    Sent once for each Pull and each DigestOrder, and for a StopPull of a pull that is
    unknown or has ended.

    Attributes:
        complete: every byte was read and is in its place.
        error: why this rank's share has failed; None if it was stopped or is complete.
        part: this rank's part of the digest; None if no digest was requested.
    """

    pull_id: str
    rank: int
    complete: bool
    error: ErrorInfo | None = None
    nbytes: int = 0
    num_descriptors: int = 0
    path: str = "none"
    part: DigestPart | None = None


PullReport = RankFailing | RankEnded
Report = PeerPrepared | PullReport

encode = msgspec.msgpack.Encoder().encode
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
