"""Processor time of running processes, and of the rest of the host.

Unlike a duration, processor time hardly depends on what else runs on the host.
"""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of these processes and of this one so far."""
    return sum(map(_seconds_of, pids)) + time.process_time()


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
        self._pids = set(server_pids)
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
