"""Places a chunk of staged KV into the pool: the second half of the staged path.

A move is one strided copy of up to seven axes between views of the slot and of the pool:

    [blocks, repeat, heads, layers, components, tokens, elements]

Blocks of the pool are scattered. A processor copies them one by one, since starting a copy costs it
little and torch's indexed copy runs at half the speed; a GPU takes the indexed copy, since starting
a kernel per block would cost it more than the copy.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.transfer.staged import Chunk, Move, Region
from kvcache.transfer.topology import IntArray, PlanError

# Moving a head's elements as wider words is faster, where the sizes allow it.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

_Convert = Callable[[torch.Tensor], torch.Tensor]


class _Lane(NamedTuple):
    """Memory seen as words of one size."""

    words: torch.Tensor  # 1-D
    word_bytes: int
    strides: dict[str, int]  # in words
    row_words: int  # one head of one token


def apply(chunk: Chunk, slot: torch.Tensor, pool: torch.Tensor) -> None:
    """Copies what the chunk's reads brought into the slot to its places in the pool.

    Converts dtype and scales where the peer's differ. On a GPU the copies are queued on the current
    stream: the slot may be reused once that stream has passed them.

    Args:
        slot: u8[at least chunk.nbytes], contiguous; chunk.reads have been read into it.
        pool: the rank's whole KV pool, contiguous, on the slot's device.

    Raises:
        PlanError: the slot is too small or the pool is not the planned one.
    """
    if slot.numel() < chunk.nbytes:
        raise PlanError(f"slot has {slot.numel()} bytes; the chunk needs {chunk.nbytes}")
    if pool.nbytes != chunk.target.nbytes:
        raise PlanError(f"pool has {pool.nbytes} bytes; planned for {chunk.target.nbytes}")
    flat = pool.view(-1)
    convert = _converter(chunk, pool)
    for region in chunk.regions:
        source, target = _lanes(region.source, chunk, slot, flat)
        for move in chunk.moves:
            _place(
                _source_view(source, region, move),
                _target_view(target, region, chunk.target, move),
                move,
                convert,
            )


def _converter(chunk: Chunk, pool: torch.Tensor) -> _Convert:
    """From a part of the source view to what is copied into the pool, whose dtype the copy takes
    on by itself where that is all there is to do."""
    if not _converts(chunk) or (chunk.factors is None and pool.dtype is not fp8.DTYPE):
        return _unchanged
    # Before the tokens and elements of a view come its layers and components.
    shape = (chunk.target.num_layers, chunk.target.num_components, 1, 1)
    factors = torch.tensor(chunk.factors or [1.0], device=pool.device)
    factors = factors.view(shape if chunk.factors else (1, 1, 1, 1))
    return lambda part: fp8.stored_as(part.float() * factors, pool.dtype)


def _unchanged(part: torch.Tensor) -> torch.Tensor:
    return part


def _converts(chunk: Chunk) -> bool:
    dtypes = {region.source.dtype for region in chunk.regions}  # none: reads alone, to measure
    return chunk.factors is not None or bool(dtypes - {chunk.target.dtype})


def measure() -> float:
    """Bytes a second of a strided copy like those of `apply` on the CPU; takes some ms."""
    source = torch.ones((16, 64, 16, 32), dtype=torch.int64)  # 4 MiB
    target = torch.zeros((16, 16, 64, 32), dtype=torch.int64).transpose(1, 2)
    seconds = []
    for _ in range(4):  # the first one finds cold caches, another one may be interrupted
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return source.nbytes / min(seconds)


def _lanes(
    source: KVLayout, chunk: Chunk, slot: torch.Tensor, pool: torch.Tensor
) -> tuple[_Lane, _Lane]:
    target = chunk.target
    if _converts(chunk):
        theirs: torch.dtype = getattr(torch, source.dtype)
        usable = slot.numel() // source.itemsize * source.itemsize
        return (
            _lane(source, slot[:usable].view(theirs)),
            _lane(target, pool),
        )
    row = source.head_dim * source.itemsize
    start = int(slot.storage_offset()) | int(pool.storage_offset()) * pool.element_size()
    word_bytes, word = next(
        (size, word) for size, word in _WORDS if row % size == 0 and start % size == 0
    )
    usable = slot.numel() // word_bytes * word_bytes
    return _lane(source, slot[:usable].view(word)), _lane(target, pool.view(word))


def _lane(layout: KVLayout, words: torch.Tensor) -> _Lane:
    size = words.element_size()
    strides = {axis: stride // size for axis, stride in layout.byte_strides.items()}
    return _Lane(words, size, strides, layout.head_dim * layout.itemsize // size)


def _source_view(lane: _Lane, region: Region, move: Move) -> torch.Tensor:
    """[slot blocks, repeat, ...]: a repetition goes on in the next block of the slot; or
    [slot blocks, pieces, ...]."""
    layout, strides = region.source, lane.strides
    shape = _shape(layout.num_blocks - move.repeat + 1, region, move, lane)
    again = strides["B"]
    if move.pieces > 1:
        shape = (shape[0], move.pieces, *shape[2:])
        again = strides["N"] * move.num_tokens
    steps = (strides["B"], again, *(strides[axis] for axis in "HLCN"), 1)
    offset = region.source_offset // lane.word_bytes + move.source_token * strides["N"]
    return lane.words.as_strided(shape, steps, lane.words.storage_offset() + offset)


def _target_view(lane: _Lane, region: Region, layout: KVLayout, move: Move) -> torch.Tensor:
    """[pool blocks, repeat, ...]: a repetition goes on at the next token of the block."""
    strides = lane.strides
    shape = _shape(layout.num_blocks, region, move, lane)
    again = strides["N"] * move.num_tokens
    steps = (strides["B"], again, *(strides[axis] for axis in "HLCN"), 1)
    offset = region.target_offset * layout.itemsize // lane.word_bytes
    offset += move.target_token * strides["N"]
    return lane.words.as_strided(shape, steps, lane.words.storage_offset() + offset)


def _shape(blocks: int, region: Region, move: Move, lane: _Lane) -> tuple[int, ...]:
    layout = region.source
    return (
        blocks,
        move.repeat,
        region.num_heads,
        layout.num_layers,
        layout.num_components,
        move.num_tokens,
        lane.row_words,
    )


def _place(source: torch.Tensor, target: torch.Tensor, move: Move, convert: _Convert) -> None:
    if move.pieces > 1:  # each has a block of D
        target = target.squeeze(1)
    rows = _slice(move.source_blocks)
    places = _slice(move.target_blocks)
    if rows is not None and places is not None:
        picked = source[rows]
        _in_pieces(target[places], move).copy_(convert(picked))
    elif target.is_cuda:
        picked = source[rows] if rows is not None else source[_index(move.source_blocks, source)]
        index = _in_pieces(_index(move.target_blocks, target), move)
        target[index] = convert(picked).to(target.dtype)
    else:
        places_of = move.target_blocks.reshape(-1, move.pieces).tolist()
        for row, of_row in zip(move.source_blocks.tolist(), places_of, strict=True):
            for piece, place in enumerate(of_row):
                part = source[row, piece] if move.pieces > 1 else source[row]
                target[place].copy_(convert(part))


def _in_pieces(blocks: torch.Tensor, move: Move) -> torch.Tensor:
    """What lies along the blocks of D, along the slot's blocks and their pieces."""
    if move.pieces == 1:
        return blocks
    of_row = move.pieces * blocks.stride(0)
    shape = (blocks.shape[0] // move.pieces, move.pieces, *blocks.shape[1:])
    return blocks.as_strided(shape, (of_row, *blocks.stride()), blocks.storage_offset())


def _slice(blocks: IntArray) -> slice | None:
    """The blocks as a slice, where they ascend in equal steps."""
    steps = np.diff(blocks)
    step = int(steps[0]) if len(steps) else 1
    if step < 1 or np.any(steps != step):
        return None
    return slice(int(blocks[0]), int(blocks[-1]) + 1, step)


def _index(blocks: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(blocks).to(like.device, non_blocking=True)
