"""A rank's staging memory: two slots that fill and empty in turn, for one pull at a time.

READs bring a peer's KV into a slot as it lies there; `place` then copies it to its places in the
pool, on a GPU by a low-priority stream beside the decode batch. Pulls that need staging queue up:
the memory is bounded, whatever the number of pulls (I8: a slot is reused only after the copies
out of it have finished).
"""

from collections import deque
from typing import Any

import torch

from kvcache.pool import KVPool
from kvcache.transfer import reformat
from kvcache.transfer.staged import Chunk


class Staging:
    """`nbytes` of memory on the pool's device, in two slots of half that size."""

    def __init__(self, nbytes: int, pool: KVPool) -> None:
        self.nbytes = nbytes
        self._pool = pool
        self._slot_bytes = nbytes // 2
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        self._copies: list[Any] = [None, None]  # CUDA events of the last copies out of each slot
        self._stream: Any = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    def slot_address(self, slot: int) -> int:
        return self.base_address + slot * self._slot_bytes

    def enter(self, pull_id: str) -> None:
        """Joins the queue."""
        self._queue.append(pull_id)

    def owned_by(self, pull_id: str) -> bool:
        return bool(self._queue) and self._queue[0] == pull_id

    def leave(self, pull_id: str) -> None:
        """Leaves the queue; the pull has no active READ into a slot."""
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True when every copy out of the slot has finished."""
        copies = self._copies[slot]
        return copies is None or bool(copies.query())

    def place(self, chunk: Chunk, slot: int) -> None:
        """Begins to copy what was read into the slot to the pool; see `is_free`."""
        start = slot * self._slot_bytes
        memory = self._memory[start : start + self._slot_bytes]
        if self._stream is None:
            reformat.apply(chunk, memory, self._pool.tensor)
            return
        with torch.cuda.device(self._pool.device), torch.cuda.stream(self._stream):
            reformat.apply(chunk, memory, self._pool.tensor)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copies[slot] = event
