"""Placing block copies with torch; on GPUs CudaPlacer (cuda_placer.py) has faster ways.

Torch makes strided copies between views of two memories. A view [pieces, heads, layers, components,
tokens, elements] has pieces at equal distances. Blocks of a pool are scattered, but pieces of one
block, and a slot's blocks, are equally spaced: each stretch of such pieces is one copy.
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

    launch_bytes = 16 << 20  # bound of a launch: 2 to 4 ms of copying on a CPU

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream = None
        if pool.device.type == "cuda":
            # 0 is the lowest priority: the engine's kernels of a higher one go first.
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]

    def bind_thread(self) -> None:
        """To be called once by the thread that uses this placer."""
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
                self._stream.synchronize()  # queued copies have no event to wait for
                raise
        return event

    def finished(self, token: Any) -> bool:
        """Whether a launch has ended; never blocks. Raises the error of a launch that failed."""
        return token is None or bool(token.query())

    def retire(self, tokens: deque[Any]) -> None:
        """Removes the oldest launches that have ended. Raises the error of one that failed."""
        while tokens:
            oldest = tokens.popleft()
            if not self.finished(oldest):
                tokens.appendleft(oldest)
                return

    def _place(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        assert source.bytes is not None
        place(copy, source.bytes, self._pool.tensor, factors)


class StagingBuffer:
    """A rank's staging memory: `nbytes` on the pool's device, owned by one pull at a time; other
    pulls that need it queue. It is divided into two slots or more. READs fill a slot in the peer's
    layout; `place` copies it into the pool. A slot is reused only after the copies out of it have
    finished (I8).

    Args:
        placer: used for nothing else.

    Raises:
        ValueError: `nbytes` cannot be allocated.
    """

    def __init__(self, nbytes: int, pool: KVPool, placer: Placer) -> None:
        self.nbytes = nbytes
        try:  # on a CPU not resident before it is used
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        except RuntimeError:
            message = f"staging_bytes is {nbytes}, more than there is; use a lower --staging-bytes"
            raise ValueError(message) from None
        self._placer = placer
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        self._placing: list[deque[Any]] = [
            deque() for _ in range(_MOST_SLOTS)
        ]  # launches by slot

    def bind_thread(self) -> None:
        """To be called once by the thread that uses this memory."""
        self._placer.bind_thread()

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    def num_slots(self, slot_bytes: int) -> int:
        """Number of slots of that size: at least two, as a chunk takes at most half the memory."""
        return min(self.nbytes // slot_bytes, _MOST_SLOTS)

    def enter(self, pull_id: str) -> None:
        """Joins the queue."""
        self._queue.append(pull_id)

    @property
    def owner(self) -> str | None:
        """The pull that may use the slots."""
        return self._queue[0] if self._queue else None

    def leave(self, pull_id: str) -> None:
        """Leaves the queue; to be called when no READ of the pull into a slot is active."""
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """Whether every copy out of the slot has finished. Raises the error of one that failed."""
        self._placer.retire(self._placing[slot])
        return not self._placing[slot]

    def place(self, step: Step, slot: int, slot_bytes: int) -> None:
        """Begins to copy the slot's KV into the pool; `is_free` says when it has ended."""
        start = slot * slot_bytes
        memory = Memory(
            self.base_address + start, self._memory[start : start + slot_bytes]
        )
        for (
            copy
        ) in step.copies:  # if a launch raises, earlier ones are known and waited for
            token = self._placer.launch(copy, memory, step.transfer.factors)
            self._placing[slot].append(token)


def launches(copies: Iterable[BlockCopy], chunk_bytes: int) -> Iterator[BlockCopy]:
    """Divides copies into parts of at most `chunk_bytes`, or of one piece."""
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
        source: u8, contiguous; `copy.sources` count from its start.
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
        read = _view(
            copy.source, copy, source, count, int(copy.sources[first]), steps[0]
        )
        write = _view(
            copy.target, copy, into, count, int(copy.targets[first]), steps[1]
        )
        write.copy_(convert(read))


def _as(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def axes_of(copy: BlockCopy) -> dict[str, int]:
    """The sizes of a piece."""
    layout = copy.source
    return {
        "H": copy.heads,
        "L": layout.num_layers,
        "C": layout.num_components,
        "N": copy.tokens,
    }


def _converter(
    copy: BlockCopy, pool: torch.Tensor, factors: Factors
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Converts a view of the source before it is copied into the pool. Nothing is to do where the
    copy itself converts the dtype, which it does but for FP8's largest numbers and for factors."""
    if factors is None and (
        pool.dtype is not fp8.DTYPE or copy.source.dtype == copy.target.dtype
    ):
        return lambda part: part
    layers, components = copy.target.num_layers, copy.target.num_components
    scale = torch.tensor(factors or [1.0] * (layers * components), device=pool.device)
    scale = scale.view(
        layers, components, 1, 1
    )  # then come a view's tokens and elements
    return lambda part: fp8.stored_as(part.float() * scale, pool.dtype)


def _view(
    layout: KVLayout,
    copy: BlockCopy,
    words: torch.Tensor,
    count: int,
    start: int,
    step: int,
) -> torch.Tensor:
    """A view of `count` pieces from byte `start` on, `step` bytes apart."""
    size, sizes = words.element_size(), axes_of(copy)
    shape = (count, *sizes.values(), layout.head_dim * layout.itemsize // size)
    steps = (step // size, *(layout.byte_strides[axis] // size for axis in sizes), 1)
    return words.as_strided(shape, steps, words.storage_offset() + start // size)


def _stretches(copy: BlockCopy) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Stretches of equally spaced pieces: (first piece, number of pieces, (bytes between two at the
    source, at the target))."""
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
