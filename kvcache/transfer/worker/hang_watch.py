"""Notices a thread that makes no progress: stuck in a driver or a transport, it obeys no orders.

Without this every pull would run into its timeout and leave its blocks quarantined, in an engine
that looks healthy.
"""

import faulthandler
import threading

from protocol.process.lifecycle import VitalThread

# Longer than a driver's slowest call, a kernel's compilation, on a machine with no time for it.
_LOOK_S, _NUM_LOOKS = 10.0, 30


class ThreadStuck(Exception):
    """A thread has been at one thing for far too long."""


class HangWatch:
    """Ends the process, as a vital thread does, when the thread it watches is stuck.

    Counts looks, not seconds: a process that was stopped for a while has done nothing wrong.

    Attributes:
        at: counted up by the watched thread whenever it begins something.
        resting: whether it waits for something to do; set by that thread.
    """

    def __init__(self, name: str) -> None:
        self.at = 0
        self.resting = False
        self._name = name
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, f"{name}-watch")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        seen, num_same = -1, 0
        while not self._stopping.wait(_LOOK_S):
            num_same = num_same + 1 if self.at == seen and not self.resting else 0
            seen = self.at
            if num_same == _NUM_LOOKS:
                faulthandler.dump_traceback()
                raise ThreadStuck(
                    f"{self._name} has made no progress for {_LOOK_S * _NUM_LOOKS:g} s"
                )
