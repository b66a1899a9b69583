"""Placing block copies with torch: strided copies between views of two memories.

A view holds pieces at equal distances: [pieces, heads, layers, components, tokens, elements].
Blocks of a pool are scattered, but pieces of one block, and a slot's blocks, follow one another.
A processor takes each stretch of such pieces at a time; on a GPU the kernel does without views.
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch

from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.transfer.plan.block_copy import BlockCopy
from kvcache.transfer.plan.endpoint import IntArray, PlanError

# Moving a head's elements as wider words is faster, where the sizes allow it.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


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
