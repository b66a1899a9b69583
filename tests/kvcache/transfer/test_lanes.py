"""READs posted by an agent's threads: beside one another, and ended only when the READ has."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvcache.transfer.agent import ReadHandle, ReadState
from kvcache.transfer.lanes import LanedAgent
from kvcache.transfer.memory_agent import MemoryAgent
from tests.kvcache.transfer.test_agent import wait_until

NBYTES = 4096


class SlowToPost(MemoryAgent):
    """Posting takes until it is allowed to end, as where posting copies."""

    copies = False  # posting ends the READ, too

    def __init__(self) -> None:
        super().__init__()
        self.posting, self.may_end = threading.Event(), threading.Event()
        self.thread = ""

    def read(self, *args: Any, **options: Any) -> ReadHandle:
        self.thread = threading.current_thread().name
        self.posting.set()
        assert self.may_end.wait(30)
        handle = super().read(*args, **options)
        if self.copies:
            self.poll(handle)
        return handle


class Rig:
    def __init__(self) -> None:
        self.source = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
        self.into = np.zeros(NBYTES, np.uint8)
        self.peer = MemoryAgent()
        self.peer.register(self.source.ctypes.data, NBYTES)
        self.lanes = [SlowToPost(), SlowToPost()]
        self.agent = LanedAgent(self.lanes)
        self.agent.register(self.into.ctypes.data, NBYTES)
        self.name = self.agent.add_peer(self.peer.metadata())

    def post(
        self, lane: int, start: int, length: int, then: Any = lambda state: None
    ) -> ReadHandle:
        at = np.array([start]), np.array([length])
        local, remote = at[0] + self.into.ctypes.data, at[0] + self.source.ctypes.data
        return self.agent.read_beside(lane, self.name, local, remote, at[1], then)

    def close(self) -> None:
        for lane in self.lanes:
            lane.may_end.set()
        self.agent.close()
        self.peer.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_lanes_post_beside_one_another_and_never_in_the_callers_thread(rig: Rig) -> None:
    handles = [rig.post(0, 0, 100), rig.post(1, 100, 100)]
    assert all(lane.posting.wait(30) for lane in rig.lanes)  # both, before either has ended
    assert [rig.agent.poll(handle) for handle in handles] == [ReadState.ACTIVE] * 2
    for lane in rig.lanes:
        lane.may_end.set()
    wait_until(lambda: all(rig.agent.poll(h) is ReadState.DONE for h in handles))
    assert np.array_equal(rig.into[:200], rig.source[:200]) and not rig.into[200:].any()
    assert {lane.thread.rpartition("_")[0] for lane in rig.lanes} == {"post-0", "post-1"}
    for handle in handles:
        rig.agent.release(handle)


def test_one_lane_posts_one_read_at_a_time(rig: Rig) -> None:
    handles = [rig.post(0, 0, 100), rig.post(2, 100, 100)]  # lane 2 of two is lane 0
    assert rig.lanes[0].posting.wait(30) and not rig.lanes[1].posting.is_set()
    rig.lanes[0].may_end.set()
    wait_until(lambda: all(rig.agent.poll(h) is ReadState.DONE for h in handles))


def test_a_read_that_cannot_be_posted_ends_in_an_error(rig: Rig) -> None:
    rig.lanes[1].may_end.set()
    handle = rig.post(1, 0, NBYTES + 1)
    wait_until(lambda: rig.agent.poll(handle) is not ReadState.ACTIVE)
    assert handle.state is ReadState.ERROR and not rig.into.any()
    rig.agent.release(handle)


def test_what_is_being_posted_is_not_released(rig: Rig) -> None:
    handle = rig.post(0, 0, 100)
    with pytest.raises(RuntimeError, match="active"):
        rig.agent.release(handle)


def test_a_stalled_read_stays_active_after_it_was_posted(rig: Rig) -> None:
    rig.lanes[1].stall()
    rig.lanes[1].may_end.set()
    handle = rig.post(1, 0, 100)
    wait_until(lambda: rig.agent.poll(handle) is ReadState.ACTIVE and rig.lanes[1].active == 1)
    assert rig.agent.poll(handle) is ReadState.ACTIVE and not rig.into.any()
    rig.lanes[1].resume()
    wait_until(lambda: rig.agent.poll(handle) is ReadState.DONE)


def test_the_lane_that_read_goes_on_with_what_follows(rig: Rig) -> None:
    found: list[tuple[ReadState, str, bool]] = []

    def then(state: ReadState) -> None:
        arrived = np.array_equal(rig.into[:100], rig.source[:100])
        found.append((state, threading.current_thread().name, arrived))

    rig.lanes[0].copies = True
    handle = rig.post(0, 0, 100, then)
    assert rig.agent.poll(handle) is ReadState.ACTIVE
    rig.lanes[0].may_end.set()
    wait_until(lambda: rig.agent.poll(handle) is ReadState.DONE)
    assert found == [(ReadState.DONE, "post-0_0", True)]


def test_a_read_has_failed_when_what_follows_it_fails(rig: Rig) -> None:
    def then(state: ReadState) -> None:
        raise RuntimeError("no room")

    rig.lanes[0].copies = True
    rig.lanes[0].may_end.set()
    handle = rig.post(0, 0, 100, then)
    wait_until(lambda: rig.agent.poll(handle) is not ReadState.ACTIVE)
    assert handle.state is ReadState.ERROR
    rig.agent.release(handle)


def test_memory_is_registered_with_every_lane_and_given_back(rig: Rig) -> None:
    other = np.zeros(64, np.uint8)
    region = rig.agent.register(other.ctypes.data, 64)
    assert len(region.key) == 2
    rig.agent.deregister(region)
    assert rig.agent.metadata() == rig.lanes[0].metadata()
