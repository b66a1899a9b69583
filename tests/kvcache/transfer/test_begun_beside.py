"""Mapped pulls that the thread that orders them begins: the same pulls, sooner."""

import dis
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from kvcache.transfer import pace
from kvcache.transfer.mapped import MAX_ACTIVE
from kvcache.transfer.pace import Pace
from kvcache.transfer.pull import PullDone, PullDrained, PullFailed
from protocol.errors import TransferFailed
from tests.e2e.cluster import wait_until

sys.path.insert(0, str(Path(__file__).parent))
from beside_rig import Noting, Pair, Strict
from pull_rig import DEADLINE_S, ENDINGS, expected


class Signal:
    """Ends the calling thread's program within `code`, after its `number`-th call: where Python
    lets a signal's handler raise."""

    def __init__(self, code: Any, number: int) -> None:
        self.code, self.left, self.returned = code, number, False

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not self.code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= self.returned
            if self.returned and self.left == 0:
                raise SystemExit
            name = dis.opname[self.code.co_code[frame.f_lasti]]
            self.returned = name.startswith("CALL")
        return self


@pytest.fixture
def pair(request: Any) -> Iterator[Pair]:
    made = Pair(getattr(request, "param", Noting))
    yield made
    made.close()


def test_who_orders_a_pull_makes_its_first_launches(pair: Pair) -> None:
    """The worker's thread wakes for the others, though no command is left that would wake it."""
    for number in range(3):
        pair.sleep()
        remote = pair.pull(str(number))
        assert isinstance(pair.decode.wait(*ENDINGS), PullDone)
        there = pair.worker._thread.ident
        begun, followed = pair.mapper.threads[:MAX_ACTIVE], pair.mapper.threads[MAX_ACTIVE:]
        assert there not in begun and followed == [there] * (6 - MAX_ACTIVE)
        assert pair.arrived(remote)
        pair.mapper.threads.clear()


def test_beside_another_pull_the_worker_begins_it(pair: Pair) -> None:
    pair.mapper.stalled = True
    pair.sleep()
    pair.pull("a")
    assert pair.worker._thread.ident not in pair.mapper.threads
    remote = pair.pull("b")
    wait_until(lambda: len(pair.mapper.threads) == 2 * MAX_ACTIVE)
    assert set(pair.mapper.threads[MAX_ACTIVE:]) == {pair.worker._thread.ident}
    pair.mapper.stalled = False
    for pull_id in "ab":
        assert isinstance(pair.decode.wait(*ENDINGS, pull_id=pull_id), PullDone)
    assert pair.arrived(remote)


def test_a_launch_that_fails_is_the_pulls_failure_not_its_orderers(pair: Pair) -> None:
    pair.mapper.fail_launches = True
    pair.sleep()
    pair.pull("a")
    assert pair.worker._thread.ident not in pair.mapper.threads
    failed = pair.decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and isinstance(failed.error, TransferFailed)
    pair.mapper.fail_launches = False
    remote = pair.pull("b")
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)


def test_a_thread_that_cannot_begin_it_leaves_it_to_the_worker(pair: Pair) -> None:
    pair.mapper.refuses = True
    wait_until(lambda: pair.link._sleeps)
    remote = pair.pull("a")
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone) and pair.arrived(remote)
    assert set(pair.mapper.threads) == {pair.worker._thread.ident}
    assert pair.worker.counters["internal_errors"] > 0


def test_a_worker_that_has_ended_is_not_begun_beside(pair: Pair) -> None:
    pair.worker.close()
    pair.pull("a")
    assert pair.mapper.threads == []
    pair.decode.coordinator.cancel("a")


def test_a_pull_may_end_beside_a_worker_that_naps(pair: Pair) -> None:
    pair.mapper.stalled = True
    remotes = [pair.pull(pull_id) for pull_id in "ab"]
    wait_until(lambda: len(pair.worker._jobs) == 2)

    class Ends(Pace):
        def nap_s(self, now: float) -> float | None:
            if threading.get_ident() == here:
                jobs.append(pair.worker._jobs.popitem(last=False))
            return None

    here, jobs = threading.get_ident(), list[Any]()
    with pair.worker._turn:
        ((job, _), *_others) = pair.worker._jobs.values()
        job.pace = Ends(job.pace.began)
        pair.worker._nap_s()
        job.pace = Pace(job.pace.began)
        pair.worker._jobs.update(jobs)
    pair.mapper.stalled = False
    for pull_id in "ab":
        assert isinstance(pair.decode.wait(*ENDINGS, pull_id=pull_id), PullDone)
    assert pair.arrived(remotes[-1]) and pair.worker.counters["internal_errors"] == 0


@pytest.mark.parametrize("is_seen", [False, True])
def test_time_that_the_worker_took_to_wake_does_not_count_as_the_links(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    """Pulls that are over by then would make later, longer ones seem far from their ends."""
    monkeypatch.setattr(pace, "SAMPLE_BYTES", 1)
    (peer,) = pair.worker._peers.values()
    peer.speed.bytes_per_s = fast = 1e15
    pair.sleep()
    pair.mapper.stalled = is_seen
    pair.pull("a")
    if is_seen:
        wait_until(lambda: len(pair.worker._jobs) == 1)
        ((job, _),) = pair.worker._jobs.values()
        wait_until(lambda: job.pace.watched)
        pair.mapper.stalled = False
    assert isinstance(pair.decode.wait(*ENDINGS), PullDone)
    wait_until(lambda: pair.link._sleeps)
    assert (peer.speed.bytes_per_s < fast) == is_seen


def test_an_orderer_that_a_signal_ends_keeps_the_turn_from_nobody(pair: Pair) -> None:
    number, ends = 0, True
    while ends:
        pair.sleep()
        signal = Signal(type(pair.worker)._begin_beside.__code__, number := number + 1)
        before = sys.gettrace()
        sys.settrace(signal)
        try:
            pair.pull(str(number))
        except SystemExit:
            pass
        finally:
            sys.settrace(before)
        ends = signal.left == 0
        wait_until(lambda: not pair.worker._turn.locked())
        pair.link.waker.wake()
        pair.decode.coordinator.cancel(str(number))
        assert pair.decode.wait(PullDrained, pull_id=str(number))
    assert number > 6


@pytest.mark.parametrize("pair", [Noting, Strict], indirect=True)
def test_every_pull_of_several_threads_ends_once_with_its_bytes(pair: Pair) -> None:
    """Whoever begins it, whoever gives it up, and if its peer is forgotten meanwhile."""
    coordinator, rounds, threads = pair.decode.coordinator, 60, 3
    blocks = [[3, 1], [7, 4], [11, 6]]  # of each thread
    told: list[Queue[Any]] = [Queue() for _ in range(threads)]
    wrong: list[str] = getattr(pair.mapper, "wrong", [])
    pool, address = pair.decode.pools[0].canonical, pair.prefill.server.address

    def run(thread: int) -> None:
        chooser = random.Random(thread)
        for number in range(rounds):
            pull_id, source = f"{thread}-{number}", chooser.sample(range(1, 30), 2)
            remote = pair.prefill.lease(source, 16, request_id=pull_id)
            pool[blocks[thread]] = 0
            attended = chooser.random() < 0.5
            coordinator.pull(pull_id, remote, 0, 16, blocks[thread], attended=attended)
            if number % 20 == thread:
                coordinator._turns.call(lambda: coordinator._bury(address))
            gives_up = chooser.random() < 0.3
            if gives_up and chooser.random() < 0.5:
                coordinator.cancel(pull_id)
            coordinator.attend()
            if gives_up:
                coordinator.cancel(pull_id)
                end = told[thread].get(timeout=DEADLINE_S)
                while isinstance(end, PullDone):  # before it was given up
                    end = told[thread].get(timeout=DEADLINE_S)
                as_wanted = isinstance(end, PullDrained)
            else:
                end = told[thread].get(timeout=DEADLINE_S)
                found = pair.decode.tokens(blocks[thread], 0, 16)
                as_wanted = isinstance(end, PullDone)
                as_wanted &= np.array_equal(found, expected(remote, 0, 16))
            after = pool[blocks[thread]].clone()
            time.sleep(0)
            as_wanted &= bool((pool[blocks[thread]] == after).all())  # nobody writes any more
            if not as_wanted or end.pull_id != pull_id:
                wrong.append(f"{pull_id}: {end}")

    runners = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
    for runner in runners:
        runner.start()
    while any(runner.is_alive() for runner in runners):
        pair.decode.woken.wait(0.05)
        pair.decode.woken.clear()
        for event in coordinator.drain():
            told[int(event.pull_id[0])].put(event)
    assert wrong == []
    assert pair.worker.counters["internal_errors"] == 0
    assert threading.get_ident() not in pair.mapper.threads
