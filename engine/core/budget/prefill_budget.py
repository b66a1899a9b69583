"""How many prompt tokens a step may compute together with streams.

The budget is the largest number of prompt tokens with which a step with the present
streams fits the target, by measured durations (step_times.py). One moving average of
the ratio of actual to measured durations corrects all of them.
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

# If a step of the streams alone takes longer than the target, prompt tokens may add
# this share to its duration. Otherwise, no prompt would be computed.
_MIN_PROMPT_SHARE: Final = 0.25
_MIN_PROMPT_TOKENS: Final = 16
# If even the fewest prompt tokens exceed the target, a step may take this many times as
# long as with the fewest: on a GPU, several hundred tokens take hardly longer than 16.
_NEGLIGIBLE_FACTOR: Final = 1.1
# Only steps that take, or should take, at least this share of the target correct the
# durations. The durations of shorter steps deviate for other reasons.
_MIN_TARGET_SHARE: Final = 0.75
_WEIGHT: Final = 0.1  # of the latest step in the moving average
# A step that took longer than expected counts as at most this share longer. No
# disturbance makes a step shorter, so steps that took less time count in full.
_MAX_DELAY: Final = 0.5
_MIN_RATIO: Final = 1 / 64
_MAX_RATIO: Final = 64.0

# For an engine without measured steps: 10,000 prompt tokens per second. The moving
# average then finds the real speed.
UNMEASURED: Final = StepTimes(
    [StreamTimes(1, Polyline([Point(0, 1e-3)]))],
    MixedTimes(1, 0, Polyline([Point(0, 0.0), Point(512, 0.0512)])),
)


class PrefillBudget:
    """Derives the prompt tokens of a step from measured durations.

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
        Steps without streams or prompts, and steps below _MIN_TARGET_SHARE of the
        target, change nothing.
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
