"""Limits the number of tokens whose missing draft KV one round computes.

A sequence that begins to decode has a prompt without draft KV. The draft model computes
this KV in pieces, one in each round, so that the streams of the engine do not wait for
a long prompt.
"""

from typing import Final

_FIRST_TOKENS: Final = 64
_MIN_TOKENS: Final = 16
_MAX_GROWTH: Final = 2  # largest factor of the limit from one round to the next


class CatchUpBudget:
    """Limits the tokens of a round such that they take at most `max_seconds`.

    Args:
        max_seconds: target duration. A round of _MIN_TOKENS tokens is always allowed.
        max_tokens: the largest number of tokens of a round.

    Attributes:
        num_tokens: largest number of missing tokens that the next round computes.
        token_s: seconds that a token took in the last large step; 0 until measured.
    """

    def __init__(self, max_seconds: float, max_tokens: int) -> None:
        self._max_seconds = max_seconds
        self._max_tokens = max_tokens
        self.num_tokens = min(_FIRST_TOKENS, max_tokens)
        self.token_s = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of a step with `num_tokens` tokens. Ignores a small step
        that takes little time, because it does not show how long a large step takes."""
        if num_tokens < self.num_tokens // 2 and seconds <= self._max_seconds:
            return
        self.token_s = seconds / num_tokens
        in_time = int(num_tokens * self._max_seconds / max(seconds, 1e-9))
        limit = min(in_time, _MAX_GROWTH * self.num_tokens)
        self.num_tokens = min(max(limit, _MIN_TOKENS), self._max_tokens)
