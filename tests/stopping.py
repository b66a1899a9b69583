"""Signals to other processes; one that stops a process has done so before it returns."""

import os
import signal
import time
from pathlib import Path

DEADLINE_S = 30.0


def send(pid: int, number: int) -> None:
    """SIGSTOP reaches a thread when that is next scheduled: until then all of them work on, for
    milliseconds where others want the processor."""
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return
    deadline = time.monotonic() + DEADLINE_S
    while not _is_stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread that ended while this looked
        return False
    return {stat.rpartition(") ")[2][0] for stat in stats} <= {"T", "t", "Z", "X"}
