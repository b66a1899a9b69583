"""Host memory is locked piece by piece.

A class that records calls replaces the GPU driver. The memory is real, and its pages
are really populated.
"""

import mmap
from itertools import pairwise
from pathlib import Path

import pytest

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move import cuda, locked_memory
from kvcache.transfer.move.locked_memory import LockedMemory, pieces_of

MIB = 1 << 20


class Driver:
    """Replaces the GPU driver. Records which memory is locked, and how many bytes of
    the mapping were resident at each call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.max_pieces = 1 << 30
        self.resident_bytes: list[int] = []
        monkeypatch.setattr(cuda, "register_host", self._register)
        monkeypatch.setattr(cuda, "unregister_host", self._unregister)

    def _register(self, address: int, nbytes: int, *, is_read_only: bool) -> None:
        if len(self.locked) == self.max_pieces:
            raise cuda.CudaError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY")
        assert address % mmap.PAGESIZE == 0
        for start, size in self.locked.items():
            assert address >= start + size or start >= address + nbytes
        self.locked[address] = nbytes
        self.resident_bytes.append(_resident_bytes(address))

    def _unregister(self, address: int) -> None:
        del self.locked[address]


def _resident_bytes(address: int) -> int:
    """Number of resident bytes of the mapping that contains `address`."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            is_inside = start <= address < end
        elif is_inside and fields[0] == "Rss:":
            return int(fields[1]) * 1024
    raise AssertionError("no mapping contains the address")


def make_pool() -> KVPool:
    """Return a pool of 8 MiB."""
    return KVPool(KVLayout("BHLCND", 512, 1, 2, 2, 16, 64, "float32"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.mark.parametrize("unit_bytes", [1, 4096, 6144, 8 * MIB, 100 * MIB])
def test_no_unit_and_no_page_belongs_to_two_pieces(unit_bytes):
    address = 7 * mmap.PAGESIZE
    nbytes = (300 * MIB // unit_bytes) * unit_bytes
    pieces = pieces_of(address, nbytes, unit_bytes)
    assert pieces[0][0] == address
    assert sum(size for _, size in pieces) == nbytes
    for (start, size), (next_start, _) in pairwise(pieces):
        assert start + size == next_start
        assert (next_start - address) % unit_bytes == 0
        assert next_start % mmap.PAGESIZE == 0
        assert size <= max(64 * MIB, unit_bytes * mmap.PAGESIZE)


def test_memory_is_populated_by_threads_before_it_is_locked(driver, monkeypatch):
    monkeypatch.setattr(locked_memory, "_PIECE_BYTES", MIB)
    pool = make_pool()
    unit_bytes = pool.layout.byte_strides["B"]
    locked = LockedMemory(pool.base_address, pool.nbytes, unit_bytes, num_threads=4)
    assert sum(driver.locked.values()) == pool.nbytes
    assert len(driver.locked) == pool.nbytes // MIB > 1
    for index, resident_bytes in enumerate(driver.resident_bytes):
        assert resident_bytes >= (index + 1) * MIB
    assert not pool.flat_bytes.any()
    locked.unlock()
    assert not driver.locked


def test_memory_that_cannot_be_locked_whole_is_not_locked_at_all(driver, monkeypatch):
    monkeypatch.setattr(locked_memory, "_PIECE_BYTES", MIB)
    driver.max_pieces = 3
    pool = make_pool()
    with pytest.raises(cuda.CudaError, match="OUT_OF_MEMORY"):
        LockedMemory(pool.base_address, pool.nbytes, 4096)
    assert not driver.locked


def test_locking_pauses_while_requests_are_computed(driver, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(locked_memory, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(locked_memory.time, "sleep", pauses.append)
    pool = make_pool()
    LockedMemory(
        pool.base_address,
        pool.nbytes,
        4096,
        is_busy=lambda: len(driver.locked) in (2, 3),
    )
    assert len(pauses) == 2
