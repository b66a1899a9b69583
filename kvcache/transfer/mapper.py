"""The seam of the mapped path: opening a peer's memory here, and gathering out of it.

CudaMapper is the real one on GPUs, HostMapper (host_mapper.py) on CPUs. MemoryMapper gathers out of
pools of its own process, with the GPU's index arithmetic, and can be told to stall or fail: for
tests and for reading along.
"""

import ctypes
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache import fp8
from kvcache.pool import TORCH_DTYPES, KVPool
from kvcache.transfer import cuda_ipc
from kvcache.transfer.boxes import Transfer
from kvcache.transfer.gather import Gather, locate
from kvcache.transfer.processes import host_id
from kvcache.transfer.topology import IntArray
from protocol.handshake import RankMetadata

logger = logging.getLogger(__name__)

EXTRA_KEY = "mapped"  # in RankMetadata.extra
NUM_PROGRAMS = 48  # thread blocks of one launch: 91 % of the plain copy, 64 would be 93 %
_SLOT_NUMBERS = 2048


class NotMappable(Exception):
    """This peer's memory cannot be opened here; the text says why."""


class MappableRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank of P offers to processes of its own host."""

    host: str
    pid: int
    handle: bytes  # of CUDA IPC; empty for host memory
    offset: int  # bytes from the allocation's base to the pool
    fd: int = -1  # of the owner, where the pool is host memory that others may map
    token: bytes = b""  # that proves it is this memory


@dataclass(frozen=True)
class MappedMemory:
    """A peer's pool in this process's address space."""

    address: int
    opened: int | None = None  # to close; None where nothing had to be opened


@dataclass(frozen=True)
class Work:
    """One pull's gathers with all that its launches need."""

    gathers: Sequence[Gather]
    sources: Sequence[MappedMemory]  # of each gather
    transfer: Transfer
    device_copy: Any = None

    @property
    def remote_blocks(self) -> IntArray:
        return self.transfer.remote_blocks

    @property
    def local_blocks(self) -> IntArray:
        return self.transfer.local_blocks


class Mapper(ABC):
    """Belongs to the thread that called `bind_thread`."""

    def bind_thread(self) -> None:  # noqa: B027 - host memory needs nothing
        """Called once by the thread that is going to use this mapper."""

    @abstractmethod
    def map(self, rank: RankMetadata) -> MappedMemory:
        """Opens a rank's pool.

        Raises:
            NotMappable: it is on another host, has no such memory, or its owner is gone.
        """

    @abstractmethod
    def unmap(self, memory: MappedMemory) -> None:
        """Closes it; every launch out of it has ended."""

    @abstractmethod
    def begin(self, work: Work) -> Work:
        """Prepares a pull's launches."""

    @abstractmethod
    def launch(self, work: Work, index: int, first: int, count: int) -> Any:
        """Begins to gather `count` blocks of gather `index`; returns a token for `finished`."""

    def end(self, work: Work) -> None:  # noqa: B027 - most keep nothing
        """The pull is over: all its launches have ended."""

    @abstractmethod
    def finished(self, token: Any) -> bool:
        """Whether a launch has ended; never blocks. Raises what it failed with, having ended."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Waits for launches that still run; called before the last memory is unmapped."""


def offer(pool: KVPool) -> dict[str, Any]:
    """What to put into RankMetadata.extra so that processes of this host may map the pool."""
    handle, offset, fd, token = b"", 0, -1, b""
    if pool.shared is not None:
        fd, token = pool.shared.fd, pool.shared.token
    if pool.device.type == "cuda":
        try:
            with torch.cuda.device(pool.device):
                handle, offset = cuda_ipc.export_handle(pool.base_address)
        except cuda_ipc.CudaError as error:
            logger.warning("the KV pool cannot be mapped by others, only read by NIXL: %s", error)
            return {}
    record = MappableRecord(
        host=host_id(), pid=os.getpid(), handle=handle, offset=offset, fd=fd, token=token
    )
    return {EXTRA_KEY: msgspec.to_builtins(record, builtin_types=(bytes,))}


def offered(rank: RankMetadata) -> MappableRecord:
    """What a peer's rank offers, if it is on this host.

    Raises:
        NotMappable: it offers nothing usable, or lives elsewhere.
    """
    if EXTRA_KEY not in rank.extra:
        raise NotMappable("it offers no memory to map")
    try:
        record = msgspec.convert(rank.extra[EXTRA_KEY], MappableRecord)
    except msgspec.ValidationError as error:
        raise NotMappable(f"its offer is malformed: {error}") from error
    if record.host != host_id():
        raise NotMappable("it is on another host")
    return record


@dataclass(eq=False)
class _Slot:
    """One pull's parameters and block tables, i64[n] in pinned memory and on the device."""

    host: torch.Tensor
    device: torch.Tensor
    numbers: IntArray = field(init=False)  # host's
    address: int = field(init=False)  # device's

    def __post_init__(self) -> None:
        self.numbers, self.address = self.host.numpy(), self.device.data_ptr()


class CudaMapper(Mapper):
    """Gathers with the kernel of mapped_kernel.py, on a stream beside the decode batch.

    Args:
        pool: of this rank, on a GPU: what is written, and whose device reads.
        num_programs: thread blocks of one launch; more are faster and leave less to others.
    """

    def __init__(self, pool: KVPool, *, num_programs: int = NUM_PROGRAMS) -> None:
        self._pool = pool
        self._device = pool.device
        self._num_programs = num_programs
        self._stream: Any = None
        self._free_slots: list[_Slot] = []

    def bind_thread(self) -> None:
        torch.cuda.set_device(self._device)
        # 0 is the lowest priority: what the engine gives a higher one goes first.
        self._stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        self._free_slots.append(self._slot(_SLOT_NUMBERS))

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
        except cuda_ipc.CudaError as error:
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
        except cuda_ipc.CudaError as error:
            raise NotMappable(f"its memory cannot be read: {error}") from error
        return MappedMemory(rank.base_address)

    def unmap(self, memory: MappedMemory) -> None:
        if memory.opened is None:
            return
        try:
            cuda_ipc.close_handle(memory.opened)
        except cuda_ipc.CudaError as error:
            logger.warning("unmapping a peer's memory: %s", error)

    def begin(self, work: Work) -> Work:
        parameters = [gather.parameters for gather in work.gathers]
        values = np.concatenate((*parameters, work.remote_blocks, work.local_blocks))
        slot = self._slot(len(values))
        slot.numbers[: len(values)] = values
        # torch's own copies and stream contexts take 50 us more, in which the link would idle.
        handle = self._stream.cuda_stream
        cuda_ipc.upload(slot.address, slot.host.data_ptr(), values.nbytes, handle)
        return replace(work, device_copy=slot)

    def end(self, work: Work) -> None:
        if work.device_copy is not None:
            self._free_slots.append(work.device_copy)

    def _slot(self, count: int) -> "_Slot":
        """Memory for a pull's numbers, used before if possible: to allocate takes longer."""
        for slot in self._free_slots:
            if len(slot.host) >= count:
                self._free_slots.remove(slot)
                return slot
        size = max(_SLOT_NUMBERS, 1 << (count - 1).bit_length())
        with torch.cuda.stream(self._stream):
            device = torch.empty(size, dtype=torch.int64, device=self._device)
        return _Slot(torch.empty(size, dtype=torch.int64, pin_memory=True), device)

    def launch(self, work: Work, index: int, first: int, count: int) -> Any:
        from kvcache.transfer import mapped_kernel  # needs Triton, which only GPU machines have

        address = work.device_copy.address
        gather = work.gathers[index]
        lengths = [8 * len(each.parameters) for each in work.gathers]
        tables = address + sum(lengths)
        mapped_kernel.launch(
            gather,
            work.sources[index].address,
            self._pool.base_address,
            address + sum(lengths[:index]),
            tables,
            tables + 8 * len(work.remote_blocks),
            first,
            count,
            num_programs=self._num_programs,
            stream=self._stream.cuda_stream,
        )
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def finished(self, token: Any) -> bool:
        return bool(token.query())


class MemoryMapper(Mapper):
    """Gathers with numpy out of pools of this process, at once unless stalled.

    Attributes:
        stalled: launches made while it is set do not end before it is unset.
        fail_launches: the next launches raise.
        mapped: addresses that are open now.
        unmapped: set whenever one is closed.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.stalled = False
        self.fail_launches = False
        self.mapped: list[int] = []
        self.unmapped = threading.Event()

    def map(self, rank: RankMetadata) -> MappedMemory:
        if offered(rank).pid != os.getpid():
            raise NotMappable("it is another process's")
        self.mapped.append(rank.base_address)
        return MappedMemory(rank.base_address)

    def unmap(self, memory: MappedMemory) -> None:
        self.mapped.remove(memory.address)
        self.unmapped.set()

    def begin(self, work: Work) -> Work:
        return work

    def launch(self, work: Work, index: int, first: int, count: int) -> Any:
        if self.fail_launches:
            raise RuntimeError("a launch failed")
        gather = work.gathers[index]
        found = locate(gather, work.remote_blocks, work.local_blocks, first, count)
        reads, writes, factors = (torch.from_numpy(array) for array in found)
        end = int(reads.max()) + 1 if len(reads) else 0
        dtype = TORCH_DTYPES[gather.source_dtype]
        nbytes = end * gather.unit_elements * dtype.itemsize
        memory = (ctypes.c_ubyte * nbytes).from_address(work.sources[index].address)
        if nbytes:
            source = torch.frombuffer(memory, dtype=dtype).view(-1, gather.unit_elements)
            target = self._pool.tensor.view(-1).view(-1, gather.unit_elements)
            picked = source[reads]
            if gather.converts:
                picked = fp8.stored_as(picked.float() * factors[:, None], target.dtype)
            fp8.addressable(target)[writes] = fp8.addressable(picked)
        return None

    def finished(self, token: Any) -> bool:
        return not self.stalled
