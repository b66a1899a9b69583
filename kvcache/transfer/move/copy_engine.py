"""What copy engines of a GPU can do of a block copy.

A piece that is one run is one copy; a piece whose runs are evenly spaced on either side is one
two-dimensional copy. Copy engines take no multiprocessor from the decode batch and move long runs
faster than a kernel does, but short rows slowly.
"""

from functools import lru_cache
from typing import NamedTuple

from kvcache.transfer.plan.block_copy import Axis, BlockCopy, Shape


class Rows(NamedTuple):
    """A piece as rows of equal length; bytes."""

    width: int
    number: int
    pitches: tuple[int, int]  # from a row to the next one, at the source and at the target

    @property
    def run_bytes(self) -> int:
        """Of a piece that is one run; else 0."""
        return self.width if self.number == 1 else 0


def rows_of(copy: BlockCopy, factors: tuple[float, ...] | None) -> Rows | None:
    """Each piece as rows; None where it is more than that, or elements change on the way."""
    if factors is not None or copy.source.dtype != copy.target.dtype:
        return None
    return _rows(copy.shape)


@lru_cache(maxsize=1024)
def _rows(shape: Shape) -> Rows | None:
    rows = Axis(1, shape.run_bytes, shape.run_bytes)
    for axis in reversed(shape.axes):  # innermost first
        if rows.size == 1:
            rows = axis
            continue
        if axis[1:] != (rows.size * rows.source_stride, rows.size * rows.target_stride):
            return None
        rows = rows._replace(size=rows.size * axis.size)
    return Rows(shape.run_bytes, rows.size, (rows.source_stride, rows.target_stride))
