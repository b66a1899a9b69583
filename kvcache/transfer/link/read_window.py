"""Cutting a plan's reads into posts of bounded size.

A post is one READ handed to the agent. Bounded in bytes, because on CPU posting *is* copying and a
cancelled pull must stop soon; bounded in runs, because each costs microseconds to post.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcache.transfer.link.agent import Addresses
from kvcache.transfer.plan.block_copy import ReadDescriptors


@dataclass(frozen=True)
class ReadWindow:
    max_bytes: int = 32 << 20  # 3 to 10 ms of copying on a CPU
    max_runs: int = 1024  # 5 to 8 ms of posting on a GPU
    max_active: int = 8  # posts to one peer that have not ended


# Between GPUs a post copies nothing by itself, and a run that is cut is slower than a whole one.
GPU_LIMITS = ReadWindow(max_bytes=1 << 30)


_FEW_RUNS = 512


def total(lengths: Addresses) -> int:
    """Their sum; numpy's takes 10 us to begin when nothing has called it for a while."""
    return sum(lengths.tolist()) if len(lengths) <= _FEW_RUNS else int(lengths.sum())


class Post(NamedTuple):
    """Runs from one rank of P; offsets in bytes from the bases of the two memories."""

    remote_rank: int
    local_offsets: Addresses  # i64[n]
    remote_offsets: Addresses  # i64[n]
    lengths: Addresses  # i64[n]

    @property
    def nbytes(self) -> int:
        return total(self.lengths)


def cut(
    reads: Iterable[ReadDescriptors], limits: ReadWindow, most_now: Callable[[], int] | None = None
) -> Iterator[Post]:
    """The reads' runs in their order, each run in at most one post unless it exceeds max_bytes.

    Args:
        most_now: asked before each post, in place of max_bytes.
    """
    most = most_now or (lambda: limits.max_bytes)
    for read in reads:
        bound = most()
        if 0 < len(read.lengths) <= limits.max_runs and total(read.lengths) <= bound:
            yield Post(read.remote_rank, read.local_offsets, read.remote_offsets, read.lengths)
            continue
        local, remote, lengths = _split_long_runs(read, bound)
        ends = np.cumsum(lengths)
        start = 0
        while start < len(lengths):
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + most(), side="right"))
            stop = min(max(fitting, start + 1), start + limits.max_runs)
            part = slice(start, stop)
            yield Post(read.remote_rank, local[part], remote[part], lengths[part])
            start = stop


def _split_long_runs(
    read: ReadDescriptors, max_bytes: int
) -> tuple[Addresses, Addresses, Addresses]:
    lengths = read.lengths
    if not len(lengths) or int(lengths.max()) <= max_bytes:
        return read.local_offsets, read.remote_offsets, lengths
    pieces = -(-lengths // max_bytes)
    run = np.repeat(np.arange(len(lengths)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    within = (np.arange(len(run)) - first) * max_bytes
    sizes = np.minimum(lengths[run] - within, max_bytes)
    return read.local_offsets[run] + within, read.remote_offsets[run] + within, sizes
