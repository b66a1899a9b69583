"""A peer's KV pool in this process's address space, where both are on one host.

A pool on the CPU is a memory file (kvcache/shared_memory.py) that is mapped read-only; one on a GPU
is opened with CUDA IPC, readable by the device that is current. The owner's death ends nothing: its
memory stays readable until it is closed here.
"""

import ctypes
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache.pool import KVPool
from kvcache.shared_memory import NotMappable as NotMappable
from kvcache.shared_memory import open_memory
from kvcache.transfer.move import cuda
from protocol.handshake import RankMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

EXTRA_KEY = "mapped"  # in RankMetadata.extra
_PROCESS = secrets.token_bytes(
    16
)  # this and what it forks: ids are equal in two containers


class MappableRecord(msgspec.Struct, kw_only=True):
    """A rank's pool as offered to processes of its own host."""

    host: str
    handle: bytes = b""  # of CUDA IPC; empty for host memory
    offset: int = 0  # bytes from the allocation's base to the pool
    fd: int = -1  # the owner's, of a pool in host memory that others may map
    token: bytes = (
        b""  # proves the identity of host memory; for a GPU's, of the owner's process
    )


@dataclass(frozen=True, eq=False)
class Memory:
    """The source of placed copies: a peer's mapped pool, or a slot of staging memory. A peer's pool
    stays mapped until `close`, or the end of this object."""

    address: int
    bytes: torch.Tensor | None = None  # u8[n], a view of it if torch is to read it
    close: Callable[[], None] = lambda: (
        None
    )  # to be called after the last copy out of it


@cache
def host_id() -> str:
    """Equal for two processes on one running kernel, in whatever containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def offer(pool: KVPool) -> dict[str, Any]:
    """RankMetadata.extra, by which processes of this host may map the pool."""
    record = MappableRecord(host=host_id(), token=_PROCESS)
    if pool.shared is not None:
        record.fd, record.token = pool.shared.fd, pool.shared.token
    if pool.device.type == "cuda":
        try:
            with torch.cuda.device(pool.device):
                record.handle, record.offset = cuda.export_handle(pool.base_address)
        except cuda.CudaError as error:
            logger.warning(
                "the KV pool cannot be mapped by others, only read by NIXL: %s", error
            )
            return {}
    return {EXTRA_KEY: msgspec.to_builtins(record, builtin_types=(bytes,))}


def describe(pool: KVPool, rank: int, agent_metadata: bytes) -> RankMetadata:
    """How peers reach a rank's pool: by NIXL, and mapped."""
    return RankMetadata(
        rank=rank,
        agent_metadata=agent_metadata,
        base_address=pool.base_address,
        nbytes=pool.nbytes,
        device_id=pool.device_id,
        device_kind=pool.device.type,
        layout=pool.layout,
        extra=offer(pool),
        pid=os.getpid(),
    )


def offered(rank: RankMetadata) -> MappableRecord:
    """The offer of a peer's rank on this host.

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


def open_host(rank: RankMetadata) -> Memory:
    """A rank's pool in host memory.

    Raises:
        NotMappable: it is on another host, has no such memory, or its owner is gone.
    """
    record = offered(rank)
    if rank.device_kind != "cpu" or record.fd < 0:
        raise NotMappable(f"its KV is in {rank.device_kind} memory that is not shared")
    mapping = open_memory(rank.pid or 0, record.fd, record.token, rank.nbytes)
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    return Memory(address, bytes_at(address, rank.nbytes), mapping.close)


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """u8[nbytes] of host memory, which lives for as long as its owner lets it."""
    return torch.frombuffer(
        (ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8
    )


def open_on_gpu(rank: RankMetadata, device: torch.device) -> Memory:
    """A rank's pool on a GPU, for `device` to read; errors as of `open_host`."""
    record = offered(rank)
    if rank.device_kind != "cuda" or not record.handle:
        raise NotMappable(f"its KV is in {rank.device_kind} memory")
    torch.cuda.set_device(device)  # the one that shall read
    if (record.token, rank.pid) == (_PROCESS, os.getpid()):  # perhaps on another device
        try:
            if rank.device_id != (device.index or 0):
                cuda.enable_peer_access(rank.device_id)
        except cuda.CudaError as error:
            raise NotMappable(f"its memory cannot be read: {error}") from error
        return Memory(rank.base_address)
    if len(record.handle) != cuda.HANDLE_BYTES or record.offset < 0:
        raise NotMappable("its offer is malformed")
    try:
        opened = cuda.open_handle(record.handle)
        _, size = cuda.allocation(opened)
    except cuda.CudaError as error:
        raise NotMappable(f"its memory cannot be opened: {error}") from error
    if record.offset + rank.nbytes > size:
        cuda.close_handle(opened)
        raise NotMappable(f"its allocation has {size} bytes, fewer than it says")

    def close() -> None:
        try:
            cuda.close_handle(opened)
        except cuda.CudaError as error:
            logger.warning("unmapping a peer's memory: %s", error)

    return Memory(opened + record.offset, close=close)
