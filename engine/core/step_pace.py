"""How long a step of many tokens will take, and so when the next one should be planned.

The next step is launched before the current one has ended. If the current one is long, planning the
next right after its start is too soon: a request that arrives meanwhile would wait for both. A
while before its end is soon enough.
"""

from typing import Final

_FEWEST_TOKENS: Final = 1024  # whose time is their number's; below, it is reading the weights
_SHORTEST_S: Final = 0.02  # waits for no less: planning takes some 1 ms
_PART: Final = 0.7  # of the expected time, after which the next step is planned
_RISE: Final = 1.02  # of the expectation, for every step that took longer


class StepPace:
    """Remembers the fastest steps, so that what it expects is seldom more than what comes."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step took this long, alone on the device."""
        if num_tokens < _FEWEST_TOKENS:
            return
        rate = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = rate if known is None else min(rate, known * _RISE)

    def wait_s(self, num_tokens: int) -> float:
        """How long after its begin nothing needs to be planned behind a step."""
        if num_tokens < _FEWEST_TOKENS or self._seconds_per_token is None:
            return 0.0
        wait_s = _PART * num_tokens * self._seconds_per_token
        return wait_s if wait_s > _SHORTEST_S else 0.0
