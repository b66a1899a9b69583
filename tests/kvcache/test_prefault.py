"""Pages get their memory without a byte changing."""

import mmap

import numpy as np

from kvcache.prefault import Prefault


def _resident_pages(memory: mmap.mmap, address: int) -> int:
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(len(memory) // mmap.PAGESIZE * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_every_page_is_resident_and_keeps_its_bytes() -> None:
    memory = mmap.mmap(-1, 5 << 20)
    view = np.frombuffer(memory, dtype=np.uint8)
    view[12345] = 7
    address = int(view.ctypes.data)
    assert _resident_pages(memory, address) < 600
    prefault = Prefault(address, len(memory))
    steps = 0
    while not prefault.done:
        prefault.step()
        steps += 1
    assert steps == 3
    assert _resident_pages(memory, address) == len(memory) // mmap.PAGESIZE
    assert view[12345] == 7 and int(view.sum()) == 7


def test_memory_that_cannot_be_had_ends_it() -> None:
    prefault = Prefault(1 << 46, 1 << 30)  # nobody's address
    prefault.step()
    assert prefault.done
