"""Pulls from mapped memory, without a GPU.

P's pools are in this process, and MemoryPlacer copies the KV.
"""

import itertools
import re
import threading
from typing import Any

import msgspec
import pytest
import torch

from kvcache.pool import KVPool
from kvcache.transfer.move.cuda_placer import CudaPlacer
from kvcache.transfer.move.peer_memory import (
    EXTRA_KEY,
    Memory,
    NotMappable,
    open_on_gpu,
)
from kvcache.transfer.move.place import Placer
from kvcache.transfer.pulls.messages import PullDrained, PullFailed
from protocol.errors import (
    LeaseGone,
    PeerIncompatible,
    PeerUnreachable,
    PullTimeout,
    TransferFailed,
)
from protocol.handshake import EngineMetadata, RankMetadata
from tests.rigs.memory_pair import DEADLINE_S, PATIENT, Decode, Prefill
from tests.rigs.memory_placer import MemoryPlacer

PULLS = itertools.count()


class Mappers:
    """Makes a placer for each rank, and keeps a list of them."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: list[MemoryPlacer] = []

    def __call__(self, pool: KVPool) -> MemoryPlacer:
        self.made.append(MemoryPlacer(pool, **self.options))
        return self.made[-1]


def pull(decode: Decode, prefill: Prefill, path: str | None = "mapped") -> Any:
    """Runs a pull and checks all bytes. Returns the event that ended the pull.

    Args:
        path: the expected path, or None if the pull must fail.
    """
    remote = prefill.lease([5, 2, 9], 24)
    name = f"pull-{next(PULLS)}"
    if path is None:
        decode.coordinator.pull(name, remote, 0, 24, [3, 1, 7])
        return decode.wait_for_error()
    done = decode.pull(name, remote, 0, 24, [3, 1, 7])
    assert done.path == path
    return done


def sides(rig: Any, **options: Any) -> tuple[Prefill, Decode, MemoryPlacer]:
    """Returns both sides, and the placer of D."""
    mappers = Mappers()
    prefill = rig(Prefill)
    decode = rig(Decode, make_placer=mappers, **options)
    return prefill, decode, mappers.made[0]


GEOMETRIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}), ({"tp": 1}, {"tp": 2}), ({"tp": 4}, {"tp": 2}), ({"tp": 8}, {"tp": 1}),
    ({"order": "LBCNHD"}, {"tp": 2, "order": "BHLCND"}),
    ({"order": "LCBHND", "tp": 2}, {"order": "BLCHND"}),
    ({"block_size": 16}, {"block_size": 8}), ({"block_size": 8}, {"block_size": 16}),
    ({"block_size": 5}, {"block_size": 12}),
]  # fmt: skip


@pytest.mark.parametrize(("p", "d"), GEOMETRIES)
def test_any_geometry_is_mapped(rig, p, d):
    # The limit is so small that every block is launched separately.
    mappers = Mappers(launch_bytes=1)
    prefill = rig(Prefill, **p)
    decode = rig(Decode, make_placer=mappers, **d)
    remote = prefill.lease(
        [5, 2, 9, 4, 1, 3, 7, 8][: -(-37 // p.get("block_size", 8))], 37
    )
    blocks = [8, 3, 1, 7, 2][: -(-37 // d.get("block_size", 8))]
    done = decode.pull("a", remote, 3, 37, blocks)
    assert (done.path, done.num_descriptors) == ("mapped", 0)
    assert done.nbytes == sum(34 * each.token_bytes for each in decode.layouts)
    assert (decode.tokens(blocks, 0, 3) == 0).all()
    assert prefill.outcomes() == ["completed"]


def test_pull_continues_when_the_placer_accepts_launches_again(rig):
    prefill, decode, mapper = sides(rig)
    mapper.claim_results = [0, 0, 1, 0, 1 << 20, 0]
    pull(decode, prefill)
    # The claim that returned 1 byte launched one block. The next successful claim
    # launched all other blocks. Only the last 0 was not used.
    assert mapper.claim_results == [0]


def test_blocks_larger_than_the_launch_limit_are_launched_one_by_one(rig, monkeypatch):
    """No launch may be empty, because a GPU would refuse it."""
    prefill, decode, mapper = sides(rig)
    launch = mapper.launch
    counts = []

    def record(copy: Any, *args: Any) -> Any:
        counts.append(len(copy.sources))
        return launch(copy, *args)

    monkeypatch.setattr(mapper, "launch", record)
    mapper.claim_results = [1] * 9
    pull(decode, prefill)
    assert set(counts) == {1}


def without_offer(metadata: EngineMetadata) -> EngineMetadata:
    ranks = [msgspec.structs.replace(rank, extra={}) for rank in metadata.ranks]
    return msgspec.structs.replace(metadata, ranks=ranks)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "offers no memory"),
        ("what", "malformed"),
        ({"host": "elsewhere"}, "another host"),
        ({"fd": -1}, "not shared"),
        ({"token": b"\1" * 16}, "another engine's"),
    ],
)
def test_error_says_why_a_peer_cannot_be_mapped(rig, changes, reason):
    prefill = rig(Prefill)
    rank = prefill.metadata.ranks[0]
    record = (
        {**rank.extra[EXTRA_KEY], **changes} if isinstance(changes, dict) else changes
    )
    rank = msgspec.structs.replace(rank, extra={EXTRA_KEY: record} if record else {})
    with pytest.raises(NotMappable, match=reason):
        Placer(prefill.pools[0]).open(rank)


def test_equal_pid_in_another_container_is_not_the_same_process(rig, monkeypatch):
    """The peer's addresses may be valid in this process too, but with different
    content.
    """
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    rank = rig(Prefill).metadata.ranks[0]
    extra = {EXTRA_KEY: {**rank.extra[EXTRA_KEY], "handle": bytes(64)}}
    rank = msgspec.structs.replace(rank, device_kind="cuda", extra=extra)
    with pytest.raises(NotMappable, match="cannot be opened"):
        open_on_gpu(rank, torch.device("cuda:0"))


def test_failed_launch_fails_the_pull_and_the_next_pull_maps_again(rig):
    prefill, decode, mapper = sides(rig, settings=PATIENT)
    pull(decode, prefill)
    mapper.num_failing = 1
    assert isinstance(pull(decode, prefill, None), TransferFailed)
    assert mapper.mapped == []
    pull(decode, prefill)


def test_blocks_and_mapping_are_not_freed_before_a_launch_has_ended(rig, monkeypatch):
    settings = {"pull_timeout_s": 100.0, "drain_grace_s": 0.05}
    prefill, decode, mapper = sides(rig, settings=settings)
    mapper.stalled = True
    launch = mapper.launch
    launched = threading.Event()

    def record(*args: Any) -> Any:
        launched.set()
        return launch(*args)

    monkeypatch.setattr(mapper, "launch", record)
    decode.coordinator.pull("a", prefill.lease([5, 2], 16), 0, 16, [3, 1])
    assert launched.wait(DEADLINE_S)
    decode.skip(100.0)
    failed = decode.wait(PullFailed)
    assert isinstance(failed.error, PullTimeout) and not failed.drained
    assert mapper.mapped == [prefill.pools[0].base_address]
    mapper.stalled = False
    assert decode.wait(PullDrained).pull_id == "a"
    assert prefill.outcomes() == ["aborted"]


def test_a_restarted_peer_is_unmapped_and_its_successor_mapped(rig, port):
    mappers = Mappers()
    first = rig(Prefill, port=port)
    decode = rig(Decode, make_placer=mappers)
    stale = first.lease([5, 2], 16)
    decode.pull("a", stale, 0, 16, [3, 1])
    (mapper,) = mappers.made
    assert mapper.mapped == [first.pools[0].base_address]
    first.server.close()
    second = rig(Prefill, port=port)
    pull(decode, second)
    assert mapper.mapped == [second.pools[0].base_address]
    decode.coordinator.pull("c", stale, 0, 16, [3, 1])
    assert isinstance(decode.wait(PullFailed).error, LeaseGone | PeerUnreachable)


def test_a_peer_that_dies_idle_is_unmapped(rig):
    """A mapping keeps memory allocated that the peer's successor needs."""
    prefill, decode, mapper = sides(rig, settings={"side_channel_timeout_s": 0.2})
    pull(decode, prefill)
    prefill.server.close()
    assert mapper.unmapped.wait(20)
    assert mapper.mapped == []


def without_compiler(pool: KVPool) -> CudaPlacer:
    """A CudaPlacer that cannot compile its kernels, on a host without a GPU."""
    placer = CudaPlacer(pool)
    placer.compile(convert=False)
    return placer


class Broken(MemoryPlacer):
    def open(self, rank: RankMetadata) -> Memory:
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("prefill_options", "make_placer", "log_text", "refusal"),
    [
        ({"edit": without_offer}, MemoryPlacer, "not mapped: the peer offers no memory",
         "offers no memory to map.*--transfer auto"),
        ({}, without_compiler, "some kernels that copy KV cannot be compiled",
         "the kernel that copies KV"),
        ({}, Broken, "not mapped: a bug", "a bug"),
    ],
)  # fmt: skip
def test_unmappable_peer_is_read_by_the_agent_or_refused_if_only_mapping_is_allowed(
    rig, prefill_options, make_placer, log_text, refusal, caplog
):
    caplog.set_level("INFO")
    prefill = rig(Prefill, **prefill_options)
    decode = rig(Decode, make_placer=make_placer)
    assert pull(decode, prefill, "direct").num_descriptors > 0
    assert log_text in caplog.text
    error = pull(rig(Decode, make_placer=make_placer, maps_only=True), prefill, None)
    assert re.search(refusal, str(error)), error
    assert isinstance(error, PeerIncompatible) or make_placer is Broken
