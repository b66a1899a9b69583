"""Confidence intervals of means, by a bootstrap over blocks of consecutive requests.

Requests that arrive one after the other wait in the same queues, so their latencies
depend on each other. A bootstrap over single requests would report an interval that is
too narrow. This module therefore draws blocks of consecutive requests.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95
_BATCH = 500  # resamples that are drawn at once, to bound the memory


class Interval(NamedTuple):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def block_length(count: int) -> int:
    """Return the number of values in a block, if there are `count` values."""
    return max(1, math.isqrt(count) // 2)


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean of values with its confidence interval.

    The values must be in the order of the requests' arrivals. A block may begin at any
    value, and continues at the first value after the last one. All values therefore
    have the same weight.

    Raises:
        ValueError: there are no values.
    """
    array = np.asarray(values, dtype=np.float64)
    count = len(array)
    if not count:
        raise ValueError("a mean needs at least one value")
    length = block_length(count)
    num_blocks = -(-count // length)
    # sums[i] is the sum of the block that begins at index i.
    wrapped = np.concatenate([array, array[: length - 1]]) if length > 1 else array
    sums = np.convolve(wrapped, np.ones(length), mode="valid")
    rng = np.random.default_rng(seed)
    means = []
    for start in range(0, NUM_RESAMPLES, _BATCH):
        size = (min(_BATCH, NUM_RESAMPLES - start), num_blocks)
        drawn = sums[rng.integers(0, count, size)]
        means.append(drawn.sum(axis=1) / (num_blocks * length))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return Interval(float(array.mean()), float(low), float(high))
