"""What the core counts, and when it tells of it."""

import time
from collections.abc import Callable
from typing import Final

from engine.core.sequence import Sequence
from engine.worker.kernel_watch import KERNELS

SILENT_S: Final = 1.0  # after which an engine with requests speaks, if only to show that it lives
_INTERVAL_S: Final = 0.25
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
