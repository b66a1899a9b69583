"""Processor time of running processes, and of the rest of the host.

Unlike a duration, processor time hardly depends on what else runs on the host.
Durations are measured several times, with as little as possible from other programs.
"""

import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from protocol.settings.machine import available_cores

# A run is undisturbed if other programs use at most this share of the processors. Runs
# are repeated until _UNDISTURBED_RUNS were undisturbed, or until the maximum.
_MAX_OTHER_SHARE = 0.1
_UNDISTURBED_RUNS = 3
_MAX_RUNS = 6


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of these processes so far."""
    return sum(map(_seconds_of, pids))


def _seconds_of(pid: int) -> float:
    """Return the processor time of a process; 0 if it has ended."""
    try:
        # Linux derives the id of a process's clock from its pid: clock_getcpuclockid(3)
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def children(pid: int) -> list[int]:
    """Return the processes that a server started: the ranks of its engine."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended
        return []
    return [int(word) for word in text.split()]


class OtherPrograms:
    """The programs of the host that are not measured, from now on.

    Args:
        server_pids: the servers and the proxy that are measured, like this program.
    """

    def __init__(self, server_pids: Sequence[int]) -> None:
        self._pids = {os.getpid(), *server_pids}
        for pid in server_pids:
            self._pids.update(children(pid))
        self._started_at = time.monotonic()
        self._seconds_before = self._seconds()

    def _seconds(self) -> float:
        return _busy_seconds_of_host() - processor_seconds(self._pids)

    def processors(self) -> float:
        """Return how many processors these programs have used, on average."""
        elapsed_s = time.monotonic() - self._started_at
        return max(self._seconds() - self._seconds_before, 0.0) / max(elapsed_s, 1e-3)


def _busy_seconds_of_host() -> float:
    """Return the time in which the host's processors were not idle, proc_stat(5)."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    values = [int(word) for word in first_line.split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = values[:8]
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


async def typical_s(pids: Sequence[int], run: Callable[[], Awaitable[float]]) -> float:
    """Return the median time of undisturbed runs; of all runs if too few were
    undisturbed, because other programs then run all the time.

    Args:
        pids: the processes that are measured.
    """
    seconds: list[float] = []
    undisturbed: list[float] = []
    while len(undisturbed) < _UNDISTURBED_RUNS and len(seconds) < _MAX_RUNS:
        others = OtherPrograms(pids)
        seconds.append(await run())
        if not is_disturbed(others.processors()):
            undisturbed.append(seconds[-1])
    is_idle = len(undisturbed) == _UNDISTURBED_RUNS
    return statistics.median(undisturbed if is_idle else seconds)


def is_disturbed(other_processors: float) -> bool:
    """Return whether the use of processors by other programs makes times too long."""
    return other_processors > _MAX_OTHER_SHARE * available_cores()
