"""A placer that copies between pools of one process. It stalls or fails on command."""

import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache import fp8
from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import (
    NUM_PARAMETERS,
    kernel_kind,
    piece_unit_offsets,
    units_of,
)
from kvcache.transfer.move.peer_memory import (
    Memory,
    NotMappable,
    bytes_at,
    mappable_record,
)
from kvcache.transfer.move.place import ALL_BYTES, Placer
from kvcache.transfer.plan.block_copy import BlockCopy, ScaleFactors
from kvcache.transfer.plan.endpoint import IntArray
from protocol.handshake import RankMetadata


def locate(
    copy: BlockCopy, scale_factors: ScaleFactors
) -> tuple[IntArray, IntArray, npt.NDArray[np.float32]]:
    """Return the pairs of units that a copy copies, and the factor of each pair.

    Returns:
        The indices of the units that are read and of those that are written, i64[n]
        each, and the factors by which elements are multiplied, float32[n].
    """
    kind, units_per_piece, parameters = units_of(copy, scale_factors)
    p = [int(value) for value in parameters[:NUM_PARAMETERS]]
    number = np.arange(len(copy.sources) * units_per_piece, dtype=np.int64)
    number, source = _divide(number, p[:3])
    target = source
    factor = np.zeros_like(number)
    for axis in range(3, NUM_PARAMETERS, 6):
        number, index = _divide(number, p[axis : axis + 3])
        source = source + index * p[axis + 3]
        target = target + index * p[axis + 4]
        factor = factor + index * p[axis + 5]
    sources, targets = piece_unit_offsets(copy, kind)
    source = source + sources[number]
    target = target + targets[number]
    if scale_factors is None:
        return source, target, np.ones(len(source), np.float32)
    scales = parameters[NUM_PARAMETERS:].astype(np.int32).view(np.float32)
    return source, target, scales[factor]


def _divide(number: IntArray, divisor_numbers: list[int]) -> tuple[IntArray, IntArray]:
    """Return the quotient and the remainder of a division.

    Like the kernel, divide by a multiplication and a shift.

    Args:
        divisor_numbers: the result of `divisor` in cuda_placer.py.
    """
    size, magic, shift = divisor_numbers
    quotient = (number * magic) >> shift
    return quotient, number - quotient * size


def place_units(
    copy: BlockCopy,
    source: torch.Tensor,
    target: torch.Tensor,
    scale_factors: ScaleFactors,
) -> None:
    """Copy the same bytes as `place`, but with the kernel's index arithmetic.

    All tensors are on the CPU. `target` is the memory of a pool, u8.
    """
    kind = kernel_kind(copy.source, copy.target, scale_factors)
    reads, writes, scales = (
        torch.from_numpy(array) for array in locate(copy, scale_factors)
    )
    if not len(reads):
        return
    assert len(writes.unique()) == len(writes)
    dtype = getattr(torch, copy.source.dtype)
    elements = kind.unit_elements
    stored_dtype = getattr(torch, copy.target.dtype)
    row_bytes = elements * stored_dtype.itemsize
    nbytes = (int(reads.max()) + 1) * elements * dtype.itemsize
    picked = source[:nbytes].view(dtype).view(-1, elements)[reads]
    if kind.scaled or kind.source_dtype != kind.target_dtype:
        picked = fp8.to_stored(picked.float() * scales[:, None], stored_dtype)
    stored = target[: len(target) // row_bytes * row_bytes].view(stored_dtype)
    fp8.addressable(stored.view(-1, elements))[writes] = fp8.addressable(picked)


class MemoryPlacer(Placer):
    """A placer that copies between pools of this process, with the kernel's index
    arithmetic.

    A launch ends at once unless the placer is stalled.

    Attributes:
        stalled: if true, no launch ends.
        num_failing: number of the next launches that will raise.
        num_failed: number of launches that raised.
        claim_results: results of the next calls of `claim_launch_bytes`. Later calls
            return ALL_BYTES.
        may_open: while this is not set, `open` waits, as if a GPU were locking a lot of
            memory.
        mapped: addresses of the memories that are open now.
        unmapped: set whenever a memory is closed.
    """

    def __init__(self, pool: KVPool, launch_bytes: int = 16 << 20) -> None:
        super().__init__(pool)
        self.launch_bytes = launch_bytes
        self.stalled = False
        self.num_failing = 0
        self.num_failed = 0
        self.claim_results: list[int] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.mapped: list[int] = []
        self.unmapped = threading.Event()

    def open(self, rank: RankMetadata) -> Memory:
        mappable_record(rank)
        assert self.may_open.wait(60)
        if rank.pid != os.getpid():
            raise NotMappable("the memory belongs to another process")
        address = rank.base_address

        def close() -> None:
            self.mapped.remove(address)
            self.unmapped.set()

        self.mapped.append(address)
        return Memory(address, bytes_at(address, rank.nbytes), close)

    def claim_launch_bytes(self, copy: BlockCopy, scale_factors: ScaleFactors) -> int:
        return self.claim_results.pop(0) if self.claim_results else ALL_BYTES

    def launch(
        self, copy: BlockCopy, source: Memory, scale_factors: ScaleFactors
    ) -> Any:
        if self.num_failing:
            self.num_failing -= 1
            self.num_failed += 1
            raise RuntimeError("a launch failed")
        assert source.bytes is not None
        place_units(copy, source.bytes, self._pool.memory, scale_factors)

    def finished(self, handle: Any) -> bool:
        return not self.stalled
