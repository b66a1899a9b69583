"""The interface of a transport, and the limits on the size of its READs.

A transport agent registers memory, adds peers, and reads from peers. A READ is a
one-sided read, as in RDMA, of several *runs*: contiguous ranges of bytes. Only one
thread at a time uses an agent. A thread that takes over an agent calls `bind_thread`
first.

A post hands one READ to the agent. The bytes of a post are limited: on a CPU, posting a
READ copies its bytes, and a cancelled pull must stop soon. The number of runs of a post
is limited, because each run takes microseconds to post.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np

from kvcache.stripe import IntArray
from kvcache.transfer.plan.block_copy import ReadDescriptors

# While the engine computes a batch, the rate of READs into a GPU is limited, because
# the writes take memory bandwidth from the batch. READs into staging memory have a
# lower limit, because a kernel then copies the same bytes from staging memory into the
# pool, which takes bandwidth again.
_PACED_POST_BYTES = 64 << 20
_PACED_BYTES_PER_S = 110e9
_PACED_STAGED_BYTES_PER_S = 33e9

MemoryKind = Literal["DRAM", "VRAM"]


class ReadState(Enum):
    """Progress of a READ.

    ACTIVE: bytes may still arrive.
    DONE: all bytes have arrived.
    ERROR: one of the READ's runs (ranges of bytes) has failed. Bytes of its other runs
        may still arrive until the agent is closed.
    """

    ACTIVE = "active"
    DONE = "done"
    ERROR = "error"


@dataclass(eq=False)
class ReadHandle:
    """A posted READ.

    Attributes:
        peer: the peer's agent name.
        state: the state at the last poll.
        key: the transport's object for the READ; only the agent uses it.
    """

    peer: str
    state: ReadState
    key: Any = field(default=None, repr=False)

    @property
    def has_ended(self) -> bool:
        """True if the READ is done or has failed, as of the last poll."""
        return self.state is not ReadState.ACTIVE


class TransferAgent(ABC):
    """One-sided reads out of peers' registered memory.

    A READ has stopped writing once `poll` has returned DONE, `read` has raised, or
    `close` has returned. Releasing a handle or deregistering memory stops no READ
    (invariant I7).
    """

    name: str  # unique among the agents of all engines, also after restarts

    @abstractmethod
    def new_sibling(self) -> "TransferAgent":
        """Creates an agent for the same device, without registered memory or peers."""

    def bind_thread(self) -> None:  # noqa: B027 - most agents need nothing
        """Prepares the calling thread for its first use of this agent."""

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
        """This agent's address and registered memory, for a peer's `add_peer`."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> str:
        """Adds a peer to read from, and returns the name of the peer's agent.

        Adding a peer twice is harmless. The call may block for as long as the operating
        system tries to connect.

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
            peer: the peer's agent name, from `add_peer`.
            local_addresses, remote_addresses, lengths: int64 [n], n >= 1, in bytes,
                inside registered regions.
            kinds: memory kind of the local side and of the remote side.

        Raises:
            TransferFailed: the READ cannot be posted; no run was posted.
        """

    @abstractmethod
    def poll(self, handle: ReadHandle) -> ReadState:
        """Updates and returns the state of a READ.

        Never blocks. A fault of the peer gives ReadState.ERROR, never an exception.
        """

    @abstractmethod
    def release(self, handle: ReadHandle) -> None:
        """Frees the resources of a READ that has ended.

        Raises:
            RuntimeError: the READ has not ended, which is a bug of the caller.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every READ, including active READs, and frees all resources."""


@dataclass(frozen=True)
class PostLimits:
    """Limits on the size and the number of posts.

    Attributes:
        max_bytes: largest number of bytes in one post. On a CPU, copying the default
            number of bytes takes 3 to 10 ms.
        max_runs: largest number of runs in one post. On a GPU, posting the default
            number of runs takes 5 to 8 ms.
        max_active: largest number of READs that are active over one link at the same
            time, not counting READs of stopped jobs.
    """

    max_bytes: int = 32 << 20
    max_runs: int = 1024
    max_active: int = 8


# Between GPUs, the posting thread copies nothing itself, so large posts do not delay a
# cancelled pull. One long run is faster than several shorter runs of the same bytes.
GPU_LIMITS = PostLimits(max_bytes=1 << 30)


class Throttle:
    """Cuts READs into posts, and limits the rate of posts while a batch is computed.

    The rate is limited because the batch needs the memory bandwidth. Only a post that
    is made while a batch is computed delays the next post.

    Args:
        is_busy: returns True while a batch is computed.
    """

    def __init__(
        self, limits: PostLimits, is_busy: Callable[[], bool] = lambda: False
    ) -> None:
        self.limits = limits
        self._is_busy = is_busy
        self._due_s = float("-inf")

    def admits(self, now_s: float) -> bool:
        """True if the next READ may be posted now."""
        return now_s >= self._due_s

    def posted(self, nbytes: int, now_s: float, *, staged: bool = False) -> None:
        """Records a post, and delays the next post if the engine computes a batch.

        Args:
            staged: the post writes into staging memory, not into the pool.
        """
        if self._is_busy():
            rate = _PACED_STAGED_BYTES_PER_S if staged else _PACED_BYTES_PER_S
            self._due_s = max(self._due_s, now_s) + nbytes / rate

    def cut(self, reads: Iterable[ReadDescriptors]) -> Iterator[ReadDescriptors]:
        """Divides READs into posts within the limits.

        Runs keep their order. A run is split only if it has more bytes than the limit
        of a post.
        """
        max_bytes = self.limits.max_bytes
        max_runs = self.limits.max_runs
        if self._is_busy():
            max_bytes = min(max_bytes, _PACED_POST_BYTES)
        for read in reads:
            rank, remote, local, lengths = _split_long_runs(read, max_bytes)
            end_bytes = np.cumsum(lengths)
            start = 0
            while start < len(lengths):
                bytes_before = end_bytes[start] - lengths[start]
                limit = bytes_before + max_bytes
                stop = int(np.searchsorted(end_bytes, limit, side="right"))
                part = slice(start, min(stop, start + max_runs))
                yield ReadDescriptors(rank, remote[part], local[part], lengths[part])
                start = part.stop


def _split_long_runs(read: ReadDescriptors, max_bytes: int) -> ReadDescriptors:
    lengths = read.lengths
    if lengths.max(initial=0) <= max_bytes:
        return read
    num_parts = -(-lengths // max_bytes)
    run = np.repeat(np.arange(len(lengths)), num_parts)
    first_part = np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    offset = (np.arange(len(run)) - first_part) * max_bytes
    return ReadDescriptors(
        remote_rank=read.remote_rank,
        remote_offsets=read.remote_offsets[run] + offset,
        local_offsets=read.local_offsets[run] + offset,
        lengths=np.minimum(lengths[run] - offset, max_bytes),
    )
