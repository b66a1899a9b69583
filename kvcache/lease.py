"""Leases: blocks that a prefill server holds for a reader until a deadline.

    grant ---> HELD ---complete---> COMPLETED
                    ---abort------> ABORTED
                    ---deadline---> EXPIRED

A lease of a prompt that is still being computed grows until it is sealed; only a sealed
lease can be completed. An ended lease leaves a tombstone: if the pull that completed
the lease repeats `complete`, it gets `ok` again. Every other pull gets `gone`, as for
an unknown lease. The number and the age of tombstones are bounded.

The table is pure: the current time is an argument, always by the prefill server's
clock. An operation at or after a deadline finds the lease expired, even if `expire` was
not called since the deadline. So a reader never gets `ok` for blocks that are no longer
held (invariants I3 to I5 in docs/design.md).
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

_MAX_TOMBSTONES = 65536
_TOMBSTONE_S = 600.0


class LeaseOutcome(Enum):
    """How a lease ended."""

    COMPLETED = "completed"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True)
class EndedLease:
    """A lease that has ended: its blocks belong to the engine again."""

    lease_id: str
    request_id: str
    block_ids: tuple[int, ...]
    outcome: LeaseOutcome


@dataclass
class _HeldLease:
    request_id: str
    block_ids: tuple[int, ...]
    lease_s: float
    deadline: float
    grows: bool


class _Tombstone(NamedTuple):
    attempt_id: str | None  # the pull attempt that completed the lease, if any
    ended_at: float


class LeaseTable:
    """All leases of one engine. All times are seconds on the same monotonic clock."""

    def __init__(self) -> None:
        self._held: dict[str, _HeldLease] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()  # oldest first
        # A heap of (deadline, lease id). A renewal adds an entry. The old entry stays
        # in the heap; `expire` ignores it.
        self._deadlines: list[tuple[float, str]] = []
        self._ended: list[EndedLease] = []
        self.ended_counts = Counter[LeaseOutcome]()  # all ended leases, by outcome

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
        """Holds blocks until `now + lease_s`, unless the lease is renewed or ended.

        Args:
            grows: More blocks will be added by calls of `grow`.
        """
        assert lease_id not in self._held and lease_id not in self._tombstones, lease_id
        deadline = now + lease_s
        self._held[lease_id] = _HeldLease(
            request_id=request_id,
            block_ids=tuple(block_ids),
            lease_s=lease_s,
            deadline=deadline,
            grows=grows,
        )
        heapq.heappush(self._deadlines, (deadline, lease_id))

    def grow(
        self,
        lease_id: str,
        block_ids: Iterable[int],
        now: float,
        *,
        seals: bool = False,
    ) -> bool:
        """Adds blocks to a lease that grows.

        Args:
            seals: `block_ids` are the last blocks of the lease.

        Returns:
            False if the lease is gone: `block_ids` then still belong to the caller.
        """
        self.expire(now)
        lease = self._held.get(lease_id)
        if lease is None:
            return False
        assert lease.grows, lease_id
        lease.block_ids += tuple(block_ids)
        lease.grows = not seals
        return True

    def blocks(self, lease_id: str, now: float) -> tuple[int, ...] | None:
        """The blocks of a held lease; None if the lease is gone."""
        self.expire(now)
        lease = self._held.get(lease_id)
        return None if lease is None else lease.block_ids

    def renew(self, lease_id: str, now: float) -> bool:
        """Moves the deadline to `now + lease_s`; False if the lease is gone."""
        self.expire(now)
        lease = self._held.get(lease_id)
        if lease is None:
            return False
        lease.deadline = now + lease.lease_s
        heapq.heappush(self._deadlines, (lease.deadline, lease_id))
        return True

    def complete(self, lease_id: str, attempt_id: str, now: float) -> bool:
        """Completes a lease. If this returns True, the bytes that were read are valid.

        Returns:
            True if the lease was held until now, or if an earlier call with the same
            attempt id completed the lease. False if the lease is gone or still grows.
        """
        self.expire(now)
        lease = self._held.get(lease_id)
        if lease is not None:
            if lease.grows:
                return False
            self._end(lease_id, LeaseOutcome.COMPLETED, attempt_id, now)
            return True
        tombstone = self._tombstones.get(lease_id)
        return tombstone is not None and tombstone.attempt_id == attempt_id

    def abort(self, lease_id: str, now: float) -> bool:
        """Ends a held lease. Returns False if the lease was gone already."""
        self.expire(now)
        if lease_id not in self._held:
            return False
        self._end(lease_id, LeaseOutcome.ABORTED, None, now)
        return True

    def expire(self, now: float) -> None:
        """Ends the leases that have reached their deadline; removes old tombstones."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._held.get(lease_id)
            if lease is not None and lease.deadline <= now:
                self._end(lease_id, LeaseOutcome.EXPIRED, None, now)
        self._remove_old_tombstones(now)

    def abort_all(self, now: float) -> None:
        """Ends every held lease, because the engine is shutting down."""
        for lease_id in list(self._held):
            self._end(lease_id, LeaseOutcome.ABORTED, None, now)

    @property
    def has_ended_leases(self) -> bool:
        """Whether `drain_ended` would return any lease."""
        return bool(self._ended)

    def drain_ended(self) -> list[EndedLease]:
        """The leases that ended since the last call, in order of ending."""
        ended = self._ended
        self._ended = []
        return ended

    def _end(
        self, lease_id: str, outcome: LeaseOutcome, attempt_id: str | None, now: float
    ) -> None:
        lease = self._held.pop(lease_id)
        self.ended_counts[outcome] += 1
        ended = EndedLease(lease_id, lease.request_id, lease.block_ids, outcome)
        self._ended.append(ended)
        self._tombstones[lease_id] = _Tombstone(attempt_id, now)
        self._remove_old_tombstones(now)

    def _remove_old_tombstones(self, now: float) -> None:
        while self._tombstones:
            oldest = next(iter(self._tombstones.values()))
            is_recent = now - oldest.ended_at <= _TOMBSTONE_S
            if is_recent and len(self._tombstones) <= _MAX_TOMBSTONES:
                return
            self._tombstones.popitem(last=False)
