"""Finds waiting requests that would wait for KV blocks too long or forever, in three
cases:

1. A pull would exceed the limit on blocks that READs may write to, because hanging
   READs use up the limit. The engine could compute the prompt instead:
   `pulls_without_capacity`.
2. Two engines each wait for blocks that are leased to the other: `DeadlockTimer`.
3. A request needs more blocks than the pool has outside quarantine:
   `QuarantineTimer`.

This module only chooses sequences. The borrower gives up the pulls or fails the
requests.
"""

import math
import time

from engine.core.scheduler import Scheduler
from engine.core.sequence import Phase, Sequence

_DEADLOCK_S = 5.0  # a waiting pull is given up when a deadlock has lasted this long


def pulls_without_capacity(scheduler: Scheduler) -> list[Sequence]:
    """Returns the waiting sequences with a pull that cannot start until hanging READs
    end, because quarantined blocks count towards the limit of
    BlockAllocator.can_receive. The engine could compute the prompts of these sequences.
    """
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


def is_short_of_blocks(scheduler: Scheduler) -> bool:
    """Whether the first waiting request needs more blocks than are available."""
    if not scheduler.waiting:
        return False
    first = scheduler.waiting[0]
    needed = scheduler.tables.num_blocks_for(first, first.num_to_admit)
    return not scheduler.allocator.can_allocate(needed)


class DeadlockTimer:
    """Detects two engines that each wait for blocks leased to the other.

    Request A on another engine may hold a lease on blocks of this engine while it waits
    for free blocks of the other engine. Blocks of the other engine may be leased to
    request B, which waits for free blocks of this engine. Neither request would ever
    run. To break the cycle, the last waiting request with a pull gives up its lease.
    """

    def __init__(self) -> None:
        self._deadlocked_since = math.inf

    def find_victim(self, scheduler: Scheduler) -> Sequence | None:
        """Returns the waiting sequence that must give up its pull now, or None. Must be
        called once in each round of the core.

        Once a deadlock has lasted _DEADLOCK_S, each round returns a sequence. While
        other sequences run, at most one sequence is returned every _DEADLOCK_S.
        """
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
            if sequence.pull is not None and not sequence.pull.is_from_store:
                return sequence
        return None

    @staticmethod
    def explanation() -> str:
        """The reason for giving up a pull, for the error."""
        return (
            f"no waiting request got KV blocks for {_DEADLOCK_S} s, because running "
            "requests or leases hold all blocks"
        )


class QuarantineTimer:
    """Measures how long each waiting request has been blocked on quarantined blocks.

    Args:
        timeout_s: longest time that a request waits for blocks that only the end of
            hanging READs can free.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._blocked_since: dict[Sequence, float] = {}

    def find_overdue(self, scheduler: Scheduler) -> list[Sequence]:
        """Returns the waiting requests that have been blocked for longer than the
        timeout. Must be called once in each round of the core."""
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
        """The reason for failing a request, for the error."""
        num_quarantined = scheduler.allocator.num_quarantined
        capacity = scheduler.allocator.capacity
        return (
            f"this request has waited more than {self._timeout_s:g} s for KV blocks, "
            f"because {num_quarantined} of {capacity} blocks are held by pulls from a "
            "prefill server that does not respond; check that server, or raise "
            "--quarantine-timeout-s"
        )
