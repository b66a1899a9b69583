"""Placing on a GPU: by copy engines and by the kernel, on a stream beside the decode batch.

To a copy engine a piece that is one run is one copy, a piece whose runs are evenly spaced on either
side one two-dimensional copy. Copy engines take no multiprocessor from the decode batch and move
long runs, many with one call, nearly as fast as a plain copy, but short rows slowly. All else is
the kernel's, whose parameters and tables of pieces go to the device in one copy. What it cannot be
compiled for is torch's.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move import cuda
from kvcache.transfer.move.kernel_index import Kind, kind_of, kinds_into, piece_units, units_of
from kvcache.transfer.move.peer_memory import Memory, NotMappable, open_on_gpu
from kvcache.transfer.move.place import ALL_BYTES, Placer
from kvcache.transfer.plan.block_copy import Axis, BlockCopy, Factors, Shape
from protocol.handshake import RankMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

NUM_PROGRAMS = 48  # thread blocks of one launch: more are hardly faster, and leave less to others
LONG_RUN_BYTES = 2 << 20  # shorter ones are slower than the kernel
# While a batch runs. The kernel costs the batch some 1 ms per GiB, however many multiprocessors it
# uses: so it is paced, and copy engines do what they can do at a third of its speed or more.
PACED_BYTES_PER_S = 90e9
_PACED_BYTES = 16 << 20  # of a launch then
LONG_ROW_BYTES = 2 << 10
_LONG_COPY_BYTES = 64 << 10
_COPIES = 128  # of a launch: begun in 0.1 to 0.6 ms


class Rows(NamedTuple):
    """A piece as rows of equal length; bytes."""

    width: int
    number: int
    pitches: tuple[int, int]  # from a row to the next one, at the source and at the target


def rows_of(copy: BlockCopy, factors: Factors) -> Rows | None:
    """Each piece as rows; None where it is more than that, or elements change on the way."""
    if factors is not None or copy.source.dtype != copy.target.dtype:
        return None
    return _rows(copy.shape)


@lru_cache(maxsize=1024)
def _rows(shape: Shape) -> Rows | None:
    rows = Axis(1, shape.run_bytes, shape.run_bytes)
    for axis in reversed(shape.axes):  # innermost first
        if rows.size == 1:
            rows = axis
            continue
        if axis[1:] != (rows.size * rows.source_stride, rows.size * rows.target_stride):
            return None
        rows = rows._replace(size=rows.size * axis.size)
    return Rows(shape.run_bytes, rows.size, (rows.source_stride, rows.target_stride))


class CudaPlacer(Placer):
    """
    Args:
        pool: of this rank, on a GPU: what is written, and whose device reads.
        num_programs: thread blocks of one launch; more are faster and leave less to others.
        long_run_bytes: copy engines move runs that are no shorter; 0 gives them all they can do.
        busy: whether a batch computes on this device.
    """

    # Some 2.8 ms over NVLink; often there is room for less.
    launch_bytes = 1 << 30

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
        self._failed: dict[Kind, str] = {}  # kinds that no kernel can be compiled for, and why

    def compile(self, *, convert: bool) -> None:
        """Before the first peer is met: has every kernel that one may need, see kinds_into."""
        address = self._pool.base_address
        for kind in kinds_into(self._pool.layout, convert=convert):
            try:
                from kvcache.transfer.move.place_kernel import launch  # needs Triton

                with torch.cuda.device(self._pool.device):
                    launch(kind, 1, *[address] * 5, 0)
            except Exception as error:  # whatever the driver or the compiler lacks
                self._failed[kind] = repr(error)
        if self._failed:
            reasons = "; ".join(sorted(set(self._failed.values())))
            logger.warning("not every kernel that places KV can be compiled: %s", reasons)

    def open(self, rank: RankMetadata) -> Memory:
        theirs, ours = KVLayout.from_record(rank.layout), self._pool.layout
        for kind in (kind_of(theirs, ours, None), kind_of(theirs, ours, (1.0,))):
            if kind in self._failed:
                raise NotMappable(f"the kernel that places KV: {self._failed[kind]}")
        return open_on_gpu(rank, self._pool.device)

    def room(self, copy: BlockCopy, factors: Factors) -> int:
        if self._by_engines(copy, factors) is not None:
            return _COPIES * copy.piece_bytes
        if not self._busy():
            return ALL_BYTES
        now = time.perf_counter()
        if now < self._paced_until:
            return 0
        late_s = _PACED_BYTES / PACED_BYTES_PER_S  # looked at too late by so much is made up for
        self._paced_until = max(self._paced_until + late_s, now)
        return _PACED_BYTES

    def _by_engines(self, copy: BlockCopy, factors: Factors) -> Rows | None:
        """What copy engines do, if they are to do it."""
        rows = rows_of(copy, factors) if cuda.copies_batches() else None
        if rows is None:
            return None
        run_bytes = rows.width if rows.number == 1 else 0
        if run_bytes >= self._long_run_bytes:
            return rows
        is_long = rows.width >= LONG_ROW_BYTES and copy.piece_bytes >= _LONG_COPY_BYTES
        return rows if is_long and self._busy() else None

    def _place(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        assert self._stream is not None
        rows = self._by_engines(copy, factors)
        if rows is None:
            self._by_kernel(copy, source, factors)
            return
        stream = self._stream.cuda_stream
        ends = copy.sources + source.address, copy.targets + self._pool.base_address
        if rows.number == 1:
            cuda.copy_runs(*ends, rows.width, stream)
        else:
            cuda.copy_rows(*ends, rows.width, rows.number, rows.pitches, stream)

    def _by_kernel(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        units = units_of(copy, factors)
        if units.kind in self._failed:
            super()._place(copy, source, factors)
            return
        from kvcache.transfer.move.place_kernel import launch

        parts, pieces = (units.parameters, *piece_units(copy, units.kind)), len(copy.sources)
        host = torch.from_numpy(np.concatenate(parts)).pin_memory()
        # Freed at once: what else gets this memory comes later on this stream.
        table = torch.split(host.to(self._pool.device, non_blocking=True), list(map(len, parts)))
        ends = source.address, self._pool.base_address
        places = (part.data_ptr() for part in table)
        launch(units.kind, self._num_programs, *ends, *places, pieces * units.of_piece)
