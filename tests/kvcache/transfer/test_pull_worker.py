"""A rank's worker by itself: every order is obeyed or answered, whatever became of others."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.pool import KVPool
from kvcache.transfer.job_maker import JobMaker
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.pull import AddPeer, Pull, RankEnded, Report, StopPull, pull_command
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.rank_links import InsideLink

sys.path.insert(0, str(Path(__file__).parent))
from pull_rig import DEADLINE_S, HEADS, Prefill, layout


class Rank:
    """A worker whose thread finds all that was sent before `start` at once."""

    def __init__(self) -> None:
        self.link = InsideLink()
        self._told = threading.Event()
        self.link.on_report = self._told.set
        pool = KVPool(layout())
        self.worker = PullWorker(0, 1, HEADS, MemoryAgent(), pool, "", inside=self.link)

    def report(self) -> Report:
        """The one that comes next."""
        assert self._told.wait(DEADLINE_S), "the worker says nothing"
        self._told.clear()
        (report,) = self.link.reports()
        return report


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.worker.close()


def order(prefill: Prefill, pull_id: str) -> Pull:
    return pull_command(pull_id, prefill.lease([5, 2], 16), 0, 16, [3, 1])


def test_an_order_that_cannot_be_obeyed_takes_no_other_with_it(
    rig: Any, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("what it needs cannot be made")

    monkeypatch.setattr(JobMaker, "prepare", broken)
    prefill = rig(Prefill)
    rank.link.send(AddPeer(prefill.metadata))
    rank.link.send(order(prefill, "a"))
    rank.worker.start()
    ended = rank.report()
    assert isinstance(ended, RankEnded) and ended.pull_id == "a" and ended.complete
    assert rank.worker.counters["internal_errors"] == 1


def test_a_stop_is_answered_whatever_became_of_its_pull(rig: Any, rank: Rank) -> None:
    """Or its blocks would be taken for blocks that a READ may still write to."""
    rank.link.send(StopPull("lost"))
    rank.worker.start()
    assert rank.report() == RankEnded(pull_id="lost", rank=0, complete=False)
