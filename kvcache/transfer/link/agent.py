"""The interface to whatever moves bytes between address spaces: register, add a peer, read, poll.

An agent belongs to one thread at a time; it may be handed to another, which calls `bind_thread`
first. Reading may copy inside `read` (shared memory on CPU does), so readers post from a thread of
their own, in bounded chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

MemoryKind = Literal["DRAM", "VRAM"]
Addresses = npt.NDArray[np.int64]


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
        local_addresses: Addresses,
        remote_addresses: Addresses,
        lengths: Addresses,
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
