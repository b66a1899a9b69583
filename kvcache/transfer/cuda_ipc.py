"""CUDA's handles for memory of another process of the same host, through the driver's library.

A handle names a whole allocation; it is 64 bytes that may travel anywhere. Opening it maps the
allocation into this process, readable by the device that is current in the calling thread.
Whoever maps memory keeps it alive: after its owner's death it is freed when it is closed here.
"""

import ctypes
from functools import lru_cache

from kvcache.transfer.cuda_driver import CudaError

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def export_handle(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that device memory at `address` is in, and its offset there.

    Raises:
        CudaError: such memory cannot be shared (managed or virtual-memory allocations).
    """
    base, _ = allocation(address)
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.reserved), address - base


def open_handle(handle: bytes) -> int:
    """Maps another process's allocation for the current device; its address here.

    Raises:
        CudaError: the owner is gone, on another host, or has no peer access to this device.
    """
    address = ctypes.c_uint64()
    record = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle))
    flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), record, flags)
    return address.value


def enable_peer_access(device: int) -> None:
    """Lets the current device's kernels read memory that this process has on `device`.

    Raises:
        CudaError: there is no peer access between the two.
    """
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    try:
        _call("cuCtxEnablePeerAccess", context, ctypes.c_uint(0))
    except CudaError as error:
        if "ALREADY_ENABLED" not in str(error):
            raise


def close_handle(address: int) -> None:
    """Unmaps what `open_handle` mapped; no kernel may be reading it."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def allocation(address: int) -> tuple[int, int]:
    """(address, bytes) of the allocation that device memory at `address` is in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(base),
        ctypes.byref(size),
        ctypes.c_uint64(address),
    )
    return base.value, size.value


def _call(name: str, *args: object) -> None:
    status = getattr(_library(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise CudaError(f"{name}: {reason}")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver's library cannot be loaded: {error}") from error
