"""Calls of the CUDA driver that a pull makes, bound once.

A pull of 128 tokens lasts as long as a few dozen lines of Python that have not run lately, so these
calls bypass torch. They keep the interpreter's lock: each only queues work or looks at a flag, and
getting the lock back from a busy engine thread takes longer than any of them. Only `copy_rows`,
which is for busy engines and takes longest, releases it.

All act on the device that is current in the calling thread. Streams, events and functions are the
driver's handles, addresses are plain integers.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kvcache.transfer.plan.endpoint import IntArray

HANDLE_BYTES = 64  # of memory for other processes
_LAZY_ENABLE_PEER_ACCESS = 1
_NOT_READY = 600
_DISABLE_TIMING = 2
_IN_STREAM_ORDER = 1  # as sources are read
_BESIDE_KERNELS = 1  # a hint: copy engines, not multiprocessors
_POINTER = 1
FEW_COPIES = 3  # calls of their own are sooner done: 30 us for two, a batch of two 48
_Address, _Handle, _Size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t


_ATTRIBUTES = np.dtype(
    [("order", "i4"), ("source_hint", "i4", 2), ("target_hint", "i4", 2), ("flags", "u4")]
)
_OPERAND = np.dtype(
    [
        ("type", "i4"),
        ("unused", "i4"),
        ("address", "i8"),
        ("pitch", "u8"),
        ("rows", "u8"),
        ("hint", "i4", 2),
    ]
)
_STRIDED_COPY = np.dtype(
    [
        ("source", _OPERAND),
        ("target", _OPERAND),
        ("width", "u8"),
        ("rows", "u8"),
        ("layers", "u8"),
        ("order", "i4"),
        ("flags", "u4"),
    ]
)


class CudaError(Exception):
    """A call of the driver failed; the text names the call and the driver's reason."""


class Driver:
    """The calls; see `driver`."""

    def __init__(self) -> None:
        try:
            library = ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"the CUDA driver's library cannot be loaded: {error}") from error
        self._library = library
        self._failed = _Size()  # older drivers write there which copy was wrong
        self._upload = self._bind("cuMemcpyHtoDAsync_v2", _Address, _Handle, _Size, _Handle)
        self._launch = self._bind(
            "cuLaunchKernel", _Handle, *[ctypes.c_uint] * 7, _Handle, _Handle, _Handle
        )
        self._copy = self._bind("cuMemcpyDtoDAsync_v2", _Address, _Address, _Size, _Handle)
        self._record = self._bind("cuEventRecord", _Handle, _Handle)
        self._query = self._bind("cuEventQuery", _Handle)
        self._attributes = np.zeros(1, _ATTRIBUTES)
        self._attributes["order"], self._attributes["flags"] = _IN_STREAM_ORDER, _BESIDE_KERNELS
        self._first = np.zeros(1, np.uint64)  # copy that the attributes are of, and all others
        self._batch = self._bind_batch()
        self._strided = self._bind_strided(ctypes.CDLL("libcuda.so.1"))

    @property
    def copies_batches(self) -> bool:
        """Whether one call can begin many copies: CUDA 12.8 and later."""
        return self._batch is not None and self._strided is not None

    def _bind_batch(self) -> Callable[..., int] | None:
        pointers, count = [_Handle] * 3, _Size
        attributes = (_Handle, _Handle, _Size)
        if hasattr(self._library, "cuMemcpyBatchAsync_v2"):
            return self._bind("cuMemcpyBatchAsync_v2", *pointers, count, *attributes, _Handle)
        if hasattr(self._library, "cuMemcpyBatchAsync"):
            old = self._bind("cuMemcpyBatchAsync", *pointers, count, *attributes, _Handle, _Handle)
            return lambda *args: old(*args[:-1], ctypes.addressof(self._failed), args[-1])
        return None

    def _bind_strided(self, library: ctypes.CDLL) -> Callable[..., int] | None:
        flags = ctypes.c_ulonglong
        if hasattr(library, "cuMemcpy3DBatchAsync_v2"):
            call = library.cuMemcpy3DBatchAsync_v2
            call.argtypes = (_Size, _Handle, flags, _Handle)
            return call
        if hasattr(library, "cuMemcpy3DBatchAsync"):
            old = library.cuMemcpy3DBatchAsync
            old.argtypes = (_Size, _Handle, _Handle, flags, _Handle)
            failed = ctypes.addressof(self._failed)
            return lambda count, copies, zero, stream: old(count, copies, failed, zero, stream)
        return None

    def _bind(self, name: str, *argtypes: type) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes = argtypes
        return function  # type: ignore[no-any-return]

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy from pinned host memory."""
        if status := self._upload(target, source, nbytes, stream):
            raise self._error("cuMemcpyHtoDAsync", status)

    def launch(
        self, function: int, blocks: int, threads: int, shared: int, stream: int, arguments: int
    ) -> None:
        """Queues a kernel; `arguments` is the address of an array of pointers to them."""
        status = self._launch(
            function, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, None
        )
        if status:
            raise self._error("cuLaunchKernel", status)

    def copy_runs(self, sources: IntArray, targets: IntArray, width: int, stream: int) -> None:
        """Queues copies of `width` bytes between addresses by the copy engines, in no order."""
        assert self._batch is not None
        if len(sources) <= FEW_COPIES:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                self.copy(source, target, width, stream)
            return
        widths = np.full(len(sources), width)
        status = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            widths.ctypes.data,
            len(sources),
            self._attributes.ctypes.data,
            self._first.ctypes.data,
            1,
            stream,
        )
        if status:
            raise self._error("cuMemcpyBatchAsync", status)

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Queues one copy."""
        if status := self._copy(target, source, nbytes, stream):
            raise self._error("cuMemcpyDtoDAsync", status)

    def copy_rows(
        self,
        sources: IntArray,
        targets: IntArray,
        width: int,
        rows: int,
        pitches: tuple[int, int],
        stream: int,
    ) -> None:
        """As `copy_runs`, with `rows` rows for each copy, `pitches` apart at source and target."""
        assert self._strided is not None
        found = np.zeros(len(sources), _STRIDED_COPY)
        places = (("source", sources), ("target", targets))
        for (side, addresses), pitch in zip(places, pitches, strict=True):
            operand = found[side]
            operand["type"], operand["address"] = _POINTER, addresses
            operand["pitch"], operand["rows"] = pitch, rows
        found["width"], found["rows"], found["layers"] = width, rows, 1
        found["order"], found["flags"] = _IN_STREAM_ORDER, _BESIDE_KERNELS
        if status := self._strided(len(found), found.ctypes.data, 0, stream):
            raise self._error("cuMemcpy3DBatchAsync", status)

    def record(self, event: int, stream: int) -> None:
        if status := self._record(event, stream):
            raise self._error("cuEventRecord", status)

    def new_event(self) -> int:
        event = _Handle()
        create = self._bind("cuEventCreate", _Handle, ctypes.c_uint)
        if status := create(ctypes.addressof(event), _DISABLE_TIMING):
            raise self._error("cuEventCreate", status)
        assert event.value is not None
        return event.value

    def has_ended(self, event: int) -> bool:
        """Whether all that was queued before the event has ended; raises what it failed with."""
        status = self._query(event)
        if status == _NOT_READY:
            return False
        if status:
            raise self._error("cuEventQuery", status)
        return True

    def parameter_sizes(self, function: int) -> list[int]:
        """Bytes of each of a kernel's parameters."""
        info = self._bind("cuFuncGetParamInfo", _Handle, _Size, _Handle, _Handle)
        offset, size, sizes = _Size(), _Size(), list[int]()
        while not info(function, len(sizes), ctypes.addressof(offset), ctypes.addressof(size)):
            sizes.append(size.value)
        return sizes

    def _error(self, name: str, status: int) -> CudaError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        return CudaError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        CudaError: there is none.
    """
    return Driver()


# -- memory of other processes of this host
#
# A handle names a whole allocation; it may travel anywhere. Opening it maps the allocation into
# this process, readable by the device that is current in the calling thread. Whoever maps memory
# keeps it alive: after its owner's death it is freed when it is closed here.


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


def export_handle(address: int) -> tuple[bytes, int]:
    """The handle of the allocation that device memory at `address` is in, and its offset there.

    Raises:
        CudaError: such memory cannot be shared (managed or virtual-memory allocations).
    """
    base, _ = allocation(address)
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle.reserved), address - base


def open_handle(handle: bytes) -> int:
    """Maps another process's allocation for the current device; its address here.

    Raises:
        CudaError: the owner is gone, on another host, or has no peer access to this device.
    """
    address = ctypes.c_uint64()
    record = _IpcHandle((ctypes.c_ubyte * HANDLE_BYTES)(*handle))
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
