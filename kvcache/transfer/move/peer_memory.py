"""Maps a KV pool of a peer on the same host into this process's address space.

A pool on the CPU is a memory file (kvcache/shared_memory.py), which is mapped
read-only. A pool on a GPU is opened with CUDA IPC for the current device. The memory
stays readable even after the death of the peer, until this process unmaps it.
"""

import ctypes
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.shared_memory import NotMappable as NotMappable
from kvcache.shared_memory import open_memory
from kvcache.transfer.move import cuda
from kvcache.transfer.move.locked_memory import LockedMemory
from protocol.handshake import DraftPool, RankMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

EXTRA_KEY = "mapped"  # the key of the MappableRecord in RankMetadata.extra
# Identifies this process and its forks. A pid does not identify a process, because
# processes in two containers may have equal pids.
_PROCESS = secrets.token_bytes(16)


class MappableRecord(msgspec.Struct, kw_only=True):
    """The data with which other processes of the same host map a rank's pool.

    Attributes:
        host: the owner's `host_id`.
        handle: the CUDA IPC handle of the allocation; empty for host memory.
        offset: bytes from the start of the allocation to the pool.
        fd: the owner's file descriptor of the memory file; -1 on a GPU.
        token: SharedMemory.token; on a GPU, the `_PROCESS` of the owner.
    """

    host: str
    handle: bytes = b""
    offset: int = 0
    fd: int = -1
    token: bytes = b""


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class Memory:
    """The source of copies into the pool: a peer's mapped pool, or a staging slot.

    A peer's pool stays mapped until `close`. Host memory is also unmapped when this
    object is freed.

    Attributes:
        bytes: u8[n], a view of the memory; None if only kernels and copy engines read
            the memory.
        close: unmaps the memory; must not be called before the last copy has ended.
    """

    address: int
    bytes: torch.Tensor | None = None
    close: Callable[[], None] = _do_nothing


@cache
def host_id() -> str:
    """The boot id of the system, equal for all processes and containers of a host.

    Returns the host name if the boot id cannot be read.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def mappable_extra(pool: KVPool) -> dict[str, Any]:
    """The entries of RankMetadata.extra with which processes of this host map the pool.

    If the pool cannot be shared, logs a warning and returns no entries.
    """
    record = MappableRecord(host=host_id(), token=_PROCESS)
    if pool.shared is not None:
        record.fd = pool.shared.fd
        record.token = pool.shared.token
    if pool.device.type == "cuda":
        try:
            with torch.cuda.device(pool.device):
                record.handle, record.offset = cuda.export_handle(pool.base_address)
        except cuda.CudaError as error:
            logger.warning(
                "the KV pool cannot be mapped by other processes: %s; "
                "peers read it over NIXL",
                error,
            )
            return {}
    return {EXTRA_KEY: msgspec.to_builtins(record, builtin_types=(bytes,))}


def describe_pool(
    pool: KVPool,
    rank: int,
    agent_metadata: bytes,
    host: str = "",
    draft: DraftPool | None = None,
) -> RankMetadata:
    """The metadata with which peers read a rank's pool, over NIXL or by mapping it.

    Args:
        host, draft: as in RankMetadata.
    """
    return RankMetadata(
        rank=rank,
        agent_metadata=agent_metadata,
        base_address=pool.base_address,
        nbytes=len(pool.memory),
        device_id=pool.device_id,
        device_kind=pool.device.type,
        layout=pool.layout,
        extra=mappable_extra(pool),
        pid=os.getpid(),
        host=host,
        draft=draft,
    )


def mappable_record(rank: RankMetadata) -> MappableRecord:
    """Reads the MappableRecord in a rank's metadata.

    Raises:
        NotMappable: there is no record, the record is malformed, or the rank is on a
            different host.
    """
    if EXTRA_KEY not in rank.extra:
        raise NotMappable("the peer offers no memory to map")
    try:
        record = msgspec.convert(rank.extra[EXTRA_KEY], MappableRecord)
    except msgspec.ValidationError as error:
        raise NotMappable(f"the peer's offer is malformed: {error}") from error
    if record.host != host_id():
        raise NotMappable("the peer is on another host")
    return record


def open_host(rank: RankMetadata) -> Memory:
    """Maps a rank's pool in host memory.

    Raises:
        NotMappable: the rank is on a different host, shares no host memory, or has
            ended.
    """
    record = mappable_record(rank)
    if rank.device_kind != "cpu" or record.fd < 0:
        raise NotMappable(
            f"the peer's KV is in {rank.device_kind} memory that is not shared"
        )
    mapping = open_memory(rank.pid or 0, record.fd, record.token, rank.nbytes)
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    return Memory(address, bytes_at(address, rank.nbytes), mapping.close)


def open_host_for_gpu(
    rank: RankMetadata, device: torch.device, is_busy: Callable[[], bool]
) -> Memory:
    """Maps a rank's pool in host memory, for `device` to read.

    All pages of the pool are locked in memory, which takes 0.1 s per GiB. Unlocking the
    pages also takes long, so `close` starts a thread that unlocks them.

    Args:
        is_busy: as in LockedMemory.

    Raises:
        NotMappable: as `open_host`; or the memory cannot be locked.
    """
    torch.cuda.set_device(device)
    memory = open_host(rank)
    unit_bytes = KVLayout.from_record(rank.layout).byte_strides["B"]
    try:
        locked = LockedMemory(
            memory.address,
            rank.nbytes,
            unit_bytes,
            is_read_only=True,
            is_busy=is_busy,
        )
    except cuda.CudaError as error:
        memory.close()
        raise NotMappable(f"the peer's memory cannot be locked: {error}") from error

    def unlock_and_close() -> None:
        torch.cuda.set_device(device)
        locked.unlock()
        memory.close()

    def close() -> None:
        name = f"unmap-{rank.pid}"
        threading.Thread(target=unlock_and_close, name=name, daemon=True).start()

    return Memory(memory.address, close=close)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A view u8[nbytes] of host memory. The view does not keep the memory alive."""
    return torch.frombuffer(
        (ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8
    )


def open_on_gpu(rank: RankMetadata, device: torch.device) -> Memory:
    """Opens a rank's pool on a GPU, for `device` to read.

    Raises:
        NotMappable: the rank is on a different host, shares no GPU memory, or has
            ended; or `device` cannot access the memory.
    """
    record = mappable_record(rank)
    if rank.device_kind != "cuda" or not record.handle:
        raise NotMappable(f"the peer's KV is in {rank.device_kind} memory")
    torch.cuda.set_device(device)
    is_same_process = (record.token, rank.pid) == (_PROCESS, os.getpid())
    if is_same_process:  # no mapping is needed, but the pool may be on a different GPU
        try:
            if rank.device_id != (device.index or 0):
                cuda.enable_peer_access(rank.device_id)
        except cuda.CudaError as error:
            raise NotMappable(f"the peer's memory cannot be read: {error}") from error
        return Memory(rank.base_address)
    if len(record.handle) != cuda.HANDLE_BYTES or record.offset < 0:
        raise NotMappable("the peer's offer is malformed")
    try:
        opened = cuda.open_handle(record.handle)
        _, size = cuda.allocation(opened)
    except cuda.CudaError as error:
        raise NotMappable(f"the peer's memory cannot be opened: {error}") from error
    if record.offset + rank.nbytes > size:
        cuda.close_handle(opened)
        raise NotMappable(
            f"the peer's allocation has {size} bytes, but the peer offers "
            f"{record.offset + rank.nbytes} bytes"
        )

    peer_rank = rank.rank
    peer_pid = rank.pid

    def close() -> None:
        try:
            cuda.close_handle(opened)
        except cuda.CudaError as error:
            logger.warning(
                "cannot unmap the KV pool of rank %d of a peer (pid %s): %s; "
                "it stays mapped until this process ends",
                peer_rank,
                peer_pid,
                error,
            )

    return Memory(opened + record.offset, close=close)
