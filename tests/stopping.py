"""Sends signals to other processes. SIGSTOP has taken effect when `send` returns."""

import os
import signal
import time
from pathlib import Path

DEADLINE_S = 30.0


def send(pid: int, number: int) -> None:
    """Send a signal to a process. After SIGSTOP, wait until all its threads have
    stopped.

    The wait is needed because a running thread stops only at its next return to the
    kernel, which may be milliseconds later on a busy machine.
    """
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return
    deadline = time.monotonic() + DEADLINE_S
    while not _is_stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} did not stop in time"
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended while its file was read
        return False
    states = {stat.rpartition(") ")[2][0] for stat in stats}
    return states <= {"T", "t", "Z", "X"}
