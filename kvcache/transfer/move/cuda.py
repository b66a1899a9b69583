"""Calls of the CUDA driver that torch has no name for: batches of copies, and memory of other
processes of this host.

All act on the device that is current in the calling thread. Addresses are plain integers.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np

from kvcache.transfer.plan.endpoint import IntArray

HANDLE_BYTES = 64  # of memory for other processes
_LAZY_ENABLE_PEER_ACCESS = 1
_IN_STREAM_ORDER = 1  # as sources are read
_BESIDE_KERNELS = 1  # a hint: copy engines, not multiprocessors
_ATTRIBUTES = np.dtype([("order", "i4"), ("hints", "i4", 4), ("flags", "u4")])


class CudaError(Exception):
    """A call of the driver failed; the text names the call and the driver's reason."""


def copies_batches() -> bool:
    """Whether one call can begin many copies: CUDA 12.8 and later."""
    return hasattr(_library(), "cuMemcpyBatchAsync")


def copy_runs(sources: IntArray, targets: IntArray, width: int, stream: int) -> None:
    """Queues copies of `width` bytes between addresses by the copy engines, in no order."""
    widths, first = np.full(len(sources), width), np.zeros(1, np.int64)
    attributes = np.zeros(1, _ATTRIBUTES)  # of the first copy, and all others
    attributes["order"], attributes["flags"] = _IN_STREAM_ORDER, _BESIDE_KERNELS
    copies = *map(_pointer, (targets, sources, widths)), c_size_t(len(sources))
    shared = _pointer(attributes), _pointer(first), c_size_t(1)
    wrong = byref(c_size_t())  # which copy
    _call("cuMemcpyBatchAsync", *copies, *shared, wrong, c_void_p(stream))


def _pointer(array: np.ndarray[Any, Any]) -> c_void_p:
    return c_void_p(array.ctypes.data)


# -- memory of other processes of this host. Whoever maps an allocation keeps it alive: after its
# owner's death it is freed when it is closed here.


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def export_handle(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that device memory at `address` is in, and its offset there.

    Raises:
        CudaError: such memory cannot be shared (managed or virtual-memory allocations).
    """
    base, _ = allocation(address)
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
    return bytes(handle.reserved), address - base


def open_handle(handle: bytes) -> int:
    """Maps another process's allocation for the current device; its address here.

    Raises:
        CudaError: the owner is gone, on another host, or has no peer access to this device.
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
    """Lets the current device's kernels read memory that this process has on `device`.

    Raises:
        CudaError: there is no peer access between the two.
    """
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
    try:
        _call("cuCtxEnablePeerAccess", context, c_uint(0))
    except CudaError as error:
        if "ALREADY_ENABLED" not in str(error):
            raise


def close_handle(address: int) -> None:
    """Unmaps memory mapped by `open_handle`; no kernel may be reading it."""
    _call("cuIpcCloseMemHandle", c_uint64(address))


def allocation(address: int) -> tuple[int, int]:
    """(address, bytes) of the allocation that device memory at `address` is in."""
    base, size = c_uint64(), c_size_t()
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
        raise CudaError(
            f"the CUDA driver's library cannot be loaded: {error}"
        ) from error
