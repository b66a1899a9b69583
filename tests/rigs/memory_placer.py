"""A placer for pools of one process that can be told to stall or fail."""

import os
import threading
from typing import Any

import torch

from kvcache import fp8
from kvcache.pool import TORCH_DTYPES, KVPool
from kvcache.transfer.move.kernel_index import kind_of, locate
from kvcache.transfer.move.peer_memory import Memory, NotMappable, bytes_at, offered
from kvcache.transfer.move.place import ALL_BYTES, Placer, Work
from kvcache.transfer.plan.block_copy import BlockCopy
from protocol.handshake import RankMetadata


def place_units(
    copy: BlockCopy, source: torch.Tensor, pool: torch.Tensor, factors: tuple[float, ...] | None
) -> None:
    """As `place`, by the kernel's index arithmetic. Arguments on the CPU."""
    kind = kind_of(copy.source, copy.target, factors)
    reads, writes, scales = (torch.from_numpy(array) for array in locate(copy, factors))
    if not len(reads):
        return
    dtype, elements = TORCH_DTYPES[copy.source.dtype], kind.unit_elements
    nbytes = (int(reads.max()) + 1) * elements * dtype.itemsize
    picked = source[:nbytes].view(dtype).view(-1, elements)[reads]
    if kind.converts:
        picked = fp8.stored_as(picked.float() * scales[:, None], pool.dtype)
    fp8.addressable(pool.view(-1).view(-1, elements))[writes] = fp8.addressable(picked)


class MemoryPlacer(Placer):
    """At once unless stalled, with the kernel's index arithmetic, out of pools of this process.

    Attributes:
        stalled: launches made while it is set do not end before it is unset.
        fail_launches: the next launches raise.
        rooms: what there is room for, asked one after the other; then all.
        mapped: addresses that are open now.
        unmapped: set whenever one is closed.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.stalled = False
        self.fail_launches = False
        self.rooms: list[int] = []
        self.mapped: list[int] = []
        self.unmapped = threading.Event()

    def open(self, rank: RankMetadata) -> Memory:
        if offered(rank).pid != os.getpid():
            raise NotMappable("it is another process's")
        address = rank.base_address

        def close() -> None:
            self.mapped.remove(address)
            self.unmapped.set()

        self.mapped.append(address)
        return Memory(address, bytes_at(address, rank.nbytes), close)

    def room(self, work: Work, index: int) -> int:
        return self.rooms.pop(0) if self.rooms else ALL_BYTES

    def launch(self, work: Work, index: int, first: int, count: int) -> Any:
        if self.fail_launches:
            raise RuntimeError("a launch failed")
        memory = work.sources[index].bytes
        assert memory is not None
        copy = work.copies[index].part(first, count)
        place_units(copy, memory, self._pool.tensor, work.factors)

    def finished(self, token: Any) -> bool:
        return not self.stalled
