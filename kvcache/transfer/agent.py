"""The interface of a transport (register memory, add a peer, read, poll) and the size of its READs.

An agent belongs to one thread at a time; the thread that takes it over calls `bind_thread` first.
A post is one READ handed to the agent. Its bytes are bounded, because on a CPU posting *is* copying
and a cancelled pull must stop soon; its runs are bounded, because each takes microseconds to post.
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
# Rates of READs between GPUs beside a batch: their writes take memory bandwidth from it. Staged
# bytes get the lower rate, as a kernel reads and writes them once more.
_PACED_BYTES_PER_S, _PACED_STAGED_BYTES_PER_S = 110e9, 33e9

MemoryKind = Literal["DRAM", "VRAM"]


class ReadState(Enum):
    ACTIVE = "active"  # bytes may still arrive, even after a release
    DONE = "done"
    ERROR = (
        "error"  # some runs may go on: bytes may still arrive until the agent is closed
    )


@dataclass(eq=False)
class ReadHandle:
    """A posted READ. `state` is that of the last poll; `key` belongs to the agent."""

    peer: str
    state: ReadState
    key: Any = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        return self.state is not ReadState.ACTIVE


class TransferAgent(ABC):
    """One-sided reads out of peers' registered memory.

    A READ has stopped writing once `poll` returned DONE, `read` raised, or `close` returned.
    Releasing a handle or deregistering memory stops no READ (invariant I7).
    """

    name: str  # unique over all engines and time

    @abstractmethod
    def another(self) -> "TransferAgent":
        """A new agent of the same device and options, with nothing registered and no peers."""

    def bind_thread(self) -> None:  # noqa: B027 - most agents need nothing
        """To be called by a thread before its first use of this agent."""

    @abstractmethod
    def register(
        self,
        address: int,
        nbytes: int,
        *,
        device_id: int = 0,
        kind: MemoryKind = "DRAM",
    ) -> None:
        """Makes memory readable by peers and usable as the local side of reads.

        Raises:
            TransferFailed: the transport cannot register this memory.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """This agent's address and the memory registered so far, for a peer's `add_peer`."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> str:
        """Makes a peer readable and returns its agent name. Adding a peer twice is harmless. May
        block for as long as the system tries to connect.

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
        """Ends every READ, also active ones, and frees all resources."""


@dataclass(frozen=True)
class ReadWindow:
    max_bytes: int = 32 << 20  # of a post: 3 to 10 ms of copying on a CPU
    max_runs: int = 1024  # of a post: 5 to 8 ms of posting on a GPU
    max_active: int = 8  # posts to one peer that have not ended


# A post between GPUs copies nothing by itself, and a whole run is faster than its pieces.
GPU_WINDOW = ReadWindow(max_bytes=1 << 30)


class Throttle:
    """Slows READs while the engine computes a batch, which needs the memory bandwidth.

    Args:
        busy: whether a batch is being computed.
    """

    def __init__(
        self, window: ReadWindow, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self.window = window
        self._busy = busy
        self._due_s = float("-inf")

    def admits(self, now_s: float) -> bool:
        """Whether the next post may go out."""
        return now_s >= self._due_s

    def posted(self, nbytes: int, now_s: float, *, staged: bool = False) -> None:
        """Counts a post that went out; `staged`: into staging memory, not into the pool."""
        if self._busy():
            rate = _PACED_STAGED_BYTES_PER_S if staged else _PACED_BYTES_PER_S
            self._due_s = max(self._due_s, now_s) + nbytes / rate

    def cut(self, reads: Iterable[ReadDescriptors]) -> Iterator[ReadDescriptors]:
        """Divides READs into posts. Runs keep their order; only one above the limit is split."""
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
