"""A rank's staging memory: slots that fill and empty in turn, for one pull at a time.

READs bring a peer's KV into a slot as it lies there; `place` then copies it to its places in the
pool, on a GPU by a low-priority stream beside the decode batch while other slots fill, on a CPU in
the calling thread, which a READ copies in as well. Pulls that need staging queue up: the memory is
bounded, whatever the number of pulls (I8: a slot is reused only after the copies out of it have
finished).
"""

import importlib.util
import mmap
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from kvcache.pool import KVPool
from kvcache.transfer import reformat
from kvcache.transfer.boxes import Transfer
from kvcache.transfer.cuda_mapper import CudaMapper
from kvcache.transfer.mapper import Mapper
from kvcache.transfer.slot_gather import SlotGather
from kvcache.transfer.staged import Chunk
from protocol.logging import get_logger

logger = get_logger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
_PROGRAMS = 132  # thread blocks: 1.2 TB/s on an H200, where 48 reach 0.57
_MOST_SLOTS = 4


def placing(pool: KVPool, *, convert: bool) -> Mapper | None:
    """What places chunks quickly in a pool on a GPU, where there is a compiler for its kernel.

    Args:
        convert: chunks may be of another dtype or other scales.
    """
    if pool.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    # Every multiprocessor, for a tenth of the time that reading takes; no copy engines, which read.
    mapper = CudaMapper(pool, num_programs=_PROGRAMS, long_run_bytes=sys.maxsize)
    mapper.compile(convert=convert)
    return mapper


class Staging:
    """`nbytes` of memory on the pool's device, at least two slots for the pull that owns it.

    Args:
        mapper: places chunks, of its own; None: torch does.
    """

    def __init__(self, nbytes: int, pool: KVPool, mapper: Mapper | None = None) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._memory = _allocate(nbytes, pool.device)
        self._gather = SlotGather(mapper) if mapper is not None else None
        self._gathers = mapper is not None
        self._mapper = mapper
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        # Of the last copies out of each slot: CUDA events, or what a gather told
        self._copies: list[Any] = [None] * _MOST_SLOTS
        self._stream: Any = None
        if pool.device.type != "cpu":
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]

    def bind_thread(self) -> None:
        """Called once by the thread that is going to use this memory."""
        if self._mapper is not None:
            self._or_torch(self._mapper.bind_thread)

    def prepare(self, transfer: Transfer) -> None:
        """Pulls between these endpoints are going to come: does what can be done before."""
        if self._gather is not None and self._gathers:
            gather = self._gather
            self._or_torch(lambda: gather.prepare(transfer))

    def _or_torch(self, preparation: Callable[[], None]) -> None:
        """Gives up the mapper if it cannot be prepared."""
        try:
            preparation()
        except Exception as error:  # whatever the driver or the kernel's compiler lacks
            logger.warning("staged KV is placed by torch, more slowly: %r", error)
            self._gathers = False  # no more; what runs has to end

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    @property
    def on_cpu(self) -> bool:
        return self._stream is None

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots of that size there are; a plan's chunk takes at most half the memory."""
        return min(self.nbytes // slot_bytes, len(self._copies))

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
        try:
            if self._gather is not None and self.owned_by(pull_id):
                self._gather.end()
        finally:
            if pull_id in self._queue:
                self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True when every copy out of the slot has finished."""
        copies = self._copies[slot]
        if isinstance(copies, list):
            return self._gather is None or self._gather.finished(copies)
        return copies is None or bool(copies.query())

    def place(self, chunk: Chunk, slot: int, slot_bytes: int) -> None:
        """Begins to copy what was read into the slot to the pool; see `is_free`."""
        if self._gather is not None and self._gathers and chunk.span is not None:
            address = self.base_address + slot * slot_bytes
            begun = self._copies[slot] = []  # some may run though another cannot begin
            self._gather.place(chunk.span, address, begun)
            return
        memory = self._memory[slot * slot_bytes : (slot + 1) * slot_bytes]
        if self.on_cpu:
            reformat.apply(chunk, memory, self._pool.tensor)
            return
        with torch.cuda.device(self._pool.device), torch.cuda.stream(self._stream):
            reformat.apply(chunk, memory, self._pool.tensor)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copies[slot] = event

    def close(self) -> None:
        """Waits for the copies that run; nothing is placed any more."""
        if self._mapper is not None:
            self._mapper.close()


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
