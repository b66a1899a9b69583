"""A circuit breaker that keeps pulls away from a peer whose pulls fail.

It is one of:
- closed: pulls are allowed.
- open: no pull is allowed until `retry_at`. It opens after two failures in a row, for a
  time that doubles with every further failure, up to a bound.
- half-open: after `retry_at` one pull at a time is allowed. A success closes the
  circuit breaker, a failure opens it again.
"""

MAX_FAILURES = 2  # in a row, before the circuit breaker opens


def backoff_s(min_s: float, max_s: float, num_failures: int) -> float:
    """The wait after a failure that was preceded by `num_failures` other failures."""
    return min(min_s * 2.0 ** min(num_failures, 30), max_s)


class CircuitBreaker:
    """The circuit breaker of one peer. Pure: no I/O, no clock.

    Args:
        min_backoff_s, max_backoff_s: shortest and longest time for which it is open.

    Attributes:
        num_failures: failed pulls in a row.
        retry_at: an open circuit breaker allows no pull before this time, and failures
            before it do not count.
    """

    def __init__(self, min_backoff_s: float, max_backoff_s: float) -> None:
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self.num_failures = 0
        self.retry_at = 0.0

    def record_failure(self, now: float) -> bool:
        """Counts a failed pull; returns True if it is the one that opens the circuit.

        A pull that fails while the circuit is open had begun before, and does not
        count.
        """
        if now < self.retry_at:
            return False
        self.num_failures += 1
        num_reopened = self.num_failures - MAX_FAILURES
        if num_reopened >= 0:
            wait_s = backoff_s(self._min_backoff_s, self._max_backoff_s, num_reopened)
            self.retry_at = now + wait_s
        else:
            self.retry_at = now
        return num_reopened == 0

    def record_success(self) -> None:
        """Closes the circuit breaker."""
        self.num_failures = 0
        self.retry_at = 0.0

    def allows_pull(self, now: float, *, busy: bool = False) -> bool:
        """True if a pull may be tried now.

        Args:
            busy: another pull from the peer is active; a half-open circuit breaker
                allows no second one.
        """
        if self.num_failures < MAX_FAILURES:
            return True
        return not busy and now >= self.retry_at
