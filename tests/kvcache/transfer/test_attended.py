"""Mapped pulls that the thread that ordered them drives to their ends, where it has nothing else to
do; and what it leaves to the worker's."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvcache.transfer import pull_worker
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.pull import PullDone, PullFailed
from protocol.errors import TransferFailed
from protocol.handshake import EngineMetadata
from tests.e2e.cluster import wait_until

sys.path.insert(0, str(Path(__file__).parent))
from beside_rig import Pair
from pull_rig import DEADLINE_S, ENDINGS, Prefill, expected


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_who_attends_to_a_short_pull_wakes_nobody_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    pair.rest()
    rounds = pair.worker._watch.at
    for number in range(3):
        pair.rest()
        pair.mapper.looks.clear()
        remote = pair.pull(str(number), attended=True)
        pair.decode.coordinator.attend()
        (done,) = pair.decode.coordinator.drain()
        assert isinstance(done, PullDone) and pair.arrived(remote)
        assert set(pair.mapper.threads + pair.mapper.looks) == {threading.get_ident()}
    assert pair.worker._watch.at == rounds


def test_who_attends_to_a_pull_waits_for_its_fence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    pair.rest()
    remote = pair.pull("a", attended=True)
    pair.decode.coordinator.attend()
    pair.decode.coordinator._turns.take(lambda: False)  # another thread may have P's answer in hand
    (done,) = pair.decode.coordinator.drain()
    assert isinstance(done, PullDone) and pair.arrived(remote)


def test_who_attended_to_one_pull_wakes_the_worker_for_the_next(pair: Pair) -> None:
    pair.rest()
    pair.pull("a", attended=True)
    pair.decode.coordinator.attend()
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone)
    pair.sleep()
    remote = pair.pull("b")
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)


def test_reads_are_the_workers_whoever_attends_to_a_mapped_pull_beside_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To post them may take longer than an engine has, and their agent is the worker's."""
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    far = Prefill(MemoryAgent, engine_id="far", edit=_not_mappable)
    try:
        pair.rest()
        pair.mapper.stalled = True
        near = pair.pull("near", attended=True)
        remote, blocks = far.lease([7, 3], 16), [4, 5]
        pair.decode.agents[0].stall()
        pair.decode.coordinator.pull("far", remote, 0, 16, blocks)
        wait_until(lambda: pair.decode.agents[0].active > 0)
        pair.decode.coordinator.attend()
        pair.mapper.stalled = False
        pair.decode.agents[0].resume()
        for pull_id in ("near", "far"):
            assert isinstance(pair.decode.wait(*ENDINGS, pull_id=pull_id), PullDone)
        assert pair.decode.agents[0].askers == {pair.worker._thread.ident}
        assert pair.arrived(near)
        assert np.array_equal(pair.decode.tokens(blocks, 0, 16), expected(remote, 0, 16))
    finally:
        far.close()


def _not_mappable(metadata: EngineMetadata) -> EngineMetadata:
    ranks = [msgspec.structs.replace(rank, extra={}) for rank in metadata.ranks]
    return msgspec.structs.replace(metadata, ranks=ranks)


@pytest.mark.parametrize("limit_s", [0.0, 0.001])
def test_a_pull_that_lasts_longer_is_left_to_the_worker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    monkeypatch.setattr(pull_worker, "_ATTEND_S", limit_s)
    pair.rest()
    pair.mapper.stalled = True
    remote = pair.pull("a", attended=True)
    pair.decode.coordinator.attend()
    assert pair.decode.coordinator.drain() == []
    pair.mapper.looks.clear()
    pair.mapper.stalled = False
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)
    assert set(pair.mapper.looks) == {pair.worker._thread.ident}


def test_a_pull_that_is_known_to_last_is_the_workers_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    (peer,) = pair.worker._peers.values()
    peer.speed.bytes_per_s = 1e-9
    pair.rest()
    remote = pair.pull("a", attended=True)
    pair.mapper.looks.clear()
    pair.decode.coordinator.attend()
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)
    assert set(pair.mapper.looks) == {pair.worker._thread.ident}


def test_beside_a_pull_of_the_workers_nobody_attends(pair: Pair) -> None:
    pair.mapper.stalled = True
    pair.pull("a")
    wait_until(lambda: len(pair.worker._jobs) == 1)
    remote = pair.pull("b", attended=True)
    pair.mapper.stalled = False
    pair.decode.coordinator.attend()
    for pull_id in "ab":
        assert isinstance(pair.decode.wait(*ENDINGS, pull_id=pull_id), PullDone)
    assert pair.arrived(remote)


def test_what_fails_while_it_is_attended_to_is_the_pulls_failure(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    pair.mapper.fail_looks = True
    pair.rest()
    pair.pull("a", attended=True)
    pair.decode.coordinator.attend()
    failed = pair.decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and isinstance(failed.error, TransferFailed)
    pair.mapper.fail_looks = False
    remote = pair.pull("b", attended=True)
    pair.decode.coordinator.attend()
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)


def test_a_bug_met_while_attending_leaves_the_worker_what_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, progress = threading.get_ident(), pair.worker._progress

    def fails_here() -> bool:
        if threading.get_ident() == here:
            raise RuntimeError("a bug")
        return progress()

    monkeypatch.setattr(pair.worker, "_progress", fails_here)
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    pair.rest()
    pair.pull("a", attended=True)
    pair.decode.coordinator.attend()
    assert isinstance(pair.decode.wait(*ENDINGS), PullFailed)
    assert pair.worker.counters["internal_errors"] == 1


def test_nobody_attends_while_the_worker_has_the_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To meet a new peer may take it long, and an engine has other things to do."""
    monkeypatch.setattr(pull_worker, "_ATTEND_S", DEADLINE_S)
    pair.rest()
    pair.mapper.stalled = True
    remote = pair.pull("a", attended=True)
    pair.mapper.looks.clear()
    with pair.worker._turn:
        pair.decode.coordinator.attend()
    pair.mapper.stalled = False
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)
    assert set(pair.mapper.looks) == {pair.worker._thread.ident}


def test_only_who_ordered_a_pull_attends_to_it(pair: Pair) -> None:
    pair.rest()
    pair.mapper.looks.clear()
    pair.mapper.stalled = True
    remote = pair.pull("a", attended=True)
    other = threading.Thread(target=pair.decode.coordinator.attend)
    other.start()
    other.join()
    pair.mapper.stalled = False
    assert pair.decode.coordinator.drain() == [] and pair.mapper.looks == []
    pair.decode.coordinator.attend()
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)
