"""Memory pages of blocks that will be used soon are populated. Their bytes do not
change.
"""

import mmap
import time

import numpy as np
import pytest

from kvcache import prefault
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.prefault import PrefaultThread

NUM_BLOCKS = 20


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_BUSY_PAUSE_S", 0.001)
    monkeypatch.setattr(prefault, "_POLL_S", 0.001)


def _pool(order: str) -> KVPool:
    return KVPool(KVLayout(order, NUM_BLOCKS, 2, 4, 2, 64, 64, "float32"))


def _is_resident(pool: KVPool) -> np.ndarray:
    """Returns bool [planes, blocks, pages], which is true for pages that have physical
    memory.

    In some layouts a block is not contiguous. A plane has one contiguous part of each
    block.
    """
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(pool.base_address // mmap.PAGESIZE * 8)
        data = pagemap.read(pool.nbytes // mmap.PAGESIZE * 8)
    entries = np.frombuffer(data, dtype=np.uint64)
    is_present = (entries >> np.uint64(63)).astype(bool)
    pages_per_block = pool.layout.byte_strides["B"] // mmap.PAGESIZE
    return is_present.reshape(-1, NUM_BLOCKS, pages_per_block)


@pytest.mark.parametrize("order", ["BHLCND", "LBCHND", "LCBNHD"])
def test_blocks_ahead_of_those_in_use_are_resident_and_keep_their_bytes(
    order, monkeypatch
):
    pool = _pool(order)
    # The thread populates five blocks (a quarter of the pool) ahead.
    monkeypatch.setattr(prefault, "_AHEAD_BYTES", pool.nbytes // 4)
    pool.flat_bytes[12345] = 7
    thread = PrefaultThread(pool)
    thread.start()
    try:
        for used, num_blocks in ((-1, 5), (2, 8), (1, 8), (3, 9), (19, 20)):
            pool.mark_used(used)
            deadline = time.monotonic() + 20
            while thread.num_populated != num_blocks:
                assert time.monotonic() < deadline, thread.num_populated
                time.sleep(0.001)
            is_resident = _is_resident(pool)
            assert is_resident[:, :num_blocks].all()
            assert not is_resident[:, num_blocks:].any()
    finally:
        thread.close()
    assert int(pool.flat_bytes[12345]) == int(pool.flat_bytes.sum()) == 7


def test_thread_ends_if_the_kernel_refuses_to_populate(monkeypatch):
    monkeypatch.setattr(KVPool, "base_address", 1 << 46)  # an unmapped address
    thread = PrefaultThread(_pool("BHLCND"))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert thread.num_populated == 0
