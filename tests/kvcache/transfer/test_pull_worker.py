"""A rank's worker without a coordinator: every command is executed, or answered with an
error.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.pool import KVPool
from kvcache.transfer import worker as pull_worker
from kvcache.transfer.agent import ReadHandle, ReadState, TransferAgent
from kvcache.transfer.peer import LocalRank, Peer
from kvcache.transfer.pulls.messages import AddPeer, Pull, RankEnded, StopPull
from kvcache.transfer.worker import TransferWorker
from protocol.process.vital_threads import VitalThread
from tests.rigs.coordinator_stub import CoordinatorStub
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import DEADLINE_S, HEADS, Prefill, layout, pull_command
from tests.rigs.process_pair import run_program


class Rank:
    """A worker and its link. The worker receives all commands that are sent before
    `start` together.
    """

    def __init__(self, agent: TransferAgent | None = None) -> None:
        self.link = CoordinatorStub()
        self.report = self.link.report
        self.pool = KVPool(layout())
        local = LocalRank(0, 1, HEADS, agent or MemoryAgent(), self.pool)
        self.worker = TransferWorker(local, self.link.worker_end)
        self.start = self.worker.start

    def close(self) -> None:
        self.worker.close()
        self.link.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def order(prefill: Prefill, pull_id: str) -> Pull:
    return pull_command(pull_id, prefill.lease([5, 2], 16), 0, 16, [3, 1])


def test_command_that_raises_does_not_stop_other_commands(rig, rank, monkeypatch):
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("a bug in the command")

    monkeypatch.setattr(Peer, "prepare", broken)
    prefill = rig(Prefill)
    rank.link.send(AddPeer(prefill.metadata))
    rank.link.send(order(prefill, "a"))
    rank.start()
    ended = rank.report()
    assert isinstance(ended, RankEnded) and ended.pull_id == "a" and ended.complete
    assert rank.worker.counters["internal_errors"] == 1


class _Broken(MemoryAgent):
    def poll(self, handle: ReadHandle) -> ReadState:
        raise RuntimeError("the device is gone")


def test_worker_ends_after_too_many_failed_rounds(rig, monkeypatch):
    """Otherwise, the worker's engine would accept pulls that all end in a timeout."""
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(pull_worker, "_MAX_FAILURES", 3)
    prefill = rig(Prefill)
    rank = Rank(_Broken())
    rank.link.send(AddPeer(prefill.metadata))
    rank.link.send(order(prefill, "a"))
    rank.start()
    rank.worker._thread.join(DEADLINE_S)
    (args,) = ended
    assert isinstance(args.thread, VitalThread) and "device is gone" in str(
        args.exc_value
    )
    rank.close()


class _Stuck(MemoryAgent):
    """An agent with READs that do not end before `resume`.

    Posting a READ blocks until `may_post` is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.posting = threading.Event()
        self.may_post = threading.Event()
        self.stall()

    def read(self, *args: Any, **options: Any) -> ReadHandle:
        self.posting.set()
        self.may_post.wait()
        return super().read(*args, **options)


def test_stuck_thread_ends_the_rank_but_hanging_reads_do_not(rig, monkeypatch):
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(pull_worker, "_CHECK_S", 0.05)
    monkeypatch.setattr(pull_worker, "_NUM_CHECKS", 5)
    agent = _Stuck()
    prefill = rig(Prefill)
    rank = Rank(agent)
    rank.link.send(AddPeer(prefill.metadata))
    rank.start()
    time.sleep(0.5)
    assert not ended  # an idle worker must not end
    agent.may_post.set()
    rank.link.send(order(prefill, "a"))
    assert agent.posting.wait(DEADLINE_S)
    time.sleep(0.5)
    assert not ended and agent.active  # a hanging READ must not end the worker
    agent.may_post.clear()
    rank.link.send(order(prefill, "b"))
    rank.worker._watchdog.join(DEADLINE_S)
    (args,) = ended
    assert args.thread is rank.worker._watchdog and isinstance(args.thread, VitalThread)
    assert "pull-0 has made no progress" in str(args.exc_value)
    agent.may_post.set()
    agent.resume()
    rank.close()


def test_thread_that_fails_to_start_is_reported(monkeypatch):
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    agent = MemoryAgent()
    monkeypatch.setattr(agent, "bind_thread", lambda: 1 / 0)
    rank = Rank(agent)
    rank.worker.start()
    rank.worker._thread.join(DEADLINE_S)
    assert [type(args.thread) for args in ended] == [VitalThread]
    rank.close()


def test_stop_of_an_unknown_pull_is_answered(rig, rank):
    """Without an answer, the pull's blocks would stay quarantined."""
    rank.link.send(StopPull("lost"))
    rank.start()
    assert rank.report() == RankEnded(pull_id="lost", rank=0, complete=False)


ONE_CORE = """
import threading, torch
from kvcache.transfer.worker import use_one_torch_thread
torch.set_num_threads(2)
torch.get_num_threads()
def copy():
    use_one_torch_thread()
    print(torch.get_num_threads())
thread = threading.Thread(target=copy)
thread.start()
thread.join()
print(torch.get_num_threads())
"""


def test_copying_thread_starts_no_torch_threads():
    assert run_program(ONE_CORE).split() == ["1", "2"]
