"""What the core learns of its steps: totals to be told, and how long a step will take."""

import time
from collections.abc import Callable
from typing import Final

from engine.core.sequence import Sequence
from engine.worker.kernel_watch import KERNELS

SILENT_S: Final = 1.0  # after which an engine with requests speaks, if only to show that it lives
_INTERVAL_S: Final = 0.25
_FEWEST_TOKENS: Final = 1024  # whose time is their number's; below, it is reading the weights
_SHORTEST_S: Final = 0.02  # waits for no less: planning takes some 1 ms
_PART: Final = 0.7  # of the expected time, after which the next step is planned
_RISE: Final = 1.02  # of the expectation, for every step that took longer
_NAMES: Final = (
    "baton_engine_steps",
    "baton_engine_step_tokens",
    "baton_engine_step_seconds",
    "baton_prefix_cache_query_tokens",
    "baton_prefix_cache_hit_tokens",
)


class CoreStats:
    """Totals by series (protocol.metrics)."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys(_NAMES, 0.0)
        self._told: dict[str, float] = {}
        self._due_s = 0.0

    def step_ended(self, num_tokens: int, seconds: float) -> None:
        self._totals["baton_engine_steps"] += 1
        self._totals["baton_engine_step_tokens"] += num_tokens
        self._totals["baton_engine_step_seconds"] += seconds

    def admitted(self, sequence: Sequence) -> None:
        """Its blocks are there, and what the prefix cache had of them is known."""
        hits = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._totals["baton_prefix_cache_query_tokens"] += sequence.num_prompt_tokens
        self._totals["baton_prefix_cache_hit_tokens"] += hits

    def totals(self) -> dict[str, float]:
        return {**self._totals, "baton_kernels_loaded_late": float(KERNELS.num_after)}

    def news(
        self, collect: Callable[[], dict[str, float]], *, is_idle: bool
    ) -> dict[str, float] | None:
        """What is to be told now, if anything: a change, of which an idle engine tells at once,
        or the same again after a silence."""
        now_s = time.monotonic()
        if not is_idle and now_s < self._due_s:
            return None
        values = collect()
        if values == self._told and (is_idle or now_s < self._due_s + SILENT_S):
            return None
        self._told, self._due_s = values, now_s + _INTERVAL_S
        return values


class StepPace:
    """How long a step of many tokens will take, and so when the next one should be planned.

    The next step is launched before the current one has ended. If the current one is long,
    planning the next right after its start is too soon: a request that arrives meanwhile would wait
    for both. A while before its end is soon enough. The fastest steps are remembered, so that what
    is expected is seldom more than what comes.
    """

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step took this long, alone on the device."""
        if num_tokens >= _FEWEST_TOKENS:
            rate, known = seconds / num_tokens, self._seconds_per_token
            self._seconds_per_token = rate if known is None else min(rate, known * _RISE)

    def wait_s(self, num_tokens: int) -> float:
        """How long after its begin nothing needs to be planned behind a step."""
        if num_tokens < _FEWEST_TOKENS or self._seconds_per_token is None:
            return 0.0
        wait_s = _PART * num_tokens * self._seconds_per_token
        return wait_s if wait_s > _SHORTEST_S else 0.0
