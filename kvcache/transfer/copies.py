"""The mapped path by copy engines of a GPU: which strided copies move a share.

If heads, layers and components are laid out alike on both sides, the tokens that two blocks share
are rows of equal length, evenly spaced on either side: one two-dimensional copy. If the block sizes
are equal too, a whole block is a single run. Copy engines take no multiprocessor from the decode
batch and move long runs faster than a kernel does, but short rows slowly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvcache.layout import KVLayout
from kvcache.transfer.boxes import Transfer, cut_tokens
from kvcache.transfer.gather import Gather, Share
from kvcache.transfer.topology import Endpoint, IntArray


@dataclass(frozen=True)
class RowSide:
    """Where a share's rows lie on one side; bytes from the pool's base, tokens in a block."""

    first: int  # of the wanted heads in block 0
    block: int  # from a block to the next one
    pitch: int  # from a row to the next one
    tokens: int


@dataclass(frozen=True, eq=False)
class Rows:
    source: RowSide
    target: RowSide
    count: int  # rows in a block
    token_bytes: int  # in a row

    @property
    def row_bytes(self) -> int:
        """Of a whole row of the smaller block."""
        return min(self.source.tokens, self.target.tokens) * self.token_bytes

    @property
    def pieces(self) -> int:
        """Copies that a block of P is, at most."""
        ours, theirs = self.target.tokens, self.source.tokens
        fits = ours % theirs == 0 or theirs % ours == 0
        return max(theirs // ours, 1) if fits else (theirs - 1) // ours + 2

    @property
    def run_bytes(self) -> int:
        """Of a whole block, if it is one run on both sides; else 0."""
        source, target = self.source, self.target
        width = source.tokens * self.token_bytes
        is_run = source.tokens == target.tokens and source.pitch == target.pitch == width
        return width * self.count if is_run else 0


class Copies(NamedTuple):
    """Copies out of one pool into another; three i64[n] of bytes, places from the pools' bases."""

    sources: IntArray
    targets: IntArray
    widths: IntArray  # of a row


def rows_of(share: Share, local: Endpoint, remote: Endpoint) -> Rows | None:
    """A share as rows; None where it is more than that, or elements change on the way."""
    source, target = remote.layout, local.layout
    order = source.order.replace("B", "")
    if share.converts or order != target.order.replace("B", ""):
        return None
    sizes = {**source.sizes, "H": share.num_heads}
    outer, inner = order.split("N")
    token, elements = 1, (source.strides, target.strides)
    for axis in reversed("N" + inner):
        if any(strides[axis] != token for strides in elements) and (axis == "N" or sizes[axis] > 1):
            return None
        token *= sizes[axis] if axis != "N" else 1
    count, pitches = 1, [layout.block_size * token for layout in (source, target)]
    for axis in reversed(outer):
        if sizes[axis] == 1:
            continue
        steps = [strides[axis] for strides in elements]
        if count == 1:
            pitches = steps
        elif steps != [count * pitch for pitch in pitches]:
            return None
        count *= sizes[axis]
    unit, itemsize = share.unit_elements, source.itemsize

    def side(layout: KVLayout, first: int, pitch: int) -> RowSide:
        return RowSide(
            first * unit * itemsize,
            layout.byte_strides["B"],
            pitch * itemsize,
            layout.block_size,
        )

    starts = share.parameters[:2].tolist()
    return Rows(
        side(source, starts[0], pitches[0]),
        side(target, starts[1], pitches[1]),
        count,
        token * itemsize,
    )


def whole_blocks(
    rows: Rows, gather: Gather, transfer: Transfer, first: int, count: int
) -> list[tuple[int, int]] | None:
    """As `plan_copies` where every block is whole and a run: (source, target) of each, without
    numpy, whose first calls in a while take longer than a few blocks. None where they are not."""
    size, step = rows.source.tokens, gather.share.block_step
    low = gather.ordinal(first)
    last = low + (count - 1) * step
    is_whole = low * size >= gather.token_start and (last + 1) * size <= gather.token_stop
    if not rows.run_bytes or not is_whole:
        return None
    transfer.local_table.check()
    remote, local = transfer.remote_table.ids, transfer.local_table.ids
    source, target = rows.source, rows.target
    return [
        (source.first + remote[block] * source.block, target.first + local[block] * target.block)
        for block in range(low, last + 1, step)
    ]


def plan_copies(
    rows: Rows,
    gather: Gather,
    transfer: Transfer,
    first: int,
    count: int,
    bases: tuple[int, int] = (0, 0),
) -> tuple[Copies | None, Copies | None]:
    """What moves `count` blocks of a gather from `first` on: runs, which are rows as wide as
    `Rows.run_bytes`, and copies of `Rows.count` rows each. None: there are none.

    Args:
        bases: what is added to each source and target: addresses of the two pools.
    """
    size, step = rows.source.tokens, gather.share.block_step
    low = gather.ordinal(first)
    stop = low + (count - 1) * step + 1
    if not rows.run_bytes:
        return None, _cut(rows, gather, transfer, range(low, stop, step), bases)
    ends: list[int] = []
    while low < stop and (low * size < gather.token_start or (low + 1) * size > gather.token_stop):
        ends.append(low)
        low += step
    if low < stop and stop * size > gather.token_stop:
        ends.append(stop - 1)
        stop -= step
    strided = [_cut(rows, gather, transfer, range(end, end + 1), bases) for end in ends]
    joined = Copies(*map(np.concatenate, zip(*strided, strict=True))) if strided else None
    runs = _runs(rows, transfer, slice(low, stop, step), bases) if low < stop else None
    return runs, joined


def _runs(rows: Rows, transfer: Transfer, blocks: slice, bases: tuple[int, int]) -> Copies:
    """Whole blocks, by their ordinals in the sequence."""
    sources = transfer.remote_blocks[blocks] * rows.source.block
    targets = transfer.local_blocks[blocks] * rows.target.block
    sources += bases[0] + rows.source.first
    targets += bases[1] + rows.target.first
    return Copies(sources, targets, np.full(len(sources), rows.run_bytes))


def _cut(
    rows: Rows, gather: Gather, transfer: Transfer, blocks: range, bases: tuple[int, int]
) -> Copies:
    """Blocks of P, by their ordinals in the sequence, cut where blocks of D end."""
    size = rows.source.tokens
    starts, lengths = cut_tokens(
        max(gather.token_start, blocks[0] * size),
        min(gather.token_stop, (blocks[-1] + 1) * size),
        size,
        rows.target.tokens,
    )
    mine = (starts // size - blocks[0]) % blocks.step == 0  # other owners have those between
    starts, lengths = starts[mine], lengths[mine]
    return Copies(
        bases[0] + _places(rows.source, rows.token_bytes, transfer.remote_blocks, starts),
        bases[1] + _places(rows.target, rows.token_bytes, transfer.local_blocks, starts),
        lengths * rows.token_bytes,
    )


def _places(side: RowSide, token_bytes: int, table: IntArray, starts: IntArray) -> IntArray:
    within = starts % side.tokens * token_bytes
    return side.first + table[starts // side.tokens] * side.block + within
