"""Measured durations of decode steps that all have the same number of streams, with
and without proposals.

A stream is a sequence that decodes. A row is a position that a step computes: each
stream has one, and each proposed token one more. The duration of a step with proposals
is stored relative to the duration of a step without proposals, as a slowdown, because
both durations grow with the contexts.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The first duration of steps without proposals is the median of this many steps, so
# that two interrupted steps do not matter.
MIN_PLAIN_STEPS: Final = 5
# After this many steps with proposals, a step without proposals is measured again. A
# measurement takes two steps, because the first one is not launched ahead. It costs 3 %
# of the gain.
PLAIN_INTERVAL: Final = 64
# Measurements expire after this many steps without prompts, because contexts change.
# 2,000 steps take about half a minute.
MAX_AGE_STEPS: Final = 2_000
# About this many of the latest measurements count in a mean, so that the mean follows
# growing contexts.
_WINDOW: Final = 12
# The relative noise of a measured duration. The mean of n durations has this error
# divided by sqrt(n). The mean slowdown of a rarely measured number of proposals is
# reduced by its error, because the number may be better than it looks.
_NOISE: Final = 0.1
# A larger relative deviation is probably not noise but a change of the durations, for
# example because sequences with long contexts have ended. Steps without proposals are
# then measured again.
_MAX_DEVIATION: Final = 0.25
# This many deviating steps with proposals in a row show a change of the durations. A
# single deviating step may have been interrupted.
_MIN_DEVIATING_STEPS: Final = 2
# A measured duration is limited to this many times the largest possible duration of the
# step, because other work of the machine may have interrupted the step.
_OUTLIER: Final = 2.0
# A step has at most this many times the rows of the largest measured step, because the
# duration of a much larger step is unknown.
_MAX_GROWTH: Final = 1.5
# Counts of streams and of proposals are rounded up to this many significant bits.
# Counts with the same result share measurements, because their durations differ by 6 %
# at most.
_SIGNIFICANT_BITS: Final = 5


def rounded_up(number: int) -> int:
    """Returns the number, rounded up to five significant bits. Counts of streams and of
    proposals that round to the same number share measurements."""
    shift = max(0, (number - 1).bit_length() - _SIGNIFICANT_BITS)
    return -(-number >> shift) << shift


def _rounded_numbers(maximum: int) -> Ints:
    """Returns the numbers from 1 to `maximum` that `rounded_up` returns."""
    numbers = [1]
    while numbers[-1] < maximum:
        numbers.append(rounded_up(numbers[-1] + 1))
    return np.array(numbers)


# The rounded numbers of proposals of a step. Durations are estimated for each of them.
NUMBERS: Final = _rounded_numbers(2**20)


class MovingMean:
    """A mean in which later values count more.

    Attributes:
        step: the number of the step of the latest value.
    """

    def __init__(self, value: float, num_values: int, step: int) -> None:
        self.value = value
        self.num_values = num_values
        self.step = step

    def add(self, value: float, step: int) -> None:
        self.num_values += 1
        self.value += (value - self.value) / min(self.num_values, _WINDOW)
        self.step = step

    def has_expired(self, step: int) -> bool:
        return step - self.step > MAX_AGE_STEPS

    def deviates(self, value: float) -> bool:
        return abs(value - self.value) > _MAX_DEVIATION * self.value


def _with(mean: MovingMean | None, value: float, step: int) -> MovingMean:
    """Returns the mean with one more value."""
    if mean is None:
        return MovingMean(value, 1, step)
    mean.add(value, step)
    return mean


class Estimates(NamedTuple):
    """Slowdowns of steps with proposals, one for each of NUMBERS. A slowdown is a
    duration relative to a step without proposals.

    Attributes:
        expected: the expected slowdowns. For a number of proposals that was not
            measured, the optimistic slowdown.
        optimistic: the smallest likely slowdowns. They are below the expected ones
            where few steps were measured.
        largest: the largest possible slowdowns, apart from noise.
        is_measured: whether steps with this number of proposals were measured.
    """

    expected: Floats
    optimistic: Floats
    largest: Floats
    is_measured: NDArray[np.bool_]


class BatchTimes:
    """The durations of steps with `num_streams` streams. The argument `step` of the
    methods is a count of all steps without prompts, with any number of streams."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._plain: MovingMean | None = None
        # Durations of the latest steps without proposals, if they deviate from the
        # mean, or if there is no mean yet.
        self._unconfirmed: list[float] = []
        self._num_since_plain = 0  # steps with proposals since the latest plain one
        self._num_deviating = 0  # deviating steps with proposals in a row
        self._slowdowns: dict[int, MovingMean] = {}  # by index in NUMBERS
        self._after_proposals: MovingMean | None = None
        self._estimates: Estimates | None = None  # None after a change

    @property
    def plain_s(self) -> float | None:
        """The duration of a step without proposals in seconds, reduced by its likely
        error; None if unknown. A value that is too large would make losses look like
        gains."""
        if self._plain is None:
            return None
        num_values = min(self._plain.num_values, _WINDOW)
        return self._plain.value * (1 - float(_NOISE / num_values**0.5))

    def needs_plain_step(self, step: int) -> bool:
        """Whether the next step must have no proposals, so that it can be measured."""
        if self._plain is None or self._plain.has_expired(step):
            return True
        return (
            bool(self._unconfirmed)
            or self._num_deviating >= _MIN_DEVIATING_STEPS
            or self._num_since_plain >= PLAIN_INTERVAL
        )

    def add_plain(self, seconds: float, step: int) -> None:
        """Records a step without proposals."""
        self._num_since_plain = 0
        self._num_deviating = 0
        self._drop_expired(step)
        if self._plain is not None and not self._plain.deviates(seconds):
            self._plain.add(seconds, step)
            self._unconfirmed.clear()
            return
        self._unconfirmed.append(seconds)
        if len(self._unconfirmed) == MIN_PLAIN_STEPS:
            median = sorted(self._unconfirmed)[MIN_PLAIN_STEPS // 2]
            self._plain = MovingMean(median, MIN_PLAIN_STEPS, step)
            self._unconfirmed.clear()

    def add_slowdown(self, num_proposals: int, slowdown: float, step: int) -> float:
        """Records the slowdown of a step with proposals. If `num_proposals` is 0, the
        step had no proposals, but speculation delayed it.

        Returns:
            The mean slowdown of such steps; at least 1, because more rows never take
            less time.
        """
        if not num_proposals:
            slowdown = min(slowdown, _OUTLIER)
            self._after_proposals = _with(self._after_proposals, slowdown, step)
            return max(1.0, self._after_proposals.value)
        self._num_since_plain += 1
        index = int(np.searchsorted(NUMBERS, num_proposals))
        slowdown = min(slowdown, _OUTLIER * float(self.estimates.largest[index]))
        mean = self._slowdowns.get(index)
        if mean is not None and mean.deviates(slowdown):
            self._num_deviating += 1
        else:
            self._num_deviating = 0
        mean = _with(mean, slowdown, step)
        self._slowdowns[index] = mean
        self._estimates = None
        return max(1.0, mean.value)

    def expected_slowdown(self, num_proposals: int) -> float:
        """The expected result of `add_slowdown`, for a step without a measured
        duration."""
        if num_proposals:
            index = int(np.searchsorted(NUMBERS, num_proposals))
            return float(self.estimates.expected[index])
        return max(1.0, self._after_proposals.value) if self._after_proposals else 1.0

    def _drop_expired(self, step: int) -> None:
        if self._plain is not None and self._plain.has_expired(step):
            self._plain = None
        for index, mean in list(self._slowdowns.items()):
            if mean.has_expired(step):
                del self._slowdowns[index]
                self._estimates = None

    @property
    def max_proposals(self) -> int:
        """The largest number of proposals that the next step may have."""
        last = 0
        if self._slowdowns:
            last = int(NUMBERS[max(self._slowdowns)])
        max_rows = int(_MAX_GROWTH * (self._num_streams + last))
        return max(last + 1, max_rows - self._num_streams)

    @property
    def estimates(self) -> Estimates:
        if self._estimates is None:
            self._estimates = self._estimate()
        return self._estimates

    def _estimate(self) -> Estimates:
        """Estimates all slowdowns.

        Between two measured numbers of proposals, the slowdown is interpolated, and the
        largest possible slowdown is that of the greater number. Beyond the greatest
        measured number, the slowdown continues with the slope from the smallest
        measured number to the greatest. Steps without proposals do not count for this
        slope, because they lack the fixed cost of a verification. The largest possible
        slowdown grows in proportion to the number of rows. It cannot grow faster,
        because a step does some work only once for all rows.
        """
        indexes = np.array(sorted(self._slowdowns), dtype=np.int64)
        means = [self._slowdowns[index] for index in indexes.tolist()]
        numbers = np.array([0, *NUMBERS[indexes].tolist()])
        values = np.array([1.0, *(max(1.0, mean.value) for mean in means)])
        noise = np.array([0.0, *(_NOISE / mean.num_values**0.5 for mean in means)])
        lowest = np.maximum(values * (1 - noise), 1)
        slope = 0.0
        if len(means) > 1:
            rise = float(lowest[-1] - values[1] * (1 + noise[1]))
            slope = max(0.0, rise / float(numbers[-1] - numbers[1]))
        beyond = np.maximum(NUMBERS - numbers[-1], 0)
        growth = 1 + beyond / (self._num_streams + numbers[-1])
        next_index = np.minimum(np.searchsorted(numbers, NUMBERS), len(means))
        optimistic = np.interp(NUMBERS, numbers, lowest) + slope * beyond
        expected = optimistic.copy()
        expected[indexes] = values[1:]
        is_measured = np.zeros(len(NUMBERS), dtype=np.bool_)
        is_measured[indexes] = True
        return Estimates(
            expected=expected,
            optimistic=optimistic,
            largest=values[next_index] * growth,
            is_measured=is_measured,
        )
