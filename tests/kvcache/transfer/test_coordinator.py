"""The pull coordinator without a worker. The test runs each round and sends reports."""

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import (
    Command,
    Pull,
    PullDone,
    PullDrained,
    PullFailed,
    RankEnded,
    RankFailing,
    StopPull,
)
from kvcache.transfer.pulls.pull_state import PullState
from protocol.errors import InternalError, PullCircuitOpen
from protocol.messages import ErrorInfo
from tests.rigs.memory_pair import DEADLINE_S, SECRET, Clock, Prefill, compat


class Driven(PullCoordinator):
    """A coordinator that runs a round only when the test calls `run_round`.

    The test also sends the reports of the only rank. No KV is read.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.notifications = list[int]()
        super().__init__([], compat(), SECRET, clock=self.clock)
        self.on_event = lambda: self.notifications.append(1)
        self.commands: list[Command] = []

    def next_events(self) -> list[Any]:
        while not (events := self.drain()):
            self.run_round()
        return events

    def run_round(self) -> None:
        self.commands += self.receive(DEADLINE_S)

    def read(self, prefill: Prefill, *pull_ids: str) -> None:
        """Starts pulls, and runs rounds until the coordinator has sent the rank the
        commands to read.
        """
        for pull_id in pull_ids:
            self.pull(pull_id, prefill.lease([3], 8), 0, 8, [1])
        while not all(
            (state := self._pulls.get(each)) and state.is_reading for each in pull_ids
        ):
            self.run_round()
        self.commands.clear()


@pytest.fixture
def coordinator() -> Iterator[Driven]:
    coordinator = Driven()
    yield coordinator
    coordinator.close()


def rank_ended(pull_id: str, *, complete: bool = True) -> RankEnded:
    return RankEnded(pull_id=pull_id, rank=0, complete=complete)


def test_report_that_raises_does_not_block_other_reports(rig, coordinator, monkeypatch):
    """An error in one report must not lose other reports. A rank reports its end only
    once, so the blocks of a lost report would stay quarantined.
    """
    reported = PullState.on_report

    def broken(state: PullState, report: RankEnded, now: float) -> Any:
        if report.pull_id == "broken" and report.complete:
            raise RuntimeError("a bug in on_report")
        return reported(state, report, now)

    monkeypatch.setattr(PullState, "on_report", broken)
    coordinator.read(rig(Prefill), "broken", "fine")
    coordinator.report(rank_ended("broken"))
    coordinator.report(rank_ended("fine"))
    (failed,) = coordinator.drain()
    assert (
        isinstance(failed, PullFailed) and failed.pull_id == "fine" and failed.drained
    )
    assert isinstance(failed.error, InternalError)
    # The coordinator sends StopPull to the rank. The rank always answers it.
    assert StopPull("broken") in coordinator.receive(0.0)
    coordinator.report(rank_ended("broken", complete=False))
    (failed,) = coordinator.drain()
    assert (
        isinstance(failed, PullFailed) and failed.pull_id == "broken" and failed.drained
    )
    coordinator.cancel("broken")
    assert coordinator.next_events() == [PullDrained("broken")]
    assert coordinator.counters()["pulls_open"] == 0


def test_successful_pull_does_not_close_the_circuit_while_a_second_pull_hangs(
    rig, coordinator
):
    prefill = rig(Prefill)
    coordinator.read(prefill, "hangs", "fine")
    coordinator.report(RankFailing("hangs", 0, ErrorInfo("transfer_failed", "broken")))
    coordinator.clock.skip(1.0)
    (hung,) = coordinator.next_events()
    assert isinstance(hung, PullFailed) and not hung.drained
    coordinator.report(rank_ended("fine"))
    (done,) = coordinator.next_events()
    assert isinstance(done, PullDone)
    coordinator.pull("later", prefill.lease([4], 8), 0, 8, [2])
    (failed,) = coordinator.next_events()
    assert isinstance(failed, PullFailed) and isinstance(failed.error, PullCircuitOpen)
    coordinator.report(rank_ended("hangs", complete=False))
    assert coordinator.next_events() == [PullDrained("hangs")]
    coordinator.read(prefill, "again")
    coordinator.report(rank_ended("again"))
    assert isinstance(coordinator.next_events()[0], PullDone)


def test_start_of_a_pull_does_not_inspect_the_other_open_pulls(rig, coordinator):
    """Otherwise, starting many pulls that wait for one handshake would take quadratic
    time.
    """
    prefill = rig(Prefill)
    coordinator.read(prefill, *(f"open-{number}" for number in range(8)))
    is_reading: Any = PullState.is_reading
    num_inspections = 0

    def count_inspections(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_inspections
        is_inspection = frame.f_code is is_reading.fget.__code__
        num_inspections += event == "call" and is_inspection

    coordinator.pull("later", prefill.lease([4], 8), 0, 8, [2])
    sys.setprofile(count_inspections)
    try:
        while not any(isinstance(command, Pull) for command in coordinator.commands):
            coordinator.run_round()
    finally:
        sys.setprofile(None)
    assert num_inspections == 0


def test_calls_after_one_that_raises_run_and_events_are_notified_once(coordinator):
    coordinator._call(lambda: 1 // 0)
    coordinator.cancel("a")
    coordinator.cancel("b")
    assert coordinator.next_events() == [PullDrained("a"), PullDrained("b")]
    assert coordinator.counters()[
        "internal_errors"
    ] == 1 and coordinator.notifications == [1]
    assert coordinator.drain() == []


def test_closed_coordinator_leaves_no_file_descriptor_open():
    before = len(os.listdir("/proc/self/fd"))
    coordinator = PullCoordinator([], compat(), SECRET)
    coordinator.close()
    coordinator.cancel("a")  # has no effect after `close`
    assert len(os.listdir("/proc/self/fd")) == before
