"""Pulls out of shared host memory: random geometries exact, real processes, peers that die."""

import ctypes
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer.move.peer_memory import EXTRA_KEY, NotMappable
from kvcache.transfer.move.place import Placer, launches, place
from kvcache.transfer.pulls.messages import PullDone, PullFailed
from kvcache.transfer.worker.peer import MappedPath
from protocol.errors import LeaseGone, PeerUnreachable, PullTimeout
from tests.rigs.geometry import DTYPES, Case, cases, garbage, memory_of, with_dtypes
from tests.rigs.memory_pair import ENDINGS, PATIENT, Decode, Prefill, assert_pulled
from tests.rigs.process_pair import Child


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(1, 1 << 16), DTYPES)
def test_any_geometry_is_copied_exactly(
    case: Case, launch_bytes: int, dtypes: tuple[str, str]
) -> None:
    case = with_dtypes(case, *dtypes)
    sources = [memory_of(case, case.p, rank, case.start) for rank in range(case.p.tp)]
    for rank in range(case.d.tp):
        pool = torch.from_numpy(garbage(case, case.d, rank))
        for copy in launches(case.transfer(rank).copies(), launch_bytes):
            place(copy, torch.from_numpy(sources[copy.owner].view(np.uint8)), pool)
        assert np.array_equal(pool.numpy(), memory_of(case, case.d, rank, case.start))


def mapped_path(pool: KVPool) -> MappedPath:
    return MappedPath(Placer(pool), required=True, launch_bytes=4096)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (4, 2), (1, 8)])
def test_a_pull_out_of_another_process(rig: Any, p_tp: int, d_tp: int) -> None:
    prefill = rig(Child, "prefill", tp=p_tp, order="LBCNHD")
    decode = rig(Decode, make_mapped=mapped_path, tp=d_tp, block_size=5)
    remote = prefill.lease([5, 2, 9], 20)
    remote = msgspec.structs.replace(remote, port=prefill.greeting["port"])
    decode.coordinator.pull("a", remote, 3, 20, [3, 1, 7, 4])
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and done.path == "mapped", done
    assert_pulled(decode, remote, [3, 1, 7, 4], 3, 20)


def test_a_peer_killed_before_the_pull_fails_it_at_the_fence_and_harms_nobody(rig: Any) -> None:
    prefill = rig(Child, "prefill")
    settings = {"fence_timeout_s": 1.0, "connection_timeout_s": 0.3, **PATIENT}
    decode = rig(Decode, make_mapped=mapped_path, settings=settings)
    first = prefill.lease([5, 2, 9], 20)
    decode.coordinator.pull("a", first, 0, 20, [3, 1, 7])
    assert isinstance(decode.wait(*ENDINGS), PullDone)
    second = prefill.lease([4, 6, 8], 20)
    prefill.signal(signal.SIGKILL)
    prefill.process.wait()
    decode.coordinator.pull("b", second, 0, 20, [2, 4, 6])
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and failed.drained
    assert isinstance(failed.error, PeerUnreachable | PullTimeout | LeaseGone)
    successor = rig(Child, "prefill")
    third = successor.lease([5, 2, 9], 20)
    decode.coordinator.pull("c", third, 0, 20, [3, 1, 7])
    assert isinstance(decode.wait(*ENDINGS), PullDone)
    assert_pulled(decode, third, [3, 1, 7], 0, 20)


def test_memory_is_mapped_to_be_read_and_unmapped_when_the_peer_is_forgotten(rig: Any) -> None:
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


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"fd": -1}, "not shared"), ({"token": b"\1" * 16}, "another engine's")],
)
def test_memory_that_is_not_the_offered_one_is_not_mapped(
    rig: Any, changes: dict[str, Any], why: str
) -> None:
    prefill = rig(Prefill)
    (rank,) = prefill.metadata.ranks
    offer = {**rank.extra[EXTRA_KEY], **changes}
    with pytest.raises(NotMappable, match=why):
        Placer(prefill.pools[0]).open(msgspec.structs.replace(rank, extra={EXTRA_KEY: offer}))
