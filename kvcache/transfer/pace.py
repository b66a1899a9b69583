"""When to look again at what a device does by itself: not all the time, and not too late.

A look costs the interpreter's lock, which the engine's thread wants; a nap may last 0.1 ms longer
than asked for. So the thread naps while a pull cannot have ended, by the speed of earlier ones, and
looks without pause for a short while around its likely end.
"""

import time
from dataclasses import dataclass

ENDING_S = 0.0004  # before its likely end a pull counts as ending
_LEAD_S = 0.00015  # a nap may be this much longer
_NAP_S = 0.0005  # at most, while something runs: commands wait as long
_PATIENCE = 0.5  # looks without pause go on for this share of the expected time after it
_SAMPLE_BYTES = 1 << 20  # less says nothing about speed


@dataclass
class Speed:
    """Of pulls from one peer. Follows gains at once and losses slowly: to look too early costs
    little."""

    bytes_per_s: float = 0.0  # 0: not known

    def learn(self, nbytes: int, seconds: float) -> None:
        if nbytes < _SAMPLE_BYTES or seconds <= 0:
            return
        found = nbytes / seconds
        self.bytes_per_s = max(found, 0.9 * self.bytes_per_s + 0.1 * found)

    def expected_s(self, nbytes: int) -> float:
        """Seconds for so many bytes; 0 when nothing is known."""
        return nbytes / self.bytes_per_s if self.bytes_per_s else 0.0


@dataclass
class Pace:
    """Of one pull; times are of `time.perf_counter`."""

    began: float
    expected_s: float  # 0: not known

    @classmethod
    def begin(cls, speed: Speed, nbytes: int) -> "Pace":
        return cls(time.perf_counter(), speed.expected_s(nbytes))

    def is_ending(self, now: float) -> bool:
        return now >= self.began + self.expected_s - ENDING_S

    def nap_s(self, now: float) -> float | None:
        """How long not to look; 0 to look again at once, None when nothing is known."""
        if not self.expected_s:
            return None
        left_s = self.began + self.expected_s - now
        if left_s > _LEAD_S:
            return min(left_s - _LEAD_S, _NAP_S)
        return 0.0 if -left_s < max(ENDING_S, _PATIENCE * self.expected_s) else None
