"""The metrics of the engine core, by series (protocol.metrics)."""

import time
from collections.abc import Callable
from typing import Final

from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from kvcache.blocks import BlockState
from protocol.metrics import ENGINE_TOTALS, stat_key
from protocol.process.output import num_dropped_lines

# An engine with requests sends a report at least about this often, to show that it is
# alive.
MAX_SILENCE_S: Final = 1.0
_REPORT_INTERVAL_S: Final = 0.25
_PREFIX_TOTALS: Final = ("prefix_cache_query_tokens", "prefix_cache_hit_tokens")


def scheduler_stats(scheduler: Scheduler) -> dict[str, float]:
    """The current metric values of a scheduler and its blocks."""
    allocator = scheduler.allocator
    counts = allocator.counts()
    values = {
        stat_key("baton_kv_blocks", state=state.name.lower()): counts[state]
        for state in BlockState
    }
    values["baton_kv_blocks_capacity"] = allocator.capacity
    values["baton_kv_block_size_tokens"] = scheduler.limits.block_size
    values["baton_kv_blocks_pinned"] = allocator.num_pinned
    values["baton_kv_pins_refused"] = allocator.num_pins_refused
    values["baton_kv_pinned_evicted"] = allocator.num_pinned_evicted
    values["baton_requests_running"] = len(scheduler.running)
    values["baton_requests_waiting"] = len(scheduler.waiting)
    values["baton_requests_receiving"] = len(scheduler.receiving)
    values["baton_preemptions"] = scheduler.num_preemptions
    return {name: float(value) for name, value in values.items()}


class CoreStats:
    """Counts the totals of the engine core, by metric series (protocol.metrics).

    Args:
        rank_stats: returns the values that rank 0 measures outside of the core.
    """

    def __init__(self, rank_stats: Callable[[], dict[str, float]] = dict) -> None:
        names = (*ENGINE_TOTALS, *_PREFIX_TOTALS)
        self._totals = dict.fromkeys((f"baton_{name}" for name in names), 0.0)
        self._rank_stats = rank_stats
        self._reported: dict[str, float] = {}
        self._due_s = 0.0

    def count_step(
        self, num_tokens: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        self._totals["baton_engine_steps"] += 1
        self._totals["baton_engine_step_tokens"] += num_tokens
        self._totals["baton_engine_step_prompt_tokens"] += num_prompt_tokens
        self._totals["baton_engine_step_seconds"] += seconds
        if num_prompt_tokens:
            self._totals["baton_engine_mixed_steps"] += 1
            self._totals["baton_engine_mixed_step_tokens"] += num_tokens
            self._totals["baton_engine_mixed_step_seconds"] += seconds

    def count_admission(self, sequence: Sequence) -> None:
        """Counts the prompt tokens of an admitted sequence and its hits in the prefix
        cache. Records the time of the sequence's first admission.
        """
        if sequence.times.admitted is None:
            sequence.times.admitted = time.monotonic()
        hits = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._totals["baton_prefix_cache_query_tokens"] += sequence.num_prompt_tokens
        self._totals["baton_prefix_cache_hit_tokens"] += hits

    def totals(self) -> dict[str, float]:
        return {
            **self._totals,
            **self._rank_stats(),
            "baton_engine_log_lines_dropped": float(num_dropped_lines()),
        }

    def take_due_report(
        self, collect: Callable[[], dict[str, float]], num_requests: int
    ) -> dict[str, float] | None:
        """Returns the values to report now, or None if no report is due.

        An engine without requests reports changes immediately. An engine with requests
        reports changes after _REPORT_INTERVAL_S. If no value has changed by that time,
        it reports at the latest after a further MAX_SILENCE_S.

        Args:
            collect: returns the current values.
            num_requests: the number of requests that have not ended.
        """
        now_s = time.monotonic()
        if num_requests and now_s < self._due_s:
            return None
        values = collect()
        if values == self._reported:
            if not num_requests or now_s < self._due_s + MAX_SILENCE_S:
                return None
        self._reported = values
        self._due_s = now_s + _REPORT_INTERVAL_S
        return values
