"""Placing block copies with torch. On GPUs CudaPlacer (cuda_placer.py) is faster.

Torch makes strided copies between views of two memories. A view has the shape [pieces,
heads, layers, components, tokens, elements] and its pieces are equally spaced. Blocks
of a pool are scattered, but the pieces of one block and the blocks of a slot are
equally spaced. Each series of equally spaced pieces is one copy.
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
from kvcache.transfer.plan.steps import Step
from protocol.handshake import RankMetadata

# Moving a head's elements as wider words is faster, where the sizes allow it.
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8
ALL_BYTES = 1 << 62
_MAX_SLOTS = 4  # of staging memory


class Placer:
    """Copies into one rank's pool with torch.

    On a CPU the calling thread copies, on a GPU a stream of the placer. A placer is
    used by one thread, the one that calls `bind_thread`.
    """

    launch_bytes = 16 << 20  # bound of a launch: 2 to 4 ms of copying on a CPU

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream = None
        if pool.device.type == "cuda":
            # 0 is the lowest priority, so the engine's kernels go first.
            self._stream = torch.cuda.Stream(pool.device, priority=0)  # type: ignore[no-untyped-call]

    def bind_thread(self) -> None:
        """Prepares the thread that uses this placer; called there once."""
        if self._stream is not None:
            torch.cuda.set_device(self._pool.device)

    def open(self, rank: RankMetadata) -> Memory:
        """Opens a peer's pool.

        Raises:
            NotMappable: the pool is on another host, is not offered, or its owner has
                ended.
        """
        return open_host(rank)

    def max_launch_bytes(self, copy: BlockCopy, factors: Factors) -> int:
        """The largest part of a copy, in bytes, that a launch may take now.

        0 means that nothing may be launched for now.
        """
        return ALL_BYTES

    def launch(self, copy: BlockCopy, source: Memory, factors: Factors) -> Any:
        """Begins to place pieces.

        Returns:
            A token for `finished`.
        """
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
        """True if a launch has ended. Never blocks.

        Raises the error of a launch that failed.
        """
        return token is None or bool(token.query())

    def retire(self, tokens: deque[Any]) -> None:
        """Removes the oldest launches from the queue, as far as they have ended.

        Raises the error of a launch that failed.
        """
        while tokens:
            oldest = tokens.popleft()
            if not self.finished(oldest):
                tokens.appendleft(oldest)
                return

    def _place(self, copy: BlockCopy, source: Memory, factors: Factors) -> None:
        assert source.bytes is not None
        place(copy, source.bytes, self._pool.tensor, factors)


class StagingBuffer:
    """A rank's staging memory: `nbytes` on the pool's device, in two slots or more.

    It is owned by one pull at a time; other pulls that need it queue. READs fill a slot
    in the peer's layout; `place` copies it into the pool. A slot is reused only after
    the copies out of it have finished (I8).

    Args:
        placer: used by this buffer only.

    Raises:
        ValueError: `nbytes` cannot be allocated.
    """

    def __init__(self, nbytes: int, pool: KVPool, placer: Placer) -> None:
        self.nbytes = nbytes
        try:  # on a CPU the memory is not resident before it is used
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        except RuntimeError:
            message = (
                f"staging_bytes is {nbytes}, more than the available memory; "
                f"use a lower --staging-bytes"
            )
            raise ValueError(message) from None
        self._placer = placer
        self._queue: deque[str] = deque()  # pull ids; the first one owns the slots
        # Launches that have not been retired, by slot.
        self._launches: list[deque[Any]] = [deque() for _ in range(_MAX_SLOTS)]

    def bind_thread(self) -> None:
        """Prepares the thread that uses this memory; called there once."""
        self._placer.bind_thread()

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    def num_slots(self, slot_bytes: int) -> int:
        """The number of slots of that size.

        It is at least two, as a chunk takes at most half the memory.
        """
        return min(self.nbytes // slot_bytes, _MAX_SLOTS)

    def enter(self, pull_id: str) -> None:
        """Adds a pull to the queue."""
        self._queue.append(pull_id)

    @property
    def owner(self) -> str | None:
        """The pull that may use the slots."""
        return self._queue[0] if self._queue else None

    def leave(self, pull_id: str) -> None:
        """Removes a pull from the queue.

        Must not be called while a READ of the pull into a slot is active.
        """
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True if every copy out of the slot has finished.

        Raises the error of a copy that failed.
        """
        self._placer.retire(self._launches[slot])
        return not self._launches[slot]

    def place(self, step: Step, slot: int, slot_bytes: int) -> None:
        """Begins to copy the slot's KV into the pool.

        The copies have ended when `is_free` is true.
        """
        start = slot * slot_bytes
        memory = Memory(
            self.base_address + start, self._memory[start : start + slot_bytes]
        )
        for copy in step.copies:
            token = self._placer.launch(copy, memory, step.transfer.factors)
            # Registered one by one: if a later launch raises, this one is waited for.
            self._launches[slot].append(token)


def launches(copies: Iterable[BlockCopy], chunk_bytes: int) -> Iterator[BlockCopy]:
    """Divides copies into parts of at most `chunk_bytes`, or of one piece."""
    for copy in copies:
        count = max(1, chunk_bytes // copy.piece_bytes)
        for first in range(0, len(copy.sources), count):
            yield copy.part(first, count)


def place(
    copy: BlockCopy, source: torch.Tensor, pool: torch.Tensor, factors: Factors = None
) -> None:
    """Copies pieces into the pool, and converts them if dtype or scales differ.

    On a GPU the copies are queued on the current stream.

    Args:
        source: u8, contiguous; `copy.sources` count from its start.
        pool: the rank's whole KV pool, contiguous, on the source's device.
        factors: of the elements, by layer and component.
    """
    convert = _converter(copy, pool, factors)
    target = pool.view(-1)
    if copy.source.dtype == copy.target.dtype and factors is None:
        row_bytes = copy.source.head_dim * copy.source.itemsize
        alignment = source.data_ptr() | target.data_ptr() | row_bytes
        dtype = next(word for word in _WORDS if alignment % word.itemsize == 0)
        source = _as(source, dtype)
        target = target.view(torch.uint8).view(dtype)
    else:
        source = _as(source, getattr(torch, copy.source.dtype))
    for first, count, source_step, target_step in _equally_spaced(copy):
        source_start = int(copy.sources[first])
        target_start = int(copy.targets[first])
        read = _view(copy.source, copy, source, count, source_start, source_step)
        write = _view(copy.target, copy, target, count, target_start, target_step)
        write.copy_(convert(read))


def _as(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory as elements of `dtype`, without a rest below one element."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def axes_of(copy: BlockCopy) -> dict[str, int]:
    """The sizes of a piece, by the axes' letters as in kvcache/layout.py."""
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
    """Returns a function that converts a view of the source for the pool.

    A copy of torch converts the dtype by itself, except for FP8's largest numbers. It
    applies no factors.
    """
    is_fp8_conversion = (
        pool.dtype is fp8.DTYPE and copy.source.dtype != copy.target.dtype
    )
    if factors is None and not is_fp8_conversion:
        return lambda part: part
    layers = copy.target.num_layers
    components = copy.target.num_components
    scale = torch.tensor(factors or [1.0] * (layers * components), device=pool.device)
    # The last two axes of a view are tokens and elements.
    scale = scale.view(layers, components, 1, 1)
    return lambda part: fp8.to_stored(part.float() * scale, pool.dtype)


def _view(
    layout: KVLayout,
    copy: BlockCopy,
    words: torch.Tensor,
    count: int,
    start: int,
    step: int,
) -> torch.Tensor:
    """A view of `count` pieces from byte `start` on, `step` bytes apart."""
    word_bytes = words.element_size()
    sizes = axes_of(copy)
    row_words = layout.head_dim * layout.itemsize // word_bytes
    strides = [layout.byte_strides[axis] // word_bytes for axis in sizes]
    return words.as_strided(
        (count, *sizes.values(), row_words),
        (step // word_bytes, *strides, 1),
        words.storage_offset() + start // word_bytes,
    )


def _equally_spaced(copy: BlockCopy) -> Iterator[tuple[int, int, int, int]]:
    """Divides a copy into series of equally spaced pieces.

    Yields:
        (first piece, number of pieces, bytes from one piece to the next at the source,
        the same at the target).
    """
    source_steps = np.diff(copy.sources).tolist()
    target_steps = np.diff(copy.targets).tolist()
    steps = [*zip(source_steps, target_steps, strict=True), (0, 0)]
    first = 0
    while first < len(copy.sources):
        last = first
        step = steps[first]
        if min(step) <= 0:  # views have no negative strides
            step = (0, 0)
        while min(step) and steps[last] == step:
            last += 1
        yield first, last - first + 1, *step
        first = last + 1
