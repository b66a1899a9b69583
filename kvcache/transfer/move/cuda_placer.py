"""Placing on a GPU: by copy engines and by the kernel, on a stream beside the decode batch.

To a copy engine a piece that is one run is one copy, a piece whose runs are evenly spaced on either
side one two-dimensional copy. Copy engines take no multiprocessor from the decode batch and move
long runs, many with one call, nearly as fast as a plain copy, but short rows slowly. All else is
the kernel's, whose parameters and tables of pieces go to the device in one copy; the driver is
called directly (cuda.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.transfer.move.cuda import Driver, driver
from kvcache.transfer.move.kernel_index import (
    Kind,
    Units,
    kind_of,
    kinds_into,
    piece_units,
    units_of,
)
from kvcache.transfer.move.peer_memory import Memory, open_on_gpu
from kvcache.transfer.move.place import ALL_BYTES, Placer, Work
from kvcache.transfer.plan.block_copy import Axis, BlockCopy, Shape, Transfer
from kvcache.transfer.plan.endpoint import IntArray
from protocol.handshake import RankMetadata
from protocol.process.logging import get_logger

if TYPE_CHECKING:
    # Needs Triton, which only GPU machines have.
    from kvcache.transfer.move.place_kernel import Kernel

logger = get_logger(__name__)

NUM_PROGRAMS = 48  # thread blocks of one launch: more are hardly faster, and leave less to others
LONG_RUN_BYTES = 2 << 20  # shorter ones are slower than the kernel
# While a batch runs. The kernel costs the batch some 1 ms per GiB, however many multiprocessors it
# uses: so it is paced, and copy engines do what they can do at a third of its speed or more.
PACED_BYTES_PER_S = 90e9
_PACED_BYTES = 16 << 20  # of a launch then
LONG_ROW_BYTES = 2 << 10
_LONG_COPY_BYTES = 64 << 10
_COPIES = 128  # of a launch: more would keep the interpreter's lock for more than 0.1 ms
_FIRST_COPIES = 8  # of a pull's first launch: the link has work sooner
_TABLE_BYTES = 32 << 10


class Rows(NamedTuple):
    """A piece as rows of equal length; bytes."""

    width: int
    number: int
    pitches: tuple[int, int]  # from a row to the next one, at the source and at the target

    @property
    def run_bytes(self) -> int:
        """Of a piece that is one run; else 0."""
        return self.width if self.number == 1 else 0


def rows_of(copy: BlockCopy, factors: tuple[float, ...] | None) -> Rows | None:
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


@dataclass(eq=False)
class _Table:
    """Memory for parameters and pieces, i64[n], pinned and on the device."""

    host: torch.Tensor
    device: torch.Tensor
    numbers: IntArray = field(init=False)  # the host's
    addresses: tuple[int, int] = field(init=False)  # of both

    def __post_init__(self) -> None:
        self.numbers = self.host.numpy()
        self.addresses = self.host.data_ptr(), self.device.data_ptr()


@dataclass(eq=False)
class _Launches:
    """What a Work's launches need."""

    rows: list[Rows | None]  # of each copy, where copy engines may do it
    has_long_runs: bool
    units: list[Units] = field(default_factory=list)  # once a kernel needs them
    places: list[int] = field(default_factory=list)  # device address of each copy's parameters
    table: _Table | None = None
    begun: bool = False


class CudaPlacer(Placer):
    """
    Args:
        pool: of this rank, on a GPU: what is written, and whose device reads.
        num_programs: thread blocks of one launch; more are faster and leave less to others.
        long_run_bytes: copy engines move runs that are no shorter; 0 gives them all they can do.
        busy: whether a batch computes on this device.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        num_programs: int = NUM_PROGRAMS,
        long_run_bytes: int = LONG_RUN_BYTES,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pool = pool
        self._target = pool.base_address
        self._device = pool.device
        self._num_programs = num_programs
        self._long_run_bytes = long_run_bytes
        self._busy = busy
        self._paced_until = 0.0  # the kernel has had its share until then
        self._free_tables: list[_Table] = []
        self._free_events: list[int] = []
        self._kernels: dict[Kind, Kernel] = {}

    def compile(self, *, convert: bool) -> None:
        """Before the first peer is met: has every kernel that one may need, see kinds_into. What
        cannot be compiled is told of here, and again when a peer needs it."""
        try:
            from kvcache.transfer.move.place_kernel import compile_kernel

            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream().cuda_stream
                for kind in kinds_into(self._pool.layout, convert=convert):
                    compile_kernel(kind, self._target, stream)
        except Exception as error:  # whatever the driver or the compiler lacks
            logger.warning("not every kernel that places KV can be compiled: %r", error)

    def bind_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._driver: Driver = driver()
        # 0 is the lowest priority: what the engine gives a higher one goes first.
        self._torch_stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        self._stream = self._torch_stream.cuda_stream
        self._free_tables += [self._new_table(_TABLE_BYTES // 8) for _ in range(2)]
        self._free_events += [self._driver.new_event() for _ in range(8)]

    def open(self, rank: RankMetadata) -> Memory:
        return open_on_gpu(rank, self._device)

    def prepare(self, transfer: Transfer) -> None:
        ends = transfer.remote[0].layout, transfer.local.layout
        self._kernel(kind_of(*ends, transfer.factors))

    def _kernel(self, kind: Kind) -> "Kernel":
        from kvcache.transfer.move.place_kernel import Kernel, compile_kernel

        if kind not in self._kernels:
            self._kernels[kind] = Kernel(*compile_kernel(kind, self._target, self._stream))
        return self._kernels[kind]

    def begin(self, work: Work) -> None:
        rows = [
            rows_of(copy, work.factors) if self._driver.copies_batches else None
            for copy in work.copies
        ]
        has_long_runs = any(each and each.run_bytes >= self._long_run_bytes for each in rows)
        work.kept = _Launches(rows, has_long_runs)

    def end(self, work: Work) -> None:
        if work.kept is not None and work.kept.table is not None:
            self._free_tables.append(work.kept.table)

    def room(self, work: Work, index: int) -> int:
        if self._by_engines(work, index) is not None:
            copies = _COPIES if work.kept.begun else _FIRST_COPIES
            return copies * work.copies[index].piece_bytes
        if not self._busy():
            return ALL_BYTES
        now = time.perf_counter()
        if now < self._paced_until:
            return 0
        late_s = _PACED_BYTES / PACED_BYTES_PER_S  # looked at too late by so much is made up for
        self._paced_until = max(self._paced_until + late_s, now)
        return _PACED_BYTES

    def _by_engines(self, work: Work, index: int) -> Rows | None:
        """What copy engines do, if they are to do it."""
        launches: _Launches = work.kept
        rows = launches.rows[index]
        if rows is None or launches.has_long_runs:  # then also of the ends, which are shorter
            return rows
        is_long = rows.width >= LONG_ROW_BYTES and rows.width * rows.number >= _LONG_COPY_BYTES
        return rows if is_long and self._busy() else None

    def launch(self, work: Work, index: int, first: int, count: int) -> int:
        event = self._free_events.pop() if self._free_events else self._driver.new_event()
        rows = self._by_engines(work, index)
        work.kept.begun = True
        try:
            if rows is not None:
                memory = work.sources[index]
                self._copy(work.copies[index].part(first, count), rows, memory.address)
            else:
                self._place(work, index, first, count)
            self._driver.record(event, self._stream)
        except Exception:
            self._wait()  # for what was queued, as there is no event to tell its end
            raise
        return event

    def _copy(self, copy: BlockCopy, rows: Rows, source: int) -> None:
        """By the copy engines."""
        ends = copy.sources + source, copy.targets + self._target
        if rows.number == 1:
            self._driver.copy_runs(*ends, rows.width, self._stream)
        else:
            self._driver.copy_rows(*ends, rows.width, rows.number, rows.pitches, self._stream)

    def _place(self, work: Work, index: int, first: int, count: int) -> None:
        """By the kernel."""
        launches: _Launches = work.kept
        if launches.table is None:
            self._upload(work)
        units, pieces = launches.units[index], len(work.copies[index].sources)
        parameters = launches.places[index]
        sources = parameters + 8 * (len(units.parameters) + first)
        self._kernel(units.kind).launch(
            self._num_programs,
            self._stream,
            work.sources[index].address,
            self._target,
            parameters,
            sources,
            sources + 8 * pieces,
            count * units.of_piece,
        )

    def _upload(self, work: Work) -> None:
        """Parameters, sources and targets of each copy, in one table."""
        launches: _Launches = work.kept
        launches.units = [units_of(copy, work.factors) for copy in work.copies]
        parts, sizes = [], [0]
        for copy, units in zip(work.copies, launches.units, strict=True):
            parts += [units.parameters, *piece_units(copy, units.kind)]
            sizes.append(sizes[-1] + sum(map(len, parts[-3:])))
        table = launches.table = self._table(sizes[-1])
        np.concatenate(parts, out=table.numbers[: sizes[-1]])
        source, address = table.addresses
        launches.places = [address + 8 * size for size in sizes]
        self._driver.upload(address, source, 8 * sizes[-1], self._stream)

    def _table(self, size: int) -> _Table:
        """Used before if possible: to allocate takes longer."""
        for table in self._free_tables:
            if len(table.numbers) >= size:
                self._free_tables.remove(table)
                return table
        return self._new_table(size)

    def _new_table(self, size: int) -> _Table:
        size = 1 << (max(size, _TABLE_BYTES // 8) - 1).bit_length()
        with torch.cuda.stream(self._torch_stream):
            device = torch.empty(size, dtype=torch.int64, device=self._device)
        return _Table(torch.empty(size, dtype=torch.int64, pin_memory=True), device)

    def _wait(self) -> None:
        try:
            self._torch_stream.synchronize()
        except RuntimeError:
            logger.exception("waiting for a launch that failed in part")

    def finished(self, token: int) -> bool:
        if not self._driver.has_ended(token):
            return False
        self._free_events.append(token)
        return True
