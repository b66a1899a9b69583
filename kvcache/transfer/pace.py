"""When to poll a device again: not all the time, and not too late.

Polling takes the interpreter's lock, which the engine's thread needs, and waking a sleeping thread
costs 0.15 ms. So the thread naps while a pull cannot have ended, judging by the speed of earlier
ones, and around its likely end its naps are as short as possible.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

ENDING_S = 0.0004  # before its likely end a pull counts as ending
_LEAD_S = 0.0001  # before it naps become as short as they can be
_SHORT_NAP_S = 0.000003
_PR_SET_TIMERSLACK = 29  # in ns
_PATIENCE = 0.5  # short naps go on for this share of the expected time after it
SAMPLE_BYTES = 1 << 20  # less says nothing about speed


# Beside a batch, of READs between GPUs. What they write takes from the batch's memory bandwidth, in
# proportion: on an H200 250 GB/s made a step 5.7 % longer, 120 GB/s 2.6 % and 110 GB/s 1.9 %. At 90
# GB/s it was no less, and pulls took a fifth longer.
PACED_BYTES_PER_S = 110e9
# Of READs into staging memory, out of which a kernel then places them: that reads and writes them
# once more. At 95 GB/s it made a step 7 % longer.
PACED_STAGED_BYTES_PER_S = 33e9
_PACED_POST_BYTES = 64 << 20


class Throttle:
    """Lets READs go on at a bounded rate while the engine computes.

    Args:
        busy: whether it does.
        max_bytes: of a post while it does not.
        bytes_per_s: of READs into their place.
        staged_bytes_per_s: of READs into staging memory.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        max_bytes: int,
        bytes_per_s: float = PACED_BYTES_PER_S,
        staged_bytes_per_s: float = PACED_STAGED_BYTES_PER_S,
    ) -> None:
        self._busy = busy
        self._max_bytes = max_bytes
        self._bytes_per_s = bytes_per_s
        self._staged_bytes_per_s = staged_bytes_per_s
        self._due_s = float("-inf")

    def post_bytes(self) -> int:
        """What the next post may read."""
        return min(_PACED_POST_BYTES, self._max_bytes) if self._busy() else self._max_bytes

    def admits(self, now: float) -> bool:
        """Whether the next post may go out."""
        return now >= self._due_s

    def is_idle(self, now: float) -> bool:
        """Whether the next post may go out, and bounds neither its size nor those after it."""
        return self.admits(now) and not self._busy()

    def posted(self, nbytes: int, now: float, *, staged: bool = False) -> bool:
        """A post went out, `staged` or into its place; whether the next one has to wait."""
        if not self._busy():
            return False
        self._due_s = max(self._due_s, now) + nbytes / self._rate(staged)
        return True

    def least_s(self, nbytes: int, *, staged: bool = False) -> float:
        """Seconds that so many bytes take at least, by what the engine does now."""
        return nbytes / self._rate(staged) if self._busy() else 0.0

    def _rate(self, staged: bool) -> float:
        return self._staged_bytes_per_s if staged else self._bytes_per_s


@dataclass
class Speed:
    """Of pulls from one peer. Follows gains at once and losses slowly: to look too early costs
    little."""

    bytes_per_s: float = 0.0  # 0: not known

    def learn(self, nbytes: int, seconds: float, *, watched: bool = True) -> None:
        """`watched` as of Pace."""
        if nbytes < SAMPLE_BYTES or seconds <= 0:
            return
        found = nbytes / seconds
        slower = 0.9 * self.bytes_per_s + 0.1 * found if watched else self.bytes_per_s
        self.bytes_per_s = max(found, slower)

    def expected_s(self, nbytes: int) -> float:
        """Seconds for so many bytes; 0 when nothing is known."""
        return nbytes / self.bytes_per_s if self.bytes_per_s else 0.0


@dataclass
class Pace:
    """Of one pull; times are of `time.perf_counter`."""

    began: float
    expected_s: float = 0.0  # 0: not known
    # While it runs. Processors that idle for more than 0.2 ms take 0.15 ms to wake.
    longest_nap_s: float = 0.0001
    throttled: bool = False  # so its speed tells nothing of the link
    watched: bool = True  # somebody looked while it ran; else it took less time than it seems

    def is_ending(self, now: float) -> bool:
        return now >= self.began + self.expected_s - ENDING_S

    def left_s(self, now: float) -> float:
        """Seconds to its likely end."""
        return self.began + self.expected_s - now

    def nap_s(self, now: float) -> float | None:
        """How long not to look; None when nothing is known."""
        if not self.expected_s:
            return None
        left_s = self.left_s(now)
        if left_s > _LEAD_S:
            return min(left_s - _LEAD_S, self.longest_nap_s)
        return _SHORT_NAP_S if -left_s < max(ENDING_S, _PATIENCE * self.expected_s) else None


def allow_short_naps() -> None:
    """Naps of the calling thread end within 1 us of their time, not within Linux's usual 50."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)
