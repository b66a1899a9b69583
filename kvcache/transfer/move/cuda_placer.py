"""Places block copies on a GPU with copy engines and a kernel, while a batch may run.

Copy engines take no multiprocessor from the batch. They move many long runs in one
call, nearly as fast as a plain copy does. So copy engines carry out the copies with
one long run per piece, and the kernel carries out all other copies. If the kernel
cannot be compiled for the KV of a peer, the peer's memory is not mapped. Instead, KV is
read over NIXL, and torch copies it out of staging memory.

The kernel (place_kernel.py) moves *units* of up to 16 bytes. It numbers the units of a
copy piece by piece, and inside a piece in the order of the source, so that units with
neighboring numbers are neighbors in the source's memory. Five divisions turn the
number of a unit into its piece and its index on every axis. Two tables have the offset
of each piece, one at the source and one at the target. Two sets of strides give the
offset of the unit inside the piece, on each side. All offsets are in units. So no list
of runs is needed, whatever the orders, block sizes, heads and dtypes are. If the two
sides have different scales, the same divisions give the layer and the component of a
unit, which select the scale factor of the unit.
"""

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move import cuda
from kvcache.transfer.move.locked_memory import LockedMemory, num_populating_threads
from kvcache.transfer.move.peer_memory import (
    Memory,
    NotMappable,
    open_host_for_gpu,
    open_on_gpu,
)
from kvcache.transfer.move.place import ALL_BYTES, axes_of
from kvcache.transfer.move.place import Placer as Placer
from kvcache.transfer.plan.block_copy import BlockCopy, ScaleFactors
from kvcache.transfer.plan.endpoint import IntArray, PlanError
from protocol.handshake import FP8, ITEMSIZE, RankMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

UNIT_BYTES = 16  # largest size of a unit: the largest word that a GPU thread moves
NUM_PARAMETERS = 3 + 4 * 6  # length of Units.parameters without scale factors
MAX_UNITS = (1 << 31) - 1  # limit of one launch: the kernel numbers units with int32
# Thread blocks of one launch. With more thread blocks the kernel is hardly faster, and
# other kernels get fewer multiprocessors.
NUM_PROGRAMS = 48
# Thread blocks of one launch that places out of staging memory: one for each
# multiprocessor of an H100 or H200. Such launches run for only a tenth of the time that
# reading takes.
_STAGING_PROGRAMS = 132
# Copy engines move runs of at least this size as fast as the kernel, or faster.
LONG_RUN_BYTES = 2 << 20
# While a batch is computed, each GiB that the placing kernel moves delays the batch by
# about 1 ms, however many multiprocessors the kernel uses. So the rate of the kernel is
# limited, and copy engines take every run of at least _BUSY_RUN_BYTES. For runs of that
# size, copy engines reach a third of the kernel's speed.
PACED_BYTES_PER_S = 90e9
_PACED_LAUNCH_BYTES = 16 << 20
_BUSY_RUN_BYTES = 64 << 10
# Limit on the number of copies in one launch for copy engines. Queuing 128 copies takes
# 0.1 to 0.6 ms.
_MAX_ENGINE_COPIES = 128


class KernelKind(NamedTuple):
    """The constants for which a kernel is compiled."""

    source_dtype: str
    target_dtype: str
    unit_elements: int  # number of elements in a unit, the same on both sides
    scaled: bool  # elements are multiplied by scale factors


class Units(NamedTuple):
    """The kernel's description of a copy, without the offsets of the pieces.

    Attributes:
        units_per_piece: number of units in one piece.
        parameters: i64[NUM_PARAMETERS + number of scale factors]. The first 3 numbers
            are the number of units in one head of one token, as from `divisor`. Then
            come 6 numbers for each axis, beginning with the innermost axis of the
            source: its size as from `divisor` (3 numbers), its stride at the source,
            its stride at the target, and its stride in the scale factors. Last come the
            float32 bits of the scale factors.
    """

    kind: KernelKind
    units_per_piece: int
    parameters: IntArray


def kernel_kind(
    source: KVLayout, target: KVLayout, scale_factors: ScaleFactors
) -> KernelKind:
    """The constants of the kernel that places a copy.

    The number of elements in a unit is the largest power of two that divides head_dim
    and for which a unit has at most 16 bytes on either side.
    """
    max_elements = UNIT_BYTES // max(source.itemsize, target.itemsize)
    largest_power_of_two = source.head_dim & -source.head_dim
    elements = min(max_elements, largest_power_of_two)
    return KernelKind(source.dtype, target.dtype, elements, scale_factors is not None)


def kernel_kinds_into(target: KVLayout, *, convert: bool) -> Iterator[KernelKind]:
    """Yields the constants of all kernels that may be needed to place KV of any peer.

    Args:
        target: the layout of the pool.
        convert: include the kernels for peers with different dtypes and scales.
    """
    dtypes = tuple(ITEMSIZE) if convert else (target.dtype,)
    for dtype in dtypes:
        source = replace(target, dtype=dtype)
        yield kernel_kind(source, target, None)
        if convert and FP8 in (dtype, target.dtype):  # only FP8 has scales
            yield kernel_kind(source, target, (1.0,))


def units_of(copy: BlockCopy, scale_factors: ScaleFactors) -> Units:
    """Describes a copy for the kernel, which moves it unit by unit.

    Raises:
        PlanError: one piece has more than MAX_UNITS units.
    """
    kind = kernel_kind(copy.source, copy.target, scale_factors)
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
            f"a block of the peer has {units_per_piece} words to copy, but at most "
            f"{MAX_UNITS} are supported; use a lower --block-size"
        )
    factors = np.array(scale_factors or (), np.float32)
    bits = factors.view(np.int32).astype(np.int64)
    parameters = np.concatenate((np.array(values, np.int64), bits))
    return Units(kind, units_per_piece, parameters)


def piece_unit_offsets(copy: BlockCopy, kind: KernelKind) -> tuple[IntArray, IntArray]:
    """Offsets of the pieces at the source and at the target, in units."""
    return (
        copy.sources // (kind.unit_elements * copy.source.itemsize),
        copy.targets // (kind.unit_elements * copy.target.itemsize),
    )


def divisor(size: int) -> tuple[int, int, int]:
    """The numbers with which a GPU divides by `size`: it multiplies and shifts.

    Returns:
        (d, magic, shift) with d = size and n // d == (n * magic) >> shift for
        0 <= n < 2**31, where n * magic < 2**63.

    Proof: let d be `size`, s the number of bits of d - 1, and shift = 31 + s. Then
    magic = ceil(2**shift / d) exceeds 2**shift / d by less than 1 <= 2**s / d. So
    n * magic / 2**shift exceeds n / d by less than n / 2**shift <= 1 / d, which is too
    little to reach the next integer.
    """
    bits = (size - 1).bit_length()
    shift = 31 + bits
    return size, -(-(1 << shift) // size), shift


def run_bytes_of(copy: BlockCopy, scale_factors: ScaleFactors) -> int:
    """Bytes of each piece if a piece is one run and is not converted; otherwise 0."""
    converts = scale_factors is not None or copy.source.dtype != copy.target.dtype
    if converts or copy.shape.axes:
        return 0
    return copy.piece_bytes


class CudaPlacer(Placer):
    """Copies KV into a pool with the copy engines of a GPU and the placing kernel.

    Args:
        pool: the pool of this rank. The copies write to this pool. A pool in host
            memory is locked, which allocates all its pages.
        device: the GPU that runs the copies; None: the GPU with the pool.
        num_programs: thread blocks of one launch; see NUM_PROGRAMS.
        long_run_bytes: copy engines move runs of at least this size; 0: all runs. While
            `is_busy`, copy engines also move runs of at least _BUSY_RUN_BYTES.
        is_busy: returns True while a batch is computed on this device.
        extra_layouts: layouts of KV in the memory behind the pool.
    """

    launch_bytes = 1 << 30  # copying this takes about 2.8 ms over NVLink

    def __init__(
        self,
        pool: KVPool,
        *,
        device: torch.device | None = None,
        num_programs: int = NUM_PROGRAMS,
        long_run_bytes: int = LONG_RUN_BYTES,
        is_busy: Callable[[], bool] = lambda: False,
        extra_layouts: Sequence[KVLayout] = (),
    ) -> None:
        super().__init__(pool, device)
        self._extra_layouts = extra_layouts
        if pool.device.type == "cpu" and self._device.type == "cuda":
            with torch.cuda.device(self._device):
                locked = LockedMemory(
                    pool.base_address,
                    len(pool.memory),
                    pool.layout.byte_strides["B"],
                    num_threads=num_populating_threads(),
                    is_busy=is_busy,
                )
            weakref.finalize(pool, locked.unlock)
        self._num_programs = num_programs
        self._long_run_bytes = long_run_bytes
        self._is_busy = is_busy
        # While a batch is computed, the kernel is not launched before this time (by
        # time.perf_counter).
        self._next_paced_launch_s = 0.0
        # Kernels that cannot be compiled, each with the reason.
        self._failed: dict[KernelKind, str] = {}

    def compile(self, *, convert: bool) -> None:
        """Compiles every kernel of `kernel_kinds_into`, before the first peer connects.

        If a kernel cannot be compiled, a warning is logged. `open` then refuses peers
        that need the kernel. Their KV is read over NIXL into staging memory, and torch
        copies it into the pool.
        """
        kinds = set(kernel_kinds_into(self._pool.layout, convert=convert))
        for layout in self._extra_layouts:
            kinds.update(kernel_kinds_into(layout, convert=False))
        for kind in kinds:
            try:
                with torch.cuda.device(self._device):
                    self._launch(kind, *[self._pool.base_address] * 5, 0)
            except Exception as error:  # driver and compiler raise errors of any type
                self._failed[kind] = repr(error)
        if self._failed:
            reasons = "; ".join(sorted(set(self._failed.values())))
            logger.warning(
                "some kernels that copy KV cannot be compiled: %s; KV of peers that "
                "need these kernels is read over NIXL and copied by torch, which is "
                "slower",
                reasons,
            )

    def open(self, rank: RankMetadata) -> Memory:
        source = KVLayout.from_record(rank.layout)
        target = self._pool.layout
        for kind in (
            kernel_kind(source, target, None),
            kernel_kind(source, target, (1.0,)),
        ):
            if kind in self._failed:
                reason = self._failed[kind]
                raise NotMappable(
                    f"the kernel that copies KV cannot be compiled: {reason}"
                )
        if rank.device_kind == "cpu":
            return open_host_for_gpu(rank, self._device, self._is_busy)
        return open_on_gpu(rank, self._device)

    def claim_launch_bytes(self, copy: BlockCopy, scale_factors: ScaleFactors) -> int:
        if self._is_for_engines(copy, scale_factors):
            return _MAX_ENGINE_COPIES * copy.piece_bytes
        if not self._is_busy():
            return ALL_BYTES
        now = time.perf_counter()
        if now < self._next_paced_launch_s:
            return 0
        # If this launch is late, the next launch may come earlier to catch up, but at
        # most by one interval.
        interval_s = _PACED_LAUNCH_BYTES / PACED_BYTES_PER_S
        self._next_paced_launch_s = max(self._next_paced_launch_s + interval_s, now)
        return _PACED_LAUNCH_BYTES

    def _is_for_engines(self, copy: BlockCopy, scale_factors: ScaleFactors) -> bool:
        """True if copy engines, not the kernel, have to carry out this copy."""
        long_bytes = self._long_run_bytes
        if self._is_busy():
            long_bytes = min(long_bytes, _BUSY_RUN_BYTES)
        is_long = run_bytes_of(copy, scale_factors) >= max(long_bytes, 1)
        return is_long and cuda.can_batch_copies()

    def _place(
        self, copy: BlockCopy, source: Memory, scale_factors: ScaleFactors
    ) -> None:
        assert self._stream is not None
        if self._is_for_engines(copy, scale_factors):
            cuda.copy_runs(
                copy.sources + source.address,
                copy.targets + self._pool.base_address,
                copy.piece_bytes,
                self._stream.cuda_stream,
            )
        else:
            self._place_by_kernel(copy, source, scale_factors)

    def _place_by_kernel(
        self, copy: BlockCopy, source: Memory, scale_factors: ScaleFactors
    ) -> None:
        units = units_of(copy, scale_factors)
        if units.kind in self._failed:
            super()._place(copy, source, scale_factors)
            return
        tables = (units.parameters, *piece_unit_offsets(copy, units.kind))
        host_tables = torch.from_numpy(np.concatenate(tables)).pin_memory()
        # The device tables may be freed right after the launch: torch reuses their
        # memory only for later work on this stream.
        device_tables = torch.split(
            host_tables.to(self._device, non_blocking=True),
            [len(table) for table in tables],
        )
        self._launch(
            units.kind,
            source.address,
            self._pool.base_address,
            *(table.data_ptr() for table in device_tables),
            len(copy.sources) * units.units_per_piece,
        )

    def _launch(self, kind: KernelKind, *numbers: int) -> None:
        from kvcache.transfer.move.place_kernel import launch  # needs Triton

        launch(*kind, self._num_programs, *numbers)


def placer_for(
    pool: KVPool,
    *,
    convert: bool,
    device: torch.device | None = None,
    **options: Any,
) -> Placer:
    """Makes the placer of a pool: on a GPU a compiled CudaPlacer, on a CPU a Placer.

    Args:
        convert: compile also the kernels that convert dtypes and scales.
        device: as in CudaPlacer.
        options: further arguments of CudaPlacer.

    Raises:
        CudaError: `device` cannot write to the host memory of the pool.
    """
    if (device or pool.device).type == "cpu":
        return Placer(pool)
    placer = CudaPlacer(pool, device=device, **options)
    placer.compile(convert=convert)
    return placer


def placer_for_host(pool: KVPool, *, maps_only: bool) -> Placer | None:
    """Makes the placer of a pool in host memory that GPUs and CPUs may use.

    On a host with a GPU, the GPU copies: it reads the pools of engines, and writes to
    this pool. The memory of this pool is locked for the GPU.

    Returns:
        The placer; None, after a warning, if the memory cannot be locked.

    Raises:
        CudaError: the memory cannot be locked, and `maps_only` forbids reading over
            NIXL instead.
    """
    if not torch.cuda.is_available():
        return placer_for(pool, convert=False)
    try:
        return placer_for(pool, convert=False, device=torch.device("cuda:0"))
    except cuda.CudaError as error:
        if maps_only:
            raise
        logger.warning(
            "%.2f GiB of host memory cannot be locked for the GPU (%s), so KV moves "
            "over NIXL, which is slower; use a lower --host-kv-bytes, or raise the "
            "limit on locked memory (ulimit -l)",
            pool.nbytes / 2**30,
            error,
        )
        return None


def staging_placer(
    pool: KVPool, *, convert: bool, extra_layouts: Sequence[KVLayout] = ()
) -> Placer:
    """Makes a placer for copies out of staging memory.

    On a GPU the placer uses the kernel alone, because READs need the copy engines.

    Args:
        extra_layouts: as in CudaPlacer.
    """
    return placer_for(
        pool,
        convert=convert,
        num_programs=_STAGING_PROGRAMS,
        long_run_bytes=sys.maxsize,
        extra_layouts=extra_layouts,
    )
