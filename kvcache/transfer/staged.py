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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np

from kvcache.layout import KVLayout
from kvcache.transfer.boxes import Transfer, cut_tokens, pair_boxes, remote_offsets
from kvcache.transfer.cost import CostModel
from kvcache.transfer.runs import Boxes, RankRead, count_runs
from kvcache.transfer.topology import HeadGroup, IntArray, PlanError, byte_strides

# Regions, and so chunks, start at multiples of this: placing may move whole words.
ALIGN_BYTES = 64
# On a CPU chunks are small, since nothing overlaps the last one's copy; but each costs some 0.1 ms
# of posting and polling. 4 and 8 MiB (1 to 2 ms of reading) beat 1 and 32 by 5 to 40 %.
_WANTED_CHUNKS = 8
_MAX_CHUNKS = 32
_MIN_CHUNK_S = 0.25e-3
_MAX_CHUNK_S = 0.75e-3
# Between GPUs copies overlap reads. More slots than two keep the link busy while a copy is begun;
# the last chunks may become smaller, down to what takes as long to read as a copy takes to begin.
# (With two slots they must not: each would wait for the one before to be placed, 0.1 ms.) But
# chunks cut runs, where these are longer.
_CUTS_BETWEEN_GPUS = ((4, True), (2, False))  # slots, and whether chunks become smaller
_CUTS = ((2, False),)
_LAST_CHUNK_S = 0.04e-3
# A cut run costs no less between GPUs, whatever a probe's few runs say: 256 KiB take 4.1 us on an
# H200, of which reading takes 0.8.
_LEAST_RUN_S = 3e-6


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

    `repeat` slot blocks in a row continue one another in one block of D; or `pieces` of a slot
    block are blocks of D, one after the other.
    """

    source_token: int  # first token inside the block of P
    target_token: int  # first token inside the block of D
    num_tokens: int  # in each repetition
    repeat: int
    source_blocks: IntArray  # i64[n] blocks of the region
    target_blocks: IntArray  # i64[n * pieces] blocks of D's pool
    pieces: int = 1


@dataclass(frozen=True)
class Chunk:
    """One slot full: reads whose local offsets count from the slot's base, then moves."""

    reads: tuple[RankRead, ...]
    nbytes: int  # of the slot, holes included
    moves: Sequence[Move]
    regions: tuple[Region, ...]  # every move is made in every region
    target: KVLayout  # of the pool
    factors: tuple[float, ...] | None = None  # of the elements, by layer and component
    span: "Span | None" = None  # which part of a staged transfer it is, if it is one


class Way(NamedTuple):
    """Of staging a transfer."""

    wider: bool  # all heads of the owners are read, not just those that are wanted
    whole: bool  # whole blocks are read at the ends
    slots: int  # at least, in staging memory
    tapers: bool  # the last chunks are smaller


class Cuts(NamedTuple):
    """Where a sequence is cut into chunks, in blocks of P."""

    blocks: int  # of a chunk, at most
    least: int  # of a chunk, while there are as many: the last ones become smaller
    period: int  # chunks begin and end at multiples of it

    def first(self, block: int) -> int:
        """Where the chunk begins that holds the first block wanted."""
        return block // self.period * self.period


class Staging(NamedTuple):
    """A transfer staged in one way."""

    transfer: Transfer
    way: Way
    regions: tuple[Region, ...]
    slot_bytes: int  # of all regions
    region_heads: tuple[range, ...]  # of the model, read into each region
    token_bytes: int  # of these heads
    cuts: Cuts
    borders: tuple[int, ...]  # of the chunks: ordinals of blocks of P in the sequence
    read_start: int  # tokens read: at least the wanted ones
    read_stop: int

    @property
    def pitch(self) -> int:
        """Distance of the chunks in the imaginary memory they are planned in: never adjacent."""
        return self.slot_bytes + ALIGN_BYTES

    @property
    def bytes_read(self) -> int:
        return (self.read_stop - self.read_start) * self.token_bytes

    @property
    def num_chunks(self) -> int:
        return len(self.borders) - 1


class Span(NamedTuple):
    """Blocks [first, last) of P in the sequence, of which tokens [start, stop) are wanted."""

    staging: Staging
    first: int
    last: int
    start: int
    stop: int


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
    exact = _region_heads(transfer, wider=False)
    least = _block_bytes(transfer, exact)
    if staging_bytes // 2 < least:
        raise PlanError(
            f"staging_bytes is {staging_bytes}; a block of the peer takes {least} bytes, "
            f"and two must fit: use at least {2 * least}"
        )
    wider = _region_heads(transfer, wider=True)
    fits = wider != exact and _block_bytes(transfer, wider) <= staging_bytes // 2
    size = transfer.remote[0].layout.block_size
    ragged = transfer.token_start % size or transfer.token_stop % size
    options = (
        _estimate(stage(transfer, Way(wider, whole, *cut), costs, staging_bytes), costs)
        for wider in ((False, True) if fits else (False,))
        for whole in ((False, True) if ragged else (False,))
        for cut in (_CUTS_BETWEEN_GPUS if costs.overlaps else _CUTS)
    )
    per_run = max(_LEAST_RUN_S - costs.per_descriptor_s, 0.0) if costs.overlaps else 0.0
    return min(options, key=lambda option: option.seconds + per_run * option.descriptors)


def _region_heads(transfer: Transfer, *, wider: bool) -> tuple[range, ...]:
    if not wider:
        return tuple(group.heads for group in transfer.groups)
    total = transfer.total_kv_heads
    return tuple(transfer.remote[group.owners[0]].heads(total) for group in transfer.groups)


def _block_bytes(transfer: Transfer, region_heads: tuple[range, ...]) -> int:
    """Bytes of a slot that one block of P takes."""
    layout = transfer.remote[0].layout
    head_bytes = layout.block_bytes // layout.num_heads
    return sum(aligned(len(heads) * head_bytes) for heads in region_heads)


def stage(transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int) -> Staging:
    """A transfer cut into chunks that fit half the staging memory."""
    geometry = _geometry(transfer, wider=way.wider)
    size, block_bytes = transfer.remote[0].layout.block_size, geometry.block_bytes
    start, stop = transfer.token_start, transfer.token_stop
    most = staging_bytes // 2
    if costs.overlaps:
        most = max(staging_bytes // way.slots, min(block_bytes * geometry.period, most))
        blocks = max(1, most // block_bytes)
        blocks = 1 << blocks.bit_length() - 1  # few shapes, as each is prepared for placing
    else:
        wanted = -(-(stop - start) // size) * block_bytes
        shortest, longest = (int(s * costs.bytes_per_s) for s in (_MIN_CHUNK_S, _MAX_CHUNK_S))
        aim = max(min(max(wanted // _WANTED_CHUNKS, shortest), longest), wanted // _MAX_CHUNKS)
        blocks = max(1, min(aim, most) // block_bytes)
    # Chunks that end where blocks of both sides do cut no block of D in two.
    period = geometry.period if geometry.period <= blocks else 1
    blocks -= blocks % period
    least = blocks
    if way.tapers:
        least = min(max(int(_LAST_CHUNK_S * costs.bytes_per_s) // block_bytes, 1), blocks)
    cuts = Cuts(blocks, least, period)
    first, last = cuts.first(start // size), -(-stop // size)
    span = (start // size * size, last * size) if way.whole else (start, stop)
    return Staging(
        transfer,
        way,
        *_regions(transfer, way, blocks),
        geometry.region_heads,
        geometry.token_bytes,
        cuts,
        _borders(first, last, cuts),
        *span,
    )


@lru_cache(maxsize=1024)
def _borders(first: int, last: int, cuts: Cuts) -> tuple[int, ...]:
    borders = [first]
    while borders[-1] < last:
        borders.append(next_border(borders[-1], last, cuts))
    return tuple(borders)


def next_border(first: int, last: int, cuts: Cuts) -> int:
    """Where the chunk from block `first` on ends, in a sequence whose blocks end at `last`."""
    blocks, least, period = cuts
    left = last - first
    count = max(min(blocks, left // 2), least)
    count = max(count // period, 1) * period
    rest = left - count
    return last if rest < least and left <= blocks else first + count


class _Geometry(NamedTuple):
    region_heads: tuple[range, ...]
    token_bytes: int  # of these heads
    block_bytes: int  # of a slot, for one block of P
    period: int  # blocks of P after which blocks of both sides end together


def _geometry(transfer: Transfer, *, wider: bool) -> _Geometry:
    found: _Geometry | None = transfer.kept.get(("geometry", wider))
    if found is None:
        theirs, ours = transfer.remote[0].layout.block_size, transfer.local.layout.block_size
        heads = _region_heads(transfer, wider=wider)
        found = _Geometry(
            heads,
            sum(len(each) for each in heads) * transfer.head_token_bytes,
            _block_bytes(transfer, heads),
            lcm(theirs, ours) // theirs,
        )
        transfer.kept["geometry", wider] = found
    return found


def _regions(transfer: Transfer, way: Way, num_blocks: int) -> tuple[tuple[Region, ...], int]:
    """The regions of a slot, and their bytes together."""
    key = ("regions", way.wider, num_blocks)
    found: tuple[tuple[Region, ...], int] | None = transfer.kept.get(key)
    if found is None:
        regions = tuple(_make_regions(transfer, way, num_blocks))
        nbytes = sum(aligned(region.source.nbytes) for region in regions)
        found = transfer.kept[key] = regions, nbytes
    return found


def _make_regions(transfer: Transfer, way: Way, num_blocks: int) -> Iterator[Region]:
    theirs, ours = transfer.remote[0].layout, transfer.local.layout
    first = transfer.local.heads(transfer.total_kv_heads).start
    offset = 0
    region_heads = _region_heads(transfer, wider=way.wider)
    for group, heads in zip(transfer.groups, region_heads, strict=True):
        layout = replace(theirs, num_heads=len(heads), num_blocks=num_blocks)
        skipped = (group.heads.start - heads.start) * byte_strides(layout)["H"]
        target = (group.heads.start - first) * ours.strides["H"]
        yield Region(layout, offset + skipped, target, len(group.heads))
        offset += aligned(layout.nbytes)


def _estimate(staging: Staging, costs: CostModel) -> StagedEstimate:
    boxes = [boxes for _, boxes in _staged_boxes(staging)]
    descriptors = sum(count_runs(part) for part in boxes)
    nbytes = sum(part.nbytes for part in boxes)
    read_s = costs.read_s(descriptors, nbytes)
    place_s = costs.reformat_s(staging.transfer.useful_bytes)
    last_share = (staging.borders[-1] - staging.borders[-2]) / (
        staging.borders[-1] - staging.borders[0]
    )
    seconds = costs.staged_s(read_s, place_s, staging.num_chunks, last_share)
    return StagedEstimate(staging, descriptors, nbytes, seconds)


def _staged_boxes(staging: Staging) -> Iterator[tuple[int, Boxes]]:
    """Boxes from P's pools to an imaginary memory in which the chunks lie `pitch` apart."""
    size = staging.transfer.remote[0].layout.block_size
    starts, tokens = cut_tokens(staging.read_start, staging.read_stop, size)
    blocks = starts // size
    borders = np.array(staging.borders, np.int64)
    chunk = np.searchsorted(borders, blocks, side="right") - 1
    return boxes_at(staging, starts, tokens, blocks - borders[chunk], chunk * staging.pitch)


def boxes_at(
    staging: Staging,
    starts: IntArray,
    tokens: IntArray,
    slot_block: IntArray,
    offset: IntArray | int,
) -> Iterator[tuple[int, Boxes]]:
    """Boxes from P's pools of `tokens[i]` tokens of the sequence from `starts[i]` on, which lie in
    one block, to a block of the slot that starts at `offset[i]`. By rank of P."""
    transfer = staging.transfer
    size = transfer.remote[0].layout.block_size
    for group, heads, region in zip(
        transfer.groups, staging.region_heads, staging.regions, strict=True
    ):
        strides = byte_strides(region.source)
        target = offset + slot_block * strides["B"] + starts % size * strides["N"]
        places = (starts // size, starts, target, tokens)
        yield from _group_boxes(staging, group, heads, region, places)
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
