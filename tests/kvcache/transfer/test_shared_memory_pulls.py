"""Pulls from shared host memory in one process. test_fence.py has pulls between
processes.
"""

import ctypes
from pathlib import Path

from kvcache.pool import KVPool
from kvcache.transfer.move.place import Placer
from tests.rigs.memory_pair import Prefill


def test_memory_is_mapped_read_only_and_unmapped_with_its_peer(rig):
    prefill = rig(Prefill)
    memory = Placer(KVPool(prefill.layouts[0])).open(prefill.metadata.ranks[0])
    pool = prefill.pools[0]
    theirs = (ctypes.c_ubyte * pool.nbytes).from_address(memory.address)
    assert bytes(theirs) == bytes(pool.flat_bytes.numpy())
    assert "w" not in permissions(memory.address)
    memory.close()
    assert permissions(memory.address) == ""


def permissions(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *rest = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high and any("baton-kv" in word for word in rest):
            return flags
    return ""
