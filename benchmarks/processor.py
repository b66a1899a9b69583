"""How fast the processors are that a measurement runs on.

Of a virtual machine each may be one thread of a core whose other thread is a neighbour's: while
that one works, Python here takes twice as long. A fixed loop tells, whatever is measured beside it.
"""

import os
import time
from pathlib import Path

QUIET = 1.3  # a processor is, whose loop takes no longer than this many of the fastest one's
_ROUNDS = 100_000


def loop_ms() -> float:
    """What the loop takes here, the best of three."""
    return min(_once_ms() for _ in range(3))


def loop_ms_beside(thread_id: int | None) -> float:
    """What it takes on the processor that a thread of this process was on last.

    Args:
        thread_id: as the system numbers it.
    """
    stat = Path(f"/proc/self/task/{thread_id}/stat").read_text()
    return _loop_ms_on(int(stat.rpartition(")")[2].split()[36]))


def fastest_loop_ms() -> float:
    """What it takes on the fastest processor that this process may use."""
    return min(_loop_ms_on(processor) for processor in os.sched_getaffinity(0))


def _loop_ms_on(processor: int) -> float:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    try:
        return loop_ms()
    finally:
        os.sched_setaffinity(0, allowed)


def _once_ms() -> float:
    started, total = time.perf_counter(), 0
    for number in range(_ROUNDS):
        total += number & 7
    return (time.perf_counter() - started) * 1e3


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
