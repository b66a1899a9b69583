"""The interface to whatever moves bytes between address spaces: register, add a peer, read, poll;
and the bounds of what is read.

An agent belongs to one thread at a time; it may be handed to another, which calls `bind_thread`
first. A post is one READ handed to the agent. It is bounded in bytes, because on a CPU posting *is*
copying and a cancelled pull must stop soon, and in runs, because each costs microseconds to post.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

from kvcache.stripe import IntArray
from kvcache.transfer.plan.block_copy import ReadDescriptors

_PACED_POST_BYTES = 64 << 20
# What READs between GPUs write takes from the batch's memory bandwidth, in proportion. Those into
# staging memory are placed by a kernel, which reads and writes them once more.
_PACED_BYTES_PER_S, _PACED_STAGED_BYTES_PER_S = 110e9, 33e9

MemoryKind = Literal["DRAM", "VRAM"]


class ReadState(Enum):
    ACTIVE = "active"  # bytes may still arrive, whatever was released meanwhile
    DONE = "done"
    ERROR = "error"  # some runs may go on: bytes may still arrive until the agent is closed


@dataclass(eq=False)
class ReadHandle:
    """A posted READ. `state` is what the last poll said; `key` is the agent's own."""

    peer: str
    state: ReadState
    key: Any = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        return self.state is not ReadState.ACTIVE


class TransferAgent(ABC):
    """One-sided reads out of peers' registered memory.

    Nothing is written for a READ any more when `poll` said DONE, `read` raised, or `close` has
    returned; releasing a handle or deregistering memory ends nothing (invariant I7).
    """

    name: str  # unique over all engines and time

    @abstractmethod
    def another(self) -> "TransferAgent":
        """A new agent of the same device and options, with nothing registered and no peers."""

    def bind_thread(self) -> None:  # noqa: B027 - most agents need nothing
        """Called once by the thread that is going to use this agent."""

    @abstractmethod
    def register(
        self, address: int, nbytes: int, *, device_id: int = 0, kind: MemoryKind = "DRAM"
    ) -> None:
        """Makes memory readable by peers and usable as the local side of reads.

        Raises:
            TransferFailed: the transport cannot register this memory.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """How peers reach this agent and everything registered so far."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> str:
        """Makes a peer readable and returns its agent name. Adding it again is harmless. May block
        for as long as the system tries to connect.

        Raises:
            TransferFailed: the metadata is not usable.
        """

    @abstractmethod
    def read(
        self,
        peer: str,
        local_addresses: IntArray,
        remote_addresses: IntArray,
        lengths: IntArray,
        *,
        local_device: int = 0,
        remote_device: int = 0,
        kinds: Sequence[MemoryKind] = ("DRAM", "DRAM"),
    ) -> ReadHandle:
        """Posts one READ of n runs, each `lengths[i]` bytes from remote to local.

        Args:
            local_addresses, remote_addresses, lengths: int64 [n], n >= 1, in bytes, inside
                registered regions.
            kinds: memory kind of the local and of the remote side.

        Raises:
            TransferFailed: nothing was posted.
        """

    @abstractmethod
    def poll(self, handle: ReadHandle) -> ReadState:
        """Progress of a READ; never raises for a peer's fault and never blocks."""

    @abstractmethod
    def release(self, handle: ReadHandle) -> None:
        """Frees an ended READ's resources.

        Raises:
            RuntimeError: it has not ended (our bug).
        """

    @abstractmethod
    def close(self) -> None:
        """Gives everything back, whatever is still active: nothing reads or is read any more."""


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
