"""The points of the page's charts: recent points, and sparse points of one hour.

A point contains counters and no rates. The page computes rates and shares from the
difference between two points.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

MAX_RECENT = 300  # while a page is open, up to one point per second is added
HISTORY_INTERVAL_S = 10.0
MAX_HISTORY = 360  # one hour
MAX_SAMPLES = 64  # first-byte times per point
MAX_COLUMNS = 200  # maximum number of values for each kind of server in a point
Row = dict[str, Any]


class _Ring:
    """The newest points, each with the number of the change that added it."""

    def __init__(self, max_points: int) -> None:
        self._points: deque[tuple[int, Row]] = deque(maxlen=max_points)
        self._first_bytes_s: list[float] = []

    def add_first_byte(self, seconds: float) -> None:
        if len(self._first_bytes_s) < MAX_SAMPLES:
            self._first_bytes_s.append(seconds)

    def add(self, change: int, point: Row) -> None:
        row = {**point, "first_bytes": self._first_bytes_s}
        self._points.append((change, row))
        self._first_bytes_s = []

    def forget_first_bytes(self) -> None:
        self._first_bytes_s = []

    def after(self, change: int) -> list[Row]:
        """Return the points that were added after this change."""
        return [point for changed, point in self._points if changed > change]


class Points:
    """The points of one proxy.

    Attributes:
        columns_changed: number of the change that added the last column.
    """

    def __init__(self) -> None:
        self._recent = _Ring(MAX_RECENT)
        self._history = _Ring(MAX_HISTORY)
        # The position of each value in a point, by name. Columns are never removed.
        self._columns: dict[str, int] = {}
        self.columns_changed = 0
        self._history_due_at = float("-inf")

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def recent(self, after: int) -> list[Row]:
        """Return the recent points that were added after this change."""
        return self._recent.after(after)

    def history(self, after: int) -> list[Row]:
        """Return the sparse points that were added after this change."""
        return self._history.after(after)

    def add_first_byte(self, seconds: float) -> None:
        """Record the time from a request to the first byte of its stream."""
        self._recent.add_first_byte(seconds)
        self._history.add_first_byte(seconds)

    def forget_first_bytes(self) -> None:
        """Forget the first-byte times that the next recent point would contain.

        Call this when a page is opened after a time without pages: the times are old.
        """
        self._recent.forget_first_bytes()

    def add(
        self,
        change: int,
        *,
        sums: Mapping[str, Counter[str]],
        servers: Iterable[str],
        totals: Mapping[str, int],
        is_watched: bool,
    ) -> None:
        """Add a point.

        Points with the same `of` are sums over the same servers. The page computes
        rates only from such points, because a server that joins or leaves changes the
        sums.

        Args:
            change: number of this change.
            sums: the servers' statistics, summed up by kind of server.
            servers: names of the servers that have statistics.
            totals: counts of this proxy's requests.
            is_watched: whether a page is open. If not, only a sparse point is added.
        """
        self._add_columns(change, {name for counts in sums.values() for name in counts})
        point = {
            "at": time.time(),
            "of": hash(tuple(servers)),
            **totals,
            **{
                kind: [counts[name] for name in self._columns]
                for kind, counts in sums.items()
            },
        }
        if is_watched:
            self._recent.add(change, point)
        now = time.monotonic()
        if now >= self._history_due_at:
            # The factor 0.9 lets a call add a point if it is slightly early. Otherwise
            # the point would wait for the next call, after twice the interval.
            self._history_due_at = now + 0.9 * HISTORY_INTERVAL_S
            self._history.add(change, point)

    def _add_columns(self, change: int, names: Collection[str]) -> None:
        for name in names:
            if name in self._columns or len(self._columns) >= MAX_COLUMNS:
                continue
            self._columns[name] = len(self._columns)
            self.columns_changed = change
