"""A rank's staging memory: slots that fill and empty in turn, for one pull at a time.

READs bring a peer's KV into a slot as it lies there; a placer then copies it into the pool. Pulls
that need staging queue up: the memory is bounded, whatever the number of pulls (I8: a slot is
reused only after the copies out of it have finished).
"""

import sys
from collections import deque
from typing import Any

import torch

from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import placer_for
from kvcache.transfer.move.peer_memory import Memory
from kvcache.transfer.move.place import Placer
from kvcache.transfer.plan.plan import Step

_MOST_SLOTS = 4
_PROGRAMS = 132  # all multiprocessors, for a tenth of the time that reading takes


def staging_placer(pool: KVPool, *, convert: bool) -> Placer:
    """What places quickly out of staging memory; not by copy engines, which read."""
    return placer_for(pool, convert=convert, num_programs=_PROGRAMS, long_run_bytes=sys.maxsize)


class StagingBuffer:
    """`nbytes` of memory on the pool's device, at least two slots for the pull that owns it.

    Args:
        placer: of its own; None: torch's.

    Raises:
        ValueError: there is not so much memory.
    """

    def __init__(self, nbytes: int, pool: KVPool, placer: Placer | None = None) -> None:
        self.nbytes = nbytes
        try:  # on a CPU not resident before it is used
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        except RuntimeError:
            told = f"staging_bytes is {nbytes}, more than there is; use a lower --staging-bytes"
            raise ValueError(told) from None
        self._placer = placer or Placer(pool)
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        self._placing: list[deque[Any]] = [deque() for _ in range(_MOST_SLOTS)]  # out of each slot

    def bind_thread(self) -> None:
        """Called once by the thread that is going to use this memory."""
        self._placer.bind_thread()

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots of that size there are; a plan's chunk takes at most half the memory."""
        return min(self.nbytes // slot_bytes, _MOST_SLOTS)

    def enter(self, pull_id: str) -> None:
        """Joins the queue."""
        self._queue.append(pull_id)

    @property
    def owner(self) -> str | None:
        """Whose the slots are."""
        return self._queue[0] if self._queue else None

    def leave(self, pull_id: str) -> None:
        """Leaves the queue; the pull has no active READ into a slot."""
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True when every copy out of the slot has finished. Raises what one has failed with."""
        self._placer.retire(self._placing[slot])
        return not self._placing[slot]

    def place(self, step: Step, slot: int, slot_bytes: int) -> None:
        """Begins to copy what was read into the slot to the pool; see `is_free`."""
        start = slot * slot_bytes
        memory = Memory(self.base_address + start, self._memory[start : start + slot_bytes])
        for copy in step.copies:  # some may run though another cannot begin
            token = self._placer.launch(copy, memory, step.transfer.factors)
            self._placing[slot].append(token)
