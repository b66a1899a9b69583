"""Mapped pulls that the thread that orders them begins, and drives where that has nothing else to
do: the same pulls, sooner."""

import dis
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from select import select
from typing import Any

import numpy as np
import pytest

from kvcache.pool import KVPool
from kvcache.transfer import pace, pull_worker
from kvcache.transfer.host_mapper import HostMapper
from kvcache.transfer.mapped import MAX_ACTIVE, MappedPath
from kvcache.transfer.mapper import MappedMemory, MemoryMapper
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.pace import Pace
from kvcache.transfer.pull import PullDone, PullDrained, PullFailed
from protocol.errors import TransferFailed
from tests.e2e.cluster import wait_until

sys.path.insert(0, str(Path(__file__).parent))
from pull_rig import DEADLINE_S, ENDINGS, PATIENT, Decode, Prefill, expected

BLOCKS = [3, 1, 7, 2, 10, 12]


class Noting(MemoryMapper):
    """Knows which thread made each launch, and may refuse a thread."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.threads: list[int] = []
        self.looks: list[int] = []  # threads that found launches ended
        self.refuses = False
        self.fail_looks = False

    def bind_caller(self) -> None:
        if self.refuses:
            raise RuntimeError("no such device in this thread")

    def launch(self, *args: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().launch(*args)

    def finished(self, token: Any) -> bool:
        if self.fail_looks:
            raise RuntimeError("the device is lost")
        if has_ended := super().finished(token):
            self.looks.append(threading.get_ident())
        return has_ended


class Strict(HostMapper):
    """Copies later, in another thread; notes two threads at once, and what is unmapped too soon."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.threads: list[int] = []
        self.wrong: list[str] = []
        self.active: Counter[int] = Counter()  # launches, by address
        self._used = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._used.acquire(blocking=False):
            self.wrong.append("two threads at once")
            self._used.acquire()
        try:
            yield
        finally:
            self._used.release()

    def unmap(self, memory: MappedMemory) -> None:
        with self._alone():
            if self.active[memory.address]:
                self.wrong.append("unmapped under launches")
            super().unmap(memory)

    def launch(self, work: Any, index: int, *blocks: int) -> Any:
        with self._alone():
            self.threads.append(threading.get_ident())
            address = work.sources[index].address
            token = super().launch(work, index, *blocks)
            self.active[address] += 1
            return token, address

    def finished(self, token: Any) -> bool:
        with self._alone():
            has_ended = super().finished(token[0])
            self.active[token[1]] -= has_ended
            return has_ended


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


class Pair:
    """P, and D of one rank, which know each other: its worker sleeps between pulls."""

    def __init__(self, make_mapper: Callable[[KVPool], Any] = Noting) -> None:
        self._make_mapper = make_mapper
        self.prefill = Prefill(MemoryAgent)
        self.decode = Decode(MemoryAgent, make_mapped=self._mapped, settings=PATIENT)
        self.worker = self.decode.workers[0]
        self.link: Any = self.worker._link
        self.pull("first")
        assert isinstance(self.decode.wait(*ENDINGS), PullDone)
        self.mapper.threads.clear()

    def _mapped(self, pool: KVPool) -> MappedPath:
        self.mapper = self._make_mapper(pool)
        return MappedPath(self.mapper, chunk_bytes=1)  # a launch for every block

    def pull(self, pull_id: str, *, attended: bool = False) -> Any:
        remote = self.prefill.lease([5, 2, 9, 4, 6, 8], 48)
        self.decode.coordinator.pull(pull_id, remote, 0, 48, BLOCKS, attended=attended)
        return remote

    def rest(self) -> None:
        """Until the worker's thread sleeps, and the coordinator's has nothing to do either."""
        wait_until(lambda: not self.decode.coordinator._pulls)
        wait_until(lambda: self.link._sleeps and not select([self.link.waker], [], [], 0)[0])

    def sleep(self) -> None:
        """As `rest`; lets the worker wake for nothing but what has begun."""
        self.rest()
        self.link._sleeps = False  # so that no order wakes it

    def arrived(self, remote: Any) -> bool:
        return np.array_equal(self.decode.tokens(BLOCKS, 0, 48), expected(remote, 0, 48))

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


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
