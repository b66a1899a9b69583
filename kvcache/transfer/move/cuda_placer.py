"""Placing on a GPU with copy engines and a kernel, concurrently with the decode batch.

Copy engines take no multiprocessor from the decode batch, and move long runs, many in
one call, nearly as fast as a plain copy. They carry out copies whose pieces are one run
each. The kernel carries out all other copies. Torch places the copies for which the
kernel cannot be compiled.

The kernel (place_kernel.py) moves *units* of up to 16 bytes. It numbers the units of a
copy piece by piece, and inside a piece in the order of the source, so that units with
neighbouring numbers are neighbours in the source's memory. Five divisions turn a unit's
number into its position on every axis. Two tables contain where its piece begins on
either side, and two sets of strides give the rest, all in units. So no list of runs is
made, whatever the orders, block sizes, heads and dtypes. If elements change their
scale, the same divisions give a unit's layer and component, and so its factor.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move import cuda
from kvcache.transfer.move.peer_memory import Memory, NotMappable, open_on_gpu
from kvcache.transfer.move.place import ALL_BYTES, Placer, axes_of
from kvcache.transfer.plan.block_copy import BlockCopy, Factors
from kvcache.transfer.plan.endpoint import IntArray, PlanError
from protocol.handshake import FP8, ITEMSIZE, RankMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

UNIT_BYTES = 16  # the largest word that a thread moves at once
NUM_PARAMETERS = 3 + 4 * 6  # without the factors
MAX_UNITS = (1 << 31) - 1  # of one launch: unit numbers have 32 bits
# Thread blocks of one launch. More are hardly faster, and leave less to other kernels.
NUM_PROGRAMS = 48
# Placing out of staging memory uses all multiprocessors, but only for a tenth of the
# time that reading takes.
_STAGING_PROGRAMS = 132
LONG_RUN_BYTES = 2 << 20  # copy engines move shorter runs slower than the kernel
# While a batch is computed, the kernel costs it some 1 ms per GiB, however many
# multiprocessors it uses. So the kernel is paced, and copy engines take all runs for
# which they reach a third of its speed or more.
PACED_BYTES_PER_S = 90e9
_PACED_LAUNCH_BYTES = 16 << 20
_BUSY_RUN_BYTES = 64 << 10
_MAX_ENGINE_COPIES = 128  # of a launch: they are begun in 0.1 to 0.6 ms


class Kind(NamedTuple):
    """The constants of a compiled kernel."""

    source_dtype: str
    target_dtype: str
    unit_elements: int  # on either side
    scaled: bool


class Units(NamedTuple):
    """A copy as units, except for the offsets of its pieces.

    Attributes:
        units_per_piece: number of units in one piece.
        parameters: i64[NUM_PARAMETERS + factors]. They start with the number of units
            in one head of one token, as a divisor (3 numbers). Then follow 6 numbers
            for each axis, innermost of the source first: its size as a divisor (3), its
            stride at the source, its stride at the target, and the number of factors
            (of layers and components) that a step on it skips. Last come the factors'
            float32 bits.
    """

    kind: Kind
    units_per_piece: int
    parameters: IntArray


def kind_of(source: KVLayout, target: KVLayout, factors: Factors) -> Kind:
    """The kernel that places a copy.

    A unit has the largest power of two of elements that divides a head's elements, and
    that takes at most 16 bytes on either side.
    """
    max_elements = UNIT_BYTES // max(source.itemsize, target.itemsize)
    largest_power_of_two = source.head_dim & -source.head_dim
    elements = min(max_elements, largest_power_of_two)
    return Kind(source.dtype, target.dtype, elements, factors is not None)


def kinds_into(target: KVLayout, *, convert: bool) -> Iterator[Kind]:
    """All kernels that may be needed to place KV of any peer into a pool.

    Args:
        convert: include KV of other dtypes and scales.
    """
    dtypes = tuple(ITEMSIZE) if convert else (target.dtype,)
    for dtype in dtypes:
        source = replace(target, dtype=dtype)
        yield kind_of(source, target, None)
        if convert and FP8 in (dtype, target.dtype):  # only FP8 has scales
            yield kind_of(source, target, (1.0,))


def units_of(copy: BlockCopy, factors: Factors) -> Units:
    """Describes a copy as units.

    Raises:
        PlanError: one piece has too many units to number.
    """
    kind = kind_of(copy.source, copy.target, factors)
    sizes = axes_of(copy)
    factor_strides = {"L": copy.source.num_components, "C": 1}
    units_per_piece = copy.source.head_dim // kind.unit_elements
    values = [*divisor(units_per_piece)]
    for axis in reversed(copy.source.order.replace("B", "").replace("D", "")):
        values += divisor(sizes[axis])
        values.append(copy.source.strides[axis] // kind.unit_elements)
        values.append(copy.target.strides[axis] // kind.unit_elements)
        values.append(factor_strides.get(axis, 0))
        units_per_piece *= sizes[axis]
    if units_per_piece > MAX_UNITS:
        raise PlanError(
            f"a block of the peer has {units_per_piece} units to place, "
            f"more than {MAX_UNITS}; use smaller blocks"
        )
    bits = np.array(factors or (), np.float32).view(np.int32).astype(np.int64)
    parameters = np.concatenate((np.array(values, np.int64), bits))
    return Units(kind, units_per_piece, parameters)


def piece_units(copy: BlockCopy, kind: Kind) -> tuple[IntArray, IntArray]:
    """Offsets of the pieces at the source and at the target, in units."""
    return (
        copy.sources // (kind.unit_elements * copy.source.itemsize),
        copy.targets // (kind.unit_elements * copy.target.itemsize),
    )


def divisor(size: int) -> tuple[int, int, int]:
    """Numbers that replace a division by a multiplication and a shift.

    Returns:
        (d, magic, shift) with n // d == (n * magic) >> shift for 0 <= n < 2**31, and
        n * magic < 2**63.

    With s the bits of d - 1, magic = ceil(2**(31 + s) / d) is too large by less than
    2**s / d. That error times n stays below 2**(31 + s) / d, which is too little to
    reach the next integer.
    """
    bits = (size - 1).bit_length()
    shift = 31 + bits
    return size, -(-(1 << shift) // size), shift


def run_bytes_of(copy: BlockCopy, factors: Factors) -> int:
    """Bytes of a piece that is one run and keeps its elements; otherwise 0."""
    converts = factors is not None or copy.source.dtype != copy.target.dtype
    if converts or copy.shape.axes:
        return 0
    return copy.piece_bytes


class CudaPlacer(Placer):
    """Places with copy engines and the kernel.

    Args:
        pool: the pool of this rank, on a GPU. It is written, and its device reads.
        num_programs: thread blocks of one launch; more are faster and leave less to
            other kernels.
        long_run_bytes: copy engines move runs of at least this size; 0 gives them all
            runs that they can copy.
        busy: returns True while a batch is computed on this device.
    """

    launch_bytes = 1 << 30  # some 2.8 ms over NVLink; max_launch_bytes is often less

    def __init__(
        self,
        pool: KVPool,
        *,
        num_programs: int = NUM_PROGRAMS,
        long_run_bytes: int = LONG_RUN_BYTES,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(pool)
        self._num_programs = num_programs
        self._long_run_bytes = long_run_bytes
        self._busy = busy
        self._paced_until = (
            0.0  # by time.perf_counter; the kernel is not launched before
        )
        # Kernels that cannot be compiled, and the reasons.
        self._failed: dict[Kind, str] = {}

    def compile(self, *, convert: bool) -> None:
        """Compiles every kernel of `kinds_into`, before a peer is met."""
        for kind in kinds_into(self._pool.layout, convert=convert):
            try:
                with torch.cuda.device(self._pool.device):
                    self._launch(kind, *[self._pool.base_address] * 5, 0)
            except Exception as error:  # whatever the driver or the compiler lacks
                self._failed[kind] = repr(error)
        if self._failed:
            reasons = "; ".join(sorted(set(self._failed.values())))
            logger.warning(
                "some kernels that place KV cannot be compiled: %s; "
                "torch places that KV, which is slower",
                reasons,
            )

    def open(self, rank: RankMetadata) -> Memory:
        source = KVLayout.from_record(rank.layout)
        target = self._pool.layout
        for kind in (kind_of(source, target, None), kind_of(source, target, (1.0,))):
            if kind in self._failed:
                reason = self._failed[kind]
                raise NotMappable(
                    f"the kernel that places KV cannot be compiled: {reason}"
                )
        return open_on_gpu(rank, self._pool.device)

    def max_launch_bytes(self, copy: BlockCopy, factors: Factors) -> int:
        if self._is_for_engines(copy, factors):
            return _MAX_ENGINE_COPIES * copy.piece_bytes
        if not self._busy():
            return ALL_BYTES
        now = time.perf_counter()
        if now < self._paced_until:
            return 0
        # The next launch may follow earlier by up to one interval if this one was late.
        interval_s = _PACED_LAUNCH_BYTES / PACED_BYTES_PER_S
        self._paced_until = max(self._paced_until + interval_s, now)
        return _PACED_LAUNCH_BYTES

    def _is_for_engines(self, copy: BlockCopy, factors: Factors) -> bool:
        """True if copy engines carry out this copy, not the kernel."""
        long_bytes = self._long_run_bytes
        if self._busy():
            long_bytes = min(long_bytes, _BUSY_RUN_BYTES)
        is_long = run_bytes_of(copy, factors) >= max(long_bytes, 1)
        return is_long and cuda.copies_batches()

    def _place(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        assert self._stream is not None
        if self._is_for_engines(copy, factors):
            cuda.copy_runs(
                copy.sources + source.address,
                copy.targets + self._pool.base_address,
                copy.piece_bytes,
                self._stream.cuda_stream,
            )
        else:
            self._place_by_kernel(copy, source, factors)

    def _place_by_kernel(
        self, copy: BlockCopy, source: Memory, factors: Factors
    ) -> None:
        units = units_of(copy, factors)
        if units.kind in self._failed:
            super()._place(copy, source, factors)
            return
        tables = (units.parameters, *piece_units(copy, units.kind))
        host_tables = torch.from_numpy(np.concatenate(tables)).pin_memory()
        # This memory may be freed at once: its next use comes later on this stream.
        device_tables = torch.split(
            host_tables.to(self._pool.device, non_blocking=True),
            [len(table) for table in tables],
        )
        self._launch(
            units.kind,
            source.address,
            self._pool.base_address,
            *(table.data_ptr() for table in device_tables),
            len(copy.sources) * units.units_per_piece,
        )

    def _launch(self, kind: Kind, *numbers: int) -> None:
        from kvcache.transfer.move.place_kernel import launch  # needs Triton

        launch(*kind, self._num_programs, *numbers)


def placer_for(pool: KVPool, *, convert: bool, **options: Any) -> Placer:
    """The placer of a pool: compiled for all peers on a GPU, torch's on a CPU.

    Args:
        convert: as of `CudaPlacer.compile`.
        options: as of CudaPlacer.
    """
    if pool.device.type == "cpu":
        return Placer(pool)
    placer = CudaPlacer(pool, **options)
    placer.compile(convert=convert)
    return placer


def staging_placer(pool: KVPool, *, convert: bool) -> Placer:
    """A fast placer out of staging memory.

    READs use the copy engines, so it does not.
    """
    return placer_for(
        pool,
        convert=convert,
        num_programs=_STAGING_PROGRAMS,
        long_run_bytes=sys.maxsize,
    )
