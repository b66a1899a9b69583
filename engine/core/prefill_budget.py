"""How many prompt tokens a step may compute together with streams, learned from the
durations of steps.

The expected duration of a step is a sum of four terms: a constant, one for each stream,
one for each token of KV that it reads, and one for each prompt token. A Kalman filter
adapts the terms to the measured durations. A single step that took far too long changes
them little.

A step with any prompt tokens has a minimum duration, because it is launched kernel by
kernel. The sum is therefore wrong for short prompts. Only steps with about as many
prompt tokens as the budget allows are used to learn the term of a prompt token.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

# The terms are durations of: a step, 64 streams, 65,536 tokens of KV, 1,024 prompt
# tokens.
_UNITS: Final[npt.NDArray[np.float64]] = np.array([1.0, 64.0, 65536.0, 1024.0])
_INITIAL_TERMS_S: Final = np.array([4e-3, 1e-3, 2e-3, 25e-3])
_MIN_TERMS_S: Final = np.array([1e-5, 0.0, 0.0, 1e-3])
_INITIAL_STD_S: Final = 0.1  # standard deviation of each initial term
_MAX_VARIANCE: Final = len(_UNITS) * _INITIAL_STD_S**2
# These are shares of the expected duration of a step.
_NOISE: Final = 0.1  # noise of one measurement
_DRIFT: Final = 2e-2  # change of the terms from one step to the next
_MAX_INNOVATION: Final = 0.3  # a larger deviation is clipped
# A step is measured if it has at least this share of the allowed prompt tokens.
_MIN_BUDGET_SHARE: Final = 0.75
# Prompts get at least this share of the time that the streams take.
_MIN_PROMPT_SHARE: Final = 0.25
_MIN_PROMPT_TOKENS: Final = 16


class Load(NamedTuple):
    """The work of one step: streams, tokens of KV that it reads, and prompt tokens."""

    streams: int
    context_tokens: int
    prompt_tokens: int


class PrefillBudget:
    """Learns the duration of steps and derives the prompt tokens that a step may have.

    Args:
        target_s: duration that a step with streams should not exceed.
        max_tokens: most tokens of a step.
    """

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._terms = _INITIAL_TERMS_S.copy()
        self._covariance = np.eye(len(_UNITS)) * _INITIAL_STD_S**2

    def record_step(self, load: Load, seconds: float) -> None:
        """Adapts the terms to the measured duration of a step."""
        if load.prompt_tokens:
            allowed_tokens = self.prompt_tokens(load.streams, load.context_tokens)
            if load.prompt_tokens < _MIN_BUDGET_SHARE * allowed_tokens:
                return
        expected_s = self.seconds(load)
        sizes = _sizes(load)
        # The uncertainty of terms that are not measured grows up to a limit.
        if self._covariance.trace() < _MAX_VARIANCE:
            self._covariance += np.eye(len(sizes)) * (_DRIFT * expected_s) ** 2
        gain = self._covariance @ sizes
        scale = sizes @ gain + (_NOISE * expected_s) ** 2
        max_innovation_s = _MAX_INNOVATION * expected_s
        innovation_s = np.clip(
            seconds - expected_s, -max_innovation_s, max_innovation_s
        )
        self._terms += gain / scale * innovation_s
        np.maximum(self._terms, _MIN_TERMS_S, out=self._terms)
        self._covariance -= np.outer(gain, gain) / scale

    def seconds(self, load: Load) -> float:
        """The expected duration of a step."""
        return float(self._terms @ _sizes(load))

    def prompt_tokens(self, streams: int, context_tokens: int) -> int:
        """Prompt tokens allowed in a step with these streams. At least a few are
        allowed, so that every prompt completes."""
        streams_s = self.seconds(Load(streams, context_tokens, 0))
        prompts_s = max(self._target_s - streams_s, _MIN_PROMPT_SHARE * streams_s)
        num_tokens = int(prompts_s * _UNITS[-1] / self._terms[-1])
        return min(max(num_tokens, _MIN_PROMPT_TOKENS), self._max_tokens)


def _sizes(load: Load) -> npt.NDArray[np.float64]:
    counts = [1.0, load.streams, load.context_tokens, load.prompt_tokens]
    return np.array(counts, np.float64) / _UNITS
