"""Whether most references to KV are refused, which an operator should hear of: pure.

Answers stay right then, and cost as much as without prefill servers.
"""

import math
from collections import Counter

from protocol.errors import KVParamsRejected

_WINDOW_S = 60.0


class RefusalAlarm:
    """Judges each minute of references at its end, which the first reference after it brings."""

    def __init__(self) -> None:
        self._began_s = -math.inf
        self._used = 0
        self._refused = Counter[str]()  # by the field at fault
        self._last: dict[str, str] = {}  # message by field

    def heard(self, refusal: KVParamsRejected | None, now_s: float) -> str | None:
        """Takes in a reference, refused or not. Returns what to warn of: at most once a minute."""
        warning = None
        if now_s - self._began_s >= _WINDOW_S:
            warning = self._verdict(now_s)
            self._began_s, self._used = now_s, 0
            self._refused.clear()
        if refusal is None:
            self._used += 1
        else:
            field = refusal.param or ""
            self._refused[field] += 1
            self._last[field] = refusal.message
        return warning

    def _verdict(self, now_s: float) -> str | None:
        num_refused = self._refused.total()
        if num_refused <= self._used:
            return None
        ((field, _),) = self._refused.most_common(1)
        return (
            f"prefill servers work in vain: {num_refused} of {num_refused + self._used} references "
            f"to their KV were refused in the last {now_s - self._began_s:.0f} s; "
            f"mostly: {self._last[field]}"
        )
