"""The chunks of the staged path, made lazily: the first one is being read while the others are
planned, and where a chunk's KV goes is worked out after its reads were posted.

Whole blocks, which most chunks consist of, take a handful of numpy calls, with what is remembered
of the two geometries; all else takes the general path.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvcache.transfer.boxes import Transfer, cut_tokens, direct_boxes, int_array
from kvcache.transfer.runs import (
    Axis,
    RankRead,
    Runs,
    axis_offsets,
    find_runs,
    grow,
    multiply_out,
)
from kvcache.transfer.runs import runs_in_order as in_order
from kvcache.transfer.staged import Chunk, Move, Span, Staging, aligned, boxes_at
from kvcache.transfer.topology import IntArray, byte_strides
from kvcache.transfer.whole_blocks import joined

_FEW_BLOCKS = 128


class Chunks(Sequence[Chunk]):
    """Of one or several stagings, in their order.

    Attributes:
        slot_bytes: what the largest chunk takes of staging memory.
    """

    def __init__(self, stagings: Sequence[Staging]) -> None:
        self._stagings = stagings
        self._made: dict[int, Chunk] = {}
        self._firsts = [0]
        for staging in stagings:
            self._firsts.append(self._firsts[-1] + staging.num_chunks)
        self.slot_bytes = max([staging.slot_bytes for staging in stagings])

    def check(self) -> None:
        """Raises PlanError if D's block table does not fit; asked before anything is placed."""
        for staging in self._stagings:
            staging.transfer.local_table.check()

    def unstaged(self) -> tuple[RankRead, ...] | None:
        """What they bring, read straight into the pool; None where elements change on the way."""
        transfers = [staging.transfer for staging in self._stagings]
        if any(transfer.converts for transfer in transfers):
            return None
        return tuple(
            RankRead(owner, *find_runs(boxes))
            for transfer in transfers
            for owner, boxes in direct_boxes(transfer)
        )

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: Any) -> Any:
        made = self._made.get(index)
        if made is None:
            if not 0 <= index < len(self):
                raise IndexError(index)
            number = bisect_right(self._firsts, index) - 1
            made = _make(self._stagings[number], index - self._firsts[number])
            self._made[index] = made
        return made


class _Moves(Sequence[Move]):
    """Made when first looked at."""

    def __init__(self, make: Callable[[], Sequence[Move]]) -> None:
        self._make = make
        self._made: Sequence[Move] | None = None

    def _all(self) -> Sequence[Move]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[Move]:
        return iter(self._all())


def _make(staging: Staging, index: int) -> Chunk:
    transfer = staging.transfer
    first, last = staging.borders[index : index + 2]
    size = transfer.remote[0].layout.block_size
    start = max(transfer.token_start, first * size)
    stop = min(transfer.token_stop, last * size)
    return Chunk(
        tuple(_reads(staging, first, last)),
        staging.slot_bytes,
        _Moves(lambda: make_moves(transfer, start, stop, first)),
        staging.regions,
        transfer.local.layout,
        transfer.factors,
        Span(staging, first, last, start, stop),
    )


# -- reads


@dataclass(frozen=True)
class Share:
    """What is read of every whole block from one rank of P into a region of the slot. Bytes."""

    owner: int
    group: int
    copy: int  # index among the ranks that take turns
    copies: int
    run_bytes: int
    offsets: tuple[IntArray, IntArray]  # of the runs inside a block, remote and local
    remote_block: int  # distance of two blocks
    local_block: int
    remote_offset: int  # to the first byte
    local_offset: int

    @property
    def joins(self) -> bool:
        """Runs of neighbouring blocks are neighbours."""
        return self.copies == 1 and self.run_bytes == self.remote_block == self.local_block


def _reads(staging: Staging, first: int, last: int) -> Iterator[RankRead]:
    transfer = staging.transfer
    size = transfer.remote[0].layout.block_size
    start, stop = max(staging.read_start, first * size), min(staging.read_stop, last * size)
    if start % size or stop % size:
        starts, tokens = cut_tokens(start, stop, size)
        for owner, boxes in boxes_at(staging, starts, tokens, starts // size - first, 0):
            for runs in in_order(boxes):
                yield RankRead(owner, *runs)
        return
    low, high = start // size, stop // size
    for share in shares_of_chunks(staging):
        begin = (share.copy - low - transfer.groups[share.group].turn) % share.copies
        if begin < high - low:
            which = slice(low + begin, high, share.copies)
            yield RankRead(share.owner, *_runs(share, transfer, which, begin + low - first))


def _runs(share: Share, transfer: Transfer, which: slice, slot: int) -> Runs:
    """Of some blocks of P into every `copies`th block of the slot from `slot` on."""
    if which.stop - which.start > _FEW_BLOCKS * share.copies:
        runs = _many_runs(share, transfer.remote_blocks[which], slot)
    else:
        runs = few_runs(share, transfer.remote_table.ids[which], slot)
    return multiply_out(runs, share.offsets)


def _many_runs(share: Share, remote: IntArray, slot: int) -> Runs:
    slots = np.arange(slot, slot + len(remote) * share.copies, share.copies)
    lengths = np.empty(len(remote), np.int64)
    lengths.fill(share.run_bytes)
    if share.joins:
        firsts, counts = joined(remote[1:] - remote[:-1] == 1)
        remote, slots, lengths = remote[firsts], slots[firsts], counts * share.run_bytes
    return Runs(
        remote * share.remote_block + share.remote_offset,
        slots * share.local_block + share.local_offset,
        lengths,
    )


def few_runs(share: Share, remote: list[int], slot: int) -> Runs:
    """The same by a loop, which takes less than half a dozen of numpy's calls when these are not
    warm: as before the first chunk, which the link waits for."""
    sources: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    expected = None  # the block that would continue the last run
    target = slot * share.local_block + share.local_offset
    for block in remote:
        if block == expected:
            lengths[-1] += share.run_bytes
        else:
            sources.append(block * share.remote_block + share.remote_offset)
            targets.append(target)
            lengths.append(share.run_bytes)
        expected = block + 1 if share.joins else None
        target += share.local_block * share.copies
    return Runs(int_array(sources), int_array(targets), int_array(lengths))


def shares_of_chunks(staging: Staging) -> tuple[Share, ...]:
    """The same for every chunk of a staging, and for all that are cut alike."""
    kept = staging.transfer.kept
    key = ("shares", staging.way.wider, staging.regions[0].source.num_blocks)
    found: tuple[Share, ...] | None = kept.get(key)
    if found is None:
        found = kept[key] = tuple(_make_shares(staging))
    return found


def _make_shares(staging: Staging) -> Iterator[Share]:
    transfer, offset = staging.transfer, 0
    for number, (group, heads, region) in enumerate(
        zip(transfer.groups, staging.region_heads, staging.regions, strict=True)
    ):
        layout, writes = region.source, byte_strides(region.source)
        sizes = (len(heads), layout.num_layers, layout.num_components, layout.block_size)
        for copy, owner in enumerate(group.owners):
            end = transfer.remote[owner]
            reads = byte_strides(end.layout)
            axes = [
                Axis(size, reads[axis], writes[axis])
                for axis, size in zip("HLCN", sizes, strict=True)
            ]
            run, left = grow(layout.head_dim * layout.itemsize, axes)
            skipped = heads.start - end.heads(transfer.total_kv_heads).start
            yield Share(
                owner,
                number,
                copy,
                len(group.owners),
                run,
                axis_offsets(left),
                reads["B"],
                writes["B"],
                skipped * reads["H"],
                offset,
            )
        offset += aligned(layout.nbytes)


# -- moves


def make_moves(transfer: Transfer, start: int, stop: int, first: int) -> tuple[Move, ...]:
    """Where tokens [start, stop) of the sequence go out of a slot whose first block is P's block
    `first` of the sequence. The same for every region."""
    theirs, ours = transfer.remote[0].layout.block_size, transfer.local.layout.block_size
    longer, shorter = max(theirs, ours), min(theirs, ours)
    if longer % shorter or start % longer or stop % longer:
        return _any_moves(transfer, start, stop, first)
    blocks = transfer.local_blocks[start // ours : stop // ours]
    if ours > theirs:
        slots = np.arange(start // theirs - first, stop // theirs - first, ours // theirs)
        return (Move(0, 0, theirs, ours // theirs, slots, blocks),)
    slots = np.arange(start // theirs - first, stop // theirs - first)
    return (Move(0, 0, ours, 1, slots, blocks, theirs // ours),)


def _any_moves(transfer: Transfer, start: int, stop: int, first: int) -> tuple[Move, ...]:
    theirs, ours = transfer.remote[0].layout.block_size, transfer.local.layout.block_size
    starts, tokens = cut_tokens(start, stop, theirs, ours)
    source_token, target_token = starts % theirs, starts % ours
    heads, repeat = _rows(starts // ours, source_token, tokens)
    key = source_token[heads]
    for part in (target_token[heads], tokens[heads], repeat):
        key = key * 257 + part  # each is at most a block: 256 tokens
    order = np.argsort(key, kind="stable")
    rows = heads[order]
    sources, targets = starts[rows] // theirs - first, transfer.local_blocks[starts[rows] // ours]
    borders = [*np.flatnonzero(np.diff(key[order], prepend=-1)).tolist(), len(order)]
    of_first = (source_token[rows], target_token[rows], tokens[rows], repeat[order])
    alike = zip(*(array[borders[:-1]].tolist() for array in of_first), strict=True)
    return tuple(
        Move(at, to, count, again, sources[low:high], targets[low:high])
        for (low, high), (at, to, count, again) in zip(pairwise(borders), alike, strict=True)
    )


def _rows(
    target_block: IntArray, source_token: IntArray, tokens: IntArray
) -> tuple[IntArray, IntArray]:
    """Joins equal segments that follow each other in one block of D: first indices and counts."""
    joined = (
        (np.diff(target_block) == 0)
        & (np.diff(tokens) == 0)
        & (source_token[1:] == 0)
        & (source_token[:-1] == 0)
    )
    heads = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joined) + 1))
    return heads, np.diff(heads, append=len(tokens))
