"""Measures delays of the load generator itself.

A load generator that is late makes a server look slow: it sends requests after they are
due, and it reads tokens some time after they have arrived.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

_INTERVAL_S = 0.01
# The report warns if the 99th percentile of the lags is above this.
MAX_USUAL_LAG_S = 0.02


@asynccontextmanager
async def measured_loop_lag() -> AsyncIterator[list[float]]:
    """Measure how late the event loop wakes a sleeping task, while the block runs.

    The yielded list gets one lag in seconds per interval.
    """
    lags_s: list[float] = []
    task = asyncio.create_task(_measure(lags_s))
    try:
        yield lags_s
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _measure(lags_s: list[float]) -> None:
    while True:
        due_at = time.perf_counter() + _INTERVAL_S
        await asyncio.sleep(_INTERVAL_S)
        lags_s.append(max(0.0, time.perf_counter() - due_at))


def summary(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return percentiles of lags, in ms. All are None if nothing was measured."""
    if not seconds:
        return {"p50": None, "p99": None, "max": None}
    p50, p99, longest = np.percentile(seconds, (50, 99, 100))
    return {
        "p50": round(float(p50) * 1e3, 3),
        "p99": round(float(p99) * 1e3, 3),
        "max": round(float(longest) * 1e3, 3),
    }
