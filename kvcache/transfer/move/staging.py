"""A rank's staging memory: slots that fill and empty in turn, for one pull at a time.

READs bring a peer's KV into a slot as it lies there; its copies then go to their places in the
pool, on a GPU by a low-priority stream beside the decode batch while other slots fill, on a CPU in
the calling thread, as a READ there copies in it. Pulls that need staging queue up: the memory is
bounded, whatever the number of pulls (I8: a slot is reused only after the copies out of it have
finished).
"""

import importlib.util
import mmap
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import Memory
from kvcache.transfer.move.place import Placer, TorchPlacer, Work
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.staged import Step
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_PROGRAMS = 132  # thread blocks: 1.2 TB/s on an H200, where 48 reach 0.57
_MOST_SLOTS = 4


def placing(pool: KVPool, *, convert: bool) -> Placer:
    """What places chunks quickly in a pool.

    Args:
        convert: chunks may be of another dtype or other scales.
    """
    if pool.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TorchPlacer(pool)
    # Every multiprocessor, for a tenth of the time that reading takes; no copy engines, which read.
    placer = CudaPlacer(pool, num_programs=_PROGRAMS, long_run_bytes=sys.maxsize)
    placer.compile(convert=convert)
    return placer


class _Placing(NamedTuple):
    """The copies out of one slot that have begun."""

    placer: Placer
    work: Work
    tokens: list[Any]

    def has_ended(self) -> bool:
        """Raises what one has failed with."""
        while self.tokens and self.placer.finished(self.tokens[0]):
            self.tokens.pop(0)
        return not self.tokens


class StagingBuffer:
    """`nbytes` of memory on the pool's device, at least two slots for the pull that owns it.

    Args:
        placer: of its own; torch takes over if it cannot be prepared.
    """

    def __init__(self, nbytes: int, pool: KVPool, placer: Placer | None = None) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._memory = _allocate(nbytes, pool.device)
        self._placers = [placer or TorchPlacer(pool)]  # the last one is used
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        self._slots: list[_Placing | None] = [None] * _MOST_SLOTS

    def bind_thread(self) -> None:
        """Called once by the thread that is going to use this memory."""
        self._or_torch(self._placers[-1].bind_thread)

    def prepare(self, transfer: Transfer) -> None:
        """Pulls between these endpoints are going to come: does what can be done before."""
        self._or_torch(lambda: self._placers[-1].prepare(transfer))

    def _or_torch(self, preparation: Callable[[], None]) -> None:
        """Gives up the placer if it cannot be prepared; what it has begun has to end."""
        try:
            preparation()
        except Exception as error:  # whatever the driver or the kernel's compiler lacks
            logger.warning("staged KV is placed by torch, more slowly: %r", error)
            self._placers.append(TorchPlacer(self._pool))

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    @property
    def on_cpu(self) -> bool:
        return self._pool.device.type == "cpu"

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots of that size there are; a plan's chunk takes at most half the memory."""
        return min(self.nbytes // slot_bytes, len(self._slots))

    def enter(self, pull_id: str) -> None:
        """Joins the queue."""
        self._queue.append(pull_id)

    @property
    def owner(self) -> str | None:
        """Whose the slots are."""
        return self._queue[0] if self._queue else None

    def owned_by(self, pull_id: str) -> bool:
        return bool(self._queue) and self._queue[0] == pull_id

    def leave(self, pull_id: str) -> None:
        """Leaves the queue; the pull has no active READ into a slot."""
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True when every copy out of the slot has finished. Raises what one has failed with."""
        placing = self._slots[slot]
        if placing is None:
            return True
        try:
            if not placing.has_ended():
                return False
        except BaseException:
            placing.tokens.pop(0)
            raise
        self._slots[slot] = None
        placing.placer.end(placing.work)
        return True

    def place(self, step: Step, slot: int, slot_bytes: int) -> None:
        """Begins to copy what was read into the slot to the pool; see `is_free`."""
        placer, start = self._placers[-1], slot * slot_bytes
        memory = Memory(self.base_address + start, self._memory[start : start + slot_bytes])
        work = Work(step.copies, [memory] * len(step.copies), step.transfer.factors)
        placing = self._slots[slot] = _Placing(placer, work, [])
        placer.begin(work)
        for index, copy in enumerate(step.copies):  # some may run though another cannot begin
            placing.tokens.append(placer.launch(work, index, 0, len(copy.sources)))


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """u8[nbytes], on huge pages where the system has them; not resident before it is used.

    Raises:
        ValueError: the system does not grant so much.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=flags)
    except OSError as error:
        told = error.strerror
        raise ValueError(
            f"staging_bytes is {nbytes} ({told}); use a lower --staging-bytes"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE_PAGE_BYTES
    return memory[start : start + nbytes]
