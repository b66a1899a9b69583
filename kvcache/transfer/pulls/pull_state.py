"""One pull's decisions: (state, event, now) -> actions. No I/O, no clock.

    HELD --pull--> WAITING --peer ready--> READING --every rank read all--> FENCING --ok--> ENDED
      |               |                       |                               |
      `---------------+-----------------------+---- failure or cancel --------'
                                              |
                                        DRAINING (READs still active) --the last one ended--> ENDED

The fence is P's answer to COMPLETE.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from kvcache.transfer.pulls.messages import (
    Event,
    PullDone,
    PullDrained,
    PullFailed,
    PullSettings,
    PullStuck,
    RankEnded,
    RankFailing,
    error_from,
)
from protocol.errors import (
    BatonError,
    InternalError,
    LeaseGone,
    PeerUnreachable,
    PullTimeout,
    PullWithheld,
    TransferFailed,
)
from protocol.handshake import AbortLease, Complete, Renew, Request
from protocol.messages import RemotePrefill

_MAX_ENDED = 16384  # pulls remembered after their end, so that a late cancel is answered once
_MIN_RENEW_S = 0.02


class Phase(Enum):
    HELD = "held"
    WAITING = "waiting"
    READING = "reading"
    FENCING = "fencing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True)
class SendRenew:
    pass


@dataclass(frozen=True)
class SendComplete:
    attempt_id: str


@dataclass(frozen=True)
class SendAbort:
    pass


@dataclass(frozen=True)
class FanOut:
    """Tell every rank to read its share."""


@dataclass(frozen=True)
class StopRanks:
    pass


@dataclass(frozen=True)
class SuspectPeer:
    """What is known of the peer may be wrong: shake hands anew before the next pull."""


@dataclass(frozen=True)
class Emit:
    event: Event


Action = SendRenew | SendComplete | SendAbort | FanOut | StopRanks | SuspectPeer | Emit


class PullState:
    """Mutable; every method returns what to do now, in order."""

    def __init__(
        self,
        pull_id: str,
        remote: RemotePrefill,
        num_ranks: int,
        settings: PullSettings,
        attempt_id: str,
        now: float,
    ) -> None:
        self.pull_id = pull_id
        self.remote = remote
        self.attempt_id = attempt_id
        self.phase = Phase.HELD
        self.drained_told = False  # PullDrained was emitted
        self._num_ranks = num_ranks
        self._settings = settings
        self._reading: set[int] = set()  # ranks that have not ended
        self._reports: list[RankEnded] = []
        self._error: BatonError | None = None
        self._failure_told = False
        self._cancelled = False
        self._began = now
        self._next_renewal = now  # at once, to find out whether the lease still is
        self._timeout = float("inf")  # of the phase
        self._next_retry = float("inf")  # of COMPLETE

    def __repr__(self) -> str:
        return f"<PullState {self.pull_id} {self.phase.value}, {len(self._reading)} ranks reading>"

    @property
    def is_undecided(self) -> bool:
        """Neither done nor failed: `fail` would matter."""
        return self._renews or self.phase is Phase.FENCING

    @property
    def reads(self) -> bool:
        """A rank has not ended what it was ordered to read."""
        return bool(self._reading)

    @property
    def hangs(self) -> bool:
        """It was given up, and its READs have not ended within the grace."""
        return self.phase is Phase.DRAINING and self._timeout == float("inf")

    @property
    def is_untouched(self) -> bool:
        """No READ was ordered, and who sent the reference ends its lease, or offers it to another
        engine: to give this pull up takes no abort."""
        return self.remote.sender_releases and self.phase in (Phase.HELD, Phase.WAITING)

    def deadline(self) -> float:
        """When `tick` next has something to do; infinity for never."""
        renewal = self._next_renewal if self._renews else float("inf")
        return min(renewal, self._timeout, self._next_retry)

    def request(self, action: SendRenew | SendComplete | SendAbort) -> Request:
        """What says this of the lease. Its answer is known by the nonce; nobody waits for that to
        an abort."""
        about = {"incarnation": self.remote.incarnation, "lease_id": self.remote.lease_id}
        match action:
            case SendRenew():
                return Renew(nonce=f"renew-{self.attempt_id}", **about)
            case SendComplete(attempt_id):
                return Complete(nonce=f"complete-{attempt_id}", attempt_id=attempt_id, **about)
            case SendAbort():
                return AbortLease(nonce=f"abort-{self.attempt_id}", **about)

    def answered(self, nonce: str, ok: bool, reason: str, now: float) -> list[Action]:
        """P's answer to the request of this nonce."""
        if nonce == f"renew-{self.attempt_id}":
            return self.renew_answered(ok, reason, now)
        if nonce == f"complete-{self.attempt_id}":
            return self.fence_answered(ok, reason, now)
        return []

    def pull(self, now: float) -> None:
        """The engine has blocks to read into."""
        if self.phase is Phase.HELD:
            self.phase, self._began = Phase.WAITING, now

    def peer_ready(self, now: float) -> list[Action]:
        if self.phase is not Phase.WAITING:
            return []
        self.phase = Phase.READING
        self._reading = set(range(self._num_ranks))
        self._timeout = now + self._settings.pull_timeout_s
        return [FanOut()]

    def fail(self, error: BatonError, now: float) -> list[Action]:
        """Something outside found that this pull cannot succeed."""
        if not self.is_undecided:
            return []
        self._error = error
        return self._stop(now)

    def rank_failing(self, report: RankFailing, now: float) -> list[Action]:
        if self.phase is not Phase.READING:
            return []
        return self._failed(error_from(report.error), now)

    def _failed(self, error: BatonError, now: float) -> list[Action]:
        """A rank could not read: the peer's fault, unless the rank says that it is not."""
        is_ours = error.code in (InternalError.code, PullWithheld.code)
        return [*([] if is_ours else [SuspectPeer()]), *self.fail(error, now)]

    def rank_ended(self, report: RankEnded, now: float) -> list[Action]:
        if report.rank not in self._reading:
            return []
        self._reading.discard(report.rank)
        self._reports.append(report)
        if self.phase is Phase.DRAINING:
            return [] if self._reading else self._drained()
        if not report.complete:
            error = error_from(report.error) if report.error else TransferFailed("READ stopped")
            return self._failed(error, now)
        if self._reading:
            return []
        self.phase = Phase.FENCING
        self._timeout = now + self._settings.fence_timeout_s
        self._next_retry = now + self._settings.fence_retry_s
        return [SendComplete(self.attempt_id)]

    def renew_answered(self, ok: bool, reason: str, now: float) -> list[Action]:
        if ok or not self._renews:
            return []
        return self.fail(self._lease_gone(reason), now)

    def fence_answered(self, ok: bool, reason: str, now: float) -> list[Action]:
        if self.phase is not Phase.FENCING:
            return []
        if not ok:
            return self.fail(self._lease_gone(reason), now)
        return [Emit(self._done(now)), *self._end()]

    def cancel(self, now: float, *, lend: bool = False) -> list[Action]:
        """The engine gave up: no verdict any more, one PullDrained, perhaps a PullStuck before.

        Args:
            lend: another engine may be asked: do not end a lease that is untouched.
        """
        if self._cancelled or self.phase is Phase.ENDED:
            return []
        self._cancelled = True
        if lend and self.is_untouched:
            return [*self._tell_drained(), *self._end()]
        if self.phase is Phase.DRAINING:
            return [Emit(PullStuck(self.pull_id))] if self._failure_told else []
        return self._stop(now)

    def tick(self, now: float) -> list[Action]:
        """Renewals, repetitions and timeouts that are due."""
        actions: list[Action] = []
        if self._renews and now >= self._next_renewal:
            interval_s = self._settings.renew_interval_s or self.remote.lease_s / 3
            interval_s = max(interval_s, _MIN_RENEW_S)
            self._next_renewal = now + interval_s
            actions.append(SendRenew())
        if now >= self._timeout:
            return actions + self._timed_out(now)
        if now >= self._next_retry:
            self._next_retry = now + self._settings.fence_retry_s
            actions.append(SendComplete(self.attempt_id))
        return actions

    @property
    def _renews(self) -> bool:
        return self.phase in (Phase.HELD, Phase.WAITING, Phase.READING)

    def _timed_out(self, now: float) -> list[Action]:
        peer = f"{self.remote.host}:{self.remote.port}"
        if self.phase is Phase.READING:
            limit_s = self._settings.pull_timeout_s
            error = PullTimeout(f"reading the KV from {peer} took longer than {limit_s} s")
            return [SuspectPeer(), *self.fail(error, now)]
        if self.phase is Phase.FENCING:
            limit_s = self._settings.fence_timeout_s
            lost = PeerUnreachable(f"{peer} did not confirm the lease within {limit_s} s")
            return [SuspectPeer(), *self.fail(lost, now)]
        self._timeout = float("inf")  # DRAINING: the grace is over
        if self._cancelled:
            return [Emit(PullStuck(self.pull_id))]
        return self._tell_failure(drained=False)

    def _stop(self, now: float) -> list[Action]:
        """Ends at once when no READ can be active, else drains."""
        if not self._reading:
            return self._drained()
        self.phase = Phase.DRAINING
        self._next_retry = float("inf")
        self._timeout = now + self._settings.drain_grace_s
        return [StopRanks()]

    def _drained(self) -> list[Action]:
        # Only now may P reuse the blocks early: reads of freed blocks would be harmless here, as
        # nothing uses the bytes, but P's memory may be unmapped or given to others.
        abort: list[Action] = [] if isinstance(self._error, LeaseGone) else [SendAbort()]
        if self._cancelled or self._failure_told:
            return [*self._tell_drained(), *abort, *self._end()]
        return [*self._tell_failure(drained=True), *abort, *self._end()]

    def _tell_failure(self, drained: bool) -> list[Action]:
        if self._cancelled or self._failure_told or self._error is None:
            return []
        self._failure_told = True
        return [Emit(PullFailed(self.pull_id, self._error, drained))]

    def _tell_drained(self) -> list[Action]:
        self.drained_told = True
        return [Emit(PullDrained(self.pull_id))]

    def _end(self) -> list[Action]:
        self.phase = Phase.ENDED
        self._timeout = self._next_retry = float("inf")
        return []

    def _lease_gone(self, reason: str) -> LeaseGone:
        return LeaseGone(
            f"lease {self.remote.lease_id} on {self.remote.engine_id} is gone: {reason}"
        )

    def _done(self, now: float) -> PullDone:
        nbytes = sum(report.nbytes for report in self._reports)
        descriptors = sum(report.descriptors for report in self._reports)
        path, *others = {report.path for report in self._reports} - {"none"} or {"none"}
        path = "mixed" if others else path
        return PullDone(self.pull_id, nbytes, descriptors, now - self._began, path)


class Deadlines:
    """When each pull has something to do next."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._planned: dict[str, float] = {}

    def plan(self, pull_id: str, at: float) -> None:
        """The pull is due then, or when it was to be before if that is sooner."""
        if at < self._planned.get(pull_id, float("inf")):
            self._planned[pull_id] = at
            heapq.heappush(self._heap, (at, pull_id))

    def due(self, now: float) -> list[str]:
        """Pulls whose time has come; they are to be planned anew."""
        found: list[str] = []
        while self.next <= now:
            at, pull_id = heapq.heappop(self._heap)
            if self._planned.get(pull_id) == at:
                del self._planned[pull_id]
                found.append(pull_id)
        return found

    @property
    def next(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def forget(self, pull_id: str) -> None:
        self._planned.pop(pull_id, None)


class EndedPulls:
    """The latest pulls that have ended, and of which PullDrained was told."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, bool] = OrderedDict()

    def __contains__(self, pull_id: str) -> bool:
        return pull_id in self._told

    def drained_told(self, pull_id: str) -> bool:
        return self._told.get(pull_id, False)

    def add(self, pull_id: str, drained_told: bool) -> None:
        self._told[pull_id] = drained_told
        if len(self._told) > _MAX_ENDED:
            self._told.popitem(last=False)
