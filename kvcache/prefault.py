"""Gives a CPU pool's first pages their memory before a pull needs them.

A page gets its memory when it is first written. When the writer is a transport that writes through
the kernel, each such page costs 10 us or more: a pull of 24 MB takes 76 ms instead of 6. Whoever
has nothing else to do calls `step` until `done`; no byte changes.
"""

import ctypes
import mmap
from typing import Final

# From Linux 5.14 on; older kernels refuse it, and pages get their memory when they are written.
_MADV_POPULATE_WRITE: Final = 23
_SLICE_BYTES: Final = 2 << 20
# A pool may be sized larger than what its container can really have; blocks are used from the first
# one on and then over and over, so the first part is what counts.
_MOST_BYTES: Final = 512 << 20


class Prefault:
    """Pages of [address, address + nbytes), a part at a time; may run beside writers."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._next = address // mmap.PAGESIZE * mmap.PAGESIZE
        self._stop = address + min(nbytes, _MOST_BYTES)
        self._libc = ctypes.CDLL(None)

    @property
    def done(self) -> bool:
        return self._next >= self._stop

    def step(self) -> None:
        """Takes about a millisecond or a few; other threads run meanwhile."""
        size = min(_SLICE_BYTES, self._stop - self._next)
        failed = self._libc.madvise(
            ctypes.c_void_p(self._next), ctypes.c_size_t(size), _MADV_POPULATE_WRITE
        )
        self._next = self._stop if failed else self._next + size
