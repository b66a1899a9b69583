"""Pulls out of shared host memory: random geometries exact, real processes, peers that die."""

import ctypes
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.pool import KVPool
from kvcache.transfer.move import place as placing
from kvcache.transfer.move.peer_memory import EXTRA_KEY, NotMappable
from kvcache.transfer.move.place import Placer, launches, place
from kvcache.transfer.pulls.messages import PullDone, PullDrained, PullFailed
from kvcache.transfer.worker.peer import MappedPath
from protocol.errors import LeaseGone, PeerIncompatible, PeerUnreachable, PullTimeout
from protocol.handshake import EngineMetadata
from tests.rigs.geometry import DTYPES, Case, cases, garbage, memory_of, with_dtypes
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import PATIENT, Decode, Prefill, expected
from tests.rigs.process_pair import Child

ENDINGS = (PullDone, PullFailed, PullDrained)


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


@pytest.fixture
def rig() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(kind: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    yield make
    for side in reversed(made):
        side.close()


def decode_side(rig: Any, required: bool = True, **options: Any) -> Decode:
    def make(pool: KVPool) -> MappedPath:
        return MappedPath(Placer(pool), required=required, launch_bytes=4096)

    return rig(Decode, MemoryAgent, make_mapped=make, **options)


def assert_pulled(decode: Decode, remote: Any, blocks: list[int], start: int, stop: int) -> None:
    assert np.array_equal(decode.tokens(blocks, start, stop), expected(remote, start, stop))


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (4, 2), (1, 8)])
def test_a_pull_out_of_another_process(rig: Any, p_tp: int, d_tp: int) -> None:
    prefill = rig(Child, "prefill", tp=p_tp, order="LBCNHD")
    decode = decode_side(rig, tp=d_tp, block_size=5)
    remote = prefill.lease([5, 2, 9], 20)
    remote = msgspec.structs.replace(remote, port=prefill.greeting["port"])
    decode.coordinator.pull("a", remote, 3, 20, [3, 1, 7, 4])
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and done.path == "mapped", done
    assert_pulled(decode, remote, [3, 1, 7, 4], 3, 20)


def test_a_peer_killed_before_the_pull_fails_it_at_the_fence_and_harms_nobody(rig: Any) -> None:
    prefill = rig(Child, "prefill")
    settings = {"fence_timeout_s": 1.0, "connection_timeout_s": 0.3, **PATIENT}
    decode = decode_side(rig, settings=settings)
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


def without_memory(metadata: EngineMetadata) -> EngineMetadata:
    """As a peer announces itself whose memory this host's processes cannot find."""
    (rank,) = metadata.ranks
    offer = {**rank.extra[EXTRA_KEY], "token": b"\1" * 16}
    rank = msgspec.structs.replace(rank, extra={EXTRA_KEY: offer})
    return msgspec.structs.replace(metadata, ranks=[rank])


def test_a_peer_that_cannot_be_mapped_is_left_to_the_agent(rig: Any) -> None:
    prefill = rig(Prefill, MemoryAgent, edit=without_memory)
    decode = decode_side(rig, required=False)
    remote = prefill.lease([5, 2, 9], 20)
    decode.coordinator.pull("a", remote, 0, 20, [3, 1, 7])
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and done.path == "direct"
    assert_pulled(decode, remote, [3, 1, 7], 0, 20)


def test_a_peer_that_cannot_be_mapped_is_refused_where_mapping_is_required(rig: Any) -> None:
    prefill = rig(Prefill, MemoryAgent, edit=without_memory)
    decode = decode_side(rig, required=True)
    decode.coordinator.pull("a", prefill.lease([5], 8), 0, 8, [3])
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and isinstance(failed.error, PeerIncompatible)
    assert "another engine's" in failed.error.message


def test_memory_is_mapped_to_be_read_and_unmapped_when_the_peer_is_forgotten() -> None:
    prefill = Prefill(MemoryAgent)
    memory = Placer(KVPool(prefill.layouts[0])).open(prefill.metadata.ranks[0])
    pool = prefill.pools[0]
    theirs = (ctypes.c_ubyte * pool.nbytes).from_address(memory.address)
    assert bytes(theirs) == bytes(pool.flat_bytes.numpy())
    assert not writable(memory.address)
    memory.close()
    assert not mapped(memory.address)
    prefill.close()


def permissions(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *rest = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high and any("baton-kv" in word for word in rest):
            return flags
    return ""


def writable(address: int) -> bool:
    return "w" in permissions(address)


def mapped(address: int) -> bool:
    return permissions(address) != ""


def test_memory_without_a_file_is_not_mapped() -> None:
    prefill = Prefill(MemoryAgent)
    rank = prefill.metadata.ranks[0]
    offer = {**rank.extra[EXTRA_KEY], "fd": -1}
    placing = Placer(KVPool(prefill.layouts[0]))
    with pytest.raises(NotMappable, match="not shared"):
        placing.open(msgspec.structs.replace(rank, extra={EXTRA_KEY: offer}))
    prefill.close()


def test_a_copy_that_fails_fails_its_pull_and_no_other(rig: Any, monkeypatch: Any) -> None:
    prefill, decode = rig(Prefill, MemoryAgent), decode_side(rig)

    def broken(*args: Any) -> None:
        raise RuntimeError("the copy broke")

    monkeypatch.setattr(placing, "place", broken)
    decode.coordinator.pull("a", prefill.lease([5, 2, 9], 20), 0, 20, [3, 1, 7])
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and "the copy broke" in failed.error.message
    if not failed.drained:
        decode.wait(PullDrained)
    monkeypatch.undo()
    remote = prefill.lease([5, 2, 9], 20)
    decode.coordinator.pull("b", remote, 0, 20, [3, 1, 7])
    assert isinstance(decode.wait(*ENDINGS), PullDone)
    assert_pulled(decode, remote, [3, 1, 7], 0, 20)


def test_a_kv_dtype_is_converted_on_the_way(rig: Any) -> None:
    prefill = rig(Prefill, MemoryAgent, dtype="float32")
    decode = decode_side(rig, dtype="bfloat16", convert=True)
    remote = prefill.lease([5, 2, 9], 20)
    decode.coordinator.pull("a", remote, 0, 20, [3, 1, 7])
    assert isinstance(decode.wait(*ENDINGS), PullDone)
    wanted = torch.from_numpy(expected(remote, 0, 20)).bfloat16().float().numpy()
    assert np.array_equal(decode.tokens([3, 1, 7], 0, 20), wanted)
