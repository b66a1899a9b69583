"""Processor time of running processes, and of the rest of the host.

Unlike a duration, processor time hardly depends on the other programs of the host.
Durations are therefore measured several times, and runs during which other programs
were busy are ignored if possible.
"""

import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from protocol.settings.machine import available_cores

# A run is undisturbed if other programs use at most this share of the processors. Runs
# are repeated until _UNDISTURBED_RUNS were undisturbed, or up to _MAX_RUNS times.
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
    """Return the ids of a server's child processes, which are its engine's ranks."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # the server has ended
        return []
    return [int(word) for word in text.split()]


class OtherPrograms:
    """Measures the processor use of all programs that do not take part in a benchmark.

    The measurement starts when the object is created.

    Args:
        server_pids: the servers and proxies of the benchmark. These processes, their
            children and this program do not count as other programs.
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
        """Return the mean number of processors that other programs have used."""
        elapsed_s = time.monotonic() - self._started_at
        return max(self._seconds() - self._seconds_before, 0.0) / max(elapsed_s, 1e-3)


def _busy_seconds_of_host() -> float:
    """Return the busy time of all processors since the boot; see proc_stat(5)."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    values = [int(word) for word in first_line.split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = values[:8]
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


async def typical_s(pids: Sequence[int], run: Callable[[], Awaitable[float]]) -> float:
    """Repeat a measurement, and return the median time of the undisturbed runs.

    If too few runs were undisturbed, other programs run all the time. The result is
    then the median time of all runs.

    Args:
        pids: processes of the measured servers and proxies.
        run: measures once, and returns a time in seconds.
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
    """Return whether other programs use so many processors that they disturb a run."""
    return other_processors > _MAX_OTHER_SHARE * available_cores()
