"""Confidence intervals of means, by a bootstrap over blocks of neighbouring requests.

Requests that arrive one after the other wait in the same queues, so their latencies
depend on each other. A bootstrap over single requests would report an interval that is
too narrow. This one draws blocks of neighbours.
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
    """Return the number of neighbours that are drawn together from `count` values."""
    return max(1, math.isqrt(count) // 2)


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean of values in the order of their arrivals, with its interval.

    Blocks may begin anywhere. A block that reaches the end continues at the start, so
    every value has the same weight.

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
