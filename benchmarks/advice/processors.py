"""Processor time of running processes.

Unlike a duration, it hardly depends on what else runs on the host.
"""

import time
from collections.abc import Iterable
from pathlib import Path


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of these processes and of this one so far."""
    return sum(map(_seconds_of, pids)) + time.process_time()


def _seconds_of(pid: int) -> float:
    # Linux derives the id of a process's clock from its pid: clock_getcpuclockid(3).
    return time.clock_gettime(~pid << 3 | 2)


def children(pid: int) -> list[int]:
    """Return the processes that a server started: the ranks of its engine."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
