"""The seam of the mapped path: opening a peer's memory here, and gathering out of it.

CudaMapper (cuda_mapper.py) is the real one on GPUs, HostMapper (host_mapper.py) on CPUs.
MemoryMapper gathers out of pools of its own process, with the GPU's index arithmetic, and can be
told to stall or fail: for tests and for reading along.
"""

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from kvcache import fp8
from kvcache.pool import TORCH_DTYPES, KVPool
from kvcache.transfer import cuda_ipc
from kvcache.transfer.boxes import Transfer
from kvcache.transfer.cuda_driver import CudaError
from kvcache.transfer.gather import Gather, locate
from kvcache.transfer.processes import host_id
from kvcache.transfer.topology import IntArray
from protocol.handshake import RankMetadata
from protocol.logging import get_logger

logger = get_logger(__name__)

EXTRA_KEY = "mapped"  # in RankMetadata.extra
ALL_BYTES = 1 << 62


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
    device_copy: Any = None  # what `begin` prepared, if anything

    @property
    def remote_blocks(self) -> IntArray:
        return self.transfer.remote_blocks

    @property
    def local_blocks(self) -> IntArray:
        return self.transfer.local_blocks


class Mapper(ABC):
    """Used by one thread."""

    def bind_thread(self) -> None:  # noqa: B027 - host memory needs nothing
        """Called once by that thread, first."""

    @abstractmethod
    def map(self, rank: RankMetadata) -> MappedMemory:
        """Opens a rank's pool.

        Raises:
            NotMappable: it is on another host, has no such memory, or its owner is gone.
        """

    @abstractmethod
    def unmap(self, memory: MappedMemory) -> None:
        """Closes it; every launch out of it has ended."""

    def prepare(self, transfer: Transfer) -> None:  # noqa: B027 - most need nothing
        """Others between the same endpoints are going to come: does what can be done before."""

    @abstractmethod
    def begin(self, work: Work) -> Work:
        """Prepares a pull's launches."""

    def room(self, work: Work, index: int) -> int:
        """The most bytes that the next launch of this gather may take now; 0: none for now."""
        return ALL_BYTES

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
        except CudaError as error:
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


class MemoryMapper(Mapper):
    """Gathers with numpy out of pools of this process, at once unless stalled.

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

    def room(self, work: Work, index: int) -> int:
        return self.rooms.pop(0) if self.rooms else ALL_BYTES

    def launch(self, work: Work, index: int, first: int, count: int) -> Any:
        if self.fail_launches:
            raise RuntimeError("a launch failed")
        gather = work.gathers[index]
        found = locate(gather, work.remote_blocks, work.local_blocks, first, count)
        reads, writes, factors = (torch.from_numpy(array) for array in found)
        end = int(reads.max()) + 1 if len(reads) else 0
        dtype = TORCH_DTYPES[gather.share.source_dtype]
        nbytes = end * gather.share.unit_elements * dtype.itemsize
        memory = (ctypes.c_ubyte * nbytes).from_address(work.sources[index].address)
        if nbytes:
            source = torch.frombuffer(memory, dtype=dtype).view(-1, gather.share.unit_elements)
            target = self._pool.tensor.view(-1).view(-1, gather.share.unit_elements)
            picked = source[reads]
            if gather.share.converts:
                picked = fp8.stored_as(picked.float() * factors[:, None], target.dtype)
            fp8.addressable(target)[writes] = fp8.addressable(picked)
        return None

    def finished(self, token: Any) -> bool:
        return not self.stalled
