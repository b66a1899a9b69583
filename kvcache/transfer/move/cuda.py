"""Calls of the CUDA driver that torch does not offer: batched copies and CUDA IPC.

All calls act on the calling thread's current device. Addresses are plain integers.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np

from kvcache.transfer.plan.endpoint import IntArray

HANDLE_BYTES = 64  # size of a CUDA IPC handle
_LAZY_ENABLE_PEER_ACCESS = 1
# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the order of the stream.
_STREAM_ORDER = 1
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines copy, not multiprocessors.
_OVERLAP_WITH_COMPUTE = 1
# CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP and _READ_ONLY: flags of cuMemHostRegister.
_REGISTER_PORTABLE = 1
_REGISTER_MAPPED = 2
_REGISTER_READ_ONLY = 8
_ATTRIBUTES = np.dtype([("order", "i4"), ("hints", "i4", 4), ("flags", "u4")])


class CudaError(Exception):
    """A driver call failed. The message names the call and the driver's reason."""


def can_batch_copies() -> bool:
    """True if one call can begin many copies: CUDA 12.8 and later."""
    return hasattr(_library(), "cuMemcpyBatchAsync")


def copy_runs(
    sources: IntArray, targets: IntArray, run_bytes: int, stream: int
) -> None:
    """Queues copies of `run_bytes` bytes each on a stream, for the copy engines.

    The copies of a call are made in no particular order.

    Args:
        sources, targets: i64[n]: the addresses of each copy.
        stream: the handle of the CUDA stream.
    """
    lengths = np.full(len(sources), run_bytes)
    # One set of attributes is enough: it applies to the first copy and all later
    # copies.
    first_copy = np.zeros(1, np.int64)
    attributes = np.zeros(1, _ATTRIBUTES)
    attributes["order"] = _STREAM_ORDER
    attributes["flags"] = _OVERLAP_WITH_COMPUTE
    failed_index = c_size_t()
    _call(
        "cuMemcpyBatchAsync",
        _pointer(targets),
        _pointer(sources),
        _pointer(lengths),
        c_size_t(len(sources)),
        _pointer(attributes),
        _pointer(first_copy),
        c_size_t(1),
        byref(failed_index),
        c_void_p(stream),
    )


def _pointer(array: np.ndarray[Any, Any]) -> c_void_p:
    return c_void_p(array.ctypes.data)


def register_host(address: int, nbytes: int, *, is_read_only: bool = False) -> None:
    """Lets GPUs of this process read and write host memory under the same addresses.

    All pages are locked in memory, which takes 0.1 s per GiB.

    Args:
        is_read_only: this process has mapped the memory for reading only.

    Raises:
        CudaError: the memory cannot be locked, or is registered already.
    """
    flags = _REGISTER_PORTABLE | _REGISTER_MAPPED
    if is_read_only:
        flags |= _REGISTER_READ_ONLY
    _call("cuMemHostRegister_v2", c_uint64(address), c_size_t(nbytes), c_uint(flags))


def unregister_host(address: int) -> None:
    """Undoes `register_host`. No copy from or to the memory may be running."""
    _call("cuMemHostUnregister", c_uint64(address))


# The functions below share GPU memory with processes of this host by CUDA IPC. If the
# owner of an allocation dies, the memory is freed only when the last process that has
# mapped it has closed its mapping.


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def export_handle(address: int) -> tuple[bytes, int]:
    """The CUDA IPC handle with which another process can map device memory.

    Returns:
        The handle of the allocation that contains `address`, and the number of bytes
        from the start of the allocation to `address`.

    Raises:
        CudaError: the memory cannot be shared: it is managed memory, or was allocated
            with the virtual-memory functions of the driver.
    """
    base, _ = allocation(address)
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
    return bytes(handle.reserved), address - base


def open_handle(handle: bytes) -> int:
    """Maps the allocation of a different process, for the current device.

    Returns:
        The address of the allocation in this process.

    Raises:
        CudaError: the owner has ended or is on another host, or the current device
            cannot access the owner's device.
    """
    address = c_uint64()
    record = _IpcHandle((ctypes.c_ubyte * HANDLE_BYTES)(*handle))
    _call(
        "cuIpcOpenMemHandle_v2",
        byref(address),
        record,
        c_uint(_LAZY_ENABLE_PEER_ACCESS),
    )
    return address.value


def enable_peer_access(device: int) -> None:
    """Allows the current device's kernels to read this process's memory on `device`.

    Raises:
        CudaError: the two devices have no peer access.
    """
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
    try:
        _call("cuCtxEnablePeerAccess", context, c_uint(0))
    except CudaError as error:
        if "ALREADY_ENABLED" not in str(error):
            raise


def close_handle(address: int) -> None:
    """Unmaps memory from `open_handle`. No kernel may be reading the memory."""
    _call("cuIpcCloseMemHandle", c_uint64(address))


def allocation(address: int) -> tuple[int, int]:
    """Returns (start, bytes) of the device allocation that contains `address`."""
    base = c_uint64()
    size = c_size_t()
    _call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
    return base.value, size.value


def _call(name: str, *args: object) -> None:
    status = getattr(_library(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(status, byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise CudaError(f"{name}: {reason}")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        message = f"the CUDA driver's library cannot be loaded: {error}"
        raise CudaError(message) from error
