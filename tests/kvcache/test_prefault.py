"""Pages get their memory without a byte changing, ahead of the blocks in use."""

import mmap
import threading
from functools import partial

import numpy as np
import pytest

from kvcache import prefault as module
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.prefault import Prefault, PrefaultThread

_SHAPE = {"num_heads": 2, "num_layers": 4, "num_components": 2, "block_size": 64, "head_dim": 64}


def _layout(order: str, num_blocks: int) -> KVLayout:
    return KVLayout(order=order, num_blocks=num_blocks, dtype="float32", **_SHAPE)


def _resident(memory: mmap.mmap, address: int) -> np.ndarray:
    """bool [pages]"""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(len(memory) // mmap.PAGESIZE * 8), dtype=np.uint64)
    return (entries >> np.uint64(63)).astype(bool)


def _finish(prefault: Prefault) -> None:
    for _ in range(1000):
        if prefault.done:
            return
        prefault.step()
    raise AssertionError("no end")


@pytest.mark.parametrize("order", ["BHLCND", "LBCHND", "LCBNHD"])
def test_blocks_ahead_of_those_in_use_are_resident_and_keep_their_bytes(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = _layout(order, 20)
    monkeypatch.setattr(module, "_AHEAD_BYTES", layout.nbytes // 4)  # five blocks
    memory = mmap.mmap(-1, layout.nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    view = np.frombuffer(memory, dtype=np.uint8)
    view[12345] = 7
    address = int(view.ctypes.data)
    stride = layout.byte_strides["B"] // mmap.PAGESIZE
    prefault = Prefault(address, layout)
    for reached, blocks in ((None, 5), (2, 8), (1, 8), (19, 20)):
        if reached is not None:
            prefault.reach(reached)
        _finish(prefault)
        by_block = _resident(memory, address).reshape(-1, 20, stride)
        assert by_block[:, :blocks].all()
        assert not by_block[:, blocks:].any()
    assert view[12345] == 7 and int(view.sum()) == 7


def test_memory_that_cannot_be_had_ends_it() -> None:
    prefault = Prefault(1 << 46, _layout("BHLCND", 20))  # nobody's address
    assert not prefault.done
    prefault.step()
    assert prefault.done
    prefault.reach(10)
    assert prefault.done


def test_a_ranks_thread_stays_ahead_of_its_steps_and_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = _layout("BHLCND", 20)
    monkeypatch.setattr(module, "_AHEAD_BYTES", layout.nbytes // 4)  # five blocks
    monkeypatch.setattr(module, "_LATER_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    populated: set[int] = set()
    reached = threading.Condition()

    class Watched(Prefault):
        def step(self) -> None:
            super().step()
            if self.done:
                with reached:
                    populated.add(self._reached)
                    reached.notify()

    monkeypatch.setattr(module, "Prefault", Watched)
    pool = KVPool(layout)
    thread = PrefaultThread(pool)
    thread.start()
    try:
        for used, blocks in ((-1, 5), (3, 9), (1, 9), (19, 20)):
            pool.use(used)
            with reached:
                assert reached.wait_for(partial(populated.__contains__, blocks), 20), populated
    finally:
        thread.close()
