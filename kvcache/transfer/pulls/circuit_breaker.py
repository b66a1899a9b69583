"""A circuit breaker that refuses pulls from a peer after failures in a row.

The circuit breaker has three states:
- closed: pulls are allowed.
- open: no pull is allowed until `retry_at`. The circuit breaker opens after two
  failures in a row. The time until `retry_at` doubles with every further failure, up
  to a bound.
- half-open: from `retry_at` on, one pull at a time is allowed. A success closes the
  circuit breaker; a failure opens it again.
"""

MAX_FAILURES = 2  # this many failures in a row open the circuit breaker


def backoff_s(min_s: float, max_s: float, num_failures: int) -> float:
    """Seconds to wait after a failure.

    Args:
        min_s: the wait if `num_failures` is 0.
        max_s: the longest wait.
        num_failures: number of earlier failures in a row; each doubles the wait.
    """
    return min(min_s * 2.0 ** min(num_failures, 30), max_s)


class CircuitBreaker:
    """The circuit breaker of one peer. Pure: no I/O, no clock.

    Args:
        min_backoff_s: time from the opening of the circuit breaker until the first
            retry. Each further failure doubles the time.
        max_backoff_s: longest time from a failure until the next retry.

    Attributes:
        num_failures: number of failed pulls in a row.
        retry_at: before this time, an open circuit breaker allows no pull and counts no
            failure.
    """

    def __init__(self, min_backoff_s: float, max_backoff_s: float) -> None:
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self.num_failures = 0
        self.retry_at = 0.0

    def record_failure(self, now: float) -> bool:
        """Counts a failed pull; returns True if that opens a closed circuit breaker.

        A failure while the circuit breaker is open does not count, because the pull
        began before the circuit breaker opened.
        """
        if now < self.retry_at:
            return False
        self.num_failures += 1
        num_excess = self.num_failures - MAX_FAILURES
        if num_excess >= 0:
            wait_s = backoff_s(self._min_backoff_s, self._max_backoff_s, num_excess)
            self.retry_at = now + wait_s
        else:
            self.retry_at = now
        return num_excess == 0

    def record_success(self) -> None:
        """Closes the circuit breaker."""
        self.num_failures = 0
        self.retry_at = 0.0

    def allows_pull(self, now: float, *, is_busy: bool = False) -> bool:
        """True if a pull may begin now.

        Args:
            is_busy: a pull from the peer is already active. A half-open circuit breaker
                then allows no second pull.
        """
        if self.num_failures < MAX_FAILURES:
            return True
        return not is_busy and now >= self.retry_at
