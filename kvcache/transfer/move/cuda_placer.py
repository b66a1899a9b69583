"""Placing on a GPU: by copy engines and by the kernel, on a stream beside the decode batch.

Copy engines take no multiprocessor from the decode batch and move long runs, many with one call,
nearly as fast as a plain copy. They do copies whose pieces are one run each, the kernel does all
others, and torch those that the kernel cannot be compiled for.

The kernel (place_kernel.py) numbers the units (of up to 16 bytes) of a copy's pieces, piece by
piece and inside a piece in the source's own order, so that neighbours in number are neighbours in
its memory. From a unit's number five divisions give its place on every axis; two tables give where
its piece begins on either side, and two sets of strides the rest, all in units. No list of runs is
made, whatever the orders, block sizes, heads and dtypes. If elements change their scale, the same
divisions find a unit's layer and component, and so its factor.
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

UNIT_BYTES = 16  # the most that a thread moves at once
NUM_PARAMETERS = 3 + 4 * 6  # before the factors, if any
MAX_UNITS = (1 << 31) - 1  # of one launch: their numbers are 32-bit
NUM_PROGRAMS = (
    48  # thread blocks of one launch: more are hardly faster, and leave less to others
)
_STAGING_PROGRAMS = (
    132  # all multiprocessors, for a tenth of the time that reading takes
)
LONG_RUN_BYTES = 2 << 20  # shorter ones are slower than the kernel
# While a batch runs. The kernel costs the batch some 1 ms per GiB, however many multiprocessors it
# uses: so it is paced, and copy engines do what they can do at a third of its speed or more.
PACED_BYTES_PER_S = 90e9
_PACED_BYTES = 16 << 20  # of a launch then
_BUSY_RUN_BYTES = 64 << 10
_COPIES = 128  # of a launch: begun in 0.1 to 0.6 ms


class Kind(NamedTuple):
    """The constants of a compiled kernel."""

    source_dtype: str
    target_dtype: str
    unit_elements: int  # on either side
    scaled: bool


class Units(NamedTuple):
    """A copy as units, but for where its pieces begin.

    The parameters are the units of one head of one token as a divisor, then of each axis, innermost
    of the source first: its size as a divisor (3), its stride at the source and at the target, and
    how many factors (of layers and components) a step is; at last the factors' float32 bits.
    """

    kind: Kind
    of_piece: int
    parameters: IntArray  # i64[NUM_PARAMETERS + factors]


def kind_of(source: KVLayout, target: KVLayout, factors: Factors) -> Kind:
    """A unit has the most elements, a power of two, that divide a head's and take 16 bytes on
    neither side."""
    fitting = UNIT_BYTES // max(source.itemsize, target.itemsize)
    elements = min(fitting, source.head_dim & -source.head_dim)
    return Kind(source.dtype, target.dtype, elements, factors is not None)


def kinds_into(target: KVLayout, *, convert: bool) -> Iterator[Kind]:
    """All that any peer's KV may need to get into a pool.

    Args:
        convert: also KV of other dtypes and scales.
    """
    for dtype in ITEMSIZE if convert else (target.dtype,):
        may_scale = convert and FP8 in (dtype, target.dtype)
        for factors in (None, (1.0,))[: 1 + may_scale]:
            yield kind_of(replace(target, dtype=dtype), target, factors)


def units_of(copy: BlockCopy, factors: Factors) -> Units:
    """
    Raises:
        PlanError: one piece has too many units to number.
    """
    kind = kind_of(copy.source, copy.target, factors)
    reads, writes, sizes = copy.source.strides, copy.target.strides, axes_of(copy)
    of_piece = copy.source.head_dim // kind.unit_elements
    values = [*divisor(of_piece)]
    for axis in reversed(copy.source.order.replace("B", "").replace("D", "")):
        strides = (
            reads[axis] // kind.unit_elements,
            writes[axis] // kind.unit_elements,
        )
        factor = {"L": copy.source.num_components, "C": 1}.get(axis, 0)
        values += [*divisor(sizes[axis]), *strides, factor]
        of_piece *= sizes[axis]
    if of_piece > MAX_UNITS:
        raise PlanError(
            f"a block of the peer has {of_piece} units to gather; use smaller blocks"
        )
    bits = np.array(factors or (), np.float32).view(np.int32).astype(np.int64)
    return Units(kind, of_piece, np.concatenate((np.array(values, np.int64), bits)))


def piece_units(copy: BlockCopy, kind: Kind) -> tuple[IntArray, IntArray]:
    """Where the pieces begin at the source and at the target, in units."""
    return (
        copy.sources // (kind.unit_elements * copy.source.itemsize),
        copy.targets // (kind.unit_elements * copy.target.itemsize),
    )


def divisor(size: int) -> tuple[int, int, int]:
    """(d, magic, shift): n // d == (n * magic) >> shift for 0 <= n < 2**31, and n * magic < 2**63.

    With s the bits of d - 1, magic = ceil(2**(31 + s) / d) overshoots by less than 2**s / d, which
    times n stays below 2**(31 + s) / d: too little to reach the next whole number.
    """
    bits = (size - 1).bit_length()
    return size, -(-(1 << (31 + bits)) // size), 31 + bits


def run_bytes_of(copy: BlockCopy, factors: Factors) -> int:
    """Of a piece that is one run and keeps its elements as they are; 0 of any other."""
    keeps = factors is None and copy.source.dtype == copy.target.dtype
    return copy.piece_bytes if keeps and not copy.shape.axes else 0


class CudaPlacer(Placer):
    """
    Args:
        pool: of this rank, on a GPU: what is written, and whose device reads.
        num_programs: thread blocks of one launch; more are faster and leave less to others.
        long_run_bytes: copy engines move runs that are no shorter; 0 gives them all they can do.
        busy: whether a batch computes on this device.
    """

    launch_bytes = 1 << 30  # some 2.8 ms over NVLink; often there is room for less

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
        self._paced_until = 0.0  # the kernel has had its share until then
        self._failed: dict[
            Kind, str
        ] = {}  # kinds that no kernel can be compiled for, and why

    def compile(self, *, convert: bool) -> None:
        """Before the first peer is met: has every kernel that one may need, see kinds_into."""
        for kind in kinds_into(self._pool.layout, convert=convert):
            try:
                with torch.cuda.device(self._pool.device):
                    self._launch(kind, *[self._pool.base_address] * 5, 0)
            except Exception as error:  # whatever the driver or the compiler lacks
                self._failed[kind] = repr(error)
        if self._failed:
            reasons = "; ".join(sorted(set(self._failed.values())))
            logger.warning(
                "not every kernel that places KV can be compiled: %s", reasons
            )

    def open(self, rank: RankMetadata) -> Memory:
        theirs, ours = KVLayout.from_record(rank.layout), self._pool.layout
        for kind in (kind_of(theirs, ours, None), kind_of(theirs, ours, (1.0,))):
            if kind in self._failed:
                raise NotMappable(f"the kernel that places KV: {self._failed[kind]}")
        return open_on_gpu(rank, self._pool.device)

    def room(self, copy: BlockCopy, factors: Factors) -> int:
        if self._is_for_engines(copy, factors):
            return _COPIES * copy.piece_bytes
        if not self._busy():
            return ALL_BYTES
        now = time.perf_counter()
        if now < self._paced_until:
            return 0
        late_s = (
            _PACED_BYTES / PACED_BYTES_PER_S
        )  # looked at too late by so much is made up for
        self._paced_until = max(self._paced_until + late_s, now)
        return _PACED_BYTES

    def _is_for_engines(self, copy: BlockCopy, factors: Factors) -> bool:
        long_bytes = self._long_run_bytes
        if self._busy():
            long_bytes = min(long_bytes, _BUSY_RUN_BYTES)
        return (
            run_bytes_of(copy, factors) >= max(long_bytes, 1) and cuda.copies_batches()
        )

    def _place(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        assert self._stream is not None
        if self._is_for_engines(copy, factors):
            ends = copy.sources + source.address, copy.targets + self._pool.base_address
            cuda.copy_runs(*ends, copy.piece_bytes, self._stream.cuda_stream)
        else:
            self._by_kernel(copy, source, factors)

    def _by_kernel(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        units = units_of(copy, factors)
        if units.kind in self._failed:
            super()._place(copy, source, factors)
            return
        parts, pieces = (
            (units.parameters, *piece_units(copy, units.kind)),
            len(copy.sources),
        )
        host = torch.from_numpy(np.concatenate(parts)).pin_memory()
        # Freed at once: what else gets this memory comes later on this stream.
        table = torch.split(
            host.to(self._pool.device, non_blocking=True), list(map(len, parts))
        )
        ends = source.address, self._pool.base_address
        places = (part.data_ptr() for part in table)
        self._launch(units.kind, *ends, *places, pieces * units.of_piece)

    def _launch(self, kind: Kind, *numbers: int) -> None:
        from kvcache.transfer.move.place_kernel import launch  # needs Triton

        launch(*kind, self._num_programs, *numbers)


def placer_for(pool: KVPool, *, convert: bool, **options: Any) -> Placer:
    """A GPU's own, compiled for all that a peer may have; torch's on a CPU.

    Args:
        convert, options: as of `compile` and of CudaPlacer.
    """
    if pool.device.type == "cpu":
        return Placer(pool)
    placer = CudaPlacer(pool, **options)
    placer.compile(convert=convert)
    return placer


def staging_placer(pool: KVPool, *, convert: bool) -> Placer:
    """A fast placer out of staging memory; without copy engines, which READs use."""
    most = {"num_programs": _STAGING_PROGRAMS, "long_run_bytes": sys.maxsize}
    return placer_for(pool, convert=convert, **most)
