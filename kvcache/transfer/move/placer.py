"""The seam between a transfer and what carries out its copies: out of memory into one pool.

TorchPlacer is for CPUs, and for GPUs without a compiler for the kernel; CudaPlacer
(cuda_placer.py) for the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.pool import KVPool
from kvcache.transfer.move.peer_memory import Memory, open_host
from kvcache.transfer.move.place import place
from kvcache.transfer.plan.block_copy import BlockCopy
from kvcache.transfer.plan.transfer import Transfer
from protocol.handshake import RankMetadata

ALL_BYTES = 1 << 62


@dataclass(eq=False)
class Work:
    """Copies that are placed by a row of launches."""

    copies: Sequence[BlockCopy]
    sources: Sequence[Memory]  # of each copy
    factors: tuple[float, ...] | None  # of the elements, by layer and component
    kept: Any = None  # by its placer


class Placer(ABC):
    """Copies into one rank's pool. Used by one thread, the one that calls `bind_thread`."""

    # Of a launch: some 2.8 ms over NVLink; often there is room for less. One loses 10 us.
    launch_bytes = 1 << 30

    def bind_thread(self) -> None:  # noqa: B027 - a CPU needs nothing
        """Called once by the thread that is going to use this placer."""

    @abstractmethod
    def open(self, rank: RankMetadata) -> Memory:
        """Opens a peer's pool.

        Raises:
            NotMappable: it is on another host, has no such memory, or its owner is gone.
        """

    def prepare(self, transfer: Transfer) -> None:  # noqa: B027 - a CPU needs nothing
        """Others between the same endpoints are going to come: does what can be done before."""

    def begin(self, work: Work) -> None:  # noqa: B027 - a CPU needs nothing
        """Prepares the launches."""

    def room(self, work: Work, index: int) -> int:
        """The most bytes that the next launch of copy `index` may take now; 0: none for now."""
        return ALL_BYTES

    @abstractmethod
    def launch(self, work: Work, index: int, first: int, count: int) -> Any:
        """Begins to place `count` pieces of copy `index`; returns a token for `finished`."""

    @abstractmethod
    def finished(self, token: Any) -> bool:
        """Whether a launch has ended; never blocks. Raises what it failed with, having ended."""

    def end(self, work: Work) -> None:  # noqa: B027 - most keep nothing
        """All its launches have ended."""


def launches(copies: Sequence[BlockCopy], chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(copy, first piece, pieces) of each launch: chunk_bytes or one piece each."""
    for index, copy in enumerate(copies):
        count = max(1, chunk_bytes // copy.piece_bytes)
        for first in range(0, len(copy.sources), count):
            yield index, first, min(count, len(copy.sources) - first)


class TorchPlacer(Placer):
    """On a CPU a launch is a copy by the calling thread; on a GPU it is queued on a stream."""

    launch_bytes = 16 << 20  # 2 to 4 ms of copying

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream = None
        if pool.device.type == "cuda":
            # 0 is the lowest priority: what the engine gives a higher one goes first.
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]

    def open(self, rank: RankMetadata) -> Memory:
        return open_host(rank)

    def launch(self, work: Work, index: int, first: int, count: int) -> "torch.cuda.Event | None":
        copy, memory = work.copies[index].part(first, count), work.sources[index].bytes
        assert memory is not None
        if self._stream is None:
            place(copy, memory, self._pool.tensor, work.factors)
            return None
        with torch.cuda.device(self._pool.device), torch.cuda.stream(self._stream):
            place(copy, memory, self._pool.tensor, work.factors)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def finished(self, token: "torch.cuda.Event | None") -> bool:
        return token is None or bool(token.query())  # type: ignore[no-untyped-call]
