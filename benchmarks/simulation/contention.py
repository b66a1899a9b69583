"""Simulated tasks that take longer while other tasks run on the same device.

A device is hardware that servers share: a GPU, or the cores of a host. Each task is
slowed down by a factor that depends on the number and the kinds of the tasks that run
at the same time.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.events import Events

# Factors by which a task takes longer while 1, 2, 3, .. tasks run, including this task.
# The last factor is also for larger numbers.
Slowdowns = tuple[float, ...]


def slowdown(factors: Slowdowns, num_running: int) -> float:
    """Return how many times as long a task takes while `num_running` tasks run."""
    return factors[min(num_running, len(factors)) - 1]


@dataclass(frozen=True)
class Contention:
    """The factors by which the tasks of one kind are slowed down on a device.

    Attributes:
        kind: name of the kind.
        alike: factors if all running tasks are of this kind.
        mixed: factors if all other running tasks are of another kind.
    """

    kind: str
    alike: Slowdowns = (1.0,)
    mixed: Slowdowns = (1.0,)

    def factor(self, num_alike: int, num_running: int) -> float:
        """Return how many times as long a task takes.

        Between the two measured cases, the factor changes in proportion to the share of
        the other tasks that are of another kind.

        Args:
            num_alike: number of running tasks of this kind, including this task.
            num_running: number of all running tasks.
        """
        alike = slowdown(self.alike, num_running)
        if num_alike == num_running:
            return alike
        mixed_share = (num_running - num_alike) / (num_running - 1)
        mixed = slowdown(self.mixed, num_running)
        return alike + mixed_share * (mixed - alike)


@dataclass(eq=False)
class _Task:
    """A running task.

    Attributes:
        number: tasks that end at the same time end in the order of their numbers.
        remaining_s: seconds that the rest of the task takes if no other task runs.
    """

    number: int
    remaining_s: float
    contention: Contention
    on_end: Callable[[], None]


class SharedDevice:
    """Runs tasks at the same time. Each task is slowed down by the other tasks."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._tasks: list[_Task] = []
        self._numbers = itertools.count()
        self._advanced_at = 0.0
        self._num_changes = 0

    def start(
        self, seconds: float, contention: Contention, on_end: Callable[[], None]
    ) -> None:
        """Start a task.

        Args:
            seconds: duration of the task if no other task runs.
        """
        self._advance()
        self._tasks.append(_Task(next(self._numbers), seconds, contention, on_end))
        self._schedule_first_end()

    def _advance(self) -> None:
        """Advance all tasks to now. Call this before the number of tasks changes."""
        elapsed_s = self._events.now - self._advanced_at
        self._advanced_at = self._events.now
        for task in self._tasks:
            task.remaining_s -= elapsed_s / self._slowdown(task)

    def _slowdown(self, task: _Task) -> float:
        contention = task.contention
        num_alike = sum(
            other.contention.kind == contention.kind for other in self._tasks
        )
        return contention.factor(num_alike, len(self._tasks))

    def _schedule_first_end(self) -> None:
        """Schedule the end of the task that ends first."""
        self._num_changes += 1
        if not self._tasks:
            return
        seconds, _, task = min(
            (task.remaining_s * self._slowdown(task), task.number, task)
            for task in self._tasks
        )
        end_s = self._events.now + max(seconds, 0.0)
        number = self._num_changes
        self._events.schedule(end_s, partial(self._end, task, number))

    def _end(self, task: _Task, number: int) -> None:
        """End a task, unless the tasks have changed since its end was scheduled.

        Args:
            number: value of `_num_changes` when the end was scheduled.
        """
        if number != self._num_changes:
            return
        self._advance()
        self._tasks.remove(task)
        self._schedule_first_end()
        task.on_end()


class Frontend:
    """Runs the work for one server's requests outside of its engine, one task after
    the other.

    This is the work of HTTP processes, of the proxy, and of a load generator on the
    same host.
    """

    def __init__(self, device: SharedDevice, contention: Contention) -> None:
        self._device = device
        self._contention = contention
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False

    def add(self, seconds: float, on_end: Callable[[], None] = lambda: None) -> None:
        """Queue a task.

        Args:
            seconds: duration of the task if nothing else runs on the device.
        """
        self._waiting.append((seconds, on_end))
        if not self._is_busy:
            self._start_next()

    def _start_next(self) -> None:
        while self._waiting:
            seconds, on_end = self._waiting.popleft()
            if seconds > 0:
                self._is_busy = True
                self._device.start(
                    seconds, self._contention, partial(self._end, on_end)
                )
                return
            on_end()

    def _end(self, on_end: Callable[[], None]) -> None:
        self._is_busy = False
        on_end()
        if not self._is_busy:
            self._start_next()
