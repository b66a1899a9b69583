"""The staged path: read the peer's KV as it lies, then place it with strided copies.

Staging memory is two or more slots of equal size: some fill while another is placed. A chunk is a
stretch of P's blocks that fits a slot. Inside a slot each head group has a region, an array in P's
own order of axes, so reading into it is a direct transfer between two layouts of one order, planned
by the same code; several owners of one group fill one region block by block, so placing it need not
know who read what. What is read may be more than what is wanted: all heads of a rank, or whole
blocks at the ends of the token range, where that makes fewer runs at less cost. It never leaves
the leased blocks.

    P (NHD, 4 heads)           slot (P's order)             D (HND, heads 2 and 3 wanted)
    b7: n0 h0h1h2h3 n1 ..  ->  s0: n0 h0h1h2h3 n1 ..   ->   b2: h2 n0 n1 .. h3 n0 n1 ..
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from kvcache.layout import KVLayout
from kvcache.transfer.boxes import Transfer, cut_tokens, pair_boxes, remote_offsets
from kvcache.transfer.cost import CostModel
from kvcache.transfer.runs import Boxes, RankRead, count_runs, runs_by_slot
from kvcache.transfer.topology import HeadGroup, IntArray, PlanError, byte_strides

# Regions, and so chunks, start at multiples of this: placing may move whole words.
ALIGN_BYTES = 64
# Nothing overlaps the last chunk's copy, so chunks are small; but each costs some 0.1 ms of posting
# and polling. Measured on a CPU, 4 and 8 MiB (1 to 2 ms of reading) beat 1 and 32 by 5 to 40 %.
_WANTED_CHUNKS = 8
_MAX_CHUNKS = 32  # each takes 20 us to plan
_MIN_CHUNK_S = 0.25e-3
_MAX_CHUNK_S = 0.75e-3


@dataclass(frozen=True)
class Region:
    """One head group's place in every slot, and where its heads belong in the pool."""

    source: KVLayout  # of the region: P's order, one slot block per block of P
    source_offset: int  # bytes from the slot's base to the first wanted head
    target_offset: int  # elements from the pool's base to that head
    num_heads: int  # wanted; the region may hold more


@dataclass(frozen=True)
class Move:
    """Token segments of one chunk that are alike but for their blocks.

    `repeat` slot blocks in a row continue one another in one block of D.
    """

    source_token: int  # first token inside the block of P
    target_token: int  # first token inside the block of D
    num_tokens: int  # in each repetition
    repeat: int
    source_blocks: IntArray  # i64[n] blocks of the region
    target_blocks: IntArray  # i64[n] blocks of D's pool


@dataclass(frozen=True)
class Chunk:
    """One slot full: reads whose local offsets count from the slot's base, then moves."""

    reads: tuple[RankRead, ...]
    nbytes: int  # of the slot, holes included
    moves: tuple[Move, ...]
    regions: tuple[Region, ...]  # every move is made in every region
    target: KVLayout  # of the pool
    factors: tuple[float, ...] | None = None  # of the elements, by layer and component


class Staging(NamedTuple):
    """One way to stage a transfer."""

    transfer: Transfer
    regions: tuple[Region, ...]
    region_heads: tuple[range, ...]  # of the model, read into each region
    first_block: int  # ordinal in the sequence at which the first chunk starts
    chunk_blocks: int
    read_start: int  # tokens read: at least the wanted ones
    read_stop: int

    @property
    def slot_bytes(self) -> int:
        return sum(aligned(region.source.nbytes) for region in self.regions)

    @property
    def pitch(self) -> int:
        """Distance of the chunks in the imaginary memory they are planned in: never adjacent."""
        return self.slot_bytes + ALIGN_BYTES

    @property
    def num_chunks(self) -> int:
        last = (self.transfer.token_stop - 1) // self.transfer.remote[0].layout.block_size
        return (last - self.first_block) // self.chunk_blocks + 1


class StagedEstimate(NamedTuple):
    staging: Staging
    descriptors: int
    bytes_read: int
    seconds: float


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def least_staging_bytes(layout: KVLayout) -> int:
    """Staging memory that two blocks of `layout` need: less is refused."""
    return 2 * aligned(layout.block_bytes)


def estimate_staged(transfer: Transfer, costs: CostModel, staging_bytes: int) -> StagedEstimate:
    """The cheapest way to stage a transfer of at least one token.

    Raises:
        PlanError: half the staging memory is smaller than one block.
    """
    exact = tuple(group.heads for group in transfer.groups)
    least = _block_bytes(transfer, exact)
    if staging_bytes // 2 < least:
        raise PlanError(
            f"staging_bytes is {staging_bytes}; a block of the peer takes {least} bytes, "
            f"and two must fit: use at least {2 * least}"
        )
    wider = tuple(
        transfer.remote[group.owners[0]].heads(transfer.total_kv_heads) for group in transfer.groups
    )
    size = transfer.remote[0].layout.block_size
    start, stop = transfer.token_start, transfer.token_stop
    whole = (start // size * size, -(-stop // size) * size)
    options = (
        _estimate(_staging(transfer, heads, span, costs, staging_bytes), costs)
        for heads in dict.fromkeys((exact, wider))
        if _block_bytes(transfer, heads) <= staging_bytes // 2
        for span in dict.fromkeys(((start, stop), whole))
    )
    return min(options, key=lambda option: option.seconds)


def _block_bytes(transfer: Transfer, region_heads: tuple[range, ...]) -> int:
    """Bytes of a slot that one block of P takes."""
    layout = transfer.remote[0].layout
    head_bytes = layout.block_bytes // layout.num_heads
    return sum(aligned(len(heads) * head_bytes) for heads in region_heads)


def _staging(
    transfer: Transfer,
    region_heads: tuple[range, ...],
    span: tuple[int, int],
    costs: CostModel,
    staging_bytes: int,
) -> Staging:
    theirs, ours = transfer.remote[0].layout, transfer.local.layout
    block_bytes = _block_bytes(transfer, region_heads)
    start, stop = transfer.token_start, transfer.token_stop
    wanted = -(-(stop - start) // theirs.block_size) * block_bytes
    shortest, longest = (int(s * costs.bytes_per_s) for s in (_MIN_CHUNK_S, _MAX_CHUNK_S))
    aim = max(min(max(wanted // _WANTED_CHUNKS, shortest), longest), wanted // _MAX_CHUNKS)
    blocks = max(1, min(aim, staging_bytes // 2) // block_bytes)
    # Chunks that end where blocks of both sides do cut no block of D in two.
    period = lcm(theirs.block_size, ours.block_size) // theirs.block_size
    period = period if period <= blocks else 1
    blocks -= blocks % period
    regions = _regions(transfer, region_heads, blocks)
    first = start // theirs.block_size // period * period
    return Staging(transfer, regions, region_heads, first, blocks, *span)


def _regions(
    transfer: Transfer, region_heads: tuple[range, ...], num_blocks: int
) -> tuple[Region, ...]:
    theirs, ours = transfer.remote[0].layout, transfer.local.layout
    first = transfer.local.heads(transfer.total_kv_heads).start
    regions, offset = [], 0
    for group, heads in zip(transfer.groups, region_heads, strict=True):
        layout = replace(theirs, num_heads=len(heads), num_blocks=num_blocks)
        skipped = (group.heads.start - heads.start) * byte_strides(layout)["H"]
        target = (group.heads.start - first) * ours.strides["H"]
        regions.append(Region(layout, offset + skipped, target, len(group.heads)))
        offset += aligned(layout.nbytes)
    return tuple(regions)


def _estimate(staging: Staging, costs: CostModel) -> StagedEstimate:
    boxes = [boxes for _, boxes in _staged_boxes(staging)]
    descriptors = sum(count_runs(part) for part in boxes)
    nbytes = sum(part.nbytes for part in boxes)
    read_s = costs.read_s(descriptors, nbytes)
    place_s = costs.reformat_s(staging.transfer.useful_bytes)
    seconds = costs.staged_s(read_s, place_s, staging.num_chunks)
    return StagedEstimate(staging, descriptors, nbytes, seconds)


def _staged_boxes(staging: Staging) -> Iterator[tuple[int, Boxes]]:
    """Boxes from P's pools to an imaginary memory in which the chunks lie `pitch` apart."""
    transfer = staging.transfer
    size = transfer.remote[0].layout.block_size
    starts, tokens = cut_tokens(staging.read_start, staging.read_stop, size)
    blocks = starts // size
    chunk, slot_block = np.divmod(blocks - staging.first_block, staging.chunk_blocks)
    offset = chunk * staging.pitch
    for group, heads, region in zip(
        transfer.groups, staging.region_heads, staging.regions, strict=True
    ):
        strides = byte_strides(region.source)
        target = offset + slot_block * strides["B"] + starts % size * strides["N"]
        yield from _group_boxes(staging, group, heads, region, (blocks, starts, target, tokens))
        offset = offset + aligned(region.source.nbytes)


def _group_boxes(
    staging: Staging,
    group: HeadGroup,
    heads: range,
    region: Region,
    places: tuple[IntArray, IntArray, IntArray, IntArray],
) -> Iterator[tuple[int, Boxes]]:
    blocks, starts, target, tokens = places
    whose = group.owner_index(blocks)
    layout = region.source
    for index, owner in enumerate(group.owners):
        mine = slice(None) if len(group.owners) == 1 else whose == index
        source = remote_offsets(staging.transfer, owner, starts[mine], heads.start)
        yield (
            owner,
            pair_boxes(
                byte_strides(staging.transfer.remote[owner].layout),
                byte_strides(layout),
                (source, target[mine], tokens[mine]),
                (len(heads), layout.num_layers, layout.num_components),
                layout.head_dim * layout.itemsize,
            ),
        )


def make_chunks(staging: Staging) -> tuple[Chunk, ...]:
    """Everything of the staged path, chunk by chunk."""
    reads: list[list[RankRead]] = [[] for _ in range(staging.num_chunks)]
    for owner, boxes in _staged_boxes(staging):
        for chunk, runs in runs_by_slot(boxes, staging.pitch):
            reads[chunk].append(RankRead(owner, *runs))
    moves, nbytes, transfer = _moves(staging), staging.slot_bytes, staging.transfer
    target, factors = transfer.local.layout, transfer.factors
    return tuple(
        Chunk(tuple(read), nbytes, tuple(move), staging.regions, target, factors)
        for read, move in zip(reads, moves, strict=True)
    )


def _moves(staging: Staging) -> list[list[Move]]:
    """The moves of each chunk; they are the same for every region."""
    transfer = staging.transfer
    theirs, ours = transfer.remote[0].layout.block_size, transfer.local.layout.block_size
    starts, tokens = cut_tokens(transfer.token_start, transfer.token_stop, theirs, ours)
    chunk, source_block = np.divmod(starts // theirs - staging.first_block, staging.chunk_blocks)
    source_token, target_token = starts % theirs, starts % ours
    first, repeat = _rows(chunk, starts // ours, source_token, tokens)
    key = chunk[first]
    for part in (source_token[first], target_token[first], tokens[first], repeat):
        key = key * 257 + part  # each is at most a block: 256 tokens
    order = np.argsort(key, kind="stable")
    rows = first[order]
    sources, targets = source_block[rows], transfer.local_blocks[starts[rows] // ours]
    borders = [*np.flatnonzero(np.diff(key[order], prepend=-1)).tolist(), len(order)]
    of_first = (chunk[rows], source_token[rows], target_token[rows], tokens[rows], repeat[order])
    alike = zip(*(array[borders[:-1]].tolist() for array in of_first), strict=True)
    moves: list[list[Move]] = [[] for _ in range(staging.num_chunks)]
    for (low, high), (number, at, to, count, again) in zip(pairwise(borders), alike, strict=True):
        moves[number].append(Move(at, to, count, again, sources[low:high], targets[low:high]))
    return moves


def _rows(
    chunk: IntArray, target_block: IntArray, source_token: IntArray, tokens: IntArray
) -> tuple[IntArray, IntArray]:
    """Joins equal segments that follow each other in one block of D: first indices and counts."""
    joined = (
        (np.diff(chunk) == 0)
        & (np.diff(target_block) == 0)
        & (np.diff(tokens) == 0)
        & (source_token[1:] == 0)
        & (source_token[:-1] == 0)
    )
    heads = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(~joined) + 1))
    return heads, np.diff(heads, append=len(tokens))
