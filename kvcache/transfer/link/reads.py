"""The bounds of READs: cut into posts, a bounded number of them active, at a bounded rate beside a
batch.

A post is one READ handed to the agent. Bounded in bytes, because on CPU posting *is* copying and a
cancelled pull must stop soon; bounded in runs, because each costs microseconds to post.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvcache.transfer.plan.block_copy import ReadDescriptors

_PACED_POST_BYTES = 64 << 20
# What READs between GPUs write takes from the batch's memory bandwidth, in proportion. Those into
# staging memory are placed by a kernel, which reads and writes them once more.
_PACED_BYTES_PER_S, _PACED_STAGED_BYTES_PER_S = 110e9, 33e9


@dataclass(frozen=True)
class ReadWindow:
    max_bytes: int = 32 << 20  # of a post: 3 to 10 ms of copying on a CPU
    max_runs: int = 1024  # of a post: 5 to 8 ms of posting on a GPU
    max_active: int = 8  # posts to one peer that have not ended


# Between GPUs a post copies nothing by itself, and a run that is cut is slower than a whole one.
GPU_WINDOW = ReadWindow(max_bytes=1 << 30)


class Throttle:
    """READs leave the engine's batch its memory bandwidth.

    Args:
        busy: whether there is a batch, beside which READs are to be slower.
    """

    def __init__(self, window: ReadWindow, busy: Callable[[], bool] = lambda: False) -> None:
        self.window = window
        self._busy = busy
        self._due_s = float("-inf")

    def admits(self, now_s: float) -> bool:
        """Whether the next post may go out."""
        return now_s >= self._due_s

    def posted(self, nbytes: int, now_s: float, *, staged: bool = False) -> None:
        """A post went out, into staging memory or into its place."""
        if self._busy():
            rate = _PACED_STAGED_BYTES_PER_S if staged else _PACED_BYTES_PER_S
            self._due_s = max(self._due_s, now_s) + nbytes / rate

    def cut(self, reads: Iterable[ReadDescriptors]) -> Iterator[ReadDescriptors]:
        """The posts of reads: their runs in their order, each in one post unless it is too long."""
        max_bytes, max_runs = self.window.max_bytes, self.window.max_runs
        if self._busy():
            max_bytes = min(max_bytes, _PACED_POST_BYTES)
        for read in reads:
            rank, remote, local, lengths = _split_long_runs(read, max_bytes)
            ends = np.cumsum(lengths)
            start = 0
            while start < len(lengths):
                before = ends[start] - lengths[start]
                fitting = int(np.searchsorted(ends, before + max_bytes, side="right"))
                part = slice(start, min(fitting, start + max_runs))
                yield ReadDescriptors(rank, remote[part], local[part], lengths[part])
                start = part.stop


def _split_long_runs(read: ReadDescriptors, max_bytes: int) -> ReadDescriptors:
    lengths = read.lengths
    if lengths.max(initial=0) <= max_bytes:
        return read
    pieces = -(-lengths // max_bytes)
    run = np.repeat(np.arange(len(lengths)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    within = (np.arange(len(run)) - first) * max_bytes
    sizes = np.minimum(lengths[run] - within, max_bytes)
    remote, local = read.remote_offsets[run] + within, read.local_offsets[run] + within
    return ReadDescriptors(read.remote_rank, remote, local, sizes)
