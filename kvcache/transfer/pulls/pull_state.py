"""One pull's decisions: (state, event, now) -> actions. No I/O, no clock.

    HELD --pull--> WAITING --peer ready--> READING --every rank read all--> FENCING --ok--> ENDED
      |               |                       |                               |
      `---------------+-----------------------+---- failure or cancel --------'
                                              |
                                        DRAINING (READs still active) --the last one ended--> ENDED

The fence is P's answer to COMPLETE. While P still computes the prompt, READING goes by cuts, and
waits between two of them for more blocks.
"""

from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from kvcache.transfer.pulls.messages import (
    Event,
    Pull,
    PullBegun,
    PullDone,
    PullDrained,
    PullFailed,
    PullSealed,
    PullSettings,
    PullStuck,
    RankEnded,
    Report,
    StopPull,
    address_of,
    key_of,
)
from kvcache.verify.scope import DigestPart, Scope
from protocol.errors import (
    BatonError,
    InternalError,
    KVCorrupt,
    LeaseGone,
    PeerIncompatible,
    PeerUnreachable,
    PullTimeout,
    PullWithheld,
    TransferFailed,
)
from protocol.handshake import (
    AbortLease,
    AskDigest,
    Complete,
    Digest,
    Gone,
    LeaseRequest,
    Ok,
    Progress,
    Renew,
    Subscribe,
)
from protocol.messages import RemotePrefill

_MIN_RENEW_S, _SUBSCRIBE_S = (
    0.02,
    1.0,
)  # between renewals at least, of subscriptions at most
_NO_FAULTS = InternalError.code, PullWithheld.code, PeerIncompatible.code  # of the peer
_NEVER = float("inf")


class Phase(Enum):
    HELD = "held"
    WAITING = "waiting"
    READING = "reading"
    FENCING = "fencing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True)
class SuspectPeer:
    """The peer's metadata may be wrong: shake hands anew before the next pull."""


# To P; to every rank; nowhere; to the engine.
Action = LeaseRequest | Subscribe | Pull | StopPull | SuspectPeer | Event


class PullState:
    """One pull. Methods that take an event return the actions it leads to, in order.

    Attributes:
        planned: when the owner will call `tick`; kept for the owner, not used here.
        drained_told: whether PullDrained was returned.
    """

    def __init__(
        self,
        pull_id: str,
        remote: RemotePrefill,
        num_ranks: int,
        settings: PullSettings,
        attempt_id: str,
        now: float,
        tokens_per_block: int = 1,
    ) -> None:
        self.pull_id, self.remote, self.attempt_id = pull_id, remote, attempt_id
        self.key, self.address = key_of(remote), address_of(remote)
        self.phase = Phase.HELD
        self.planned = _NEVER
        self.drained_told = False
        self._num_ranks, self._settings = num_ranks, settings
        self._order: Pull | None = None
        self._tokens_per_block = tokens_per_block
        self._grows = remote.transfer_id is not None  # P has not sent the reference yet
        self._blocks = list(remote.block_ids)
        self._read_to = 0  # end of the tokens ordered so far
        self._reading: set[int] = set()  # ranks that have not ended
        self._reports: list[RankEnded] = []
        self._verified = "off"  # as of PullDone
        self._is_converted = False  # as of PullDone
        self._scope: Scope | None = None  # of the cut that is not verified yet
        self._parts: list[DigestPart] = []  # this engine's digest of it, by rank
        self._sums: bytes | None = None  # P's digest of it
        self._doubts = (
            False  # digests differed; P is asked again, as the lease may have ended
        )
        self._error: BatonError | None = None
        self._failure_told = self._cancelled = False
        self._began = now
        self._next_renewal = now  # at once: the lease may be gone already
        self._timeout = _NEVER  # of the phase
        self._next_retry = _NEVER  # of COMPLETE, or of the question for a digest
        # While the prompt grows, P must have answered by then.
        self._silent_until = now + settings.fence_timeout_s if self._grows else _NEVER

    @property
    def reads(self) -> bool:
        """A rank has not reported the end of its share."""
        return bool(self._reading)

    @property
    def hangs(self) -> bool:
        """The pull was given up, and its READs have not ended within the grace."""
        return self.phase is Phase.DRAINING and self._timeout == _NEVER

    @property
    def is_untouched(self) -> bool:
        """No READ was ordered, and the sender of the reference will end its lease, or offer it to
        another engine: giving this pull up needs no abort."""
        return self.remote.sender_releases and self.phase in (Phase.HELD, Phase.WAITING)

    def abort(self, how: str = "abort") -> AbortLease:
        """The message that gives up the lease, or the subscription if no lease is known yet; its
        answer is ignored. `how` "lend": another engine may subscribe."""
        named = "" if how == "lend" else self.remote.lease_id
        lease = self._lease | {"lease_id": named or self.remote.transfer_id or ""}
        return AbortLease(nonce=f"{how}-{self.attempt_id}", **lease)

    @property
    def _lease(self) -> dict[str, str]:
        return {
            "incarnation": self.remote.incarnation,
            "lease_id": self.remote.lease_id,
        }

    def deadline(self) -> float:
        """When `tick` next has something to do; infinity for never."""
        renewal = (
            min(self._next_renewal, self._silent_until) if self._renews else _NEVER
        )
        return min(renewal, self._timeout, self._next_retry)

    def pull(self, order: Pull, now: float) -> None:
        """The engine has blocks to read into."""
        if self.phase is Phase.HELD:
            self.phase, self._order, self._began = Phase.WAITING, order, now
            self._read_to = order.token_start

    def peer_ready(
        self, now: float, verified: str = "off", *, is_converted: bool = False
    ) -> list[Action]:
        """The handshake is done: orders the first cut. Arguments: as in PullDone."""
        if self.phase is not Phase.WAITING or self._order is None:
            return []
        self.phase = Phase.READING
        self._verified = verified
        self._is_converted = is_converted
        self._timeout = now + self._settings.pull_timeout_s
        return self._read_on(now)

    def _read_on(self, now: float) -> list[Action]:
        """Orders the next cut unless one is being read or verified: all tokens that P has, down to
        a multiple of this engine's blocks. After the last cut, asks for the fence."""
        if (
            self.phase is not Phase.READING
            or self._reading
            or self._scope
            or self._order is None
        ):
            return []
        order, stop = self._order, self._order.token_stop
        if self._grows:
            there = len(self._blocks) * self.remote.block_size
            stop = min(stop, there - there % self._tokens_per_block)
        elif self._read_to == stop and self._reports:
            self.phase = Phase.FENCING
            self._timeout = now + self._settings.fence_timeout_s
            return [self._complete(now)]
        if self._grows and stop <= self._read_to:
            return []
        if self.remote.transfer_id is not None:
            order = replace(order, token_start=self._read_to, token_stop=stop)
            lease_id, blocks = self.remote.lease_id, list(self._blocks)
            order = replace(order, lease_id=lease_id, remote_block_ids=blocks)
        self._read_to = stop
        self._reading = set(range(self._num_ranks))
        self._timeout = now + self._settings.pull_timeout_s
        return self._ordered(order, now)

    def _progressed(self, progress: Progress, now: float) -> list[Action]:
        """P has more blocks. A message whose first block does not follow ours is repeated later."""
        if not self._grows or progress.first > len(self._blocks):
            return []
        actions: list[Action] = []
        if not self.remote.lease_id:
            known = {"lease_s": progress.lease_s, "block_size": progress.block_size}
            self.remote = replace(self.remote, lease_id=progress.lease_id, **known)
            actions.append(PullBegun(self.pull_id, progress.lease_id))
        elif progress.lease_id != self.remote.lease_id:
            return self.fail(
                LeaseGone("the prompt is computed anew, under another lease"), now
            )
        self._blocks[progress.first :] = progress.block_ids
        if self.phase is Phase.READING:
            self._timeout = now + self._settings.pull_timeout_s
        if progress.reference:
            self._grows, self._silent_until = False, _NEVER
            self._next_renewal = now + self._renew_s
            actions.append(PullSealed(self.pull_id, progress.reference))
        return actions + self._read_on(now)

    def _ordered(self, order: Pull, now: float) -> list[Action]:
        """The order to read a cut and, if KV is verified, the question for P's digest of it."""
        self._parts, self._sums, self._doubts = [], None, False
        span = order.token_start, order.token_stop
        if self._verified not in ("sample", "all") or span[0] == span[1]:
            return [order]
        samples = self._verified == "sample"
        self._scope = Scope(order.lease_id, *span, samples=samples, reach=order.reach)
        return [replace(order, scope=self._scope), self._ask(self._scope, now)]

    def _ask(self, scope: Scope, now: float) -> AskDigest:
        self._next_retry = now + self._settings.fence_retry_s
        return AskDigest(
            nonce=self._digest_nonce,
            token_start=scope.start,
            token_stop=scope.stop,
            samples=scope.samples,
            reach=scope.reach,
            **self._lease,
        )

    @property
    def _digest_nonce(self) -> str:
        time = "again" if self._doubts else "digest"
        return f"{time}{self._read_to}-{self.attempt_id}"

    def _checked(self, now: float) -> list[Action]:
        """Once every rank has read a cut and P has answered: compares digests, and reads on."""
        scope = self._scope
        if self._reading or (scope is not None and self._sums is None):
            return []
        if scope is not None and self._sums is not None:
            if not self._sums:
                message = (
                    f"{self.remote.engine_id} could not compute the digest of its KV"
                )
                return self._failed(TransferFailed(message), now)
            if where := scope.faults(self._parts, self._sums):
                if not self._doubts:
                    self._doubts, self._sums = True, None
                    return [self._ask(scope, now)]
                message = (
                    f"the KV from {self.remote.engine_id} is not what it holds: {where}"
                )
                return self._failed(KVCorrupt(message), now)
            self._scope = None
        return self._read_on(now)

    def fail(self, error: BatonError, now: float) -> list[Action]:
        """Fails the pull for a reason found by the owner, unless its outcome is decided."""
        if not (self._renews or self.phase is Phase.FENCING):
            return []
        self._error = error
        return self._stop(now)

    def reported(self, report: Report, now: float) -> list[Action]:
        """Takes a rank's report: it is failing while READs are active, or it has ended."""
        if not isinstance(report, RankEnded):
            failed = self.phase is Phase.READING
            return self._failed(report.error.to_error(), now) if failed else []
        if report.rank not in self._reading:
            return []
        self._reading.discard(report.rank)
        self._reports.append(report)
        if self.phase is Phase.DRAINING:
            return [] if self._reading else self._drained()
        if not report.complete:
            error = (
                report.error.to_error()
                if report.error
                else TransferFailed("READ stopped")
            )
            return self._failed(error, now)
        self._parts += [report.part] if report.part else []
        return self._checked(now)

    def answered(
        self, reply: Ok | Gone | Progress | Digest, now: float
    ) -> list[Action]:
        """Takes P's answer to a message of this pull."""
        if self._grows and self._renews:
            self._silent_until = now + self._settings.fence_timeout_s
        if isinstance(reply, Progress):
            return self._progressed(reply, now) if self._renews else []
        if isinstance(reply, Digest):
            if reply.nonce != self._digest_nonce or self.phase is not Phase.READING:
                return []
            self._sums, self._next_retry = reply.sums, _NEVER
            return self._checked(now)
        asked = "subscribe" if self._grows else "renew"
        asks = f"{asked}-{self.attempt_id}", self._digest_nonce
        is_fence = (
            reply.nonce == f"complete-{self.attempt_id}" and self.phase is Phase.FENCING
        )
        if not is_fence and not (reply.nonce in asks and self._renews):
            return []
        if isinstance(reply, Gone):
            lease = f"lease {self.remote.lease_id} on {self.remote.engine_id}"
            return self.fail(LeaseGone(f"{lease} is gone: {reply.reason}"), now)
        return self._ended(self._done(now)) if is_fence else []

    def cancel(self, now: float, *, lend: bool = False) -> list[Action]:
        """The engine gave up: one PullDrained follows, perhaps after a PullStuck, and no verdict.

        Args:
            lend: another engine may pull instead: an untouched lease is kept.
        """
        if self._cancelled or self.phase is Phase.ENDED:
            return []
        self._cancelled = True
        if lend and self.is_untouched:
            unsubscribe = [self.abort("lend")] if self._grows else []
            return self._ended(self._tell_drained(), *unsubscribe)
        if self.phase is Phase.DRAINING:
            return [PullStuck(self.pull_id)] if self._failure_told else []
        return self._stop(now)

    def tick(self, now: float) -> list[Action]:
        """Sends renewals and repetitions that are due, and fails at timeouts."""
        actions: list[Action] = []
        if self._renews and now >= self._next_renewal:
            self._next_renewal = now + self._renew_s
            renew = Renew(nonce=f"renew-{self.attempt_id}", **self._lease)
            actions.append(self._subscribe() if self._grows else renew)
        if self._renews and now >= self._silent_until:
            peer, limit_s = (
                f"{self.remote.host}:{self.remote.port}",
                self._settings.fence_timeout_s,
            )
            error = PeerUnreachable(
                f"{peer} said nothing of the prompt for {limit_s} s"
            )
            return actions + self._failed(error, now)
        if now >= self._timeout:
            return actions + self._timed_out(now)
        if now >= self._next_retry:
            actions.append(
                self._ask(self._scope, now) if self._scope else self._complete(now)
            )
        return actions

    @property
    def _renews(self) -> bool:
        return self.phase in (Phase.HELD, Phase.WAITING, Phase.READING)

    @property
    def _renew_s(self) -> float:
        interval_s = self._settings.renew_interval_s or self.remote.lease_s / 3
        return max(
            min(interval_s, _SUBSCRIBE_S) if self._grows else interval_s, _MIN_RENEW_S
        )

    def _subscribe(self) -> Subscribe:
        assert self.remote.transfer_id is not None
        return Subscribe(
            nonce=f"subscribe-{self.attempt_id}",
            incarnation=self.remote.incarnation,
            transfer_id=self.remote.transfer_id,
            prompt_digest=self.remote.prompt_digest,
            num_blocks=len(self._blocks),
        )

    def _complete(self, now: float) -> Complete:
        self._next_retry = now + self._settings.fence_retry_s
        attempt_id = self.attempt_id
        return Complete(
            nonce=f"complete-{attempt_id}", attempt_id=attempt_id, **self._lease
        )

    def _failed(self, error: BatonError, now: float) -> list[Action]:
        """Fails the pull and, unless the error is none of the peer's, suspects the peer."""
        return [SuspectPeer()] * (error.code not in _NO_FAULTS) + self.fail(error, now)

    def _timed_out(self, now: float) -> list[Action]:
        peer, limit_s = (
            f"{self.remote.host}:{self.remote.port}",
            self._settings.pull_timeout_s,
        )
        if self.phase is Phase.READING and not (self._reading or self._scope):
            message = f"{peer} computed no more of the prompt for {limit_s} s"
            return self.fail(PullTimeout(message), now)
        if self.phase is Phase.READING:
            message = f"reading the KV from {peer} took longer than {limit_s} s"
            if not self._reading:
                message = f"{peer} told no digest of its KV for {limit_s} s"
            return self._failed(PullTimeout(message), now)
        if self.phase is Phase.FENCING:
            message = f"{peer} did not confirm the lease within {self._settings.fence_timeout_s} s"
            return self._failed(PeerUnreachable(message), now)
        self._timeout = _NEVER  # DRAINING: the grace is over
        return (
            [PullStuck(self.pull_id)]
            if self._cancelled
            else [self._tell_failure(drained=False)]
        )

    def _stop(self, now: float) -> list[Action]:
        """Ends at once when no READ can be active, else drains."""
        if not self._reading:
            return self._drained()
        self.phase = Phase.DRAINING
        self._next_retry = _NEVER
        self._timeout = now + self._settings.drain_grace_s
        return [StopPull(self.pull_id)]

    def _drained(self) -> list[Action]:
        # The lease is aborted only now: while READs go on, P must not unmap its memory or give it
        # to others. (For D late bytes are harmless: nothing uses them.)
        abort: list[Action] = (
            [] if isinstance(self._error, LeaseGone) else [self.abort()]
        )
        if (
            self._grows and abort and not self.remote.lease_id
        ):  # P may not know the offer yet
            abort.insert(0, self._subscribe())
        if self._cancelled or self._failure_told:
            return self._ended(self._tell_drained(), *abort)
        return self._ended(self._tell_failure(drained=True), *abort)

    def _tell_failure(self, drained: bool) -> PullFailed:
        assert self._error is not None
        self._failure_told = True
        return PullFailed(self.pull_id, self._error, drained)

    def _tell_drained(self) -> PullDrained:
        self.drained_told = True
        return PullDrained(self.pull_id)

    def _ended(self, *actions: Action) -> list[Action]:
        self.phase = Phase.ENDED
        self._timeout = self._next_retry = _NEVER
        return list(actions)

    def _done(self, now: float) -> PullDone:
        nbytes = sum(report.nbytes for report in self._reports)
        descriptors = sum(report.descriptors for report in self._reports)
        path, *others = {report.path for report in self._reports} - {"none"} or {"none"}
        path = "mixed" if others else path
        fence_s = now - (self._timeout - self._settings.fence_timeout_s)
        num_tokens = (
            self._order.token_stop - self._order.token_start if self._order else 0
        )
        return PullDone(
            pull_id=self.pull_id,
            nbytes=nbytes,
            descriptors=descriptors,
            seconds=now - self._began,
            path=path,
            fence_s=fence_s,
            num_tokens=num_tokens,
            verified=self._verified,
            is_converted=self._is_converted,
        )
