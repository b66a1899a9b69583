import os
import threading
from collections.abc import Iterator
from select import select

import pytest

from kvcache.transfer.turns import Turns
from kvcache.transfer.waker import Alarm

DEADLINE_S = 20.0


class State:
    """Counts turns; obeys calls."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, float("inf")
        self.turns, self.told, self.failures = 0, 0, 0
        self.turned = threading.Event()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.names: set[str] = set()
        self.all = Turns(
            "test-turns",
            [self],
            turn=self.turn,
            failed=self.fail,
            after=(self.after,),
            deadline=lambda: self.due,
            clock=lambda: self.now,
        )

    def fileno(self) -> int:
        return self.fd

    def fail(self) -> None:
        self.failures += 1

    def turn(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        self.names.add(threading.current_thread().name)
        self.turns += 1

    def after(self) -> None:
        self.told += 1
        self.turned.set()

    def wait(self) -> None:
        assert self.turned.wait(DEADLINE_S)
        self.turned.clear()


@pytest.fixture
def state() -> Iterator[State]:
    state = State()
    yield state
    state.all.close(lambda: None)
    os.close(state.fd)


def test_calls_are_obeyed_in_order_in_the_callers_thread(state: State) -> None:
    found: list[tuple[int, int]] = []
    for number in range(3):
        state.all.call(lambda number=number: found.append((number, threading.get_ident())))
    assert found == [(number, threading.get_ident()) for number in range(3)] and state.told == 3


def test_a_call_that_raises_is_followed_up_and_stops_no_other(state: State) -> None:
    found: list[int] = []
    state.all.call(lambda: found.append(1 // 0))
    assert state.failures == 1 and found == []
    state.all.call(lambda: found.append(2))
    assert state.failures == 1 and found == [2]


def test_a_call_takes_a_turn_only_when_that_is_due_then(state: State) -> None:
    state.all.call(lambda: None)
    assert state.turns == 0

    def makes_due() -> None:
        state.due = state.now

    state.all.call(makes_due)
    assert state.turns == 1


def test_a_call_that_makes_nothing_due_sooner_says_so_for_itself_alone(state: State) -> None:
    state.due = state.now

    def says_so() -> bool:
        return True

    state.all.call(says_so)
    assert state.turns == 0

    def says_so_and_calls() -> bool:
        state.all._calls.append(lambda: None)  # as another thread would meanwhile
        return True

    state.all.call(says_so_and_calls)
    assert state.turns == 1


def test_the_thread_takes_turns_for_sources_and_deadlines(state: State) -> None:
    state.all.start()
    state.wait()
    os.eventfd_write(state.fd, 1)
    state.wait()
    assert state.names == {"test-turns"}
    before = state.turns
    state.due = -1.0  # sooner than the thread thinks: it is told
    state.all.take()
    while "test-turns" not in state.names or state.turns < before + 2:
        state.wait()
    state.due = float("inf")


def test_a_turn_may_be_declined_and_there_is_none_after_the_end(state: State) -> None:
    state.all.take(lambda: False)
    assert state.turns == 0
    last: list[bool] = []
    state.all.close(lambda: last.append(True))
    state.all.call(lambda: last.append(False))
    assert last == [True] and state.turns == 0


def test_turns_leave_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    state = State()
    state.all.start()
    state.wait()
    state.all.close(lambda: None)
    os.close(state.fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sooner_deadline_wakes_the_thread_when_it_comes_and_not_before(state: State) -> None:
    state.all.start()
    state.wait()
    before = state.turns
    state.due = 1000.0
    state.all.take()
    assert select([state.all._waker, state.all._alarm], [], [], 0)[0] == []
    assert (state.turns, state.names) == (before + 1, {"test-turns", "MainThread"})
    state.due = 0.001
    state.all.take()
    while state.turns < before + 3:
        state.wait()
    state.due = float("inf")


def test_an_alarm_rings_at_what_was_set_last() -> None:
    alarm = Alarm()
    alarm.set(0.0)
    assert select([alarm], [], [], DEADLINE_S)[0] == [alarm]
    alarm.clear()
    alarm.clear()  # nor does it block
    assert select([alarm], [], [], 0)[0] == []
    alarm.set(1e-9)
    alarm.set(1e6)
    assert select([alarm], [], [], 0)[0] == []
    alarm.set(1e-9)
    alarm.set(float("inf"))
    assert select([alarm], [], [], 0)[0] == []
    alarm.close()
