"""Host memory that is locked (pinned) for GPUs, piece by piece.

The CUDA driver locks 1 GiB in about 0.06 s. In that time, the driver launches no kernel
of this process, so locking a large pool in one call would stop all requests for
seconds. Several threads first allocate the pages that do not exist yet, because the
driver would allocate them in one thread at less than 2 GB/s.
"""

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvcache.transfer.move import cuda
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_PIECE_BYTES: Final = 64 << 20  # the driver locks this in about 4 ms
MAX_THREADS: Final = 16  # more threads hardly allocate faster
# Commands of madvise. Old Linux kernels refuse the last two commands; the CUDA driver
# then allocates the pages.
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23


def num_populating_threads() -> int:
    """The number of threads that populate memory at the start of a program."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


class LockedMemory:
    """Host memory that GPUs of this process read and write under the same addresses.

    A copy must not cross the border between two pieces. Copies never cross the border
    between two units, so the size of a piece is a multiple of `unit_bytes`.

    Args:
        unit_bytes: size of a unit: `KVLayout.byte_strides["B"]` of the pool.
        is_read_only: this process has mapped the memory for reading only.
        num_threads: threads that populate the memory.
        is_busy: returns True while requests are computed. Then locking pauses after
            each piece for as long as the piece took.

    Raises:
        CudaError: the memory cannot be locked, or is locked already.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        unit_bytes: int,
        *,
        is_read_only: bool = False,
        num_threads: int = 1,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_busy = is_busy
        self._locked: list[int] = []  # the addresses of the locked pieces
        command = _MADV_POPULATE_READ if is_read_only else _MADV_POPULATE_WRITE
        _advise(address, nbytes, _MADV_HUGEPAGE)
        pieces = pieces_of(address, nbytes, unit_bytes)
        executor = ThreadPoolExecutor(num_threads, "populate")
        try:
            populated = [
                executor.submit(_advise, start, size, command) for start, size in pieces
            ]
            for (start, size), future in zip(pieces, populated, strict=True):
                future.result()
                self._lock(start, size, is_read_only=is_read_only)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            self.unlock()
            raise
        executor.shutdown()

    def _lock(self, address: int, nbytes: int, *, is_read_only: bool) -> None:
        began_s = time.perf_counter()
        cuda.register_host(address, nbytes, is_read_only=is_read_only)
        self._locked.append(address)
        self._pause(time.perf_counter() - began_s)

    def unlock(self) -> None:
        """Unlocks the memory. No copy from or to the memory may be running."""
        while self._locked:
            began_s = time.perf_counter()
            try:
                cuda.unregister_host(self._locked.pop())
            except cuda.CudaError as error:
                logger.warning("host memory of a KV pool cannot be unlocked: %s", error)
            self._pause(time.perf_counter() - began_s)

    def _pause(self, seconds: float) -> None:
        """Lets other threads of this process use the driver."""
        if self._is_busy():
            time.sleep(seconds)


def pieces_of(address: int, nbytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Divides memory into pieces of about _PIECE_BYTES.

    Returns:
        Address and size of each piece. Each border between two pieces is a border
        between two pages, and between two units.
    """
    step = math.lcm(unit_bytes, mmap.PAGESIZE)
    step *= max(1, _PIECE_BYTES // step)
    return [
        (address + offset, min(step, nbytes - offset))
        for offset in range(0, nbytes, step)
    ]


def _advise(address: int, nbytes: int, command: int) -> None:
    """Calls madvise. Ignores a refusal, because the memory is usable anyway."""
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_size_t(address), ctypes.c_size_t(nbytes), command)
