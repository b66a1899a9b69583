"""Placing block copies with torch; on GPUs CudaPlacer (cuda_placer.py) has faster ways.

Torch makes strided copies between views of two memories. A view holds pieces at equal distances:
[pieces, heads, layers, components, tokens, elements]. Blocks of a pool are scattered, but pieces of
one block, and a slot's blocks, follow one another: each stretch of such pieces is one copy.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move.peer_memory import Memory, open_host
from kvcache.transfer.plan.block_copy import BlockCopy, Factors
from kvcache.transfer.plan.plan import Step
from protocol.handshake import RankMetadata

# Moving a head's elements as wider words is faster, where the sizes allow it.
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8
ALL_BYTES = 1 << 62
_MOST_SLOTS = 4  # of staging memory


class Placer:
    """Copies into one rank's pool, by torch: on a CPU in the calling thread, on a GPU on a stream
    of its own. Used by one thread, the one that calls `bind_thread`."""

    launch_bytes = 16 << 20  # of a launch, at most; 2 to 4 ms of copying on a CPU

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream = None
        if pool.device.type == "cuda":
            # 0 is the lowest priority: what the engine gives a higher one goes first.
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]

    def bind_thread(self) -> None:
        """Called once by the thread that is going to use this placer."""
        if self._stream is not None:
            torch.cuda.set_device(self._pool.device)

    def open(self, rank: RankMetadata) -> Memory:
        """Opens a peer's pool.

        Raises:
            NotMappable: it is on another host, has no such memory, or its owner is gone.
        """
        return open_host(rank)

    def room(self, copy: BlockCopy, factors: Factors) -> int:
        """The most bytes of a copy that a launch may take now; 0: none for now."""
        return ALL_BYTES

    def launch(self, copy: BlockCopy, source: Memory, factors: Factors) -> Any:
        """Begins to place pieces; returns a token for `finished`."""
        if self._stream is None:
            self._place(copy, source, factors)
            return None
        with torch.cuda.device(self._pool.device), torch.cuda.stream(self._stream):
            try:
                self._place(copy, source, factors)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            except Exception:
                self._stream.synchronize()  # no event tells when what was queued has ended
                raise
        return event

    def finished(self, token: Any) -> bool:
        """Whether a launch has ended; never blocks. Raises what it failed with, having ended."""
        return token is None or bool(token.query())

    def retire(self, tokens: deque[Any]) -> None:
        """Takes out launches that have ended, in their order. Raises what one failed with."""
        while tokens:
            oldest = tokens.popleft()
            if not self.finished(oldest):
                tokens.appendleft(oldest)
                return

    def _place(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        assert source.bytes is not None
        place(copy, source.bytes, self._pool.tensor, factors)


class StagingBuffer:
    """A rank's staging memory: `nbytes` on the pool's device, as slots that fill and empty in turn,
    at least two, for one pull at a time. READs bring a peer's KV into a slot as it lies there; what
    is placed out of it goes into the pool. Pulls that need staging queue up. A slot is reused only
    after the copies out of it have finished (I8).

    Args:
        placer: of its own.

    Raises:
        ValueError: there is not so much memory.
    """

    def __init__(self, nbytes: int, pool: KVPool, placer: Placer) -> None:
        self.nbytes = nbytes
        try:  # on a CPU not resident before it is used
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        except RuntimeError:
            told = f"staging_bytes is {nbytes}, more than there is; use a lower --staging-bytes"
            raise ValueError(told) from None
        self._placer = placer
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        self._placing: list[deque[Any]] = [deque() for _ in range(_MOST_SLOTS)]  # out of each slot

    def bind_thread(self) -> None:
        """Called once by the thread that is going to use this memory."""
        self._placer.bind_thread()

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots of that size there are; a plan's chunk takes at most half the memory."""
        return min(self.nbytes // slot_bytes, _MOST_SLOTS)

    def enter(self, pull_id: str) -> None:
        """Joins the queue."""
        self._queue.append(pull_id)

    @property
    def owner(self) -> str | None:
        """Whose the slots are."""
        return self._queue[0] if self._queue else None

    def leave(self, pull_id: str) -> None:
        """Leaves the queue; the pull has no active READ into a slot."""
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True when every copy out of the slot has finished. Raises what one has failed with."""
        self._placer.retire(self._placing[slot])
        return not self._placing[slot]

    def place(self, step: Step, slot: int, slot_bytes: int) -> None:
        """Begins to copy what was read into the slot to the pool; see `is_free`."""
        start = slot * slot_bytes
        memory = Memory(self.base_address + start, self._memory[start : start + slot_bytes])
        for copy in step.copies:  # some may run though another cannot begin
            token = self._placer.launch(copy, memory, step.transfer.factors)
            self._placing[slot].append(token)


def launches(copies: Iterable[BlockCopy], chunk_bytes: int) -> Iterator[BlockCopy]:
    """The copies in parts of chunk_bytes, or of one piece."""
    for copy in copies:
        count = max(1, chunk_bytes // copy.piece_bytes)
        for first in range(0, len(copy.sources), count):
            yield copy.part(first, count)


def place(
    copy: BlockCopy, source: torch.Tensor, pool: torch.Tensor, factors: Factors = None
) -> None:
    """Copies pieces into the pool, in another dtype and scale where the source's differ.

    On a GPU the copies are queued on the current stream.

    Args:
        source: u8, contiguous: the memory that `copy.sources` count from.
        pool: the rank's whole KV pool, contiguous, on the source's device.
        factors: of the elements, by layer and component.
    """
    convert = _converter(copy, pool, factors)
    into = pool.view(-1)
    if copy.source.dtype == copy.target.dtype and factors is None:
        row = copy.source.head_dim * copy.source.itemsize
        start = source.data_ptr() | into.data_ptr() | row
        dtype = next(word for word in _WORDS if start % word.itemsize == 0)
        source, into = _as(source, dtype), into.view(torch.uint8).view(dtype)
    else:
        source = _as(source, getattr(torch, copy.source.dtype))
    for first, count, steps in _stretches(copy):
        read = _view(copy.source, copy, source, count, int(copy.sources[first]), steps[0])
        write = _view(copy.target, copy, into, count, int(copy.targets[first]), steps[1])
        write.copy_(convert(read))


def _as(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def axes_of(copy: BlockCopy) -> dict[str, int]:
    """The sizes of a piece."""
    layout = copy.source
    return {"H": copy.heads, "L": layout.num_layers, "C": layout.num_components, "N": copy.tokens}


def _converter(
    copy: BlockCopy, pool: torch.Tensor, factors: Factors
) -> Callable[[torch.Tensor], torch.Tensor]:
    """From a view of the source to what is copied into the pool, whose dtype the copy takes on by
    itself where that is all there is to do."""
    if factors is None and (pool.dtype is not fp8.DTYPE or copy.source.dtype == copy.target.dtype):
        return lambda part: part
    layers, components = copy.target.num_layers, copy.target.num_components
    scale = torch.tensor(factors or [1.0] * (layers * components), device=pool.device)
    scale = scale.view(layers, components, 1, 1)  # then come a view's tokens and elements
    return lambda part: fp8.stored_as(part.float() * scale, pool.dtype)


def _view(
    layout: KVLayout, copy: BlockCopy, words: torch.Tensor, count: int, start: int, step: int
) -> torch.Tensor:
    """`count` pieces from byte `start` on, `step` bytes apart."""
    size, sizes = words.element_size(), axes_of(copy)
    shape = (count, *sizes.values(), layout.head_dim * layout.itemsize // size)
    steps = (step // size, *(layout.byte_strides[axis] // size for axis in sizes), 1)
    return words.as_strided(shape, steps, words.storage_offset() + start // size)


def _stretches(copy: BlockCopy) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(first piece, pieces, bytes between two at the source and at the target) of pieces that are
    equally far from each other."""
    reads, writes = np.diff(copy.sources).tolist(), np.diff(copy.targets).tolist()
    steps = [*zip(reads, writes, strict=True), (0, 0)]
    first = 0
    while first < len(copy.sources):
        last, step = first, steps[first]
        if min(step) <= 0:  # views have no negative strides
            step = 0, 0
        while min(step) and steps[last] == step:
            last += 1
        yield first, last - first + 1, step
        first = last + 1
