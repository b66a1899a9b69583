"""Waiting requests that cannot get KV blocks by waiting, and when to act on them.

1. A pull needs blocks that only hanging READs could free, but computing the prompt
   locally needs fewer: `pulls_without_capacity`.
2. Two engines each wait for blocks that are leased to the other: `DeadlockTimer`.
3. A request needs more blocks than the pool has outside quarantine:
   `QuarantineTimer`.

These functions only choose sequences. The borrower gives up the pulls or fails the
requests.
"""

import math
import time

from engine.core.scheduler import Scheduler
from engine.core.sequence import Phase, Sequence

_DEADLOCK_S = 5.0  # how long a deadlock lasts before a waiting pull is given up


def pulls_without_capacity(scheduler: Scheduler) -> list[Sequence]:
    """Waiting pulls that need the blocks of hanging READs, but can be computed before."""
    if not scheduler.allocator.num_quarantined:
        return []
    sequences = []
    for sequence in scheduler.waiting:
        if sequence.pull is None or scheduler.is_blocked_on_quarantine(sequence):
            continue
        needed = scheduler.tables.num_blocks_for(sequence, sequence.num_to_admit)
        if not scheduler.allocator.can_receive(needed, ignore_receiving=True):
            sequences.append(sequence)
    return sequences


class DeadlockTimer:
    """Detects two engines that each wait for blocks leased to the other.

    A request that holds blocks of this engine may wait for blocks of another engine,
    and those may be leased to a request that waits here. Neither would ever run. The
    last waiting request with a pull breaks the cycle: it gives up its lease.
    """

    def __init__(self) -> None:
        self._deadlocked_since = math.inf

    def find_victim(self, scheduler: Scheduler) -> Sequence | None:
        """The waiting pull to give up now. Without running sequences, one is given up
        in each round once the deadlock is old enough; otherwise one per period."""
        now = time.monotonic()
        if not scheduler.is_deadlocked:
            self._deadlocked_since = math.inf
            return None
        self._deadlocked_since = min(self._deadlocked_since, now)
        if now - self._deadlocked_since < _DEADLOCK_S:
            return None
        if scheduler.running:
            self._deadlocked_since = now
        for sequence in reversed(scheduler.waiting):
            if sequence.pull is not None:
                return sequence
        return None

    @staticmethod
    def explanation() -> str:
        return (
            f"no waiting request got KV blocks for {_DEADLOCK_S} s, because running "
            "requests or leases hold them all"
        )


class QuarantineTimer:
    """Measures how long each waiting request is blocked on quarantined blocks.

    Args:
        timeout_s: longest time that a request waits for blocks that only the end of
            hanging READs can free.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._blocked_since: dict[Sequence, float] = {}

    def find_overdue(self, scheduler: Scheduler) -> list[Sequence]:
        """The waiting requests that have been blocked for longer than the timeout."""
        now = time.monotonic()
        blocked: list[Sequence] = []
        if scheduler.allocator.num_quarantined:
            blocked = [
                sequence
                for sequence in scheduler.waiting
                if scheduler.is_blocked_on_quarantine(sequence)
            ]
        self._blocked_since = {
            sequence: self._blocked_since.get(sequence, now) for sequence in blocked
        }
        return [
            sequence
            for sequence, since in self._blocked_since.items()
            if now - since >= self._timeout_s and sequence.phase is Phase.WAITING
        ]

    def explanation(self, scheduler: Scheduler) -> str:
        num_quarantined = scheduler.allocator.num_quarantined
        capacity = scheduler.allocator.capacity
        return (
            "this request needs more KV blocks than are left: reads from a prefill "
            f"server that hangs hold {num_quarantined} of {capacity} blocks, for longer "
            f"than {self._timeout_s:g} s; raise --quarantine-timeout-s, or check the "
            "prefill server"
        )
