"""Carries out ("places") block copies with torch; CudaPlacer is faster on GPUs.

Torch makes strided copies between views of two memories. A view has the shape [pieces,
heads, layers, components, tokens, elements], so the pieces of a view must be equally
spaced. A sequence's blocks are scattered over a pool, but the pieces inside a block are
equally spaced, and so are the blocks inside a slot. Each series of equally spaced
pieces is one copy by torch.
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
from kvcache.transfer.plan.block_copy import BlockCopy, ScaleFactors
from kvcache.transfer.plan.steps import Step
from protocol.handshake import RankMetadata

# Elements that need no conversion are copied as integers of one of these dtypes: the
# largest dtype with a size that divides all sizes and addresses, because larger words
# are copied faster.
_WORDS = torch.int64, torch.int32, torch.int16, torch.uint8
ALL_BYTES = 1 << 62  # `claim_launch_bytes` returns this value if there is no limit
_MAX_SLOTS = 4  # largest number of slots that the staging memory is divided into


class Placer:
    """Copies into one rank's pool with torch.

    On a CPU the calling thread copies. On a GPU the copies run on the placer's stream.
    Only the thread that has called `bind_thread` may use a placer.

    Args:
        device: carries out the copies; None: the device of the pool.
    """

    launch_bytes = 16 << 20  # limit of one launch; a CPU copies this in 2 to 4 ms

    def __init__(self, pool: KVPool, device: torch.device | None = None) -> None:
        self._pool = pool
        self._device = device or pool.device
        self._stream = None
        if self._device.type == "cuda":
            # 0 is the lowest priority of a CUDA stream. The engine's stream has a
            # higher priority, so the engine's kernels run first.
            self._stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self._device, priority=0
            )

    def bind_thread(self) -> None:
        """Prepares the calling thread. Only this thread may then use the placer."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    def open(self, rank: RankMetadata) -> Memory:
        """Opens a peer's pool.

        Raises:
            NotMappable: the pool is on another host, is not offered, or its owner has
                ended.
        """
        return open_host(rank)

    def claim_launch_bytes(self, copy: BlockCopy, scale_factors: ScaleFactors) -> int:
        """Returns how many bytes of a copy may be launched now; 0: none.

        The caller must immediately launch the returned number of bytes, because a
        placer with a limited rate counts these bytes as launched.
        """
        return ALL_BYTES

    def launch(
        self, copy: BlockCopy, source: Memory, scale_factors: ScaleFactors
    ) -> Any:
        """Begins to copy all pieces of a copy into the pool.

        Returns:
            A handle with which `finished` checks this launch.
        """
        if self._stream is None:
            self._place(copy, source, scale_factors)
            return None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                self._place(copy, source, scale_factors)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            except Exception:
                # Copies that were queued before the error have no event, so this waits
                # for all copies on the stream.
                self._stream.synchronize()
                raise
        return event

    def finished(self, handle: Any) -> bool:
        """True if a launch has ended. Never blocks.

        Raises the launch's error if the launch has failed.

        Args:
            handle: the result of `launch`.
        """
        return handle is None or bool(handle.query())

    def retire(self, handles: deque[Any]) -> None:
        """Removes launches that have ended from the front of a queue of handles.

        Stops at the first launch that has not ended. Raises the error of a failed
        launch.
        """
        while handles:
            oldest = handles.popleft()
            if not self.finished(oldest):
                handles.appendleft(oldest)
                return

    def _place(
        self, copy: BlockCopy, source: Memory, scale_factors: ScaleFactors
    ) -> None:
        assert source.bytes is not None
        place(copy, source.bytes, self._pool.memory, scale_factors)


class StagingBuffer:
    """A rank's staging memory: `nbytes` on the pool's device, in two slots or more.

    One pull at a time owns all slots; other pulls wait in a queue. READs fill a slot in
    the peer's layout, then `place` copies the slot into the pool. A slot is reused only
    after the copies out of it have ended (invariant I8 in docs/design.md).

    Args:
        placer: copies out of the staging memory; no other object may use this placer.

    Raises:
        ValueError: `nbytes` cannot be allocated.
    """

    def __init__(self, nbytes: int, pool: KVPool, placer: Placer) -> None:
        self.nbytes = nbytes
        # On a CPU, pages take memory only at their first write. So this allocation
        # fails only for sizes far beyond the available memory.
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=pool.device)
        except RuntimeError:
            message = (
                f"staging_bytes is {nbytes}, more than the available memory; "
                f"use a lower --staging-bytes"
            )
            raise ValueError(message) from None
        self._placer = placer
        self._queue: deque[str] = deque()  # pull ids; the first pull owns all slots
        # Launches that have not been retired, by slot.
        self._launches: list[deque[Any]] = [deque() for _ in range(_MAX_SLOTS)]

    def bind_thread(self) -> None:
        """Prepares the calling thread. Only this thread may then use the memory."""
        self._placer.bind_thread()

    @property
    def base_address(self) -> int:
        return int(self._memory.data_ptr())

    def num_slots(self, slot_bytes: int) -> int:
        """The number of slots of `slot_bytes` that the memory is divided into.

        The number is at least two, because a chunk takes at most half the memory.
        """
        return min(self.nbytes // slot_bytes, _MAX_SLOTS)

    def join_queue(self, pull_id: str) -> None:
        """Queues a pull for the memory. The first pull in the queue owns all slots."""
        self._queue.append(pull_id)

    @property
    def owner(self) -> str | None:
        """The id of the pull that may use the slots; None if no pull is queued."""
        return self._queue[0] if self._queue else None

    def leave_queue(self, pull_id: str) -> None:
        """Removes a pull from the queue. Does nothing if the pull is not queued.

        Must not be called while a READ of the pull into a slot is active.
        """
        if pull_id in self._queue:
            self._queue.remove(pull_id)

    def is_free(self, slot: int) -> bool:
        """True if every copy out of the slot has ended.

        Raises the error of a failed copy.
        """
        self._placer.retire(self._launches[slot])
        return not self._launches[slot]

    def place(self, step: Step, slot: int, slot_bytes: int) -> None:
        """Begins to copy the KV of a step from its slot into the pool.

        The copies have ended when `is_free(slot)` is true.
        """
        start = slot * slot_bytes
        memory = Memory(
            self.base_address + start, self._memory[start : start + slot_bytes]
        )
        for copy in step.copies:
            handle = self._placer.launch(copy, memory, step.transfer.scale_factors)
            # Each launch is recorded immediately. If a later launch raises, `is_free`
            # still waits for the earlier launches.
            self._launches[slot].append(handle)


def split_into_launches(
    copies: Iterable[BlockCopy], max_bytes: int
) -> Iterator[BlockCopy]:
    """Divides copies into parts of at most `max_bytes`, but at least one piece each."""
    for copy in copies:
        count = max(1, max_bytes // copy.piece_bytes)
        for first in range(0, len(copy.sources), count):
            yield copy.part(first, count)


def place(
    copy: BlockCopy,
    source: torch.Tensor,
    target: torch.Tensor,
    scale_factors: ScaleFactors = None,
) -> None:
    """Copies pieces into the pool, and converts them if dtype or scales differ.

    On a GPU the copies are queued on the current stream.

    Args:
        source: u8, contiguous; the offsets in `copy.sources` count from its start.
        target: u8, contiguous, on the source's device: the rank's memory. The offsets
            in `copy.targets` count from its start.
    """
    convert = _converter(copy, target.device, scale_factors)
    if copy.source.dtype == copy.target.dtype and scale_factors is None:
        row_bytes = copy.source.head_dim * copy.source.itemsize
        alignment = source.data_ptr() | target.data_ptr() | row_bytes
        dtype = next(word for word in _WORDS if alignment % word.itemsize == 0)
        source = _view_as(source, dtype)
        target = _view_as(target, dtype)
    else:
        source = _view_as(source, getattr(torch, copy.source.dtype))
        target = _view_as(target, getattr(torch, copy.target.dtype))
    for first, count, source_step, target_step in _equally_spaced(copy):
        source_start = int(copy.sources[first])
        target_start = int(copy.targets[first])
        read = _view(copy.source, copy, source, count, source_start, source_step)
        write = _view(copy.target, copy, target, count, target_start, target_step)
        write.copy_(convert(read))


def _view_as(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A view of bytes as elements of `dtype`, without an incomplete last element."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def axes_of(copy: BlockCopy) -> dict[str, int]:
    """The sizes of a piece, by the axes' letters as in kvcache/layout.py."""
    layout = copy.source
    return {
        "H": copy.num_heads,
        "L": layout.num_layers,
        "C": layout.num_components,
        "N": copy.num_tokens,
    }


def _converter(
    copy: BlockCopy, device: torch.device, scale_factors: ScaleFactors
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that converts a view of the source for the target.

    The function clamps to FP8's largest number and multiplies by scale factors, because
    torch's own copy only converts the dtype. If neither is needed, the function returns
    the view unchanged.
    """
    dtype: torch.dtype = getattr(torch, copy.target.dtype)
    is_fp8_conversion = dtype is fp8.DTYPE and copy.source.dtype != copy.target.dtype
    if scale_factors is None and not is_fp8_conversion:
        return lambda part: part
    layers = copy.target.num_layers
    components = copy.target.num_components
    factors = scale_factors or [1.0] * (layers * components)
    scale = torch.tensor(factors, device=device)
    # The last two axes of a view are tokens and elements.
    scale = scale.view(layers, components, 1, 1)
    return lambda part: fp8.to_stored(part.float() * scale, dtype)


def _view(
    layout: KVLayout,
    copy: BlockCopy,
    words: torch.Tensor,
    count: int,
    start: int,
    step: int,
) -> torch.Tensor:
    """A view of `count` equally spaced pieces of a copy, at its source or target.

    Args:
        layout: the layout of the memory.
        words: the memory, as words of several bytes or as elements.
        start: byte at which the first piece starts.
        step: bytes from the start of one piece to the start of the next one.
    """
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
        bytes from one piece to the next at the target).
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
