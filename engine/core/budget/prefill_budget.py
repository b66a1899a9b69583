"""Limits the prompt tokens of a step that also decodes, so that it meets a target
duration.

The budget is the largest number of prompt tokens with which the step, including its
decoding sequences ("streams"), is expected to meet the target. An expected duration is
a measured duration (step_times.py) times one factor for all steps: a moving average of
the ratio of actual to measured durations.
"""

from typing import Final

from engine.core.budget.step_times import (
    Load,
    MixedTimes,
    Point,
    Polyline,
    StepTimes,
    StreamTimes,
)

# Prompt tokens may always add this share to the duration of a step with the streams
# alone. Prompts therefore progress even if the streams alone exceed the target.
_MIN_PROMPT_SHARE: Final = 0.25
_MIN_PROMPT_TOKENS: Final = 16
# A step may always take this many times as long as a step with _MIN_PROMPT_TOKENS
# prompt tokens, because on a GPU several hundred tokens take hardly longer than 16.
_NEGLIGIBLE_FACTOR: Final = 1.1
# Only steps with an expected or actual duration of at least this share of the target
# correct the expected durations. The errors of shorter steps say little about steps
# near the target.
_MIN_TARGET_SHARE: Final = 0.75
_WEIGHT: Final = 0.1  # of the latest step in the moving average
# A step that took longer than expected counts as at most this share longer, because a
# disturbance may have delayed it. Steps that took less time count in full, because no
# disturbance makes a step shorter.
_MAX_DELAY: Final = 0.5
_MIN_RATIO: Final = 1 / 64
_MAX_RATIO: Final = 64.0

# The times that an engine without measured steps assumes: 10,000 prompt tokens per
# second. The moving average then corrects them.
UNMEASURED: Final = StepTimes(
    [StreamTimes(1, Polyline([Point(0, 1e-3)]))],
    MixedTimes(1, 0, Polyline([Point(0, 0.0), Point(512, 0.0512)])),
)


class PrefillBudget:
    """Calculates from measured durations how many prompt tokens a step may compute.

    Args:
        times: the durations that the warm-up measured.
        target_s: duration that a step with streams should not exceed.
        max_tokens: largest number of prompt tokens of a step.
    """

    def __init__(self, times: StepTimes, target_s: float, max_tokens: int) -> None:
        self._times = times
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._ratio = 1.0  # of actual to measured durations

    def prompt_tokens(
        self,
        streams: int,
        context_tokens: int,
        prompt_start: float = 0.0,
        extra_s: float = 0.0,
    ) -> int:
        """Prompt tokens allowed in a step with these streams. At least a few are
        allowed, so that every prompt completes.

        Args:
            context_tokens: tokens of KV that all streams together read.
            prompt_start: tokens of KV before the prompt tokens.
            extra_s: time that the step may take beyond the target.
        """
        times = self._times
        load = Load(streams, context_tokens, self._max_tokens, prompt_start)
        min_tokens = min(_MIN_PROMPT_TOKENS, self._max_tokens)
        shortest_s = times.seconds(load._replace(prompt_tokens=min_tokens))
        decode_s = times.decode_s(streams, context_tokens)
        limit_s = max(
            (self._target_s + extra_s) / self._ratio,
            (1 + _MIN_PROMPT_SHARE) * decode_s,
            _NEGLIGIBLE_FACTOR * shortest_s,
        )
        return max(times.max_prompt_tokens(load, limit_s), min_tokens)

    def record_step(self, load: Load, seconds: float) -> None:
        """Corrects the expected durations by the duration of a finished step.

        A single step that took far too long changes the expected durations little.
        Steps without streams, steps without prompts, and steps much shorter than the
        target (_MIN_TARGET_SHARE) change nothing.
        """
        if not load.streams or not load.prompt_tokens:
            return
        expected_s = self.seconds(load)
        is_short = max(expected_s, seconds) < _MIN_TARGET_SHARE * self._target_s
        if is_short or expected_s <= 0.0:
            return
        deviation = min(seconds / expected_s - 1, _MAX_DELAY)
        ratio = self._ratio * (1 + _WEIGHT * deviation)
        self._ratio = min(max(ratio, _MIN_RATIO), _MAX_RATIO)

    def seconds(self, load: Load) -> float:
        """The expected duration of a step."""
        return self._ratio * self._times.seconds(load)
