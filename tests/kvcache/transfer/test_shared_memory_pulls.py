"""Pulls out of shared host memory: of real processes, read-only, and of nobody else."""

import ctypes
from pathlib import Path

import msgspec
import pytest

from kvcache.pool import KVPool
from kvcache.transfer.move.place import Placer
from tests.kvcache.transfer.test_pull_shared import SmallLaunches
from tests.rigs.memory_pair import Decode, Prefill
from tests.rigs.process_pair import Child


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (4, 2), (1, 8)])
def test_a_pull_out_of_another_process(rig, p_tp, d_tp):
    prefill = rig(Child, "prefill", tp=p_tp, order="LBCNHD")
    decode = rig(Decode, make_placer=SmallLaunches, tp=d_tp, block_size=5)
    remote = prefill.lease([5, 2, 9], 20)
    remote = msgspec.structs.replace(remote, port=prefill.greeting["port"])
    done = decode.pull("a", remote, 3, 20, [3, 1, 7, 4])
    assert done.path == "mapped", done


def test_memory_is_mapped_to_be_read_and_unmapped_when_the_peer_is_forgotten(rig):
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
