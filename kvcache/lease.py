"""Leases: blocks that a prefill server keeps for a reader until a deadline.

    grant ---> HELD ---complete---> COMPLETED
                    ---abort------> ABORTED
                    ---deadline---> EXPIRED

A lease of a prompt that is still computed grows until it is sealed, and cannot be completed before.
An ended lease leaves a tombstone: the attempt that completed it gets `ok` again, all others get
`gone`, as for an unknown lease. Tombstones are bounded by count and age.

Pure: the clock is an argument, always the prefill server's own (I3). An operation at or after a
deadline finds the lease expired, even if `expire` was not called since: a reader never gets `ok`
for blocks that are not held any more (I4, I5).
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

_MAX_TOMBSTONES = 65536
_TOMBSTONE_S = 600.0


class LeaseState(Enum):
    """How a lease ended."""

    COMPLETED = "completed"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True)
class EndedLease:
    """A lease whose blocks are the engine's again."""

    lease_id: str
    request_id: str
    block_ids: tuple[int, ...]
    outcome: LeaseState


@dataclass
class _Held:
    request_id: str
    block_ids: tuple[int, ...]
    lease_s: float
    deadline: float
    grows: bool


class _Tombstone(NamedTuple):
    attempt_id: str | None  # of the completion
    ended_at: float


class LeaseTable:
    """All leases of one engine. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()  # oldest first
        self._deadlines: list[
            tuple[float, str]
        ] = []  # a heap; renewed leases leave old entries
        self._ended: list[EndedLease] = []
        self.ended_counts = Counter[LeaseState]()  # since the start

    @property
    def num_held(self) -> int:
        return len(self._held)

    def grant(
        self,
        lease_id: str,
        request_id: str,
        block_ids: Iterable[int],
        lease_s: float,
        now: float,
        *,
        grows: bool = False,
    ) -> None:
        """Holds the blocks until `now + lease_s`, unless renewed or ended before."""
        assert lease_id not in self._held and lease_id not in self._tombstones, lease_id
        self._held[lease_id] = _Held(
            request_id, tuple(block_ids), lease_s, now + lease_s, grows
        )
        heapq.heappush(self._deadlines, (now + lease_s, lease_id))

    def grow(
        self,
        lease_id: str,
        block_ids: Iterable[int],
        now: float,
        *,
        seals: bool = False,
    ) -> bool:
        """Holds these blocks as well; `seals`: they are the last ones. False when the lease is
        gone: the blocks stay the caller's."""
        self.expire(now)
        lease = self._held.get(lease_id)
        if lease is None:
            return False
        assert lease.grows, lease_id
        lease.block_ids += tuple(block_ids)
        lease.grows = not seals
        return True

    def blocks(self, lease_id: str, now: float) -> tuple[int, ...] | None:
        """The held blocks; None when the lease is gone."""
        self.expire(now)
        lease = self._held.get(lease_id)
        return None if lease is None else lease.block_ids

    def renew(self, lease_id: str, now: float) -> bool:
        """Moves the deadline to `now + lease_s`; False when the lease is gone."""
        self.expire(now)
        lease = self._held.get(lease_id)
        if lease is None:
            return False
        lease.deadline = now + lease.lease_s
        heapq.heappush(self._deadlines, (lease.deadline, lease_id))
        return True

    def complete(self, lease_id: str, attempt_id: str, now: float) -> bool:
        """The fence: True when the lease was held until now, or was completed by the same attempt.
        False for a lease that still grows."""
        self.expire(now)
        if (lease := self._held.get(lease_id)) is not None:
            if lease.grows:
                return False
            self._end(lease_id, LeaseState.COMPLETED, attempt_id, now)
            return True
        grave = self._tombstones.get(lease_id)
        return grave is not None and grave.attempt_id == attempt_id

    def abort(self, lease_id: str, now: float) -> bool:
        """Ends a held lease; False when it was gone already."""
        self.expire(now)
        if lease_id not in self._held:
            return False
        self._end(lease_id, LeaseState.ABORTED, None, now)
        return True

    def expire(self, now: float) -> None:
        """Ends the leases whose deadline has come, forgets old tombstones."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._held.get(lease_id)
            if lease is not None and lease.deadline <= now:
                self._end(lease_id, LeaseState.EXPIRED, None, now)
        self._bury(now)

    def abort_all(self, now: float) -> None:
        """Ends every held lease: the engine is going away."""
        for lease_id in list(self._held):
            self._end(lease_id, LeaseState.ABORTED, None, now)

    @property
    def has_ended(self) -> bool:
        """True while `drain_ended` has something to hand over."""
        return bool(self._ended)

    def drain_ended(self) -> list[EndedLease]:
        """Leases that ended since the last call, each exactly once, in order of ending."""
        ended, self._ended = self._ended, []
        return ended

    def _end(
        self, lease_id: str, outcome: LeaseState, attempt_id: str | None, now: float
    ) -> None:
        lease = self._held.pop(lease_id)
        self.ended_counts[outcome] += 1
        self._ended.append(
            EndedLease(lease_id, lease.request_id, lease.block_ids, outcome)
        )
        self._tombstones[lease_id] = _Tombstone(attempt_id, now)
        self._bury(now)

    def _bury(self, now: float) -> None:
        while self._tombstones:
            grave = next(iter(self._tombstones.values()))
            fresh = now - grave.ended_at <= _TOMBSTONE_S
            if fresh and len(self._tombstones) <= _MAX_TOMBSTONES:
                return
            self._tombstones.popitem(last=False)
