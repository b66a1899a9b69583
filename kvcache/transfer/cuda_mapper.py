"""The mapped path between GPUs: opens a peer's pool with CUDA IPC and copies out of it.

Long runs go through the copy engines, many with one call: they reach 97 % of the plain copy's speed
and take no multiprocessor from the decode batch. All else is gathered by a kernel.

The link is idle between the order and the first launch, so little is done then: what depends on the
two geometries is on the device since the handshake, the block tables of a pull go there in one
copy, and the driver is called directly (cuda_driver.py).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvcache.pool import KVPool
from kvcache.transfer import cuda_ipc
from kvcache.transfer.boxes import Transfer
from kvcache.transfer.copies import Rows, plan_copies, rows_of, whole_blocks
from kvcache.transfer.cuda_driver import FEW_COPIES, CudaError, Driver, driver
from kvcache.transfer.gather import Share, shares_of
from kvcache.transfer.mapper import ALL_BYTES, MappedMemory, Mapper, NotMappable, Work, offered
from protocol.handshake import RankMetadata
from protocol.logging import get_logger

if TYPE_CHECKING:
    from kvcache.transfer.mapped_kernel import Kernel  # needs Triton, which only GPU machines have

logger = get_logger(__name__)

NUM_PROGRAMS = 48  # thread blocks of one launch: 91 % of the plain copy, 64 would be 93 %
LONG_RUN_BYTES = 2 << 20  # shorter ones are slower than the kernel
# While a batch runs. The kernel costs the batch some 1 ms per GiB, however many multiprocessors it
# uses: so it is paced, and copy engines do what they can do at a third of its speed or more.
PACED_BYTES_PER_S = 90e9
_PACED_BYTES = 16 << 20  # of a launch then
LONG_ROW_BYTES = 2 << 10
_LONG_COPY_BYTES = 64 << 10
_COPIES = 128  # of a launch: more would keep the interpreter's lock for more than 0.1 ms
_FIRST_COPIES = 8  # of a pull's first launch: the link has work sooner

_SLOT_BYTES = 32 << 10


@dataclass(eq=False)
class _Slot:
    """One pull's block tables, i64[n] in pinned memory and on the device."""

    host: torch.Tensor
    device: torch.Tensor
    bytes: memoryview = field(init=False)  # host's
    source: int = field(init=False)  # host's address
    address: int = field(init=False)  # device's

    def __post_init__(self) -> None:
        self.bytes, self.source = self.host.numpy().data.cast("B"), self.host.data_ptr()
        self.address = self.device.data_ptr()


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A share's kernel with its parameters on the device, and what it is to copy engines."""

    kernel: "Kernel"
    parameters: torch.Tensor
    address: int
    rows: Rows | None


@dataclass(eq=False)
class _Tables:
    """Where a pull's block tables are on the device, once a kernel needs them."""

    slot: _Slot | None = None


class CudaMapper(Mapper):
    """Copies on a stream beside the decode batch.

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
        self._stream = 0
        self._free_slots: list[_Slot] = []
        self._free_events: list[int] = []
        self._prepared: dict[Share, _Prepared] = {}

    def compile(self, *, convert: bool) -> None:
        """Before the first peer is met: has every kernel that one may need, see compile_kernels.
        What cannot be compiled is told of here, and again when a peer needs it."""
        try:
            from kvcache.transfer.mapped_kernel import compile_kernels

            compile_kernels(self._pool, convert=convert)
        except Exception as error:  # whatever the driver or the compiler lacks
            logger.warning("not every kernel that gathers KV can be compiled: %r", error)

    def bind_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._driver: Driver = driver()
        # 0 is the lowest priority: what the engine gives a higher one goes first.
        self._torch_stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        self._stream = self._torch_stream.cuda_stream
        self._free_slots += [self._slot(_SLOT_BYTES) for _ in range(2)]
        self._free_events += [self._driver.new_event() for _ in range(8)]

    def map(self, rank: RankMetadata) -> MappedMemory:
        record = offered(rank)
        if rank.device_kind != "cuda" or not record.handle:
            raise NotMappable(f"its KV is in {rank.device_kind} memory")
        torch.cuda.set_device(self._device)  # the device that shall read
        if record.pid == os.getpid():
            return self._map_own(rank)
        if len(record.handle) != cuda_ipc.HANDLE_BYTES or record.offset < 0:
            raise NotMappable("its offer is malformed")
        try:
            opened = cuda_ipc.open_handle(record.handle)
            _, size = cuda_ipc.allocation(opened)
        except CudaError as error:
            raise NotMappable(f"its memory cannot be opened: {error}") from error
        if record.offset + rank.nbytes > size:
            cuda_ipc.close_handle(opened)
            raise NotMappable(f"its allocation has {size} bytes, fewer than it says")
        return MappedMemory(opened + record.offset, opened)

    def _map_own(self, rank: RankMetadata) -> MappedMemory:
        """A pool of this very process, perhaps on another device."""
        try:
            if rank.device_id != self._pool.device_id:
                cuda_ipc.enable_peer_access(rank.device_id)
        except CudaError as error:
            raise NotMappable(f"its memory cannot be read: {error}") from error
        return MappedMemory(rank.base_address)

    def unmap(self, memory: MappedMemory) -> None:
        if memory.opened is None:
            return
        try:
            cuda_ipc.close_handle(memory.opened)
        except CudaError as error:
            logger.warning("unmapping a peer's memory: %s", error)

    def prepare(self, transfer: Transfer) -> None:
        for owners in shares_of(transfer):
            for share in owners:
                if share not in self._prepared:
                    self._prepare(share, transfer)

    def _prepare(self, share: Share, transfer: Transfer) -> _Prepared:
        from kvcache.transfer.mapped_kernel import kernel_for

        with torch.cuda.stream(self._torch_stream):
            parameters = torch.from_numpy(share.parameters).to(self._device)
        address = parameters.data_ptr()
        kernel = kernel_for(share, address, self._stream)
        rows = None
        if self._driver.copies_batches:
            rows = rows_of(share, transfer.local, transfer.remote[share.remote_rank])
        found = self._prepared[share] = _Prepared(kernel, parameters, address, rows)
        return found

    def begin(self, work: Work) -> Work:
        return Work(work.gathers, work.sources, work.transfer, _Tables())

    def _upload(self, work: Work) -> _Slot:
        remote, local = work.transfer.remote_table.bytes, work.transfer.local_table.bytes
        nbytes = len(remote) + len(local)
        slot = work.device_copy.slot = self._slot(nbytes)
        slot.bytes[: len(remote)] = remote
        slot.bytes[len(remote) : nbytes] = local
        self._driver.upload(slot.address, slot.source, nbytes, self._stream)
        return slot

    def end(self, work: Work) -> None:
        if work.device_copy is not None and work.device_copy.slot is not None:
            self._free_slots.append(work.device_copy.slot)

    def _slot(self, nbytes: int) -> _Slot:
        """Memory for a pull's tables, used before if possible: to allocate takes longer."""
        for slot in self._free_slots:
            if len(slot.bytes) >= nbytes:
                self._free_slots.remove(slot)
                return slot
        size = 1 << (max(nbytes, _SLOT_BYTES) // 8 - 1).bit_length()
        with torch.cuda.stream(self._torch_stream):
            device = torch.empty(size, dtype=torch.int64, device=self._device)
        return _Slot(torch.empty(size, dtype=torch.int64, pin_memory=True), device)

    def room(self, work: Work, index: int) -> int:
        share = work.gathers[index].share
        prepared = self._prepared.get(share)
        if prepared is None:
            return ALL_BYTES
        if prepared.rows is not None and self._uses_copies(prepared):
            copies = _FIRST_COPIES if work.device_copy is None else _COPIES
            return max(1, copies // prepared.rows.pieces) * share.block_bytes
        if not self._busy():
            return ALL_BYTES
        now = time.perf_counter()
        if now < self._paced_until:
            return 0
        late_s = _PACED_BYTES / PACED_BYTES_PER_S  # looked at too late by so much is made up for
        self._paced_until = max(self._paced_until + late_s, now)
        return _PACED_BYTES

    def _uses_copies(self, prepared: _Prepared) -> bool:
        rows = prepared.rows
        if rows is None or rows.run_bytes >= self._long_run_bytes:
            return rows is not None
        width = rows.run_bytes or rows.row_bytes
        is_long = rows.row_bytes * rows.count >= _LONG_COPY_BYTES
        return is_long and width >= LONG_ROW_BYTES and self._busy()

    def launch(self, work: Work, index: int, first: int, count: int) -> int:
        gather = work.gathers[index]
        prepared = self._prepared.get(gather.share) or self._prepare(gather.share, work.transfer)
        event = self._free_events.pop() if self._free_events else self._driver.new_event()
        try:
            if prepared.rows is not None and self._uses_copies(prepared):
                self._copy(work, index, prepared.rows, first, count)
            else:
                self._gather(work, index, prepared, first, count)
            self._driver.record(event, self._stream)
        except Exception:
            self._wait()  # for what was queued, as there is no event to tell its end
            raise
        return event

    def _copy(self, work: Work, index: int, rows: Rows, first: int, count: int) -> None:
        """By the copy engines."""
        bases = (work.sources[index].address, self._target)
        gather = work.gathers[index]
        if count <= FEW_COPIES:
            blocks = whole_blocks(rows, gather, work.transfer, first, count)
            if blocks is not None:
                for source, target in blocks:
                    places = bases[0] + source, bases[1] + target
                    self._driver.copy(*places, rows.run_bytes, self._stream)
                return
        runs, strided = plan_copies(rows, gather, work.transfer, first, count, bases)
        if runs is not None:
            self._driver.copy_runs(runs, self._stream)
        if strided is not None:
            pitches = (rows.source.pitch, rows.target.pitch)
            self._driver.copy_rows(strided, rows.count, pitches, self._stream)

    def _gather(self, work: Work, index: int, prepared: _Prepared, first: int, count: int) -> None:
        """By the kernel."""
        gather = work.gathers[index]
        slot = work.device_copy.slot or self._upload(work)
        prepared.kernel.launch(
            self._num_programs,
            self._stream,
            work.sources[index].address,
            self._target,
            prepared.address,
            slot.address,
            slot.address + len(work.transfer.remote_table.bytes),
            gather.ordinal(first),
            count * gather.share.block_units,
            gather.token_start,
            gather.token_stop,
        )

    def _wait(self) -> None:
        try:
            self._torch_stream.synchronize()
        except RuntimeError:
            logger.exception("waiting for a launch that failed in part")

    def finished(self, token: Any) -> bool:
        if not self._driver.has_ended(token):
            return False
        self._free_events.append(token)
        return True
