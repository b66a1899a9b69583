"""The coordinator by itself; this test plays the ranks."""

import os
import threading
from typing import Any

import pytest

from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullDrained, PullFailed, RankEnded, StopPull
from kvcache.transfer.pulls.pull_state import PullState
from kvcache.transfer.pulls.rank_links import WorkerLink
from protocol.errors import InternalError
from tests.rigs.memory_pair import SECRET, Prefill, compat, pulls_address


def test_a_report_that_cannot_be_taken_keeps_no_other_from_being_heard(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else blocks would be quarantined for ever: no rank says its end twice."""
    prefill, link = rig(Prefill), WorkerLink(address := pulls_address())
    coordinator = PullCoordinator(address, 1, compat(), SECRET)
    link.open(threading.Event())
    rank_ended = PullState.rank_ended

    def broken(state: PullState, report: RankEnded, now: float) -> Any:
        if report.pull_id == "broken" and report.complete:
            raise RuntimeError("it cannot be taken")
        return rank_ended(state, report, now)

    monkeypatch.setattr(PullState, "rank_ended", broken)
    try:
        for pull_id in ("broken", "fine"):
            coordinator.pull(pull_id, prefill.lease([3], 8), 0, 8, [1])
        while coordinator.handshakes()["ok"] == 0:
            coordinator._round()
        assert len(link.receive()) == 3  # AddPeer and both pulls
        for pull_id in ("broken", "fine"):
            link.report(RankEnded(pull_id=pull_id, rank=0, complete=True))
        coordinator._round()
        (failed,) = coordinator.drain()
        assert isinstance(failed, PullFailed) and failed.pull_id == "fine" and failed.drained
        assert isinstance(failed.error, InternalError)
        stopped = [c.pull_id for c in link.receive() if isinstance(c, StopPull)]
        assert "broken" in stopped  # a rank answers this in any case
        link.report(RankEnded(pull_id="broken", rank=0, complete=False))
        coordinator._round()
        (failed,) = coordinator.drain()
        assert isinstance(failed, PullFailed) and failed.pull_id == "broken" and failed.drained
        coordinator.cancel("broken")
        coordinator._round()
        assert coordinator.drain() == [PullDrained("broken")]
        assert coordinator.counters()["pulls_open"] == 0
    finally:
        coordinator.close()
        link.close()


def test_a_call_that_raises_stops_no_other_and_what_is_told_is_told_once() -> None:
    told: list[int] = []
    on_event = lambda: told.append(1)  # noqa: E731
    coordinator = PullCoordinator(pulls_address(), 0, compat(), SECRET, on_event=on_event)
    coordinator._call(lambda: 1 // 0)
    coordinator.cancel("a")
    coordinator.cancel("b")
    coordinator._round()
    assert coordinator.counters()["internal_errors"] == 1 and len(told) == 1
    assert coordinator.drain() == [PullDrained("a"), PullDrained("b")]
    assert coordinator.drain() == []
    coordinator.close()


def test_a_coordinator_leaves_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    coordinator = PullCoordinator(pulls_address(), 1, compat(), SECRET)
    coordinator.start()
    coordinator.close()
    coordinator.cancel("a")  # is nobody's any more
    assert len(os.listdir("/proc/self/fd")) == before
