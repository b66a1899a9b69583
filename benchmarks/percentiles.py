"""Percentiles, and nothing that numpy would have to be imported for."""

from collections.abc import Sequence

LEVELS = (50, 90, 99)


def percentile(values: Sequence[float], level: float) -> float:
    """The value below which `level` percent lie, linearly interpolated; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * level / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
