"""Placing block copies: the seam to what carries them out, and doing so with torch.

Torch makes strided copies between views of two memories. A view holds pieces at equal distances:
[pieces, heads, layers, components, tokens, elements]. Blocks of a pool are scattered, but pieces of
one block, and a slot's blocks, follow one another: each stretch of such pieces is one copy. That
does on CPUs, and on GPUs without a compiler for the kernel; CudaPlacer (cuda_placer.py) is for the
others.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move.peer_memory import Memory, open_host
from kvcache.transfer.plan.block_copy import BlockCopy, Transfer
from kvcache.transfer.plan.endpoint import IntArray, PlanError
from protocol.handshake import RankMetadata

# Moving a head's elements as wider words is faster, where the sizes allow it.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
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


def place(
    copy: BlockCopy,
    source: torch.Tensor,
    pool: torch.Tensor,
    factors: tuple[float, ...] | None = None,
) -> None:
    """Copies pieces into the pool, in another dtype and scale where the source's differ.

    On a GPU the copies are queued on the current stream.

    Args:
        source: u8, contiguous: the memory that `copy.sources` count from.
        pool: the rank's whole KV pool, contiguous, on the source's device.
        factors: of the elements, by layer and component.

    Raises:
        PlanError: the source is too small or the pool is not the planned one.
    """
    if pool.nbytes != copy.target.nbytes:
        raise PlanError(f"pool has {pool.nbytes} bytes; planned for {copy.target.nbytes}")
    needed = int(copy.sources.max()) + _reach(copy) if len(copy.sources) else 0
    if source.numel() < needed:
        raise PlanError(f"source has {source.numel()} bytes; the copy needs {needed}")
    convert = _converter(copy, pool, factors)
    into = pool.view(-1)
    if copy.source.dtype == copy.target.dtype and factors is None:
        row = copy.source.head_dim * copy.source.itemsize
        start = source.data_ptr() | into.data_ptr() | row
        words = (word for size, word in _WORDS if start % size == 0)
        dtype = next(words)
        source, into = _as(source, dtype), into.view(torch.uint8).view(dtype)
    else:
        source = _as(source, getattr(torch, copy.source.dtype))
    views = zip(
        _views(copy.source, copy, copy.sources, source),
        _views(copy.target, copy, copy.targets, into),
        strict=True,
    )
    for read, write in views:
        write.copy_(convert(read))


def measure() -> float:
    """Bytes a second of a strided copy like those of `place` on the CPU; takes some ms."""
    source = torch.ones((16, 64, 16, 32), dtype=torch.int64)  # 4 MiB
    target = torch.zeros((16, 16, 64, 32), dtype=torch.int64).transpose(1, 2)
    seconds = []
    for _ in range(4):  # the first one finds cold caches, another one may be interrupted
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return source.nbytes / min(seconds)


def _as(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _reach(copy: BlockCopy) -> int:
    """Bytes from a piece's first element to the one behind its last."""
    strides, sizes = copy.source.byte_strides, _sizes(copy)
    reach = sum((size - 1) * strides[axis] for axis, size in sizes.items())
    return reach + copy.source.head_dim * copy.source.itemsize


def _sizes(copy: BlockCopy) -> dict[str, int]:
    layout = copy.source
    return {"H": copy.heads, "L": layout.num_layers, "C": layout.num_components, "N": copy.tokens}


def _converter(
    copy: BlockCopy, pool: torch.Tensor, factors: tuple[float, ...] | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """From a view of the source to what is copied into the pool, whose dtype the copy takes on by
    itself where that is all there is to do."""
    if factors is None and (pool.dtype is not fp8.DTYPE or copy.source.dtype == copy.target.dtype):
        return lambda part: part
    # Before the tokens and elements of a view come its layers and components.
    shape = (copy.target.num_layers, copy.target.num_components, 1, 1)
    scale = torch.tensor(factors or [1.0], device=pool.device).view(shape if factors else [1] * 4)
    return lambda part: fp8.stored_as(part.float() * scale, pool.dtype)


def _views(
    layout: KVLayout, copy: BlockCopy, starts: IntArray, words: torch.Tensor
) -> Iterator[torch.Tensor]:
    size, row = words.element_size(), layout.head_dim * layout.itemsize
    sizes, strides = _sizes(copy), layout.byte_strides
    shape = (*sizes.values(), row // size)
    steps = (*(strides[axis] // size for axis in sizes), 1)
    offset = words.storage_offset()
    for first, count, step in _stretches(copy, starts):
        yield words.as_strided(
            (count, *shape), (step // size, *steps), offset + int(starts[first]) // size
        )


def _stretches(copy: BlockCopy, starts: IntArray) -> Iterator[tuple[int, int, int]]:
    """(first piece, pieces, bytes between two) of rows of pieces that are equally far from each
    other on both sides; the distance is that of `starts`."""
    if len(starts) == 0:
        return
    steps = np.diff(starts)
    reads, writes = np.diff(copy.sources), np.diff(copy.targets)
    breaks = (reads[1:] != reads[:-1]) | (writes[1:] != writes[:-1])
    ends = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(steps)]
    is_ahead = ((reads > 0) & (writes > 0)).tolist()  # views have no negative strides
    first = 0
    for low, high in pairwise(ends):  # pieces low to high are equally far from each other
        low = max(low, first)
        if low == high or not is_ahead[low]:
            continue
        while first < low:
            yield first, 1, 0
            first += 1
        yield low, high - low + 1, int(steps[low])
        first = high + 1
    while first < len(starts):
        yield first, 1, 0
        first += 1
